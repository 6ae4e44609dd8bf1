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

import numba
import numpy as np

from balance.deal import descending
from balance.records import IntArray
from balance.swaps import LAST_CUT, Pairs, Plan, lower, measure, shares


def place_batches(lengths: IntArray, batches: IntArray, source_offsets: IntArray, *, ranks_per_node: int) -> IntArray:
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
    pairs = Pairs(*_pairs(lengths, batches, source_offsets))
    plan = Plan(*_first_plan(pairs, ranks_per_node))
    _fill(descending(lengths), batches, source_offsets, plan)
    measure(pairs, plan)
    lower(pairs, plan)
    return np.asarray(_ranks_inside(pairs, plan, num_ranks), dtype=np.int64)


def _check(lengths: IntArray, batches: IntArray, offsets: IntArray, ranks_per_node: int) -> None:
    num_ranks = len(offsets) - 1
    if ranks_per_node < 1 or num_ranks < 1:
        raise ValueError(f"{num_ranks} ranks, {ranks_per_node} per node; give at least 1 of each")
    if not len(lengths) == len(batches) == offsets[-1] or offsets[0] != 0 or (np.diff(offsets) < 0).any():
        raise ValueError(
            f"{len(lengths)} lengths, {len(batches)} batches, offsets from {offsets[0]} to {offsets[-1]}; give one"
            " length and batch per example, and ascending offsets from 0 to their number"
        )
    if len(batches) and not (batches.min() >= 0 and batches.max() < num_ranks and lengths.min() >= 0):
        raise ValueError(
            f"batches {batches.min()} to {batches.max()}, lengths from {lengths.min()}; batches must be 0 to"
            f" {num_ranks - 1}, one per rank, and lengths not negative"
        )


@numba.njit(cache=True)
def _pairs(lengths, batches, offsets):  # type: ignore[no-untyped-def]
    """The fields of Pairs: examples of one rank for one batch are one pair."""
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
def _first_plan(pairs, ranks_per_node):  # type: ignore[no-untyped-def]
    """Stage 1: the fields of Plan, for the least target found by bisection."""
    num_ranks = len(pairs.row_starts) - 1
    num_nodes = -(-num_ranks // ranks_per_node)
    loads = np.zeros(num_ranks, np.int64)
    for rank in range(num_ranks):
        loads[rank] = pairs.row_tokens[pairs.row_starts[rank] : pairs.row_starts[rank + 1]].sum()
    heaviest = np.argsort(-loads, kind="mergesort")
    node_of, members = np.empty(num_ranks, np.int64), np.empty((num_nodes, ranks_per_node), np.int64)
    low, high = np.int64(0), loads.max()
    while high - low > high // LAST_CUT:
        middle = (low + high) // 2
        if _cover(pairs, middle, loads, heaviest, node_of, members):
            high = middle
        else:
            low = middle + 1
    _cover(pairs, high, loads, heaviest, node_of, members)
    return node_of, members, loads


@numba.njit(cache=True)
def _cover(pairs, target, loads, heaviest, node_of, members):  # type: ignore[no-untyped-def]
    """Whether the ranks can keep what they hold above `target`; sets the nodes of the batches needed for it."""
    row_starts, row_batches, row_tokens = pairs.row_starts, pairs.row_batches, pairs.row_tokens
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
            emptiest = np.argmax(room)
            room[emptiest] -= 1
            plan.node_of[batch] = emptiest
            members[emptiest, np.argmin(members[emptiest])] = batch


@numba.njit(cache=True)
def _ranks_inside(pairs, plan, num_ranks):  # type: ignore[no-untyped-def]
    """Rank of each batch: in each node the (rank, batch) pair with most tokens first, ties to the lowest numbers."""
    ranks_per_node = plan.members.shape[1]
    ranks = np.empty(num_ranks, np.int64)
    held = np.empty((ranks_per_node, ranks_per_node), np.int64)  # (place, rank in node); -1 when given
    for node in range(len(plan.members)):
        size = min(ranks_per_node, num_ranks - node * ranks_per_node)
        for place in range(size):
            shares(pairs, plan.members[node, place], node, held[place])
        for _ in range(size):
            best = np.argmax(held[:size, :size].copy())
            place, local = best // size, best % size
            ranks[plan.members[node, place]] = node * ranks_per_node + local
            held[place, :] = -1
            held[:, local] = -1
    return ranks
