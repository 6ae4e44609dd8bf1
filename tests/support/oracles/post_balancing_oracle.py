"""OrchMLLM's post-balancing algorithms and node-wise problem in plain Python, as one reads them in
the paper and in our docstrings; and brute force over all assignments, for a handful of examples.
"""

import heapq
from itertools import combinations_with_replacement, permutations, product


def sums_oracle(lengths, num_batches):
    """Algorithm 1. An example over the mean fills a batch anyway, so all of these count as equally
    long.
    """
    full = sum(lengths) // num_batches + 1
    order = sorted(range(len(lengths)), key=lambda e: -min(lengths[e], full))
    heap = [(0, batch, batch) for batch in range(num_batches)]  # (sum, since when, batch)
    batches = [0] * len(lengths)
    for turn, example in enumerate(order):
        total, _, batch = heap[0]
        batches[example] = batch
        heapq.heapreplace(heap, (total + min(lengths[example], full), num_batches + turn, batch))
    return batches


def padded_oracle(lengths, num_batches):
    """Algorithm 2, repaired: walk every run for every bound."""
    order = sorted(range(len(lengths)), key=lambda e: (lengths[e], -e))

    def runs(bound):
        result = [[]]
        for example in order:
            if result[-1] and (len(result[-1]) + 1) * lengths[example] > bound:
                result.append([])
            result[-1].append(example)
        return result

    batches = [0] * len(lengths)
    if not lengths:
        return batches
    low, high = max(lengths), max(lengths) * -(-len(lengths) // num_batches)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(runs(middle)) <= num_batches else (middle + 1, high)
    for batch, members in enumerate(runs(low)):
        for example in members:
            batches[example] = batch
    return batches


def squares_oracle(lengths, num_batches, tolerance):
    """Algorithm 4, repaired: look at all batches for every example."""
    sums, squares = [0] * num_batches, [0] * num_batches
    batches = [0] * len(lengths)
    for example in sorted(range(len(lengths)), key=lambda e: -lengths[e]):
        least = min(sums)
        near = [b for b in range(num_batches) if sums[b] == least or sums[b] < least + tolerance]
        batch = min(near, key=lambda b: (squares[b], b))
        batches[example] = batch
        sums[batch] += lengths[example]
        squares[batch] += lengths[example] ** 2
    return batches


def conv_oracle(lengths, num_batches):
    """Algorithm 5, repaired."""
    bound = max(loads(lengths, sums_oracle(lengths, num_batches), num_batches, sum))
    order = sorted(range(len(lengths)), key=lambda e: -lengths[e])
    filled = [[]]
    while order:
        example = order[0]
        first = lengths[filled[-1][0]] if filled[-1] else 0
        if filled[-1] and (len(filled[-1]) + 1) * first > bound:
            if len(filled) >= num_batches:
                break
            filled.append([])
        filled[-1].append(order.pop(0))
    filled += [[] for _ in range(num_batches - len(filled))]
    full = sum(lengths) // num_batches + 1
    heap = [(sum(min(lengths[e], full) for e in members), b, b) for b, members in enumerate(filled)]
    heapq.heapify(heap)
    for turn, example in enumerate(order):
        total, _, batch = heap[0]
        filled[batch].append(example)
        heapq.heapreplace(heap, (total + lengths[example], num_batches + turn, batch))
    batches = [0] * len(lengths)
    for batch, members in enumerate(filled):
        for example in members:
            batches[example] = batch
    return batches


def loads(lengths, batches, num_batches, load):
    """`load` of the lengths of each batch."""
    members = [[] for _ in range(num_batches)]
    for length, batch in zip(lengths, batches, strict=True):
        members[batch].append(length)
    return [load(batch) for batch in members]


def padded(lengths):
    return len(lengths) * max(lengths, default=0)


def best_load(lengths, num_batches, load):
    """Least possible largest `load` of a batch, over all assignments."""
    choices = product(range(num_batches), repeat=len(lengths))
    return min(max(loads(lengths, batches, num_batches, load)) for batches in choices)


def best_cut(lengths, num_batches, load):
    """Least possible largest `load`, over all cuts of the sorted lengths into runs."""
    values = sorted(lengths)
    cuts = combinations_with_replacement(range(len(values) + 1), num_batches - 1)
    return min(
        max(load(values[a:b]) for a, b in zip((0, *cut), (*cut, len(values)), strict=True))
        for cut in cuts
    )


def sends(lengths, sources, targets, ranks_per_node, num_ranks):
    """What each rank sends to other nodes."""
    result = [0] * num_ranks
    for length, source, target in zip(lengths, sources, targets, strict=True):
        if source // ranks_per_node != target // ranks_per_node:
            result[source] += length
    return result


def best_send(lengths, sources, batches, ranks_per_node, num_ranks):
    """Least possible largest inter-node send of a rank, over all permutations of the batches."""
    return min(
        max(sends(lengths, sources, [rank_of[b] for b in batches], ranks_per_node, num_ranks))
        for rank_of in permutations(range(num_ranks))
    )
