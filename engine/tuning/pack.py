"""Packings of a step's samples into micro-batches, and clusters of these. Pure.

PipeTune packs a step's samples (128) into micro-batches of at most L_max = micro-batch size x
max_seq_len tokens and even FLOPs, for each micro-batch size that fits into memory. Here a sample's
cost is its marginal time in a mean micro-batch by the cost function: additive, but aware of the
hardware. Micro-batches of similar cost form at most five clusters, so that a planner can try all
orders of the clusters. Plain loops in numba, O(samples x micro-batches): 128 samples in 20 us,
1,024 in .2 ms.
"""

from collections.abc import Callable, Iterator
from itertools import permutations
from typing import Literal

import numpy as np

from isobatch.balance.dispatching.post_balancing import as_batches
from isobatch.balance.kernels import kernel
from isobatch.common.types import BoolArray, FloatArray, Groups, IntArray
from isobatch.engine.cost_model.costs import Costs
from isobatch.engine.cost_model.loads import PHASES, QUANTITIES, Loads, PhaseLoads

CostFunction = Callable[[Loads], Costs]
"""Costs of the layers for any micro-batches, by a model on a cluster or by a profile."""

MicroBatchSizes = Literal["given", "multiples", "any"]
"""Micro-batch sizes to try: given; multiples of max_seq_len (PipeTune); also others."""

STEP = 1.2
"""Ratio of neighbouring sizes of `any`."""
MOST_PER_STAGE = 8
"""Micro-batches per stage of the smallest size: a bubble of at most 1/8 is left."""


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


SampleCosts = IntArray | FloatArray

MAX_CLUSTERS = 5
"""PipeTune keeps the number of clusters below six: 5! = 120 orders to simulate."""

TOLERANCE = 0.01
"""Distance of a micro-batch from its cluster's mean, in mean costs, if five clusters suffice."""


def pack_balanced(lengths: IntArray, costs: SampleCosts, *, max_len: int) -> Groups:
    """Micro-batches of at most `max_len` tokens whose costs are even (PipeTune, Algorithm 1).

    Most expensive sample first (then longest), to the cheapest micro-batch that can take it; one is
    added when none can. Repaired against print, which starts from no micro-batch and so never
    reaches its second choice: start with ceil(sum of lengths / max_len). If that was too few, also
    start with one more, and keep the evener of both (max / mean cost). Samples keep their order
    inside a micro-batch. Raises ValueError for a sample over `max_len`.

    >>> groups = pack_balanced(np.array([5, 4, 3, 3]), np.array([25, 16, 9, 9]), max_len=8)
    >>> [groups[g].tolist() for g in range(len(groups))]
    [[0, 3], [1, 2]]
    """
    lengths, costs = np.asarray(lengths, dtype=np.int64), np.asarray(costs, dtype=np.float64)
    if len(lengths) != len(costs):
        raise ValueError(f"{len(lengths)} lengths but {len(costs)} costs; give one of each sample")
    if len(lengths) and not (lengths.min() >= 0 and costs.min() >= 0 and np.isfinite(costs).all()):
        lowest = f"lowest length {lengths.min()}, lowest cost {costs.min()}"
        raise ValueError(f"{lowest}; give finite ones from 0 on")
    if max_len < 1:
        raise ValueError(f"max_len is {max_len} tokens; give at least 1")
    over = np.flatnonzero(lengths > max_len)
    if len(over):
        raise ValueError(
            f"{len(over)} samples are longer than max_len {max_len} (first: sample {over[0]} with"
            f" {lengths[over[0]]}); reject or split them first"
        )
    order = np.lexsort((-lengths, -costs))
    fewest = max(-(-int(lengths.sum()) // max_len), min(1, len(lengths)))
    batches, used = _pack(lengths, costs, order, max_len, fewest)
    if used > fewest:
        again, used_again = _pack(lengths, costs, order, max_len, fewest + 1)
        if _unevenness(costs, again, used_again) < _unevenness(costs, batches, used):
            batches, used = again, used_again
    return as_batches(batches, used)


def cluster_costs(
    costs: SampleCosts, *, max_clusters: int = MAX_CLUSTERS, tolerance: float = TOLERANCE
) -> IntArray:
    """Cluster of each micro-batch by cost (PipeTune, section 5), int64; 0 is the cheapest.

    The least sum of squared distances from the clusters' means, exactly, by dynamic programming
    over the sorted costs; as few clusters as keep every micro-batch within `tolerance` x the mean
    cost of its cluster's mean, at most `max_clusters`. Equal costs share a cluster.

    >>> cluster_costs(np.array([10.0, 99.0, 10.05, 100.0, 50.0])).tolist()
    [0, 2, 0, 2, 1]
    """
    costs = np.asarray(costs, dtype=np.float64)
    if max_clusters < 1 or not (costs >= 0).all() or not np.isfinite(costs).all():
        raise ValueError(
            f"max_clusters is {max_clusters}, lowest cost {costs.min()}; "
            "give at least 1, and costs >= 0"
        )
    values, inverse, counts = np.unique(costs, return_inverse=True, return_counts=True)
    if len(values) < 2:
        return np.zeros(len(costs), np.int64)
    # around 0 and of size 1, so that sums of squares keep their digits
    scaled = (values - costs.mean()) / costs.mean()
    for num_clusters in range(1, max_clusters + 1):
        labels = _split(scaled, counts.astype(np.float64), min(num_clusters, len(values)))
        means = np.bincount(labels, counts * scaled) / np.bincount(labels, counts)
        if float(np.abs(scaled - means[labels]).max()) <= tolerance:
            break
    return np.asarray(labels[inverse], dtype=np.int64)


def cluster_orders(clusters: IntArray) -> Iterator[IntArray]:
    """All orders of micro-batches in which clusters stay together, int64, one per cluster order.

    >>> [order.tolist() for order in cluster_orders(np.array([0, 1, 0]))]
    [[0, 2, 1], [1, 0, 2]]
    """
    for turns in permutations(range(int(clusters.max(initial=-1)) + 1)):
        yield np.argsort(np.argsort(turns)[clusters] if turns else clusters, kind="stable")


def _unevenness(costs: FloatArray, batches: IntArray, num_batches: int) -> float:
    """max / mean cost of the micro-batches, times a constant: the total is the same in all."""
    return float(np.bincount(batches, costs).max()) * num_batches


@kernel
def _pack(lengths, costs, order, max_len, num_batches):  # type: ignore[no-untyped-def]
    """Place the samples of `order`, from `num_batches` micro-batches; -> (batches, how many)."""
    batches = np.empty(len(order), np.int64)
    max_batches = num_batches + len(order)
    batch_len, batch_cost = np.zeros(max_batches, np.int64), np.zeros(max_batches, np.float64)
    for sample in order:
        cheapest = -1
        for batch in range(num_batches):
            fits = batch_len[batch] + lengths[sample] <= max_len
            if fits and (cheapest < 0 or batch_cost[batch] < batch_cost[cheapest]):
                cheapest = batch
        if cheapest < 0:
            cheapest = num_batches
            num_batches += 1
        batches[sample] = cheapest
        batch_len[cheapest] += lengths[sample]
        batch_cost[cheapest] += costs[sample]
    return batches, num_batches


@kernel
def _split(values, weights, num_clusters):  # type: ignore[no-untyped-def]
    """Cluster of each ascending value: consecutive, with the least sum of squared distances."""
    num_values = len(values)
    # sums of weights, values and squares before each place
    sums = np.zeros((3, num_values + 1))
    weight, first, second = sums[0], sums[1], sums[2]
    for index in range(num_values):
        weight[index + 1] = weight[index] + weights[index]
        first[index + 1] = first[index] + weights[index] * values[index]
        second[index + 1] = second[index] + weights[index] * values[index] ** 2
    # best[k, end]: the first `end` values in k clusters; cut: where the last of those starts
    best = np.full((num_clusters + 1, num_values + 1), np.inf)
    cut = np.zeros((num_clusters + 1, num_values + 1), np.int64)
    best[0, 0] = 0.0
    for clusters in range(1, num_clusters + 1):
        for end in range(clusters, num_values + 1):
            for start in range(clusters - 1, end):
                total = first[end] - first[start]
                spread = second[end] - second[start] - total * total / (weight[end] - weight[start])
                reached = best[clusters - 1, start] + spread
                if reached < best[clusters, end]:
                    best[clusters, end], cut[clusters, end] = reached, start
    # back from the last value
    labels = np.empty(num_values, np.int64)
    end = num_values
    for clusters in range(num_clusters, 0, -1):
        labels[cut[clusters, end] : end] = clusters - 1
        end = cut[clusters, end]
    return labels
