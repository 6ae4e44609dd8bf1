"""A packed build's samples as loads of training steps, its own or random.

Read from its tables: the index has only sums of groups, and attention costs by squares of lengths.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from isobatch.balance.baseline_samplers import as_groups, random_batches
from isobatch.balance.order.step_order import epoch_steps
from isobatch.common.errors import ConfigError, DataError
from isobatch.common.types import COUNT_COLUMNS, Counts, Groups, IntArray, Limits
from isobatch.engine.cost_model.loads import (
    Loads,
    PhaseLoads,
    largest_micro_batch,
    packed_loads,
    sample_loads,
)
from isobatch.models.image_rules import NativeSizeRule
from isobatch.models.presets import ModelPreset
from isobatch.shards.index import INDEX_NAME, open_index
from isobatch.shards.manifest import MANIFEST_NAME, read_manifest
from isobatch.shards.tables import COUNTS_NAME, GROUPS_NAME, read_samples


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedBuild:
    """What planning needs of a build."""

    place: str
    model: ModelPreset
    limits: Limits
    counts: Counts
    """Counts of every stored sample."""
    groups: Groups
    """The stored groups; their samples are numbers in `counts`."""

    def stream_steps(self, *, dp: int, micro_batches: int, steps: int, seed: int = 0) -> Loads:
        """The first epoch's first steps as `loaders` gives them, (steps * dp * micro_batches,).

        Step by step, in it rank by rank; at most what the epoch has. ConfigError if it has none.
        """
        count = self._num_steps(len(self.groups), dp * micro_batches, steps, "groups")
        loads = (
            self.groups.sum(self.limits.vision_load(self.counts)),
            self.groups.sum(self.limits.llm_load(self.counts)),
        )
        taken = epoch_steps(loads, (dp, micro_batches), seed=seed, max_steps=count)
        return packed_loads(sample_loads(self.counts, self.model), self.groups.take(taken.ravel()))

    def random_steps(
        self, *, dp: int, micro_batches: int, steps: int, batch_size: int, seed: int = 0
    ) -> Loads:
        """The same samples in random micro-batches, LLM sequences padded to the longest of each.

        As `stream_steps`. What trainers do without packing (OmniBal, Table 3); vision is unpadded.
        """
        packed = self.groups.samples
        have, need = len(packed) // batch_size, dp * micro_batches
        count = self._num_steps(have, need, steps, f"batches of {batch_size}")
        places = as_groups(random_batches(packed, need, batch_size, seed)[:count])
        groups = Groups(packed[places.samples], places.offsets)
        loads = packed_loads(sample_loads(self.counts, self.model), groups)
        return padded(loads, groups, self.counts.seq_len)

    @property
    def mean_group_size(self) -> int:
        """Samples per group, rounded down, at least 1: for as many random batches as groups."""
        return max(1, len(self.groups.samples) // max(1, len(self.groups)))

    def full_micro_batch(self) -> Loads:
        """One micro-batch as large as the caps allow: memory must suffice for it."""
        rule, tokens, seq_len = self.model.vision, self.limits.max_vision, self.limits.max_seq_len
        items = tokens
        if isinstance(rule, NativeSizeRule):
            items = int(self.counts.num_image_patches[self.groups.samples].max(initial=0))
        else:
            tokens *= rule.vit_tokens_per_patch
        groups_loads = packed_loads(sample_loads(self.counts, self.model), self.groups)
        vision, llm = (tokens, tokens**2 // max(1, items), items), (seq_len, seq_len**2, 1)
        return Loads(
            vision=PhaseLoads(*(np.array([value]) for value in vision)),
            audio=largest_micro_batch(groups_loads).audio,
            llm=PhaseLoads(*(np.array([value]) for value in llm)),
        )

    def _num_steps(self, have: int, need: int, wanted: int, what: str) -> int:
        if have < need:
            raise ConfigError(
                f"{self.place} has {have:,} {what}, a step needs {need:,} (dp x micro-batches); "
                "use fewer of either"
            )
        return min(wanted, have // need)


def padded(loads: Loads, groups: Groups, seq_len: IntArray) -> Loads:
    """Loads of groups whose LLM sequences are all padded to the longest one's length."""
    longest = np.maximum.reduceat(seq_len[groups.samples], groups.offsets[:-1])
    llm = PhaseLoads(groups.sizes * longest, groups.sizes * longest**2, groups.sizes)
    return replace(loads, llm=llm)


def read_build(root: Path) -> PackedBuild:
    """The build in a folder. DataError if it is none, or not one that this version reads."""
    manifest = read_manifest(root)
    needed = INDEX_NAME, COUNTS_NAME, GROUPS_NAME
    lacking = [name for name in needed if not (root / manifest.table_path(name)).is_file()]
    if lacking:
        raise DataError(
            f"{root}: planning needs {INDEX_NAME}, {COUNTS_NAME} and {GROUPS_NAME} of the build, "
            f"and {', '.join(lacking)} is not there; copy them next to {MANIFEST_NAME}, or build "
            "again"
        )
    table = read_samples(manifest, open_index(manifest))
    return PackedBuild(
        place=manifest.place,
        model=manifest.model,
        limits=manifest.limits,
        counts=Counts(**{name: table.column(name) for name in COUNT_COLUMNS}),
        groups=table.groups,
    )
