"""What partitions cost: groups and order of 16 against one, and memory of who joins them.

    python benchmarks/packing_partitions.py FILE... [--partitions 16] [--dp 8] [--join 1 16]

FILE: a counts.parquet, or a length file as the OmniBal authors publish them; several are one
dataset, one source after the other. `--repeat N`: each source N times, for a small corpus.
`--mixture N`: also the mixture of three sources of `order.py`, of N samples, with images as in
FILE. Samples are dealt to partitions as `packer build` deals pieces of files (16 contiguous pieces
of a source for each), and grouped by the packer's code under the caps of the whole; what they leave
over is packed together. Fill, waiting and source entropy (1: as in a random order) are those of
`packer report`. Exit status 1 if one of them is worse than that of one partition by more than
`MOST`.

`--join N...`: N partitions of a million samples each (lengths drawn with a fixed seed, no images)
are joined by the packer's code; peak memory of that process, and what it reads per sample. The
report of the joined tables is made by another process.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from isobatch.balance.grouping.caps import GroupOptions
from isobatch.common.types import COUNT_COLUMNS, Groups, Limits
from isobatch.models.presets import load_model, model_to_dict
from isobatch.packer.group import Grouping, group_counts, group_within, read_lengths
from isobatch.packer.partitions.cut import PIECES, deal
from isobatch.packer.partitions.join import join_build, packed_parts
from isobatch.packer.partitions.partition import REMAINDER_GROUPS, ROWS_NAME, PackedPartition
from isobatch.packer.partitions.results import TABLES, Results
from isobatch.packer.report.figures import Report, make_report
from isobatch.packer.sources.base import FilePiece
from isobatch.shards.index import IndexPart, join_parts
from isobatch.shards.manifest import BuildFile, write_manifest
from isobatch.shards.stored_group import PackedBlock
from isobatch.shards.tables import (
    COUNTS_NAME,
    COUNTS_SCHEMA,
    GROUPS_NAME,
    REJECTED_NAME,
    counts_arrays,
    groups_table,
    reject_rows,
    source_numbers,
    write_table,
)

MILLION = 1_000_000
LIMITS = Limits(max_seq_len=48_000, max_vision=48_000, min_seq_len=0, min_vision=0)
MOST = np.array([0.002, 0.002, 0.002, 0.01])
"""What partitions may cost: fill, waiting for vision and for the LLM, source entropy."""
console = Console(width=110)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--partitions", type=int, default=16)
    parser.add_argument("--dp", type=int, default=8)
    parser.add_argument("--max-seq-len", type=int, default=4096)
    parser.add_argument("--repeat", type=int, default=1, metavar="N")
    parser.add_argument("--mixture", type=int, default=0, metavar="N")
    parser.add_argument("--join", nargs="*", type=int, default=[])
    parser.add_argument("--joined", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--reported", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.joined:
        join(Path(options.joined[0]), int(options.joined[1]))
        return 0
    if options.reported:
        report(Path(options.reported[0]))
        return 0
    missed = [
        name for name, data in datasets(options) if not groups_and_order(name, *data, options)
    ]
    if options.join:
        console.print(memory(options.join))
    for name in missed:
        console.print(f"missed: {name}", style="red")
    return 1 if missed else 0


# --- groups and order ---


def datasets(options: argparse.Namespace) -> Iterator[tuple[str, tuple[pa.Table, int]]]:
    """(name, (counts, LLM tokens of a group at most)) of each dataset."""
    if options.files:
        counts = pa.concat_tables([read_lengths(file) for file in options.files]).combine_chunks()
        sources = source_numbers(counts)
        rows = [np.flatnonzero(sources == source) for source in range(int(sources.max()) + 1)]
        counts = counts.take(pa.array(np.concatenate([np.tile(of, options.repeat) for of in rows])))
        counts = counts.set_column(0, "position", pa.array(np.arange(len(counts))))
        yield " + ".join(file.stem for file in options.files), (counts, options.max_seq_len)
    if options.mixture:
        from order import mixture, published  # noqa: PLC0415  imports much else

        tiles, tokens, _ = published(options.files)
        data = mixture(tiles, tokens, options.mixture, np.random.default_rng(0))
        columns: dict[str, Any] = {name: getattr(data.counts, name) for name in COUNT_COLUMNS}
        columns |= {
            "position": np.arange(len(data.sources)),
            "sample_id": data.sources.astype(str),
            "source": data.sources.astype(str),
            "seq_len": data.counts.seq_len,
            "media_bytes": np.zeros_like(data.sources),
        }
        table = pa.table({f.name: pa.array(columns[f.name], f.type) for f in COUNTS_SCHEMA})
        yield data.name, (table, data.limits.max_seq_len)


def groups_and_order(
    name: str, counts: pa.Table, max_seq_len: int, options: argparse.Namespace
) -> bool:
    """Print a table; whether no figure is worse than that of one partition by MOST."""
    table = Table(title=f"{name}: {len(counts):,} samples, dp {options.dp}")
    columns = ("partitions", "groups", "fill", "waiting ViT", "waiting LLM", "source entropy")
    for column in columns:
        table.add_column(column, justify="right")
    arrays = counts_arrays(counts)
    settings = GroupOptions(max_seq_len=max_seq_len)
    unit = "vit_tokens" if arrays.num_image_patches.max() < 2 else "image_patches"
    whole = group_counts(arrays, settings, vision_unit=unit, context_len=1 << 20)
    figures = []
    for number in (1, options.partitions):
        found = whole if number == 1 else in_partitions(counts, whole.limits, settings, number)
        with TemporaryDirectory() as folder:
            report = written(counts, found, Path(folder), options.dp)
        ours = report.methods["ours"]
        entropy = ours.shuffle[1].source_entropy
        figures.append([report.fill, ours.dist_ratio_vit, ours.dist_ratio_llm, entropy])
        shares = [f"{value:.2%}" for value in figures[-1][:3]]
        table.add_row(f"{number}", f"{report.num_groups:,}", *shares, f"{entropy:.3f}")
    console.print(table)
    more = np.diff(figures, axis=0)[0] * [-1, 1, 1, -1]
    return bool((more <= MOST).all())


def in_partitions(counts: pa.Table, limits: Limits, options: GroupOptions, number: int) -> Grouping:
    """Groups of samples of one partition each, and of what they leave over, as they are stored."""
    sources = source_numbers(counts)
    rows: list[list[np.ndarray]] = [[] for _ in range(number)]
    for source in range(int(sources.max()) + 1):
        members = np.flatnonzero(sources == source)
        borders = np.linspace(0, len(members), number * PIECES + 1).astype(int).tolist()
        pieces = [FilePiece("", start, end, size=end - start) for start, end in pairwise(borders)]
        for place, of in enumerate(deal(pieces, number, options.seed, source)):
            rows[place] += [members[piece.start : piece.stop] for piece in of or ()]
    parts: list[Groups] = []
    over, remainder = [], [np.empty(0, np.int64)]

    def add(mine: np.ndarray, leave: int) -> None:
        arrays = counts_arrays(counts.take(pa.array(mine)))
        found = group_within(arrays, limits, options, [], leave=leave)
        parts.append(Groups(mine[found.groups.samples], found.groups.offsets))
        over.extend((int(mine[row]), reason, detail) for row, reason, detail in found.over)
        remainder.append(mine[found.remainder])

    for chosen in rows:
        add(np.concatenate(chosen), REMAINDER_GROUPS)
    # as `packer build` has them: by source, then by partition
    joined = np.concatenate(remainder)
    add(joined[np.argsort(sources[joined], kind="stable")], 0)
    return Grouping(
        groups=Groups.joined(parts),
        limits=limits,
        over=over,
        limits_explained=[],
        remainder=np.empty(0, np.int64),
    )


def written(counts: pa.Table, found: Grouping, folder: Path, dp: int) -> Report:
    write_table(counts, folder / COUNTS_NAME)
    write_table(groups_table(found.groups, counts_arrays(counts)), folder / GROUPS_NAME)
    write_table(reject_rows(counts, found.over), folder / REJECTED_NAME)
    limits = {**found.limits.to_json(), "limits_explained": found.limits_explained}
    (folder / "limits.json").write_text(json.dumps(limits))
    return make_report(folder, dp=dp)


# --- memory of joining ---


def memory(numbers: list[int]) -> Table:
    table = Table(title="joining partitions of a million samples")
    heads = "samples", "peak memory", "over the first", "read per sample", "CPU s"
    for name in (*heads, "report: peak", "CPU s"):
        table.add_column(name, justify="right")
    first = 0
    with TemporaryDirectory() as folder:
        make_partition(Path(folder))
        size = sum(file.stat().st_size for file in Path(folder, "partition").iterdir())
        for number in numbers:
            (seconds, peak), report = (
                run_child(what, folder, number) for what in ("--joined", "--reported")
            )
            first = first or int(peak)
            table.add_row(
                f"{number * MILLION:,}",
                f"{int(peak) / 1024:,.0f} MiB",
                f"{int(peak) / first - 1:+.1%}",
                f"{size / MILLION:.0f} B",
                f"{float(seconds):.0f}",
                f"{int(report[1]) / 1024:,.0f} MiB",
                f"{float(report[0]):.0f}",
            )
    return table


def run_child(what: str, folder: str, number: int) -> list[str]:
    """CPU seconds and peak memory in KiB of a process."""
    command = [sys.executable, __file__, what, folder, str(number)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def make_partition(folder: Path) -> None:
    """The results of one partition: groups of some 16 samples, ids of the usual length."""
    rng = np.random.default_rng(0)
    target = folder / "partition"
    target.mkdir()
    loads = {name: rng.integers(0, 3000, MILLION).astype(np.int32) for name in COUNT_COLUMNS}
    columns = {
        "position": np.arange(MILLION),
        "sample_id": [f"source-{place % 7}/{place:09d}" for place in range(MILLION)],
        "source": [f"source-{place % 7}" for place in range(MILLION)],
        **loads,
        "seq_len": loads["num_text_tokens"],
        "media_bytes": rng.integers(0, 1 << 20, MILLION),
    }
    counts = pa.table({f.name: pa.array(columns[f.name], f.type) for f in COUNTS_SCHEMA})
    rejected, *packed = rng.permutation(MILLION)
    packed = np.array(packed)
    offsets = np.append(np.arange(0, len(packed), 16), len(packed))
    groups = Groups(packed, offsets)
    write_table(counts, target / COUNTS_NAME)
    write_table(groups_table(groups, counts_arrays(counts)), target / GROUPS_NAME)
    write_table(
        reject_rows(counts, [(int(rejected), "missing_image", "a.png")]), target / REJECTED_NAME
    )
    ids = counts.column("sample_id").take(pa.array(groups.samples)).to_pylist()
    part = IndexPart(0)
    block = PackedBlock.__new__(PackedBlock)
    for name, value in {
        "group_offsets": offsets,
        "counts": {name: values[groups.samples] for name, values in loads.items()},
        "sample_ids": ids,
    }.items():
        object.__setattr__(block, name, value)
    part.add(block, [(place * 1000, 1000) for place in range(len(groups))])
    part.file = BuildFile(name="shards/shard-00000-00000.arrow", size=1, checksum="0")
    part.save(folder / "part.arrow")
    figures = join_parts([folder / "part.arrow"], target / ROWS_NAME)
    packed = PackedPartition(
        num_read=MILLION,
        num_repeated=0,
        remainder=[],
        index=figures,
        shards=[part.file.to_json()],
        limits={},
        limits_explained=[],
        extras={},
        has_videos=False,
        never_read={},
    )
    (folder / "packed.json").write_text(packed.to_json())


def join(folder: Path, number: int) -> None:
    class Same(Results):
        """Every partition is the same one."""

        @contextmanager
        def opened(self, number, names):
            yield folder / "partition"

    packed = PackedPartition.from_json((folder / "packed.json").read_text())
    out = folder / "out"
    out.mkdir(exist_ok=True)
    started = time.process_time()
    join_build(packed_parts(Same(str(folder), ""), range(number), [packed] * number), out)
    assert all(Path(out, name).exists() for name in TABLES)
    print_used(started)
    totals = {"num_groups": number * packed.index.num_groups, "num_rejected": number}
    totals |= {"num_packed": number * packed.index.sums["num_samples"], "num_repeated": 0}
    values = {
        "format": "arrow",
        "model": model_to_dict(load_model("internvl_1_5")),
        "tokenizer": {"image_token_id": 3, "vocab_size": 100, "hash": ""},
        "config": {"partition_samples": MILLION},
        "limits": asdict(LIMITS),
        "totals": totals,
        "shards": [],
        "files": [],
    }
    write_manifest(out, values)


def report(folder: Path) -> None:
    started = time.process_time()
    assert make_report(folder / "out").num_packed % MILLION
    print_used(started)


def print_used(started: float) -> None:
    """CPU seconds since then, and the peak memory of this process in KiB."""
    print(time.process_time() - started, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


if __name__ == "__main__":
    sys.exit(main())
