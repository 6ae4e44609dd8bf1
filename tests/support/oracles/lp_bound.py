"""A lower bound on the number of groups under two caps: the LP of Gilmore and Gomory (1961) by
column generation.

Samples of equal loads are one type; the LP may use a fraction of a pattern (a group that fits).
Patterns are priced by a 2-D knapsack. With duals pi and z the value of the best pattern, sum(pi *
count) / z bounds every grouping from below (Farley 1990), also before the LP has converged.
Rounding loads down to `unit` keeps the bound valid and makes it fast.
"""

import numba
import numpy as np
from scipy.optimize import linprog
from scipy.sparse import csc_array

NEW_PATTERNS = 100
"""Per iteration: the best pattern that contains a type, for the types for which it is worth
most.
"""


def lp_bound(vision, tokens, caps, *, unit=1, gap=1e-4, max_iterations=100):
    """The largest bound that is found, a float; at least the sums divided by the caps."""
    simple = max(vision.sum() / max(caps[0], 1), tokens.sum() / max(caps[1], 1))
    room = np.array([caps[0], caps[1] // unit])
    types, counts = np.unique(
        np.stack([vision, tokens // unit], axis=1), axis=0, return_counts=True
    )
    most = np.where(types > 0, room // np.maximum(types, 1), counts[:, None]).min(axis=1)
    patterns = list(np.diag(np.minimum(most, counts)))
    best = simple
    for _ in range(max_iterations):
        matrix = csc_array(np.array(patterns, dtype=float).T)
        solution = linprog(
            np.ones(len(patterns)), A_ub=-matrix, b_ub=-counts.astype(float), method="highs"
        )
        duals = np.maximum(-solution.ineqlin.marginals, 0)
        values, last = price(types, duals, counts, room)
        best = max(best, float(duals @ counts) / max(values[-1, -1], 1))
        new = new_patterns(types, duals, room, values, last)
        if not new or solution.fun <= best * (1 + gap):
            break
        patterns += new
    return best


def new_patterns(types, duals, room, values, last):
    """Patterns that would improve the LP, best first."""
    rests = room - types
    worth = values[rests[:, 0], rests[:, 1]] + duals
    new = {}
    for kind in np.argsort(-worth, kind="stable")[:NEW_PATTERNS]:
        if worth[kind] <= 1 + 1e-7:
            break
        pattern = trace(types, last, rests[kind])
        pattern[kind] += 1
        new[pattern.tobytes()] = pattern
    return list(new.values())


@numba.njit(cache=True)
def price(types, duals, counts, room):  # type: ignore[no-untyped-def]
    """(value of the best pattern in every room up to `room`, the type that it ends with; -1: less
    vision, -2: tokens).

    A type may come any number of times in a pattern, which only makes the bound weaker. Types
    without any load fit all in one group, so they are worth their dual times their number
    everywhere.
    """
    values, last = (
        np.zeros((room[0] + 1, room[1] + 1)),
        np.full((room[0] + 1, room[1] + 1), -3, np.int32),
    )
    if types[0].sum() == 0:  # types are sorted
        values[0, 0] = duals[0] * counts[0]
    for vision in range(room[0] + 1):
        for tokens in range(room[1] + 1):
            if vision + tokens > 0:
                values[vision, tokens], last[vision, tokens] = _best(
                    types, duals, values, vision, tokens
                )
    return values, last


@numba.njit(cache=True)
def _best(types, duals, values, vision, tokens):  # type: ignore[no-untyped-def]
    """(value, last type) of the best pattern in one room, given those of all smaller ones."""
    value, last = -1.0, 0
    if vision > 0:
        value, last = values[vision - 1, tokens], -1
    if tokens > 0 and values[vision, tokens - 1] > value:
        value, last = values[vision, tokens - 1], -2
    for kind in range(len(types)):
        rest_vision, rest_tokens = vision - types[kind, 0], tokens - types[kind, 1]
        fits = rest_vision >= 0 and rest_tokens >= 0 and types[kind].sum() > 0
        if fits and values[rest_vision, rest_tokens] + duals[kind] > value + 1e-12:
            value, last = values[rest_vision, rest_tokens] + duals[kind], kind
    return value, last


@numba.njit(cache=True)
def trace(types, last, room):  # type: ignore[no-untyped-def]
    """The best pattern in `room`, as the number of each type."""
    pattern = np.zeros(len(types), np.int64)
    vision, tokens = room[0], room[1]
    while last[vision, tokens] != -3:
        kind = last[vision, tokens]
        if kind == -1:
            vision -= 1
        elif kind == -2:
            tokens -= 1
        else:
            pattern[kind] += 1
            vision, tokens = vision - types[kind, 0], tokens - types[kind, 1]
    return pattern
