"""Chains of overlapping windows: how `engine.planning.search.branch_and_bound` puts bounds for a
few stages together. Pure NumPy.

A partition is a chain of windows of w neighbouring stages, each beginning one stage after the one
before, in which all agree on what they share. No partition is faster than the slowest window of its
chain; so one whose best chain is no faster than what is known already is dropped, and two
neighbouring windows that are left make one of w + 1 stages.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from balance.types import IntArray
from engine.planning.search.local_search import NEVER


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """Windows that begin at one stage; int64."""

    borders: IntArray
    """(windows, width + 1)."""
    choices: IntArray
    """(windows, width): which of the choices of recomputed layers each stage has."""
    bound_ns: IntArray
    """(windows,): that a step takes at least."""
    left: IntArray
    """(windows,): what the window shares with the one before in a chain, by a number that both have
    for it.
    """
    right: IntArray
    """(windows,): the same with the one behind."""

    def __len__(self) -> int:
        return len(self.bound_ns)

    def take(self, places: IntArray) -> Windows:
        """Some of them."""
        return Windows(
            borders=self.borders[places],
            choices=self.choices[places],
            bound_ns=self.bound_ns[places],
            left=self.left[places],
            right=self.right[places],
        )


def chain_bounds(chain: list[Windows]) -> list[IntArray]:
    """Of each window, by where it begins, the slowest window of the best chain that it is part of;
    else NEVER.
    """
    ahead = _best_before([(one.bound_ns, one.left, one.right) for one in chain])
    back = _best_before([(one.bound_ns, one.right, one.left) for one in reversed(chain)])
    return [np.maximum(a, b) for a, b in zip(ahead, reversed(back), strict=True)]


def _best_before(chain: list[tuple[IntArray, IntArray, IntArray]]) -> list[IntArray]:
    """Bounds of the best chains that end with each window, in the order given; (bounds, shared
    before, behind).
    """
    best = [chain[0][0]]
    for (_, _, behind), (bounds, before, _) in pairwise(chain):
        least = np.full(max(behind.max(initial=-1), before.max(initial=-1)) + 1, NEVER)
        np.minimum.at(least, behind, best[-1])
        best.append(np.maximum(bounds, least[before]))
    return best


def best_chain(chain: list[Windows], bounds: list[IntArray]) -> tuple[IntArray, IntArray]:
    """-> (borders, choices) of a partition whose slowest window is as fast as any's. `bounds` as
    `chain_bounds`.
    """
    at = int(bounds[0].argmin())
    borders, choices = chain[0].borders[at], chain[0].choices[at]
    for one, behind, limits in zip(chain, chain[1:], bounds[1:], strict=False):
        at = int(np.where(behind.left == one.right[at], limits, NEVER).argmin())
        borders, choices = (
            np.append(borders, behind.borders[at, -1]),
            np.append(choices, behind.choices[at, -1]),
        )
    return borders, choices


def prune(chain: list[Windows], bounds: list[IntArray], limit_ns: int) -> list[Windows]:
    """The windows of chains that are faster than `limit_ns`."""
    return [
        one.take(np.flatnonzero(own < limit_ns)) for one, own in zip(chain, bounds, strict=True)
    ]


def count_joined(chain: list[Windows]) -> int:
    """How many windows `join` makes."""
    total = 0
    for one, behind in pairwise(chain):
        size = max(one.right.max(initial=-1), behind.left.max(initial=-1)) + 1
        total += int(
            np.bincount(one.right, minlength=size) @ np.bincount(behind.left, minlength=size)
        )
    return total


def join(chain: list[Windows]) -> list[Windows]:
    """Windows of one stage more, without bounds of their own yet: that of the slower half."""
    joined = []
    for one, behind in pairwise(chain):
        order = np.argsort(behind.left, kind="stable")
        keys = behind.left[order]
        first, last = (
            np.searchsorted(keys, one.right),
            np.searchsorted(keys, one.right, side="right"),
        )
        counts = last - first
        left = np.repeat(np.arange(len(one)), counts)
        # the n-th partner of each window
        right = order[
            np.arange(len(left))
            - np.repeat(np.cumsum(counts) - counts, counts)
            + np.repeat(first, counts)
        ]
        joined.append(
            Windows(
                borders=np.concatenate([one.borders[left], behind.borders[right, -1:]], axis=1),
                choices=np.concatenate([one.choices[left], behind.choices[right, -1:]], axis=1),
                bound_ns=np.maximum(one.bound_ns[left], behind.bound_ns[right]),
                left=left,
                right=right,
            )
        )
    return joined
