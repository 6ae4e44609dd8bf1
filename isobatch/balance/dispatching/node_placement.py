"""Batches to ranks, so that no rank sends much to other nodes.

The problem of OrchMLLM's Algorithm 3, solved without an integer program. Post-balancing says which
examples form a batch, not which rank runs it. Links inside a node are fast, so a node should keep
the batches that its own ranks hold much of; what counts is the rank that sends most to other nodes.
Pure and deterministic: every rank computes it.

In numba, as plain loops, for assigned slices and methods of arrays take it seconds to compile:
bisect the target, the tokens that a rank may send. For a target, node after node takes
the batches that its ranks need, always for the rank that sends most: the smallest example that
covers what is above the target, else the largest. A full node swaps batches with other
nodes, or with free ones. What counts there is the excess, the sum over ranks of what they send
above the target, and every exchange must lower it: one swap, or two of which the first alone may do
harm. A node that still sends more goes first in all later attempts, so most targets out of reach
fail at the first node. At the end each batch that nobody needed goes to the node of its largest
example. benchmarks/post_balancing.py has times, and the gap to a proven bound
(an integer program for one node alone).
"""

from typing import NamedTuple

import numpy as np

from isobatch.balance.dispatching.post_balancing import as_batches
from isobatch.balance.kernels import copy_into, fill, inner, kernel
from isobatch.common.types import IntArray

PRECISION = 256
"""The bisection ends when the target is known to 1/256."""
ATTEMPTS = 5
"""Attempts at a target, each with the node at which the last one failed in front."""
MAX_SWAPS = 32
"""Exchanges of batches in one attempt at most, to bound the time: some 20 us each, usually few."""
REACH = 8
"""Exchanges are worth trying up to 1/8 above the target."""
FREE = -1
"""Node of a batch that has none yet."""
ONE, ANY_GAIN = np.int64(1), np.int64(np.iinfo(np.int64).min)
"""Arguments: for a number that is written in a call numba compiles the function once more."""
WIDTH = np.int64(8)
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
    """Batches of each node, (num_nodes, ranks_per_node): the first `taken` of a row."""
    taken: IntArray
    sends: IntArray
    """Tokens that each rank sends to other nodes if free batches go elsewhere."""


def place_batches(
    lengths: IntArray, batches: IntArray, source_offsets: IntArray, *, ranks_per_node: int
) -> IntArray:
    """Rank of each batch for a small largest inter-node send (OrchMLLM, Algorithm 3).

    `lengths` are tokens, `batches` the batch of each example as a function of `post_balancing`
    gives it, both rank after rank: rank r holds the examples `source_offsets[r]` to
    `source_offsets[r + 1]`. There are as many batches as ranks. A node is `ranks_per_node` ranks in
    a row, the last may be fewer. Returns a permutation, int64, shape (num_ranks,): batch b moves to
    rank `result[b]`, in its node the one that holds most of it; examples to `result[batches]`.

    >>> lengths, batches = np.array([9, 1, 8, 2]), np.array([2, 0, 1, 3])
    >>> place_batches(lengths, batches, np.array([0, 1, 2, 3, 4]), ranks_per_node=2)
    array([1, 2, 0, 3])
    """
    lengths = np.ascontiguousarray(lengths, np.int64)
    batches = np.ascontiguousarray(batches, np.int64)
    source_offsets = np.ascontiguousarray(source_offsets, np.int64)
    num_ranks = len(source_offsets) - 1
    if ranks_per_node < 1 or num_ranks < 1:
        raise ValueError(f"{num_ranks} ranks, {ranks_per_node} per node; give at least 1 of each")
    equal = len(lengths) == len(batches) == source_offsets[-1]
    if not equal or source_offsets[0] != 0 or (np.diff(source_offsets) < 0).any():
        raise ValueError(
            f"{len(lengths)} lengths, {len(batches)} batches, offsets from {source_offsets[0]} to"
            f" {source_offsets[-1]}; give one of each per example, and ascending offsets from 0"
        )
    in_range = not len(batches) or 0 <= batches.min() <= batches.max() < num_ranks
    if not in_range or lengths.min(initial=0) < 0:
        raise ValueError(
            f"batches {batches.min()} to {batches.max()}, lengths from {lengths.min()}; batches"
            f" must be 0 to {num_ranks - 1}, one per rank, and lengths not negative"
        )
    if len(lengths) == 0:
        return np.arange(num_ranks)
    ranks_per_node = min(ranks_per_node, num_ranks)
    members = as_batches(batches, num_ranks)
    step = StepExamples(lengths, batches, source_offsets, members.offsets, members.samples)
    # tokens that each rank holds
    loads = np.diff(np.concatenate([[0], np.cumsum(lengths)])[source_offsets])
    heaviest = np.maximum.reduceat(loads, np.arange(0, num_ranks, ranks_per_node))
    placement, draft = (_nothing_placed(loads, ranks_per_node) for _ in range(2))
    nodes = np.argsort(-heaviest, kind="stable")
    homes = np.repeat(np.arange(num_ranks) // ranks_per_node, np.diff(source_offsets))
    return np.asarray(_place_all(step, loads, nodes, homes, draft, placement), dtype=np.int64)


def _nothing_placed(loads: IntArray, ranks_per_node: int) -> Placement:
    num_nodes = -(-len(loads) // ranks_per_node)
    members = np.full((num_nodes, ranks_per_node), FREE)
    taken = np.zeros(num_nodes, np.int64)
    return Placement(np.full(len(loads), FREE), members, taken, loads.copy())


@kernel
def _place_all(step, loads, nodes, homes, draft, placement):  # type: ignore[no-untyped-def]
    """Rank of each batch: those that ranks need, then all others, then the ranks of each node."""
    _smallest_target(step, loads, nodes, draft, placement)
    _fill(step, placement, homes)
    return _ranks_inside(step, placement)


@inner
def _smallest_target(step, loads, nodes, draft, best):  # type: ignore[no-untyped-def]
    """Bisect the target; sets `best` to the placement of the smallest one that was reached.

    Most of its batches may be free. Targets are tried on `draft`, at first in the order `nodes`.
    """
    low, high = np.int64(0), loads[_largest(loads)]
    while high - low > high // PRECISION:
        target = (low + high) // 2
        failed = len(nodes)
        for _ in range(ATTEMPTS):
            if failed > 0:
                failed = _cover(step, draft, loads, nodes, target)
        if failed < 0:
            high = draft.sends[_largest(draft.sends)]
            copy_into(best.node_of, draft.node_of)
            copy_into(best.taken, draft.taken)
            copy_into(best.sends, draft.sends)
            for node in range(len(nodes)):
                copy_into(best.members[node], draft.members[node])
        else:
            low = target + 1


@inner
def _cover(step, placement, loads, nodes, target):  # type: ignore[no-untyped-def]
    """Place batches so that no rank sends more than `target`, node after node of `nodes`.

    -1 if that succeeds; else the place in `nodes` of the one that failed, which moves to the front.
    """
    fill(placement.node_of, FREE)
    fill(placement.taken, 0)
    copy_into(placement.sends, loads)
    swaps = np.int64(MAX_SWAPS)
    # again, if swaps left an earlier node above the target
    while placement.sends[_largest(placement.sends)] > target:
        for at in range(len(nodes)):
            node = nodes[at]
            swaps = _serve(step, placement, node, target, swaps)
            if swaps < 0:
                for before in range(at, 0, -1):
                    nodes[before] = nodes[before - 1]
                nodes[0] = node
                return at
    return -1


@inner
def _serve(step, placement, node, target, swaps):  # type: ignore[no-untyped-def]
    """Give a node batches until no rank sends more than `target`; -> swaps left, -1 if stuck."""
    first, sends = _node_sends(placement, node)
    while True:
        local = _largest(sends)
        rank = first + local
        need = sends[local] - target
        if need <= 0:
            return swaps
        example = -1
        if placement.taken[node] < len(sends):
            example = _smallest_cover(step, placement, rank, need)
        if example >= 0:
            _place(step, placement, step.batches[example], node, placement.taken[node])
            placement.taken[node] += 1
        elif swaps > 0 and need <= target // REACH and _improve(step, placement, rank, target):
            swaps -= 1
        else:
            return -1


@inner
def _smallest_cover(step, placement, rank, need):  # type: ignore[no-untyped-def]
    """Smallest example >= `need` of `rank` in a free batch, else the largest; -1 if no tokens."""
    best, tokens = -1, np.int64(0)
    for example in range(step.offsets[rank], step.offsets[rank + 1]):
        length = step.lengths[example]
        better = tokens < length if tokens < need else need <= length < tokens
        if better and placement.node_of[step.batches[example]] < 0:
            best, tokens = example, length
    return best


@inner
def _fill(step, placement, homes):  # type: ignore[no-untyped-def]
    """Each free batch to the node of its largest example that has a slot, else to any.

    `homes` are the examples'. Takes from no rank, so `placement.sends` is not updated.
    """
    num_nodes, any_node = len(placement.taken), 0
    free_slots = np.empty(num_nodes, np.int64)
    for node in range(num_nodes):
        free_slots[node] = len(_node_sends(placement, node)[1]) - placement.taken[node]
    for batch in range(len(placement.node_of)):
        if placement.node_of[batch] >= 0:
            continue
        best, tokens = -1, np.int64(-1)
        for at in range(step.batch_starts[batch], step.batch_starts[batch + 1]):
            example = step.by_batch[at]
            node = homes[example]
            if step.lengths[example] > tokens and free_slots[node] > 0:
                best, tokens = node, step.lengths[example]
        if best < 0:
            while free_slots[any_node] == 0:
                any_node += 1
            best = any_node
        placement.node_of[batch] = best
        placement.members[best, placement.taken[best]] = batch
        placement.taken[best] += 1
        free_slots[best] -= 1


@inner
def _ranks_inside(step, placement):  # type: ignore[no-untyped-def]
    """Rank of each batch: per node the (slot, rank) with most tokens first, ties to the lowest."""
    ranks_per_node = placement.members.shape[1]
    ranks = np.empty(len(placement.node_of), np.int64)
    # (slot, rank in node); -1 when assigned
    held = np.empty((ranks_per_node, ranks_per_node), np.int64)
    for node in range(len(placement.members)):
        first, sends = _node_sends(placement, node)
        for slot in range(len(sends)):
            _shares(step, placement.members[node, slot], first, held[slot])
        for _ in range(len(sends)):
            best_slot, best, tokens = 0, 0, np.int64(-1)
            for slot in range(len(sends)):
                for local in range(len(sends)):
                    if held[slot, local] > tokens:
                        best_slot, best, tokens = slot, local, held[slot, local]
            ranks[placement.members[node, best_slot]] = first + best
            for at in range(len(sends)):
                held[best_slot, at] = -1
                held[at, best] = -1
    return ranks


@inner
def _node_sends(placement, node):  # type: ignore[no-untyped-def]
    """First rank of a node, and a view of what its ranks send; the last node may be smaller."""
    first = node * placement.members.shape[1]
    return first, placement.sends[first : first + placement.members.shape[1]]


@inner
def _largest(values):  # type: ignore[no-untyped-def]
    """Position of the first of the largest."""
    best = 0
    for at in range(1, len(values)):
        if values[at] > values[best]:
            best = at
    return best


@inner
def _place(step, placement, batch, node, slot):  # type: ignore[no-untyped-def]
    """Give a free batch to a node."""
    placement.node_of[batch] = node
    placement.members[node, slot] = batch
    first, sends = _node_sends(placement, node)
    _add_shares(step, batch, first, -ONE, sends)


@inner
def _release(step, placement, batch):  # type: ignore[no-untyped-def]
    """Make a batch free; -> the node and the slot that it had, FREE and 0 if it was."""
    node, slot = placement.node_of[batch], 0
    if node >= 0:
        while placement.members[node, slot] != batch:
            slot += 1
        placement.node_of[batch] = FREE
        first, sends = _node_sends(placement, node)
        _add_shares(step, batch, first, ONE, sends)
    return node, slot


@inner
def _swap(step, placement, out, batch):  # type: ignore[no-untyped-def]
    """Put `batch` in the slot of `out`, and `out` in the slot of `batch` if it had one."""
    node, slot = _release(step, placement, out)
    other, other_slot = _release(step, placement, batch)
    _place(step, placement, batch, node, slot)
    if other >= 0:
        _place(step, placement, out, other, other_slot)


@inner
def _shares(step, batch, first, held):  # type: ignore[no-untyped-def]
    """Set `held` to the tokens of `batch` that each of the ranks from `first` on holds.

    0 where there are no more ranks.
    """
    fill(held, 0)
    _add_shares(step, batch, first, ONE, held)


@inner
def _add_shares(step, batch, first, sign, totals):  # type: ignore[no-untyped-def]
    """Add to `totals`, `sign` times, the tokens of `batch` on each rank from `first` on."""
    start = step.offsets[first]
    stop = step.offsets[min(first + len(totals), len(step.offsets) - 1)]
    # the batch's first example that is one of theirs
    at, end = step.batch_starts[batch], step.batch_starts[batch + 1]
    high = end
    while at < high:
        middle = (at + high) // 2
        if step.by_batch[middle] < start:
            at = middle + 1
        else:
            high = middle
    local = 0
    while at < end and step.by_batch[at] < stop:
        example = step.by_batch[at]
        while example >= step.offsets[first + local + 1]:
            local += 1
        totals[local] += sign * step.lengths[example]
        at += 1


@inner
def _improve(step, placement, rank, target):  # type: ignore[no-untyped-def]
    """Make a swap that lowers the excess and lets `rank` send less, or two swaps; -> found."""
    gains, outs, ins = _best_swaps(step, placement, rank, target, WIDTH, ANY_GAIN)
    if gains[0] > 0:
        _swap(step, placement, outs[0], ins[0])
        return True
    # a swap that may do harm, then one that makes up for it; else undo the first
    for at in range(WIDTH):
        if ins[at] < 0:
            break
        nodes = (placement.node_of[outs[at]], placement.node_of[ins[at]])
        _swap(step, placement, outs[at], ins[at])
        for node in nodes:
            if node >= 0 and _repair(step, placement, node, target, gains[at]):
                return True
        _swap(step, placement, ins[at], outs[at])
    return False


@inner
def _repair(step, placement, node, target, gain):  # type: ignore[no-untyped-def]
    """Make a swap for a rank of `node` that gains more than the last, of `gain`, lost; -> found."""
    first, sends = _node_sends(placement, node)
    for local in range(len(sends)):
        if sends[local] > target:
            _, outs, ins = _best_swaps(step, placement, first + local, target, ONE, -gain)
            if ins[0] >= 0:
                _swap(step, placement, outs[0], ins[0])
                return True
    return False


@inner
def _best_swaps(step, placement, rank, target, number, min_gain):  # type: ignore[no-untyped-def]
    """Best swaps that let `rank` send less and gain more than `min_gain`; -> (gains, outs, ins).

    A swap's gain, maybe negative, is by how much it lowers the excess over `target` of both nodes.
    So many as `number`, best first: batches given and taken, -1 where there are fewer.
    """
    ranks_per_node = placement.members.shape[1]
    node, local = rank // ranks_per_node, rank % ranks_per_node
    gains, outs = np.empty(number, np.int64), np.empty(number, np.int64)
    ins = np.empty(number, np.int64)
    fill(gains, min_gain)
    fill(outs, -1)
    fill(ins, -1)
    first, sends = _node_sends(placement, node)
    # what each rank of the node holds of the node's batches
    held = np.empty((placement.taken[node], len(sends)), np.int64)  # (slot, rank in node)
    for slot in range(len(held)):
        _shares(step, placement.members[node, slot], first, held[slot])
    incoming = np.empty(len(sends), np.int64)
    leaving, returned = np.empty(ranks_per_node, np.int64), np.empty(ranks_per_node, np.int64)
    seen = np.zeros(len(placement.node_of), np.bool_)
    # batches of which `rank` holds something, for each of the node's own
    for example in range(step.offsets[rank], step.offsets[rank + 1]):
        batch = step.batches[example]
        other = placement.node_of[batch]
        if other == node or seen[batch]:
            continue
        seen[batch] = True
        _shares(step, batch, first, incoming)
        for slot in range(len(held)):
            if incoming[local] <= held[slot, local]:
                continue
            out = placement.members[node, slot]
            gain = _gain(sends, held[slot], incoming, target)
            # the other node rarely gains anything: last, because it is expensive
            if gain > gains[-1] and other >= 0:
                other_first, other_sends = _node_sends(placement, other)
                _shares(step, batch, other_first, leaving)
                _shares(step, out, other_first, returned)
                gain += _gain(other_sends, leaving, returned, target)
            if gain > gains[-1]:
                _insert((gains, outs, ins), gain, out, batch)
    return gains, outs, ins


@inner
def _insert(best, gain, out, batch):  # type: ignore[no-untyped-def]
    """Put a swap at its place among the best, after equal ones; the last drops out."""
    gains, outs, ins = best
    at = len(gains) - 1
    while at > 0 and gains[at - 1] < gain:
        gains[at], outs[at], ins[at] = gains[at - 1], outs[at - 1], ins[at - 1]
        at -= 1
    gains[at], outs[at], ins[at] = gain, out, batch


@inner
def _gain(sends, received, sent, target):  # type: ignore[no-untyped-def]
    """By how much a node's excess over `target` falls when its ranks give and take these tokens."""
    gain = np.int64(0)
    for local in range(len(sends)):
        after = sends[local] + received[local] - sent[local]
        gain += max(0, sends[local] - target) - max(0, after - target)
    return gain
