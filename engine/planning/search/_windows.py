"""Chains of windows, which join bounds of stages into partitions. Pure.

A partition is a chain of windows of w neighbouring stages, each one stage further, which agree on
shared stages. No partition is faster than the slowest window of its chain: so a window whose best
chain is no faster than the best known partition is pruned, and two remaining neighbours are joined.
"""

from dataclasses import dataclass, fields
from itertools import pairwise

import numpy as np

from isobatch.common.types import IntArray
from isobatch.engine.planning.search.local_search import NEVER


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """Windows that begin at one stage; int64."""

    borders: IntArray
    """(windows, width + 1)."""
    choices: IntArray
    """(windows, width): number of each stage's choice of recomputed layers."""
    bound_ns: IntArray
    """(windows,): lower bound of a step's time."""
    head: IntArray
    """(windows,): number of the part shared with the previous window in a chain."""
    tail: IntArray
    """(windows,): number of the part shared with the next window."""

    def __len__(self) -> int:
        return len(self.bound_ns)

    def take(self, indices: IntArray) -> "Windows":
        """Some of the windows."""
        return Windows(**{f.name: getattr(self, f.name)[indices] for f in fields(self)})


def chain_bounds(chain: list[Windows]) -> list[IntArray]:
    """Bound of the best chain through each window, by first stage; NEVER if there is no chain."""
    ahead = _best_before([(one.bound_ns, one.head, one.tail) for one in chain])
    back = _best_before([(one.bound_ns, one.tail, one.head) for one in reversed(chain)])
    return [np.maximum(a, b) for a, b in zip(ahead, reversed(back), strict=True)]


def _best_before(chain: list[tuple[IntArray, IntArray, IntArray]]) -> list[IntArray]:
    """Bounds of the best chains that end with each window; windows as (bounds, before, after)."""
    best = [chain[0][0]]
    for (_, _, after), (bounds, before, _) in pairwise(chain):
        joint = np.full(max(after.max(initial=-1), before.max(initial=-1)) + 1, NEVER)
        np.minimum.at(joint, after, best[-1])
        best.append(np.maximum(bounds, joint[before]))
    return best


def best_chain(chain: list[Windows], bounds: list[IntArray]) -> tuple[IntArray, IntArray]:
    """-> (borders, choices) of a partition with the least bound; `bounds` as `chain_bounds`."""
    at = int(bounds[0].argmin())
    borders, choices = chain[0].borders[at], chain[0].choices[at]
    for one, after, limits in zip(chain, chain[1:], bounds[1:], strict=False):
        at = int(np.where(after.head == one.tail[at], limits, NEVER).argmin())
        borders = np.append(borders, after.borders[at, -1])
        choices = np.append(choices, after.choices[at, -1])
    return borders, choices


def prune(chain: list[Windows], bounds: list[IntArray], limit_ns: int) -> list[Windows]:
    """The windows of chains with a bound below `limit_ns`."""
    pairs = zip(chain, bounds, strict=True)
    return [one.take(np.flatnonzero(bound_ns < limit_ns)) for one, bound_ns in pairs]


def count_joined(chain: list[Windows], bounds: list[IntArray], limit_ns: int) -> int:
    """Number of windows that `join` makes of those of chains with a bound below `limit_ns`."""
    total = 0
    pairs = zip(chain, bounds, strict=True)
    selected = [
        (one.head[bound_ns < limit_ns], one.tail[bound_ns < limit_ns]) for one, bound_ns in pairs
    ]
    for (_, tails), (heads, _) in pairwise(selected):
        size = max(tails.max(initial=-1), heads.max(initial=-1)) + 1
        total += int(np.dot(*(np.bincount(shared, minlength=size) for shared in (tails, heads))))
    return total


def join(chain: list[Windows]) -> list[Windows]:
    """Windows of one stage more, with the bound of the slower half."""
    joined = []
    for one, after in pairwise(chain):
        # partners of each window: those that share its tail, sorted by that part
        order = np.argsort(after.head, kind="stable")
        keys = after.head[order]
        first = np.searchsorted(keys, one.tail)
        counts = np.searchsorted(keys, one.tail, side="right") - first
        lower = np.repeat(np.arange(len(one)), counts)
        # the n-th partner of each window
        nth = np.arange(len(lower)) - np.repeat(np.cumsum(counts) - counts, counts)
        upper = order[nth + np.repeat(first, counts)]
        joined.append(
            Windows(
                borders=np.concatenate([one.borders[lower], after.borders[upper, -1:]], axis=1),
                choices=np.concatenate([one.choices[lower], after.choices[upper, -1:]], axis=1),
                bound_ns=np.maximum(one.bound_ns[lower], after.bound_ns[upper]),
                head=lower,
                tail=upper,
            )
        )
    return joined
