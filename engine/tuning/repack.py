"""PipeTune's packing: micro-batches of a step that cost the same.

For the pipeline planner: a step's samples (PipeTune: 128) are packed into micro-batches of at most
`max_len` tokens and even cost, then micro-batches of similar cost form at most five clusters, so
that a planner can try all orders of the clusters. Pure; plain loops in numba, O(samples x
micro-batches): 128 samples in 20 us, 1,024 in .2 ms.

`max_len` is PipeTune's L_max, micro-batch size x max_seq_len. A sample's cost is any additive one:
FLOPs or time, with attention by its own length (`models.flops` gives them).
"""

from collections.abc import Iterator
from itertools import permutations

import numpy as np

from isobatch.balance.dispatching.post_balancing import as_batches
from isobatch.balance.kernels import kernel
from isobatch.common.types import FloatArray, Groups, IntArray

Costs = IntArray | FloatArray

MAX_CLUSTERS = 5
"""PipeTune keeps the number of clusters below six: 5! = 120 orders to simulate."""

TOLERANCE = 0.01
"""Distance of a micro-batch from its cluster's mean, in mean costs, if five clusters suffice."""


def pack_balanced(lengths: IntArray, costs: Costs, *, max_len: int) -> Groups:
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
    costs: Costs, *, max_clusters: int = MAX_CLUSTERS, tolerance: float = TOLERANCE
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
