"""Exchanges of batches in node-wise rearrangement, for nodes whose places are all taken.

For `balance.steps.node_placement`, which makes the plan. What counts is the excess, the sum over
ranks of what they send above the target, and every exchange must lower it: one swap, or two of
which the first alone may do harm. A batch comes in from another node, or is free, as most are while
the plan is made. Numba; changes the plan in place.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from balance.types import IntArray

FREE = -1
"""The node of a batch that no node has yet."""
WIDTH = 8
"""Swaps after which a second one is tried when no single swap helps."""


class Step(NamedTuple):
    """The examples of a step, rank after rank, and which of them form each batch."""

    lengths: IntArray
    batches: IntArray
    offsets: IntArray
    """Rank r holds the examples from `offsets[r]` to `offsets[r + 1]`."""
    batch_starts: NDArray[np.int32]
    """Batch b is `by_batch[batch_starts[b]:batch_starts[b + 1]]`."""
    by_batch: NDArray[np.int32]
    """Ascending inside a batch."""


class Plan(NamedTuple):
    """A node for each batch, or FREE."""

    node_of: IntArray
    members: IntArray
    """The same as lists, shape (num_nodes, ranks_per_node): the first `taken` of a row are
    batches.
    """
    taken: IntArray
    sends: IntArray
    """What each rank sends to other nodes if free batches go elsewhere."""


@numba.njit(cache=True)
def node_sends(plan, node):  # type: ignore[no-untyped-def]
    """First rank of a node, and a view of what its ranks send: as many as it has places, fewer in
    the last node.
    """
    first = node * plan.members.shape[1]
    return first, plan.sends[first : first + plan.members.shape[1]]


@numba.njit(cache=True)
def keep(step, plan, batch, node, place):  # type: ignore[no-untyped-def]
    """Give a free batch to a node."""
    plan.node_of[batch], plan.members[node, place] = node, batch
    first, sends = node_sends(plan, node)
    _add_shares(step, batch, first, -1, sends)


@numba.njit(cache=True)
def _release(step, plan, batch):  # type: ignore[no-untyped-def]
    """Make a batch free; -> the node and the place that it had, FREE and 0 if it was."""
    node, place = plan.node_of[batch], 0
    if node >= 0:
        while plan.members[node, place] != batch:
            place += 1
        plan.node_of[batch] = FREE
        first, sends = node_sends(plan, node)
        _add_shares(step, batch, first, 1, sends)
    return node, place


@numba.njit(cache=True)
def _swap(step, plan, out, batch):  # type: ignore[no-untyped-def]
    """Put `batch` in the place of `out`, and `out` in the place of `batch` if it had one."""
    node, place = _release(step, plan, out)
    other, other_place = _release(step, plan, batch)
    keep(step, plan, batch, node, place)
    if other >= 0:
        keep(step, plan, out, other, other_place)


@numba.njit(cache=True)
def shares(step, batch, first, held):  # type: ignore[no-untyped-def]
    """Set `held` to the tokens of `batch` that each of the ranks from `first` on holds."""
    held[:] = 0
    _add_shares(step, batch, first, 1, held)


@numba.njit(cache=True)
def _add_shares(step, batch, first, sign, totals):  # type: ignore[no-untyped-def]
    """Add to `totals`, `sign` times, the tokens of `batch` that each of the ranks from `first` on
    holds.
    """
    low, end = step.batch_starts[batch], step.batch_starts[batch + 1]
    high = end
    while low < high:
        middle = (low + high) // 2
        if step.by_batch[middle] < step.offsets[first]:
            low = middle + 1
        else:
            high = middle
    local, stop = 0, step.offsets[first + len(totals)]
    while low < end and step.by_batch[low] < stop:
        example = step.by_batch[low]
        while example >= step.offsets[first + local + 1]:
            local += 1
        totals[local] += sign * step.lengths[example]
        low += 1


@numba.njit(cache=True)
def improve(step, plan, rank, target):  # type: ignore[no-untyped-def]
    """Make one swap that lowers the excess, or two that together do; the first lets `rank` send
    less. -> found
    """
    gains, outs, ins = _best_swaps(step, plan, rank, target, np.full(WIDTH, np.iinfo(np.int64).min))
    if gains[0] > 0:
        _swap(step, plan, outs[0], ins[0])
        return True
    for at in range((ins >= 0).sum()):
        nodes = (plan.node_of[outs[at]], plan.node_of[ins[at]])
        _swap(step, plan, outs[at], ins[at])
        for node in nodes:
            if node >= 0 and _repair(step, plan, node, target, gains[at]):
                return True
        _swap(step, plan, ins[at], outs[at])
    return False


@numba.njit(cache=True)
def _repair(step, plan, node, target, gain):  # type: ignore[no-untyped-def]
    """Make a swap for a rank of `node` above `target` that gains more than the last one, of `gain`,
    lost; -> found
    """
    first, sends = node_sends(plan, node)
    for local in range(len(sends)):
        if sends[local] > target:
            _, outs, ins = _best_swaps(step, plan, first + local, target, np.full(1, -gain))
            if ins[0] >= 0:
                _swap(step, plan, outs[0], ins[0])
                return True
    return False


@numba.njit(cache=True)
def _best_swaps(step, plan, rank, target, gains):  # type: ignore[no-untyped-def]
    """Best swaps that let `rank` send less and gain more than `gains`; -> (gains, batches given,
    batches taken).

    A swap's gain is by how much it lowers the sum of what the ranks of both nodes send above
    `target`; also negative. As many as `gains` is long, best first; batches are -1 where there are
    fewer.
    """
    ranks_per_node = plan.members.shape[1]
    node, local = rank // ranks_per_node, rank % ranks_per_node
    outs, ins = np.full(len(gains), -1), np.full(len(gains), -1)
    first, sends = node_sends(plan, node)
    held = np.empty((plan.taken[node], len(sends)), np.int64)  # (place, rank in node)
    for place in range(len(held)):
        shares(step, plan.members[node, place], first, held[place])
    incoming = np.empty(len(sends), np.int64)
    leaving, returned = np.empty(ranks_per_node, np.int64), np.empty(ranks_per_node, np.int64)
    seen = np.zeros(len(plan.node_of), np.bool_)
    for batch in step.batches[step.offsets[rank] : step.offsets[rank + 1]]:
        other = plan.node_of[batch]
        if other == node or seen[batch]:
            continue
        seen[batch] = True
        shares(step, batch, first, incoming)
        for place in range(len(held)):
            if incoming[local] <= held[place, local]:
                continue
            out, gain = plan.members[node, place], _gain(sends, held[place], incoming, target)
            if (
                gain > gains[-1] and other >= 0
            ):  # the other node rarely gains anything: last, because it is dear
                other_first, other_sends = node_sends(plan, other)
                shares(step, batch, other_first, leaving[: len(other_sends)])
                shares(step, out, other_first, returned[: len(other_sends)])
                gain += _gain(other_sends, leaving, returned, target)
            if gain > gains[-1]:
                _insert(gains, outs, ins, gain, out, batch)
    return gains, outs, ins


@numba.njit(cache=True)
def _insert(gains, outs, ins, gain, out, batch):  # type: ignore[no-untyped-def]
    """Put a swap at its place among the best, behind equal ones; the last drops out."""
    at = len(gains) - 1
    while at > 0 and gains[at - 1] < gain:
        gains[at], outs[at], ins[at] = gains[at - 1], outs[at - 1], ins[at - 1]
        at -= 1
    gains[at], outs[at], ins[at] = gain, out, batch


@numba.njit(cache=True)
def _gain(sends, given, taken, target):  # type: ignore[no-untyped-def]
    """By how much the excess over `target` of a node's ranks falls when they give and take these
    tokens.
    """
    gain = np.int64(0)
    for local in range(len(sends)):
        gain += max(0, sends[local] - target) - max(
            0, sends[local] + given[local] - taken[local] - target
        )
    return gain
