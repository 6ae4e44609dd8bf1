"""OrchMLLM's post-balancing in plain Python: brute force, and the algorithms one example at a time."""

from itertools import product


def batches_of(lengths, assignment, num_batches):
    batches = [[] for _ in range(num_batches)]
    for length, batch in zip(lengths, assignment, strict=True):
        batches[batch].append(length)
    return batches


def largest_sum(batches):
    return max(sum(batch) for batch in batches)


def largest_padded(batches):
    return max(len(batch) * max(batch, default=0) for batch in batches)


def brute_force(lengths, num_batches, measure):
    """The least value of `measure` over all ways to deal the examples."""
    return min(
        measure(batches_of(lengths, assignment, num_batches))
        for assignment in product(range(num_batches), repeat=len(lengths))
    )


def longest_first(lengths):
    return sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))


def least_sum(lengths, num_batches):
    """Algorithm 1: longest first, to the batch of the least sum; -> ascending sums, which ties do not change."""
    sums = [0] * num_batches
    for i in longest_first(lengths):
        sums[sums.index(min(sums))] += lengths[i]
    return sorted(sums)


def least_squares(lengths, num_batches, tolerance):
    """Algorithm 4, corrected: the least squares among those whose sum is least or below the least + tolerance."""
    sums, squares, result = [0] * num_batches, [0] * num_batches, [0] * len(lengths)
    for i in longest_first(lengths):
        low = min(sums)
        near = [b for b in range(num_batches) if sums[b] == low or sums[b] < low + tolerance]
        batch = min(near, key=lambda b: (squares[b], b))
        sums[batch] += lengths[i]
        squares[batch] += lengths[i] ** 2
        result[i] = batch
    return result
