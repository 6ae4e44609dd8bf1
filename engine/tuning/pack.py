"""Packings of a step's samples into micro-batches of several sizes. Pure.

PipeTune packs samples into micro-batches of at most L_max = micro-batch size x max_seq_len tokens
and even FLOPs, for each micro-batch size that fits into memory. Here a sample's cost is its
marginal time in a mean micro-batch by the cost function: additive, but aware of the hardware.
"""

from collections.abc import Callable
from typing import Literal

import numpy as np

from isobatch.common.types import BoolArray, FloatArray, Groups, IntArray
from isobatch.engine.cost_model.costs import Costs
from isobatch.engine.cost_model.loads import PHASES, QUANTITIES, Loads, PhaseLoads
from isobatch.engine.tuning.repack import pack_balanced

CostFunction = Callable[[Loads], Costs]
"""Costs of the layers for any micro-batches, by a model on a cluster or by a profile."""

MicroBatchSizes = Literal["given", "multiples", "any"]
"""Micro-batch sizes to try: given; multiples of max_seq_len (PipeTune); also others."""

STEP = 1.2
"""Ratio of neighbouring sizes of `any`."""
MOST_PER_STAGE = 8
"""Micro-batches per stage of the smallest size: a bubble of at most 1/8 is left."""


def pack_in_order(lengths: IntArray, max_len: int) -> Groups:
    """Micro-batches filled in the order of the samples: PipeTune's "Original".

    A sample over `max_len` has a micro-batch of its own.

    >>> pack_in_order(np.array([3, 2, 4, 9, 1]), 6).offsets.tolist()
    [0, 2, 3, 4, 5]
    """
    offsets = [0]
    filled = 0
    for place, length in enumerate(np.asarray(lengths).tolist()):
        if place > offsets[-1] and filled + length > max_len:
            offsets.append(place)
            filled = 0
        filled += length
    return Groups(np.arange(len(lengths)), np.array([*offsets, len(lengths)], np.int64))


def marginal_costs(
    cost: CostFunction, samples: Loads, recompute: BoolArray, num_micro_batches: int
) -> dict[str, FloatArray]:
    """Marginal forward and backward time of each sample by phase, float64 ns, (samples,).

    The difference that each quantity makes if the mean of `num_micro_batches` had it twice.
    """
    # (phases, quantities) of the mean micro-batch
    count = max(1, num_micro_batches)
    phases = [getattr(samples, phase) for phase in PHASES]
    mean = np.array([[getattr(phase, q).sum() // count for q in QUANTITIES] for phase in phases])
    # the mean micro-batch, and one per quantity with twice as much of it
    probes = np.repeat(mean[:, :, np.newaxis], 1 + mean.size, axis=2)
    for number, (phase, quantity) in enumerate(np.ndindex(*mean.shape)):
        probes[phase, quantity, 1 + number] *= 2
    probed = dict(zip(PHASES, (PhaseLoads(*columns) for columns in probes), strict=True))
    costs = cost(Loads(**probed))
    again = np.where(np.asarray(recompute)[:, np.newaxis], costs.recompute_ns, 0)
    total = (costs.forward_ns + costs.backward_ns + again).sum(axis=0).astype(np.float64)
    slopes = np.maximum(total[1:] - total[0], 0).reshape(mean.shape) / np.maximum(mean, 1)

    by_phase = {}
    for name, phase_slopes in zip(PHASES, slopes, strict=True):
        load = getattr(samples, name)
        terms = (s * getattr(load, q) for q, s in zip(QUANTITIES, phase_slopes, strict=True))
        by_phase[name] = sum(terms, start=np.zeros(len(samples)))
    return by_phase


def lengths_to_try(
    lengths: IntArray, *, max_seq_len: int, sizes: MicroBatchSizes, first_len: int, num_stages: int
) -> list[int]:
    """L_max of each micro-batch size to try: `first_len` first, then the largest first.

    No two give the same number of micro-batches, and none is below the longest sample.
    """
    total, longest = max(1, int(lengths.sum())), max(1, int(lengths.max(initial=1)))
    wanted = [max(first_len, longest)]
    if sizes != "given":
        multiples = range(-(-longest // max_seq_len), -(-total // max_seq_len) + 1)
        wanted += [multiple * max_seq_len for multiple in multiples]
    if sizes == "any":
        max_count = min(len(lengths), max(MOST_PER_STAGE * num_stages, -(-total // max_seq_len)))
        powers = STEP ** np.arange(0, np.log(max_count + 1) / np.log(STEP))
        counts = np.unique(np.rint(powers).astype(np.int64))
        wanted += [max(longest, -(-total // int(count))) for count in counts if count <= max_count]
    by_count: dict[int, int] = {}
    for max_len in wanted:
        by_count.setdefault(-(-total // max_len), max_len)
    return [wanted[0], *sorted(set(by_count.values()) - {wanted[0]}, reverse=True)]


def balanced_packings(
    lengths: IntArray, costs: dict[str, FloatArray], max_len: int
) -> list[Groups]:
    """Micro-batches of one size with even LLM cost, as PipeTune, and with even total cost."""
    encoders, llm = costs["vision"] + costs["audio"], costs["llm"] + costs["labels"]
    weights = (llm, llm + encoders) if encoders.any() else (llm,)
    return [pack_balanced(lengths, weight, max_len=max_len) for weight in weights]
