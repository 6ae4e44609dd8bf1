"""A packed build's samples as the loads of training steps: those that the loaders give, and random
ones to compare.

The one module of the planner that reads tables (pyarrow). What a group holds is in groups.parquet,
what each sample costs in counts.parquet: the index has sums only, and attention costs by squares of
lengths. 1.2 million samples take some .3 s.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq

from balance.baseline_samplers import as_groups, random_batches
from balance.errors import ConfigError, DataError, first_line
from balance.order.block_shuffle import BlockShuffle, OrderConfig
from balance.presets import ModelPreset, NativeRule, model_from_dict
from balance.types import COUNT_COLUMNS, Counts, Groups, IntArray, Limits
from engine.cost_model.loads import Loads, PhaseLoads, packed_loads, sample_loads

MANIFEST_NAME, INDEX_NAME, COUNTS_NAME, GROUPS_NAME = (
    "manifest.json",
    "index.arrow",
    "counts.parquet",
    "groups.parquet",
)
FORMAT_VERSION = 2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedBuild:
    """What planning needs of a build."""

    place: str
    model: ModelPreset
    order: OrderConfig
    limits: Limits
    counts: Counts
    """Of every sample of counts.parquet."""
    groups: Groups
    """The stored groups; their samples are numbers in `counts`."""

    def stream_steps(self, *, dp: int, micro_batches: int, steps: int, seed: int = 0) -> Loads:
        """The first epoch's first steps as `loaders` gives them, (steps * dp * micro_batches,).

        Step by step, in it rank by rank. Whole steps only, at most what the epoch has; ConfigError
        if it has none.
        """
        count = self._num_steps(len(self.groups), dp * micro_batches, steps, "groups")
        stream = BlockShuffle(num_groups=len(self.groups), order=self.order, seed=seed, epoch=0)
        taken = np.stack([stream.take_step(dp, micro_batches) for _ in range(count)])
        return packed_loads(sample_loads(self.counts, self.model), self.groups.take(taken.ravel()))

    def random_steps(
        self, *, dp: int, micro_batches: int, steps: int, batch_size: int, seed: int = 0
    ) -> Loads:
        """The same samples in random micro-batches of `batch_size`, LLM sequences padded to the
        longest of each.

        As `stream_steps`. What trainers do without packing (OmniBal, Table 3); vision is not
        padded.
        """
        packed = self.groups.samples
        count = self._num_steps(
            len(packed) // batch_size, dp * micro_batches, steps, f"batches of {batch_size}"
        )
        batches = random_batches(packed, dp * micro_batches, batch_size, seed)[:count]
        places = as_groups(batches)
        groups = Groups(packed[places.samples], places.offsets)
        return padded(
            packed_loads(sample_loads(self.counts, self.model), groups), groups, self.counts.seq_len
        )

    @property
    def mean_group_size(self) -> int:
        """Samples per group, rounded down but at least 1: random micro-batches of so many are as
        many as the groups.
        """
        return max(1, len(self.groups.samples) // max(1, len(self.groups)))

    def full_micro_batch(self) -> Loads:
        """One micro-batch that is as large as the build's caps allow: what memory must suffice
        for.
        """
        limits, rule = self.limits, self.model.vision
        if isinstance(rule, NativeRule):
            tokens, items = (
                limits.max_vision,
                int(self.counts.num_image_patches[self.groups.samples].max(initial=0)),
            )
        else:
            tokens, items = limits.max_vision * rule.vit_tokens_per_patch, limits.max_vision
        most = packed_loads(sample_loads(self.counts, self.model), self.groups)
        audio = {
            f.name: np.array([getattr(most.audio, f.name).max(initial=0)])
            for f in fields(PhaseLoads)
        }
        seq_len = limits.max_seq_len
        return Loads(
            vision=_phase([tokens], [tokens**2 // max(1, items)], [items]),
            audio=PhaseLoads(**audio),
            llm=_phase([seq_len], [seq_len**2], [1]),
        )

    def _num_steps(self, have: int, need: int, wanted: int, what: str) -> int:
        if have < need:
            raise ConfigError(
                f"{self.place} has {have:,} {what}, a step needs {need:,} (dp x micro-batches); use fewer of either"
            )
        return min(wanted, have // need)


def padded(loads: Loads, groups: Groups, seq_len: IntArray) -> Loads:
    """Loads of groups whose LLM sequences are all padded to the longest one's length."""
    longest = np.maximum.reduceat(seq_len[groups.samples], groups.offsets[:-1])
    llm = PhaseLoads(
        tokens=groups.sizes * longest, squares=groups.sizes * longest**2, items=groups.sizes
    )
    return Loads(vision=loads.vision, audio=loads.audio, llm=llm)


def _phase(tokens: Sequence[int], squares: Sequence[int], items: Sequence[int]) -> PhaseLoads:
    return PhaseLoads(tokens=np.array(tokens), squares=np.array(squares), items=np.array(items))


def read_build(root: Path) -> PackedBuild:
    """The build in a folder. DataError if it is none, or not one that this version reads."""
    manifest = _read_manifest(root)
    lacking = [
        name for name in (INDEX_NAME, COUNTS_NAME, GROUPS_NAME) if not (root / name).is_file()
    ]
    if lacking:
        raise DataError(
            f"{root}: planning needs {INDEX_NAME}, {COUNTS_NAME} and {GROUPS_NAME} of the build, and "
            f"{', '.join(lacking)} is not there; copy them beside {MANIFEST_NAME}, or build again"
        )
    try:
        counts_table = pq.read_table(root / COUNTS_NAME, columns=list(COUNT_COLUMNS))
        groups_table = pq.read_table(root / GROUPS_NAME, columns=["samples", "num_samples"])
        counts = Counts(
            **{
                name: counts_table.column(name).to_numpy().astype(np.int64)
                for name in COUNT_COLUMNS
            }
        )
        rows = [chunk.flatten().to_numpy() for chunk in groups_table.column("samples").chunks]
        offsets = np.concatenate(
            [[0], np.cumsum(groups_table.column("num_samples").to_numpy(), dtype=np.int64)]
        )
        groups = Groups(np.concatenate([np.empty(0, np.int64), *rows]), offsets)
        sums = _index_sums(root)
        fits = all(
            np.array_equal(groups.sum(getattr(counts, name)), sums[name]) for name in COUNT_COLUMNS
        )
    except (OSError, pa.ArrowException, KeyError, ValueError, IndexError) as error:
        raise DataError(
            f"{root}: planning needs {INDEX_NAME}, {COUNTS_NAME} and {GROUPS_NAME} of the build, which cannot be read "
            f"({first_line(error)}); copy them beside {MANIFEST_NAME}, or build again"
        ) from None
    if not fits:
        raise DataError(
            f"{root}: {COUNTS_NAME} and {GROUPS_NAME} do not fit {INDEX_NAME}: copy all files of one build"
        )
    return PackedBuild(place=str(root), counts=counts, groups=groups, **manifest)


def _read_manifest(root: Path) -> dict[str, Any]:
    """What planning needs of the manifest: fields of `PackedBuild`."""
    if not root.is_dir():
        raise DataError(f"{root}: no such folder; give the output folder of `packer build`")
    path = root / MANIFEST_NAME
    if not path.is_file():
        raise DataError(
            f"{root}: no {MANIFEST_NAME}, so no finished build; run the same `packer build` to finish it"
        )
    try:
        values = json.loads(path.read_bytes())
        version = values["format_version"]
        if version == FORMAT_VERSION:
            _check_content(path, values)
            return {
                "model": model_from_dict(values["model"]),
                "order": OrderConfig(**values["order"]),
                "limits": Limits(**values["limits"]),
            }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise DataError(
            f"{path}: not a manifest of Isobatch ({type(error).__name__}); build again"
        ) from None
    raise DataError(
        f"{path}: format version {version}; this isobatch reads version {FORMAT_VERSION}: build again"
    )


def _check_content(path: Path, values: dict[str, Any]) -> None:
    """DataError unless the manifest still is what its `content_hash` says."""
    rest = {name: value for name, value in values.items() if name != "content_hash"}
    plain = json.dumps(rest, sort_keys=True, ensure_ascii=False).encode()
    if "content_hash" in values and values["content_hash"] != hashlib.sha256(plain).hexdigest():
        raise DataError(f"{path}: damaged or edited: its content is not what its content_hash says")


def _index_sums(root: Path) -> dict[str, IntArray]:
    """The count columns of the index, one entry per group."""
    with pa.memory_map(str(root / INDEX_NAME)) as source:
        table = pa.ipc.open_file(source).read_all()
        return {name: table.column(name).to_numpy().astype(np.int64) for name in COUNT_COLUMNS}
