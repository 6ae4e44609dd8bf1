"""How balanced the ranks are that Megatron-Energon feeds: with our groups, and with its packing.

    python benchmarks/energon_order.py [--lengths FILE...] [--build OUT...] [--dp 8] [--workers 2]

Needs megatron-energon (7.4.1 was measured). Its own loader reads a tar of group numbers, or of
sample numbers, rank by rank and with worker processes, so the order is its own; loads are those of
the lengths. Its packing is its hook `select_samples_to_pack`, for which it ships no algorithm: of a
buffer of samples the longest first, filled with the longest that fit, by tokens alone.
Data: as `benchmarks/order.py`, and finished builds (`--build`) with their own groups.

A step is the t-th micro-batch of every rank. Steps that not all ranks have are left out.
"""

from __future__ import annotations

import argparse
import bisect
import io
import json
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from megatron.energon import (
    Cooker,
    DefaultTaskEncoder,
    Sample,
    WorkerConfig,
    basic_sample_keys,
    edataclass,
    get_loader,
    get_train_dataset,
    stateless,
)
from megatron.energon.flavors.webdataset.prepare import WebdatasetPreparator
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import order  # noqa: E402

from isobatch.balance.grouping.even_out import group_balanced  # noqa: E402
from isobatch.balance.metrics import dist_ratio  # noqa: E402
from isobatch.balance.order.step_order import DEFAULT_BALANCE, epoch_steps  # noqa: E402
from isobatch.common.types import Groups, IntArray  # noqa: E402
from isobatch.shards.manifest import read_manifest  # noqa: E402
from isobatch.shards.tables import counts_arrays, read_groups, read_table  # noqa: E402

SHARD_SAMPLES = 500
BUFFER = 1_000
"""Samples that Energon's packing chooses from, per worker."""
SEQUENCE = 100
"""`max_samples_per_sequence`, as Energon's documentation has it."""


@edataclass
class Numbers(Sample):  # type: ignore[misc]
    """Rows of what a micro-batch is made of: one group, or packed samples."""

    rows: list[int]


class Encoder(DefaultTaskEncoder):  # type: ignore[misc,type-arg]
    """Reads numbers, and packs them where Energon is asked to."""

    decoder = None

    def __init__(self, tokens: IntArray, max_seq_len: int) -> None:
        super().__init__()
        self.tokens, self.max_seq_len = tokens, max_seq_len
        self.cookers = (Cooker(self.cook),)

    @stateless
    def cook(self, sample: dict[str, Any]) -> Numbers:
        return Numbers(**basic_sample_keys(sample), rows=[json.loads(sample["json"])])

    def select_samples_to_pack(self, samples: list[Numbers]) -> list[list[Numbers]]:
        left = sorted((int(self.tokens[one.rows[0]]), place) for place, one in enumerate(samples))
        packs = []
        while left:
            room, pack = self.max_seq_len, []
            while (fitting := bisect.bisect_right(left, (room, len(samples)))) > 0:
                length, place = left.pop(fitting - 1)
                room -= length
                pack.append(samples[place])
            packs.append(pack)
        return packs

    @stateless
    def pack_selected_samples(self, samples: list[Numbers]) -> Numbers:
        rows = [row for sample in samples for row in sample.rows]
        return Numbers.derive_from(samples[0], rows=rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", nargs="+", type=Path, help="OmniBal's length files")
    parser.add_argument("--build", nargs="*", type=Path, default=[], help="finished builds")
    parser.add_argument("--dp", type=int, default=8)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--samples", type=int, default=48_000, help="of generated datasets")
    parser.add_argument("--counts", default=[], help=argparse.SUPPRESS)
    options = parser.parse_args()
    console = Console(width=110)
    for data, groups in datasets(options):
        table = Table(title=f"{data.name}: {len(data.counts):,} samples, dp {options.dp}")
        for head in ("", "micro-batches", "ViT, %", "LLM, %", "attention, %", "steps left out"):
            table.add_column(head, justify="right" if head else "left")
        for name, rows in methods(data, groups, options.dp, options.workers):
            table.add_row(name, *cells(rows, data))
        console.print(table)


def datasets(options: argparse.Namespace) -> Iterator[tuple[order.Data, Groups]]:
    """Samples with their groups in stored order."""
    for place in options.build:
        manifest = read_manifest(place)
        counts = counts_arrays(read_table(place / "counts.parquet"))
        sources = np.zeros(len(counts), np.int64)
        name = f"{place.name}, {manifest.limits.max_seq_len:,} tokens"
        data = order.Data(name=name, counts=counts, sources=sources, limits=manifest.limits)
        yield data, read_groups(read_table(place / "groups.parquet"))
    if options.build:
        return
    for data in order.datasets(options):
        groups = group_balanced(*data.loads, data.limits, seed=0)
        yield data, groups.take(np.random.default_rng(0).permutation(len(groups)))


def methods(
    data: order.Data, groups: Groups, dp: int, workers: int
) -> Iterator[tuple[str, list[list[IntArray]]]]:
    """Samples of the micro-batches of each rank, in its order."""
    vision, tokens = data.loads
    loads = groups.sum(vision), groups.sum(tokens)
    steps = epoch_steps(loads, (dp, 1), balance=DEFAULT_BALANCE, epoch=0)[..., 0]
    members = np.split(groups.samples, groups.offsets[1:-1])
    yield "Isobatch", [[members[group] for group in rank if group >= 0] for rank in steps.T]
    encoder = Encoder(tokens, data.limits.max_seq_len)
    with tempfile.TemporaryDirectory() as folder:
        of_groups, of_samples = Path(folder, "groups"), Path(folder, "samples")
        write(of_groups, np.arange(len(groups)), np.stack(loads, axis=1))
        write(of_samples, np.random.default_rng(1).permutation(groups.samples))
        for name, options in (
            ("Energon, our groups and order", {}),
            ("Energon, our groups, its order", {"dataset_config": "stored_order.yaml"}),
        ):
            ranks = read(of_groups, encoder, dp, workers, **options)
            assert sorted(row for rank in ranks for rows in rank for row in rows) == [
                *range(len(groups))
            ]
            yield name, [[members[rows[0]] for rows in rank] for rank in ranks]
        begun = time.perf_counter()
        ranks = read(of_samples, encoder, dp, workers, packing_buffer_size=BUFFER)
        print(f"packed in {time.perf_counter() - begun:.1f} s", file=sys.stderr)
        yield "Energon, its packing", [[np.array(rows) for rows in rank] for rank in ranks]


def write(folder: Path, numbers: IntArray, loads: IntArray | None = None) -> None:
    """Tars of numbers, prepared by Energon; with `loads` also as a build is."""
    folder.mkdir()
    names = []
    for first in range(0, len(numbers), SHARD_SAMPLES):
        names.append(f"{first // SHARD_SAMPLES:05d}.tar")
        with tarfile.open(folder / names[-1], "w") as tar:
            for place, number in enumerate(numbers[first : first + SHARD_SAMPLES].tolist(), first):
                content = json.dumps(number).encode()
                member = tarfile.TarInfo(f"{place:07d}.json")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    WebdatasetPreparator.prepare_dataset(
        folder, names, split_parts_ratio=[("train", 1.0)], shuffle_seed=None, workers=2
    )
    meta = folder / ".nv-meta"
    ours, plain = (
        f"__module__: {module}\n__class__: {kind}\n"
        for module, kind in (
            ("isobatch.loaders.integrations.energon_dataset", "BalancedGroups"),
            ("megatron.energon", "CrudeWebdataset"),
        )
    )
    (meta / "stored_order.yaml").write_text(plain)
    (meta / "dataset.yaml").write_text(plain if loads is None else ours)
    if loads is not None:
        np.save(meta / "loads.npy", loads)


def read(
    folder: Path,
    encoder: Encoder,
    dp: int,
    workers: int,
    **options: Any,
) -> list[list[list[int]]]:
    """Rows of each micro-batch of each rank, one epoch."""
    ranks = []
    for rank in range(dp):
        dataset = get_train_dataset(
            folder,
            worker_config=WorkerConfig(rank=rank, world_size=dp, num_workers=workers),
            batch_size=None,
            shuffle_buffer_size=None,
            max_samples_per_sequence=SEQUENCE,
            task_encoder=encoder,
            repeat=False,
            **options,
        )
        ranks.append([sample.rows for sample in get_loader(dataset)])
    return ranks


def cells(ranks: list[list[IntArray]], data: order.Data) -> list[str]:
    vision, tokens = data.loads
    num_steps = min(map(len, ranks))
    left_out = max(map(len, ranks)) - num_steps
    steps = [rank[step] for step in range(num_steps) for rank in ranks]
    loads = (np.array([load[rows].sum() for rows in steps]) for load in (vision, tokens, tokens**2))
    dists = (f"{dist_ratio(load, len(ranks)):.2%}".rstrip("%") for load in loads)
    return [f"{sum(map(len, ranks)):,}", *dists, str(left_out)]


if __name__ == "__main__":
    main()
