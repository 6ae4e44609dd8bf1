"""Swaps of batches between nodes, for `engine.dispatching._node_placement`.

Used when all places of a node are taken. What counts is the excess, the sum over ranks of what they
send above the target, and every exchange must lower it: one swap, or two of which the first alone
may do harm. Batches come in from other nodes, or are free. Numba; changes the placement in place.
"""

from typing import NamedTuple

import numba
import numpy as np

from isobatch.common.types import IntArray

FREE = -1
"""Node of a batch that has none yet."""
WIDTH = 8
"""First swaps after which a second one is tried when no single swap helps."""


class StepExamples(NamedTuple):
    """The examples of a step, rank after rank, and which of them form each batch."""

    lengths: IntArray
    batches: IntArray
    offsets: IntArray
    """Rank r holds the examples from `offsets[r]` to `offsets[r + 1]`."""
    batch_starts: IntArray
    """Batch b is `by_batch[batch_starts[b]:batch_starts[b + 1]]`."""
    by_batch: IntArray
    """Ascending inside a batch."""


class Placement(NamedTuple):
    """A node for each batch, or FREE."""

    node_of: IntArray
    members: IntArray
    """The same as lists, (num_nodes, ranks_per_node): the first `taken` of a row are batches."""
    taken: IntArray
    sends: IntArray
    """Tokens that each rank sends to other nodes if free batches go elsewhere."""


@numba.njit(cache=True)
def node_sends(placement, node):  # type: ignore[no-untyped-def]
    """First rank of a node, and a view of what its ranks send; the last node may be smaller."""
    first = node * placement.members.shape[1]
    return first, placement.sends[first : first + placement.members.shape[1]]


@numba.njit(cache=True)
def place(step, placement, batch, node, slot):  # type: ignore[no-untyped-def]
    """Give a free batch to a node."""
    placement.node_of[batch], placement.members[node, slot] = node, batch
    first, sends = node_sends(placement, node)
    _add_shares(step, batch, first, -1, sends)


@numba.njit(cache=True)
def _release(step, placement, batch):  # type: ignore[no-untyped-def]
    """Make a batch free; -> the node and the slot that it had, FREE and 0 if it was."""
    node, slot = placement.node_of[batch], 0
    if node >= 0:
        while placement.members[node, slot] != batch:
            slot += 1
        placement.node_of[batch] = FREE
        first, sends = node_sends(placement, node)
        _add_shares(step, batch, first, 1, sends)
    return node, slot


@numba.njit(cache=True)
def _swap(step, placement, out, batch):  # type: ignore[no-untyped-def]
    """Put `batch` in the slot of `out`, and `out` in the slot of `batch` if it had one."""
    node, slot = _release(step, placement, out)
    other, other_slot = _release(step, placement, batch)
    place(step, placement, batch, node, slot)
    if other >= 0:
        place(step, placement, out, other, other_slot)


@numba.njit(cache=True)
def shares(step, batch, first, held):  # type: ignore[no-untyped-def]
    """Set `held` to the tokens of `batch` that each of the ranks from `first` on holds."""
    held[:] = 0
    _add_shares(step, batch, first, 1, held)


@numba.njit(cache=True)
def _add_shares(step, batch, first, sign, totals):  # type: ignore[no-untyped-def]
    """Add to `totals`, `sign` times, the tokens of `batch` on each rank from `first` on."""
    examples = step.by_batch[step.batch_starts[batch] : step.batch_starts[batch + 1]]
    start, stop = step.offsets[first], step.offsets[first + len(totals)]
    local = 0
    for example in examples[np.searchsorted(examples, start) :]:
        if example >= stop:
            break
        while example >= step.offsets[first + local + 1]:
            local += 1
        totals[local] += sign * step.lengths[example]


@numba.njit(cache=True)
def improve(step, placement, rank, target):  # type: ignore[no-untyped-def]
    """Make a swap that lowers the excess and lets `rank` send less, or two swaps; -> found."""
    min_gains = np.full(WIDTH, np.iinfo(np.int64).min)
    gains, outs, ins = _best_swaps(step, placement, rank, target, min_gains)
    if gains[0] > 0:
        _swap(step, placement, outs[0], ins[0])
        return True
    # a swap that may do harm, then one that makes up for it; else undo the first
    for at in range((ins >= 0).sum()):
        nodes = (placement.node_of[outs[at]], placement.node_of[ins[at]])
        _swap(step, placement, outs[at], ins[at])
        for node in nodes:
            if node >= 0 and _repair(step, placement, node, target, gains[at]):
                return True
        _swap(step, placement, ins[at], outs[at])
    return False


@numba.njit(cache=True)
def _repair(step, placement, node, target, gain):  # type: ignore[no-untyped-def]
    """Make a swap for a rank of `node` that gains more than the last, of `gain`, lost; -> found."""
    first, sends = node_sends(placement, node)
    for local in range(len(sends)):
        if sends[local] > target:
            min_gains = np.full(1, -gain)
            _, outs, ins = _best_swaps(step, placement, first + local, target, min_gains)
            if ins[0] >= 0:
                _swap(step, placement, outs[0], ins[0])
                return True
    return False


@numba.njit(cache=True)
def _best_swaps(step, placement, rank, target, gains):  # type: ignore[no-untyped-def]
    """Best swaps that let `rank` send less and gain more than `gains`; -> (gains, outs, ins).

    A swap's gain, maybe negative, is by how much it lowers the excess over `target` of both nodes.
    As many as `gains` is long, best first: batches given and taken, -1 where there are fewer.
    """
    ranks_per_node = placement.members.shape[1]
    node, local = rank // ranks_per_node, rank % ranks_per_node
    outs, ins = np.full(len(gains), -1), np.full(len(gains), -1)
    first, sends = node_sends(placement, node)
    # what each rank of the node holds of the node's batches
    held = np.empty((placement.taken[node], len(sends)), np.int64)  # (slot, rank in node)
    for slot in range(len(held)):
        shares(step, placement.members[node, slot], first, held[slot])
    incoming = np.empty(len(sends), np.int64)
    leaving, returned = np.empty(ranks_per_node, np.int64), np.empty(ranks_per_node, np.int64)
    seen = np.zeros(len(placement.node_of), np.bool_)
    # batches of which `rank` holds something, for each of the node's own
    for batch in step.batches[step.offsets[rank] : step.offsets[rank + 1]]:
        other = placement.node_of[batch]
        if other == node or seen[batch]:
            continue
        seen[batch] = True
        shares(step, batch, first, incoming)
        for slot in range(len(held)):
            if incoming[local] <= held[slot, local]:
                continue
            out, gain = placement.members[node, slot], _gain(sends, held[slot], incoming, target)
            # the other node rarely gains anything: last, because it is expensive
            if gain > gains[-1] and other >= 0:
                other_first, other_sends = node_sends(placement, other)
                shares(step, batch, other_first, leaving[: len(other_sends)])
                shares(step, out, other_first, returned[: len(other_sends)])
                gain += _gain(other_sends, leaving, returned, target)
            if gain > gains[-1]:
                _insert((gains, outs, ins), gain, out, batch)
    return gains, outs, ins


@numba.njit(cache=True)
def _insert(best, gain, out, batch):  # type: ignore[no-untyped-def]
    """Put a swap at its place among the best, after equal ones; the last drops out."""
    gains, outs, ins = best
    at = len(gains) - 1
    while at > 0 and gains[at - 1] < gain:
        gains[at], outs[at], ins[at] = gains[at - 1], outs[at - 1], ins[at - 1]
        at -= 1
    gains[at], outs[at], ins[at] = gain, out, batch


@numba.njit(cache=True)
def _gain(sends, received, sent, target):  # type: ignore[no-untyped-def]
    """By how much a node's excess over `target` falls when its ranks give and take these tokens."""
    gain = np.int64(0)
    for local in range(len(sends)):
        after = sends[local] + received[local] - sent[local]
        gain += max(0, sends[local] - target) - max(0, after - target)
    return gain
