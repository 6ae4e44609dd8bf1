"""PipeTune's Algorithm 1 and exact clustering in plain Python."""

from itertools import combinations


def pack_oracle(lengths, costs, max_len, num_batches):
    """Algorithm 1 from `num_batches` empty micro-batches; 0 is the printed form. -> lists of
    samples.
    """
    batches = [[] for _ in range(num_batches)]
    for sample in sorted(range(len(lengths)), key=lambda s: (-costs[s], -lengths[s])):
        fitting = [b for b in batches if sum(lengths[s] for s in b) + lengths[sample] <= max_len]
        if not fitting:
            fitting = [[]]
            batches += fitting
        # summed in the order of placing, as the costs of a running total are
        min(fitting, key=lambda b: sum(costs[s] for s in b)).append(sample)
    return batches


def unevenness(batches, costs):
    """max / mean cost."""
    totals = [sum(costs[s] for s in b) for b in batches]
    return max(totals) * len(totals) / sum(totals) if sum(totals) else 1.0


def best_spread(values, num_clusters):
    """Least sum of squared distances from the means over all cuts of the sorted values into
    runs.
    """
    values = sorted(values)
    cuts = combinations(range(1, len(values)), min(num_clusters, len(values)) - 1)
    return min(
        sum(spread(values[a:b]) for a, b in zip((0, *cut), (*cut, len(values)), strict=True))
        for cut in cuts
    )


def spread(values):
    mean = sum(values) / len(values)
    return sum((value - mean) ** 2 for value in values)
