"""What a step planner is asked and answers: samples, and who works on which.

For the loaders, which ask, and for whoever balances a step: PipeTune's packing
(`engine.tuning.pack`) makes other micro-batches, OrchMLLM's dispatching
(`engine.dispatching`) gives each encoder's work to other ranks. The loader then reads each image
only on the rank that encodes it. Pure; every rank asks, so planners are deterministic:
who works on a sample must not depend on who asks.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from isobatch.common.errors import ConfigError
from isobatch.common.types import Counts, Groups, IntArray

ENCODERS = ("vision", "audio")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRequest:
    """All samples of a step, as its stored groups came: by rank, then by micro-batch.

    Samples are numbered by their place here, from 0.
    """

    counts: Counts
    """Counts of each sample, shape (num_samples,)."""
    offsets: IntArray
    """Shape (dp * micro_batches + 1,): micro-batch m of rank r is the samples from `offsets[i]` to
    `offsets[i + 1]`, i = r * micro_batches + m; none where the epoch has ended.
    """
    dp: int
    """Data-parallel ranks."""
    micro_batches: int
    """Micro-batches per rank, as the loader was told."""
    rank: int | None = None
    """Rank that asks, of whose micro-batches alone the packing matters: a planner may save the time
    for that of others. None: that of all."""

    def __len__(self) -> int:
        return len(self.counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepAssignment:
    """Who works on which samples of a step; samples are numbered as in `StepRequest`."""

    micro_batches: tuple[Groups, ...]
    """Micro-batches of each rank, each sample in one; numbers may differ by rank, if
    the trainer can take that. Of ranks that do not ask, all samples may be in one."""
    encoders: Mapping[str, tuple[Groups, ...]] = field(default_factory=dict)
    """Encoder (`vision`, `audio`) -> the batches that each rank encodes: each sample with images
    (clips) in one, others may be left out. Without it, samples are encoded in their micro-batch.
    """
    notes: tuple[object, ...] = ()
    """A note for the trainer of each rank, which the loader hands on with the step; or nothing."""


class StepPlanner(Protocol):
    """Makes other micro-batches of a step's samples. Ranks that ask agree on each sample's rank."""

    def __call__(self, samples: StepRequest) -> StepAssignment:
        """The work of all ranks for one step."""


def check_assignment(work: StepAssignment, samples: StepRequest) -> None:
    """ConfigError, with the sample that is wrong, unless each is assigned exactly once."""
    if unknown := set(work.encoders) - set(ENCODERS):
        raise _wrong(f"names the encoders {sorted(unknown)}; use {', '.join(ENCODERS)}")
    counts = samples.counts
    ones = np.ones(len(samples), np.int64)
    _check_once(work.micro_batches, samples, min_times=ones, what="micro-batches")
    if work.notes and len(work.notes) != samples.dp:
        raise _wrong(f"gave notes to {len(work.notes)} ranks; there are {samples.dp}")
    for name, ranks in work.encoders.items():
        media = counts.num_vit_tokens if name == "vision" else counts.num_audio_tokens
        what = f"batches of the {name} encoder"
        _check_once(ranks, samples, min_times=np.minimum(media, 1), what=what)


def _check_once(
    ranks: tuple[Groups, ...], samples: StepRequest, *, min_times: IntArray, what: str
) -> None:
    """Require each sample in one of the groups, or in none where `min_times` is 0."""
    if len(ranks) != samples.dp:
        raise _wrong(f"gave {what} to {len(ranks)} ranks; there are {samples.dp}")
    assigned = np.concatenate([np.empty(0, np.int64), *(groups.samples for groups in ranks)])
    outside = assigned[(assigned < 0) | (assigned >= len(samples))]
    if len(outside):
        raise _wrong(f"assigned sample {outside[0]}; there are {len(samples)}, numbered from 0")
    times = np.bincount(assigned, minlength=len(samples))
    wrong = np.flatnonzero((times < min_times) | (times > 1))
    if len(wrong):
        raise _wrong(f"gave sample {wrong[0]} to {times[wrong[0]]} {what}; give each to one")


def _wrong(what: str) -> ConfigError:
    return ConfigError(f"the step planner {what}")
