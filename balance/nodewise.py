"""Node-wise rearrangement: which rank runs which batch, so that no rank sends much to other nodes.

The problem of OrchMLLM's Algorithm 3, solved without an integer program. Post-balancing says which examples form a
batch, not which rank runs it; inside a node links are fast, so a node should keep the batches that its own ranks hold
much of, and what counts is the rank that sends most to other nodes. Pure and deterministic: every rank computes it.

Three stages, in numba: (1) bisect the target, the tokens that a rank may send: ranks in descending load each take the
smallest batch that covers what they hold above it; (2) give the remaining places to the holders of the largest
examples; (3) lower the target while swaps of batches between nodes, one or two at a time, reach it. Only (rank, batch)
pairs with tokens are kept, so memory is that of the examples. Times, and the gap to a proven bound (an integer program
for one node alone, other nodes ignored), in docs/benchmarks.md.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np

from balance.post import _descending
from balance.records import IntArray

FIRST_CUT, LAST_CUT = 16, 1 << 10
"""Stage 3 first tries to lower the target by 1/16, at last by 1/1024."""
WIDTH = 24
"""Swaps after which a second one is tried when no single swap helps."""
MAX_SWAPS = 4_000
"""Searches for a swap in stage 3, at most: bounds its time, some 10 us each, and is rarely reached."""


class _Problem(NamedTuple):
    """Tokens of each (rank, batch) pair that has any, by rank and by batch."""

    row_starts: IntArray
    row_batches: IntArray
    row_tokens: IntArray
    column_starts: IntArray
    column_ranks: IntArray
    column_tokens: IntArray


class _Plan(NamedTuple):
    """A node for each batch: `members` (num_nodes, ranks_per_node) is the same as lists, -1 where a node has none."""

    node_of: IntArray
    members: IntArray
    sends: IntArray


def place_batches(
    lengths: IntArray, batches: IntArray, source_offsets: IntArray, *, ranks_per_node: int
) -> IntArray:
    """Rank of each batch so that the largest inter-node send of a rank is small (OrchMLLM, Algorithm 3).

    `lengths` are tokens, `batches` the batch of each example as `balance.post` gives it, both rank after rank: rank r
    holds the examples from `source_offsets[r]` to `source_offsets[r + 1]`. There are as many batches as ranks; node p
    is the ranks from p * ranks_per_node on, the last node may be smaller. Returns int64, shape (num_ranks,), a
    permutation: batch b moves to rank `result[b]`, so `result[batches]` is the new rank of each example. Inside a
    node batches go where most of them is.

    >>> place_batches(np.array([9, 1, 8, 2]), np.array([2, 0, 1, 3]), np.array([0, 1, 2, 3, 4]), ranks_per_node=2)
    array([1, 2, 0, 3])
    """
    lengths, batches, source_offsets = (np.ascontiguousarray(a, np.int64) for a in (lengths, batches, source_offsets))
    num_ranks = len(source_offsets) - 1
    _check(lengths, batches, source_offsets, ranks_per_node)
    if len(lengths) == 0:
        return np.arange(num_ranks)
    problem = _Problem(*_pairs(lengths, batches, source_offsets))
    plan = _Plan(*_first_plan(problem, ranks_per_node))
    _fill(_descending(lengths), batches, source_offsets, plan)
    _measure(problem, plan)
    _lower(problem, plan, WIDTH)
    return np.asarray(_ranks_inside(problem, plan, num_ranks), dtype=np.int64)


def _check(lengths: IntArray, batches: IntArray, offsets: IntArray, ranks_per_node: int) -> None:
    num_ranks = len(offsets) - 1
    if ranks_per_node < 1 or num_ranks < 1:
        raise ValueError(f"{num_ranks} ranks, {ranks_per_node} per node; give at least 1 of each")
    if not len(lengths) == len(batches) == offsets[-1] or offsets[0] != 0 or (np.diff(offsets) < 0).any():
        raise ValueError(
            f"{len(lengths)} lengths, {len(batches)} batches, offsets from {offsets[0]} to {offsets[-1]}; give one"
            " length and batch per example, and ascending offsets from 0 to their number"
        )
    if len(batches) and not (0 <= batches.min() and batches.max() < num_ranks and lengths.min() >= 0):
        raise ValueError(
            f"batches {batches.min()} to {batches.max()}, lengths from {lengths.min()}; batches must be 0 to"
            f" {num_ranks - 1}, one per rank, and lengths not negative"
        )


@numba.njit(cache=True)
def _pairs(lengths, batches, offsets):  # type: ignore[no-untyped-def]
    """The fields of _Problem: examples of one rank for one batch are one pair."""
    num_ranks = len(offsets) - 1
    row_starts, column_starts = np.zeros(num_ranks + 1, np.int64), np.zeros(num_ranks + 1, np.int64)
    row_batches, row_tokens = np.empty(len(lengths), np.int32), np.empty(len(lengths), np.int64)
    pair_of = np.full(num_ranks, -1, np.int64)  # the last pair of each batch; of this rank if not before its row
    pairs = 0
    for rank in range(num_ranks):
        row_starts[rank] = pairs
        for example in range(offsets[rank], offsets[rank + 1]):
            batch = batches[example]
            if pair_of[batch] < row_starts[rank]:
                pair_of[batch] = pairs
                row_batches[pairs], row_tokens[pairs] = batch, 0
                column_starts[batch + 1] += 1
                pairs += 1
            row_tokens[pair_of[batch]] += lengths[example]
    row_starts[num_ranks] = pairs
    column_starts = np.cumsum(column_starts)
    ends = column_starts[:-1].copy()
    column_ranks, column_tokens = np.empty(pairs, np.int32), np.empty(pairs, np.int64)
    for rank in range(num_ranks):
        for pair in range(row_starts[rank], row_starts[rank + 1]):
            batch = row_batches[pair]
            column_ranks[ends[batch]], column_tokens[ends[batch]] = rank, row_tokens[pair]
            ends[batch] += 1
    return row_starts, row_batches[:pairs], row_tokens[:pairs], column_starts, column_ranks, column_tokens


@numba.njit(cache=True)
def _first_plan(problem, ranks_per_node):  # type: ignore[no-untyped-def]
    """Stage 1: the fields of _Plan, for the least target found by bisection."""
    num_ranks = len(problem.row_starts) - 1
    num_nodes = -(-num_ranks // ranks_per_node)
    loads = np.zeros(num_ranks, np.int64)
    for rank in range(num_ranks):
        loads[rank] = problem.row_tokens[problem.row_starts[rank] : problem.row_starts[rank + 1]].sum()
    heaviest = np.argsort(-loads, kind="mergesort")
    node_of, members = np.empty(num_ranks, np.int64), np.empty((num_nodes, ranks_per_node), np.int64)
    low, high = np.int64(0), loads.max()
    while high - low > high // LAST_CUT:
        middle = (low + high) // 2
        if _cover(problem, middle, loads, heaviest, node_of, members):
            high = middle
        else:
            low = middle + 1
    _cover(problem, high, loads, heaviest, node_of, members)
    return node_of, members, loads


@numba.njit(cache=True)
def _cover(problem, target, loads, heaviest, node_of, members):  # type: ignore[no-untyped-def]
    """Whether the ranks can keep what they hold above `target`; sets the nodes of the batches needed for it."""
    row_starts, row_batches, row_tokens = problem.row_starts, problem.row_batches, problem.row_tokens
    ranks_per_node = members.shape[1]
    node_of[:] = -1
    members[:] = -1
    taken = np.zeros(len(members), np.int64)
    for rank in heaviest:
        need = loads[rank] - target
        if need <= 0:
            return True
        node = rank // ranks_per_node
        for pair in range(row_starts[rank], row_starts[rank + 1]):
            if node_of[row_batches[pair]] == node:
                need -= row_tokens[pair]
        while need > 0:
            best = _smallest_cover(row_batches, row_tokens, row_starts[rank], row_starts[rank + 1], need, node_of)
            if best < 0 or taken[node] == min(ranks_per_node, len(loads) - node * ranks_per_node):
                return False
            node_of[row_batches[best]] = node
            members[node, taken[node]] = row_batches[best]
            taken[node] += 1
            need -= row_tokens[best]
    return True


@numba.njit(cache=True)
def _smallest_cover(row_batches, row_tokens, start, end, need, node_of):  # type: ignore[no-untyped-def]
    """The pair of a free batch with the fewest tokens >= `need`, else with the most; -1 without a free batch."""
    best = -1
    for pair in range(start, end):
        if node_of[row_batches[pair]] < 0 and (
            best < 0
            or (row_tokens[pair] > row_tokens[best] and row_tokens[best] < need)
            or need <= row_tokens[pair] < row_tokens[best]
        ):
            best = pair
    return best


@numba.njit(cache=True)
def _fill(order, batches, offsets, plan):  # type: ignore[no-untyped-def]
    """Stage 2: each batch without a node to the node of its largest example that has a free place, else to any."""
    members, num_ranks = plan.members, len(offsets) - 1
    num_nodes, ranks_per_node = members.shape
    room = np.empty(num_nodes, np.int64)
    for node in range(num_nodes):
        room[node] = min(ranks_per_node, num_ranks - node * ranks_per_node) - (members[node] >= 0).sum()
    node_of_example = np.empty(len(batches), np.int64)
    for rank in range(num_ranks):
        node_of_example[offsets[rank] : offsets[rank + 1]] = rank // ranks_per_node
    for example in order:
        batch, node = batches[example], node_of_example[example]
        if plan.node_of[batch] < 0 and room[node] > 0:
            room[node] -= 1
            plan.node_of[batch] = node
            members[node, np.argmin(members[node])] = batch
    for batch in range(num_ranks):
        if plan.node_of[batch] < 0:
            node = np.argmax(room)
            room[node] -= 1
            plan.node_of[batch] = node
            members[node, np.argmin(members[node])] = batch


@numba.njit(cache=True)
def _measure(problem, plan):  # type: ignore[no-untyped-def]
    """Set `plan.sends`: what each rank sends to other nodes."""
    ranks_per_node = plan.members.shape[1]
    for rank in range(len(plan.sends)):
        plan.sends[rank] = 0
        for pair in range(problem.row_starts[rank], problem.row_starts[rank + 1]):
            if plan.node_of[problem.row_batches[pair]] != rank // ranks_per_node:
                plan.sends[rank] += problem.row_tokens[pair]


@numba.njit(cache=True)
def _lower(problem, plan, width):  # type: ignore[no-untyped-def]
    """Stage 3: lower the target by a part of the largest send; the part halves whenever the target is not reached."""
    kept = (plan.node_of.copy(), plan.members.copy(), plan.sends.copy())
    cut, swaps = FIRST_CUT, MAX_SWAPS
    while cut <= LAST_CUT and swaps > 0:
        target = plan.sends.max() - max(1, plan.sends.max() // cut)
        if target < 0:
            return
        stuck = False
        while plan.sends.max() > target and not stuck:
            swaps -= 1
            # the worst rank first: if nothing helps it, the target is out of reach
            stuck = swaps < 0 or not _improve(problem, plan, plan.sends.argmax(), target, width)
        if plan.sends.max() < kept[2].max():
            kept[0][:], kept[1][:], kept[2][:] = plan.node_of, plan.members, plan.sends
        else:
            plan.node_of[:], plan.members[:], plan.sends[:] = kept
        if stuck:
            cut *= 4


@numba.njit(cache=True)
def _improve(problem, plan, rank, target, width):  # type: ignore[no-untyped-def]
    """Make one swap that lowers the sum of what ranks send above `target`, or two that together do; -> found."""
    ranks_per_node = plan.members.shape[1]
    gains, outs, ins = _best_swaps(problem, plan, rank, target, np.full(width, np.iinfo(np.int64).min))
    if gains[0] > 0:
        _swap(problem, plan, outs[0], ins[0])
        return True
    for first in range((ins >= 0).sum()):
        nodes = (plan.node_of[outs[first]], plan.node_of[ins[first]])
        _swap(problem, plan, outs[first], ins[first])
        for node in nodes:
            start = node * ranks_per_node
            for other in range(start, min(start + ranks_per_node, len(plan.sends))):
                if plan.sends[other] > target:
                    _, next_outs, next_ins = _best_swaps(problem, plan, other, target, np.full(1, -gains[first]))
                    if next_ins[0] >= 0:
                        _swap(problem, plan, next_outs[0], next_ins[0])
                        return True
        _swap(problem, plan, ins[first], outs[first])
    return False


@numba.njit(cache=True)
def _best_swaps(problem, plan, rank, target, gains):  # type: ignore[no-untyped-def]
    """Best swaps that let `rank` send less and gain more than `gains`; -> (gains, batches given, batches taken).

    A swap's gain is by how much it lowers the sum of what the ranks of both nodes send above `target`; also negative.
    As many as `gains` is long, best first; batches are -1 where there are fewer.
    """
    members, ranks_per_node = plan.members, plan.members.shape[1]
    node = rank // ranks_per_node
    outs, ins = np.full(len(gains), -1), np.full(len(gains), -1)
    held = np.empty((ranks_per_node, ranks_per_node), np.int64)  # (place, rank in node)
    for place in range(ranks_per_node):
        _shares(problem, members[node, place], node, held[place])
    taken, there_out = np.empty(ranks_per_node, np.int64), np.empty(ranks_per_node, np.int64)
    there_in = np.empty(ranks_per_node, np.int64)
    for pair in range(problem.row_starts[rank], problem.row_starts[rank + 1]):
        batch = problem.row_batches[pair]
        other = plan.node_of[batch]
        if other == node:
            continue
        _shares(problem, batch, node, taken)
        _shares(problem, batch, other, there_out)
        for place in range(ranks_per_node):
            out = members[node, place]
            if out < 0 or problem.row_tokens[pair] <= held[place, rank - node * ranks_per_node]:
                continue
            gain = _gain(plan.sends, node, held[place], taken, target)
            if gain <= gains[-1]:
                continue
            _shares(problem, out, other, there_in)
            gain += _gain(plan.sends, other, there_out, there_in, target)
            if gain <= gains[-1]:
                continue
            at = len(gains) - 1
            while at > 0 and gains[at - 1] < gain:
                gains[at], outs[at], ins[at] = gains[at - 1], outs[at - 1], ins[at - 1]
                at -= 1
            gains[at], outs[at], ins[at] = gain, out, batch
    return gains, outs, ins


@numba.njit(cache=True)
def _gain(sends, node, given, taken, target):  # type: ignore[no-untyped-def]
    """By how much the excess over `target` of a node's ranks falls when they give and take these tokens."""
    gain = np.int64(0)
    start = node * len(given)
    for local in range(min(len(given), len(sends) - start)):
        send = sends[start + local]
        gain += max(0, send - target) - max(0, send + given[local] - taken[local] - target)
    return gain


@numba.njit(cache=True)
def _shares(problem, batch, node, shares):  # type: ignore[no-untyped-def]
    """Set `shares` to the tokens of `batch` that each rank of `node` holds; zeros for batch -1."""
    shares[:] = 0
    if batch < 0:
        return
    first = node * len(shares)
    low, high = problem.column_starts[batch], problem.column_starts[batch + 1]
    end = high
    while low < high:
        middle = (low + high) // 2
        if problem.column_ranks[middle] < first:
            low = middle + 1
        else:
            high = middle
    while low < end and problem.column_ranks[low] < first + len(shares):
        shares[problem.column_ranks[low] - first] = problem.column_tokens[low]
        low += 1


@numba.njit(cache=True)
def _swap(problem, plan, out, batch):  # type: ignore[no-untyped-def]
    """Exchange the nodes of two batches."""
    members, node_of = plan.members, plan.node_of
    ranks_per_node = members.shape[1]
    node, other = node_of[out], node_of[batch]
    for place in range(ranks_per_node):
        if members[node, place] == out:
            members[node, place] = batch
        if members[other, place] == batch:
            members[other, place] = out
    for moved, source, goal in ((out, node, other), (batch, other, node)):
        node_of[moved] = goal
        for pair in range(problem.column_starts[moved], problem.column_starts[moved + 1]):
            rank = problem.column_ranks[pair]
            if rank // ranks_per_node == source:
                plan.sends[rank] += problem.column_tokens[pair]
            elif rank // ranks_per_node == goal:
                plan.sends[rank] -= problem.column_tokens[pair]


@numba.njit(cache=True)
def _ranks_inside(problem, plan, num_ranks):  # type: ignore[no-untyped-def]
    """Rank of each batch: in each node the (rank, batch) pair with most tokens first, ties to the lowest numbers."""
    ranks_per_node = plan.members.shape[1]
    ranks = np.empty(num_ranks, np.int64)
    shares = np.empty((ranks_per_node, ranks_per_node), np.int64)  # (place, rank in node); -1 when given
    for node in range(len(plan.members)):
        size = min(ranks_per_node, num_ranks - node * ranks_per_node)
        for place in range(size):
            _shares(problem, plan.members[node, place], node, shares[place])
        for _ in range(size):
            best = np.argmax(shares[:size, :size].copy())
            place, local = best // size, best % size
            ranks[plan.members[node, place]] = node * ranks_per_node + local
            shares[place, :] = -1
            shares[:, local] = -1
    return ranks
