"""`GlobalShuffle`: groups in fully random order, in steps that share evenly.

For the loaders, where only a rank's sum over a step's micro-batches matters
(`balance.order.assign_ranks`). No randomness is lost: a few groups of each step wait for a later
one. Pure; holds no order, only a position in it: 250 million groups cost nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numba
import numpy as np

from balance.order.assign_ranks import assign_ranks, choose_step_groups, num_spare_groups
from balance.order.block_shuffle import LoadLookup, unfit_state
from balance.rng import SHUFFLE, random_bits
from balance.types import IntArray

ROUNDS = 6
"""Rounds of the Feistel network; four give a random-looking permutation (Luby, Rackoff 1988)."""


class GlobalShuffle:
    """A random order; each step exchanges a few groups with later ones to be shared evenly.

    Its state is `consumed`, how far the random order has been read, and `spare`, read but not used.
    """

    def __init__(
        self,
        *,
        num_groups: int,
        seed: int,
        epoch: int,
        consumed: int = 0,
        spare: Sequence[int] = (),
    ) -> None:
        known = all(0 <= group < num_groups for group in spare)
        if not len(spare) <= consumed <= num_groups or not known:
            raise unfit_state(f"{consumed} of {num_groups} groups, {len(spare)} spare")
        self._num_groups, self.consumed = num_groups, consumed
        self._spare = np.array(spare, dtype=np.int64)
        self._keys = random_bits(ROUNDS, seed, SHUFFLE, epoch)

    @property
    def remaining(self) -> int:
        """Groups of this epoch that are still to come."""
        return self._num_groups - self.consumed + len(self._spare)

    def take(self, count: int) -> IntArray:
        """The next `count` groups, int64, those that waited first; fewer at the epoch's end."""
        groups = self._read(count)
        self._spare = groups[count:]
        return groups[:count]

    def take_step(self, dp: int, micro_batches: int, loads: LoadLookup) -> IntArray:
        """The next step's groups, int64, (dp, micro_batches): ranks' sums over it are balanced."""
        candidates = self._read(dp * micro_batches + num_spare_groups(dp, micro_batches))
        vision, tokens = loads(candidates)
        chosen = choose_step_groups(vision, tokens, dp, micro_batches)
        self._spare = np.delete(candidates, chosen)
        places = assign_ranks(vision[chosen], tokens[chosen], dp, micro_batches)
        return np.where(places >= 0, candidates[chosen[places]], -1) if len(chosen) else places

    def state(self) -> dict[str, Any]:
        """Keywords, plain JSON, with which a new order continues exactly here."""
        return {"consumed": self.consumed, "spare": self._spare.tolist()}

    def copy(self) -> GlobalShuffle:
        """An order in the same state that moves independently."""
        twin = object.__new__(GlobalShuffle)
        twin.__dict__.update(self.__dict__)  # arrays are replaced, never changed
        return twin

    def _read(self, count: int) -> IntArray:
        """The spare groups, and as many new ones as make `count` of them."""
        stop = min(self._num_groups, self.consumed + max(0, count - len(self._spare)))
        new = _permuted(self.consumed, stop, self._num_groups, self._keys)
        self.consumed = stop
        return np.concatenate([self._spare, new])


@numba.njit(cache=True)
def _permuted(start, stop, num_groups, keys):  # type: ignore[no-untyped-def]
    """Places `start` to `stop` of a random order of `range(num_groups)`, without holding it.

    A Feistel network permutes the numbers of an even number of bits; a number too large is permuted
    again until it is not (Black, Rogaway 2002), 2.5 times on average at most.
    """
    # half the bits of the network's numbers
    half = np.uint64(1)
    while (np.int64(1) << np.int64(2 * half)) < num_groups:
        half += np.uint64(1)
    mask = (np.uint64(1) << half) - np.uint64(1)
    groups = np.empty(stop - start, np.int64)
    for place in range(start, stop):
        number = np.uint64(place)
        while True:
            left, right = number >> half, number & mask
            for key in keys:
                bits = (right ^ key) * np.uint64(0xBF58476D1CE4E5B9)
                bits = (bits ^ (bits >> np.uint64(29))) * np.uint64(0x94D049BB133111EB)
                left, right = right, left ^ ((bits ^ (bits >> np.uint64(32))) & mask)
            number = (left << half) | right
            if number < np.uint64(num_groups):
                break
        groups[place - start] = number
    return groups
