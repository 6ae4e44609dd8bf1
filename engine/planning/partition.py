"""Even partitions by one figure per layer (OmniBal, Table 4). Pure.

Each minimises the largest sum of its figure over stages, then the variance, exactly, by dynamic
programming in a few ms for 160 layers. None considers memory, communication or the schedule.
"""

from collections.abc import Callable

import numpy as np

from isobatch.common.errors import ConfigError
from isobatch.common.types import FloatArray, IntArray
from isobatch.engine.cost_model.costs import Costs


def even_partition(weights: IntArray, num_stages: int) -> IntArray:
    """Borders, (num_stages + 1,), of the contiguous partition with the least largest sum.

    Ties: least variance, then most layers in front. `weights`, (layers,), are not negative.
    ConfigError if there are fewer layers than stages.

    >>> even_partition(np.array([1, 1, 1, 1, 4]), 3).tolist()
    [0, 2, 4, 5]
    """
    num_layers = len(weights)
    check_stages(num_layers, num_stages)
    running = np.concatenate([[0], np.cumsum(weights, dtype=np.int64)])
    sums = (running[np.newaxis, :] - running[:, np.newaxis]).astype(np.float64)  # (from, to)
    sums[np.tril_indices(num_layers + 1)] = np.inf  # no stage is empty
    largest = _best_tails(sums, num_stages, np.maximum)[0][0, 0]
    squares = np.where(sums <= largest, (sums / max(largest, 1)) ** 2, np.inf)
    _, nexts = _best_tails(squares, num_stages, np.add)
    borders = [0]
    for stage in range(num_stages):
        borders.append(int(nexts[stage, borders[-1]]))
    return np.array(borders)


def by_params(costs: Costs, num_stages: int) -> IntArray:
    """The same number of parameters in every stage, as far as whole layers allow."""
    return even_partition(costs.param_counts, num_stages)


def by_layers(costs: Costs, num_stages: int) -> IntArray:
    """The same number of layers in every stage; the first ones have one more."""
    return even_partition(np.ones(costs.num_layers, np.int64), num_stages)


def by_forward_time(costs: Costs, num_stages: int) -> IntArray:
    """The same forward time in every stage: profile-based, as PipeDream and DreamPipe do."""
    return even_partition(costs.forward_ns.sum(axis=1), num_stages)


def by_step_time(costs: Costs, num_stages: int) -> IntArray:
    """The same forward and backward time in every stage, nothing recomputed, for frozen layers."""
    return even_partition((costs.forward_ns + costs.backward_ns).sum(axis=1), num_stages)


METHODS: dict[str, Callable[[Costs, int], IntArray]] = {
    "parameter-based": by_params,
    "layer-based": by_layers,
    "profile-based": by_forward_time,
}
"""The first three rows of OmniBal's Table 4."""


def check_stages(num_layers: int, num_stages: int) -> None:
    """ConfigError unless each stage can have a layer."""
    if not 1 <= num_stages <= num_layers:
        raise ConfigError(
            f"{num_stages} stages of {num_layers} layers; give 1 to {num_layers}, a layer for each"
        )


def _best_tails(
    values: FloatArray, num_stages: int, combine: np.ufunc
) -> tuple[FloatArray, IntArray]:
    """Least value of cutting the layers from each one on into the last stages.

    `values[a, b]`: value of the stage a:b; `combine` adds or takes the larger. -> (value, end of
    the first of these stages), each (num_stages, layers + 1): row s is for the stages from s on.
    """
    num_layers = len(values) - 1
    shape = num_stages, num_layers + 1
    best, ends = np.full(shape, np.inf), np.full(shape, num_layers)
    best[-1] = values[:, -1]
    for stage in reversed(range(num_stages - 1)):
        whole = combine(values, best[stage + 1][np.newaxis, :])
        # the last one of equals
        ends[stage] = num_layers - np.argmin(whole[:, ::-1], axis=1)
        best[stage] = whole.min(axis=1)
    return best, ends
