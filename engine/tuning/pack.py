"""Which micro-batches a step's samples could form: sizes and packings, for `engine.tuning.tune`.
Pure NumPy.

PipeTune packs samples into micro-batches of at most L_max = micro-batch size x max_seq_len tokens
and even FLOPs, for each micro-batch size that fits into memory. Here a sample's cost comes out of
the cost function itself: what a micro-batch of the step's mean would take longer with it. So
packing knows the hardware, and is additive all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from balance.steps.repack import pack_balanced
from balance.types import Groups, IntArray
from engine.cost_model.costs import Costs
from engine.cost_model.loads import PHASES, QUANTITIES, Loads, PhaseLoads

CostFunction = Callable[[Loads], Costs]
"""Costs of any micro-batches: a model, cluster and parallelism, or a profile."""

MicroBatchSizes = Literal["given", "multiples", "any"]
"""Micro-batch sizes to try: that of the given micro-batches; every multiple of max_seq_len, as
PipeTune; or also sizes between and below these, a step of STEP apart.
"""

STEP = 1.2
MOST_PER_STAGE = 8
"""Most micro-batches per stage for small sizes: at most 1/8 of bubble is left."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Packing:
    """Micro-batches that hold all samples of a step."""

    groups: Groups
    max_len: int
    """Tokens that a micro-batch may have."""


def pack_in_order(lengths: IntArray, max_len: int) -> Groups:
    """Micro-batches filled one after the other, in the order of the samples: PipeTune's "Original".

    A sample over `max_len` gets one of its own.

    >>> pack_in_order(np.array([3, 2, 4, 9, 1]), 6).offsets.tolist()
    [0, 2, 3, 4, 5]
    """
    offsets, filled = [0], 0
    for place, length in enumerate(np.asarray(lengths).tolist()):
        if place > offsets[-1] and filled + length > max_len:
            offsets.append(place)
            filled = 0
        filled += length
    return Groups(np.arange(len(lengths)), np.array([*offsets, len(lengths)], np.int64))


def marginal_costs(
    cost: CostFunction, samples: Loads, recompute: NDArray[np.bool_], num_micro_batches: int
) -> dict[str, NDArray[np.float64]]:
    """By phase, what each sample adds to the time of all layers, forward and backward, float64 ns,
    (samples,).

    From the difference that each quantity makes if the mean of `num_micro_batches` micro-batches
    had it twice.
    """
    count = max(1, num_micro_batches)
    mean = np.array(
        [[getattr(getattr(samples, p), q).sum() // count for q in QUANTITIES] for p in PHASES]
    )
    probes = np.repeat(mean[:, :, np.newaxis], 1 + mean.size, axis=2)
    for number, (phase, quantity) in enumerate(np.ndindex(*mean.shape)):
        probes[phase, quantity, 1 + number] *= 2
    loads = Loads(
        **{
            p: PhaseLoads(**dict(zip(QUANTITIES, own, strict=True)))
            for p, own in zip(PHASES, probes, strict=True)
        }
    )
    costs = cost(loads)
    times = (
        costs.forward_ns
        + costs.backward_ns
        + np.where(np.asarray(recompute)[:, np.newaxis], costs.recompute_ns, 0)
    )
    total = times.sum(axis=0).astype(np.float64)
    slopes = np.maximum(total[1:] - total[0], 0).reshape(mean.shape) / np.maximum(mean, 1)
    return {
        phase: sum(
            (
                slope * getattr(getattr(samples, phase), name)
                for name, slope in zip(QUANTITIES, own, strict=True)
            ),
            start=np.zeros(len(samples)),
        )
        for phase, own in zip(PHASES, slopes, strict=True)
    }


def lengths_to_try(
    lengths: IntArray, *, max_seq_len: int, sizes: MicroBatchSizes, given: int, num_stages: int
) -> list[int]:
    """L_max of each micro-batch size to try, largest first, no two of which give the same number of
    micro-batches.

    `given` comes first. None is below the longest sample.
    """
    total, longest = max(1, int(lengths.sum())), max(1, int(lengths.max(initial=1)))
    wanted = [max(given, longest)]
    if sizes != "given":
        wanted += [
            k * max_seq_len for k in range(-(-longest // max_seq_len), -(-total // max_seq_len) + 1)
        ]
    if sizes == "any":
        most = min(len(lengths), max(MOST_PER_STAGE * num_stages, -(-total // max_seq_len)))
        counts = np.unique(
            np.rint(STEP ** np.arange(0, np.log(most + 1) / np.log(STEP))).astype(np.int64)
        )
        wanted += [max(longest, -(-total // int(count))) for count in counts if count <= most]
    by_count: dict[int, int] = {}
    for max_len in wanted:
        by_count.setdefault(-(-total // max_len), max_len)
    return [wanted[0], *sorted(set(by_count.values()) - {wanted[0]}, reverse=True)]


def balanced_packings(
    lengths: IntArray, costs: dict[str, NDArray[np.float64]], max_lens: Sequence[int]
) -> list[Packing]:
    """For each size, micro-batches of even LLM cost, as PipeTune, and of even cost."""
    encoders = costs["vision"] + costs["audio"]
    weights = (costs["llm"], costs["llm"] + encoders) if encoders.any() else (costs["llm"],)
    return [
        Packing(groups=pack_balanced(lengths, weight, max_len=max_len), max_len=max_len)
        for max_len in max_lens
        for weight in weights
    ]
