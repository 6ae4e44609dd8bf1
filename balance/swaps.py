"""Stage 3 of node-wise rearrangement: swaps of batches between nodes that lower the largest inter-node send.

For `balance.nodewise`, which makes the first plan. A target is set a little below the largest send; what counts is the
excess, the sum over ranks of what they send above the target, and every step must lower it: a swap, or two swaps of
which the first alone may do harm. Looking at the worst rank alone keeps this cheap, some 10 us per step at 60 examples
per rank: a target that the worst rank cannot reach is out of reach. Numba; changes the plan in place.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from balance.records import IntArray

FIRST_CUT, LAST_CUT = 16, 1 << 10
"""Stage 3 first tries to lower the target by 1/16, at last by 1/1024."""
WIDTH = 24
"""Swaps after which a second one is tried when no single swap helps."""
MAX_STEPS = 4_000
"""Steps at most, to bound the time; some 10 us each, and typically a few hundred."""


class Pairs(NamedTuple):
    """Tokens of each (rank, batch) pair that has any, by rank and by batch."""

    row_starts: IntArray
    row_batches: NDArray[np.int32]
    row_tokens: IntArray
    column_starts: IntArray
    column_ranks: NDArray[np.int32]
    column_tokens: IntArray


class Plan(NamedTuple):
    """A node for each batch: `members` (num_nodes, ranks_per_node) is the same as lists, -1 where a node has none."""

    node_of: IntArray
    members: IntArray
    sends: IntArray


@numba.njit(cache=True)
def measure(pairs, plan):  # type: ignore[no-untyped-def]
    """Set `plan.sends`: what each rank sends to other nodes."""
    ranks_per_node = plan.members.shape[1]
    for rank in range(len(plan.sends)):
        plan.sends[rank] = 0
        for pair in range(pairs.row_starts[rank], pairs.row_starts[rank + 1]):
            if plan.node_of[pairs.row_batches[pair]] != rank // ranks_per_node:
                plan.sends[rank] += pairs.row_tokens[pair]


@numba.njit(cache=True)
def lower(pairs, plan):  # type: ignore[no-untyped-def]
    """Stage 3: lower the target by a part of the largest send; a quarter of that part when it is not reached."""
    kept = (plan.node_of.copy(), plan.members.copy(), plan.sends.copy())
    cut, steps = FIRST_CUT, MAX_STEPS
    while cut <= LAST_CUT and steps > 0:
        target = plan.sends.max() - max(1, plan.sends.max() // cut)
        if target < 0:
            return
        stuck = False
        while plan.sends.max() > target and not stuck:
            steps -= 1
            # the worst rank first: if nothing helps it, the target is out of reach
            stuck = steps < 0 or not _improve(pairs, plan, plan.sends.argmax(), target, WIDTH)
        if plan.sends.max() < kept[2].max():
            kept[0][:], kept[1][:], kept[2][:] = plan.node_of, plan.members, plan.sends
        else:
            plan.node_of[:], plan.members[:], plan.sends[:] = kept
        if stuck:
            cut *= 4


@numba.njit(cache=True)
def _improve(pairs, plan, rank, target, width):  # type: ignore[no-untyped-def]
    """Make one swap that lowers the sum of what ranks send above `target`, or two that together do; -> found."""
    ranks_per_node = plan.members.shape[1]
    gains, outs, ins = _best_swaps(pairs, plan, rank, target, np.full(width, np.iinfo(np.int64).min))
    if gains[0] > 0:
        _swap(pairs, plan, outs[0], ins[0])
        return True
    for first in range((ins >= 0).sum()):
        nodes = (plan.node_of[outs[first]], plan.node_of[ins[first]])
        _swap(pairs, plan, outs[first], ins[first])
        for node in nodes:
            start = node * ranks_per_node
            for other in range(start, min(start + ranks_per_node, len(plan.sends))):
                if plan.sends[other] > target:
                    _, next_outs, next_ins = _best_swaps(pairs, plan, other, target, np.full(1, -gains[first]))
                    if next_ins[0] >= 0:
                        _swap(pairs, plan, next_outs[0], next_ins[0])
                        return True
        _swap(pairs, plan, ins[first], outs[first])
    return False


@numba.njit(cache=True)
def _best_swaps(pairs, plan, rank, target, gains):  # type: ignore[no-untyped-def]
    """Best swaps that let `rank` send less and gain more than `gains`; -> (gains, batches given, batches taken).

    A swap's gain is by how much it lowers the sum of what the ranks of both nodes send above `target`; also negative.
    As many as `gains` is long, best first; batches are -1 where there are fewer.
    """
    members, ranks_per_node = plan.members, plan.members.shape[1]
    node = rank // ranks_per_node
    outs, ins = np.full(len(gains), -1), np.full(len(gains), -1)
    held = np.empty((ranks_per_node, ranks_per_node), np.int64)  # (place, rank in node)
    for place in range(ranks_per_node):
        shares(pairs, members[node, place], node, held[place])
    taken, there_out = np.empty(ranks_per_node, np.int64), np.empty(ranks_per_node, np.int64)
    there_in = np.empty(ranks_per_node, np.int64)
    for pair in range(pairs.row_starts[rank], pairs.row_starts[rank + 1]):
        batch = pairs.row_batches[pair]
        other = plan.node_of[batch]
        if other == node:
            continue
        shares(pairs, batch, node, taken)
        shares(pairs, batch, other, there_out)
        for place in range(ranks_per_node):
            out = members[node, place]
            if out < 0 or pairs.row_tokens[pair] <= held[place, rank - node * ranks_per_node]:
                continue
            gain = _gain(plan.sends, node, held[place], taken, target)
            if gain <= gains[-1]:  # the other node rarely gains anything: not worth a look
                continue
            shares(pairs, out, other, there_in)
            gain += _gain(plan.sends, other, there_out, there_in, target)
            if gain <= gains[-1]:
                continue
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
def _gain(sends, node, given, taken, target):  # type: ignore[no-untyped-def]
    """By how much the excess over `target` of a node's ranks falls when they give and take these tokens."""
    gain = np.int64(0)
    start = node * len(given)
    for local in range(min(len(given), len(sends) - start)):
        send = sends[start + local]
        gain += max(0, send - target) - max(0, send + given[local] - taken[local] - target)
    return gain


@numba.njit(cache=True)
def shares(pairs, batch, node, shares):  # type: ignore[no-untyped-def]
    """Set `shares` to the tokens of `batch` that each rank of `node` holds; zeros for batch -1."""
    shares[:] = 0
    if batch < 0:
        return
    first = node * len(shares)
    low, high = pairs.column_starts[batch], pairs.column_starts[batch + 1]
    end = high
    while low < high:
        middle = (low + high) // 2
        if pairs.column_ranks[middle] < first:
            low = middle + 1
        else:
            high = middle
    while low < end and pairs.column_ranks[low] < first + len(shares):
        shares[pairs.column_ranks[low] - first] = pairs.column_tokens[low]
        low += 1


@numba.njit(cache=True)
def _swap(pairs, plan, out, batch):  # type: ignore[no-untyped-def]
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
        for pair in range(pairs.column_starts[moved], pairs.column_starts[moved + 1]):
            rank = pairs.column_ranks[pair]
            if rank // ranks_per_node == source:
                plan.sends[rank] += pairs.column_tokens[pair]
            elif rank // ranks_per_node == goal:
                plan.sends[rank] -= pairs.column_tokens[pair]
