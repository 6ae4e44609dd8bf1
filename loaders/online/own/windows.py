"""`OwnWindows`: windows of which each rank packs what it has loaded.

For `loaders.plan.steps`. Groups are numbered in rounds, one of every rank, which cost about the
same.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from balance.rng import PLANNED, random_permutation
from balance.types import Groups, IntArray, Limits
from loaders.online.own._rounds import deal, make_rounds
from loaders.online.own.lengths import OwnLengths
from loaders.plan.window_order import WindowOrder
from loaders.plan.windows import Loads, WindowEpoch, WindowGroups


class OwnEpoch(WindowEpoch):
    """The groups of an epoch, of all ranks."""

    _forgotten = 0

    @property
    def lengths(self) -> OwnLengths:
        """What ranks have loaded."""
        return cast("OwnLengths", self.source.lengths)

    def forget(self, before: int) -> None:
        """Drop the groups before that number, and what was loaded for them."""
        planned = self._planned
        numbers = np.arange(max(self._forgotten, planned.first), before)
        self.lengths.drop(planned.members(numbers).samples)
        self._forgotten = before
        super().forget(before)

    def close(self) -> None:
        """End what is under way, and wait until it has."""
        super().close()
        with self._making:
            pass

    def own_state(self, carried: IntArray) -> dict[str, Any]:
        """Which ranks there are, and what each carries."""
        return self.lengths.state(carried)

    def _order(self, consumed: int, carried: IntArray) -> IntArray:
        """Each sample for a rank: those that keep many get few."""
        lengths, ranks = self.lengths, self.source.settings.ranks
        samples = super()._order(consumed, carried)
        held = np.bincount(lengths.rank_of(carried), minlength=ranks).tolist()
        owners = np.repeat(np.arange(ranks), deal(len(samples), held))
        lengths.owners |= dict(zip(samples.tolist(), owners.tolist(), strict=True))
        return samples

    def _pack(
        self, samples: IntArray, loads: Loads, limits: Limits, consumed: int, *, is_last: bool
    ) -> tuple[Groups, IntArray]:
        """Groups that each rank has of its samples, in rounds; others wait."""
        owners, made = self.lengths.rank_of(samples), list[Groups]()
        for rank in range(self.source.settings.ranks):
            rows = np.flatnonzero(owners == rank)
            own = loads[0][rows], loads[1][rows]
            groups, _ = super()._pack(samples[rows], own, limits, consumed, is_last=is_last)
            made.append(Groups(rows[groups.samples], groups.offsets))
        # as many rounds as all ranks have groups for, at the end as any has
        count = (max if is_last else min)(map(len, made))
        seed = self.source.settings.seed
        order = random_permutation(count, seed, PLANNED, self.number, consumed)
        rounds = make_rounds(made, loads, count, order)
        return rounds, np.setdiff1d(np.arange(len(samples)), rounds.samples)


class OwnWindows(WindowGroups):
    """The epochs of a dataset whose samples are loaded to be measured."""

    epoch_type = OwnEpoch

    def prepare(self, number: int) -> None:
        """Nothing: what an epoch has loaded is kept until its end."""

    def begin(self, number: int, state: dict[str, Any]) -> tuple[WindowEpoch, WindowOrder]:
        """An epoch, and its order after a position, maybe of other ranks."""
        if self._epoch is not None:
            self._epoch.close()
        ranks = self.settings.ranks
        waiting, owners = state.get("waiting", []), state.get("owners", [])
        if state.get("ranks", ranks) != ranks:  # dealt in turn; empty groups fill the last round
            waiting = [group for group in waiting if group]
            waiting += [[]] * (-len(waiting) % ranks)
            owners = [n % ranks for n in range(len(owners))]
            state = {**state, "waiting": waiting}
        owner_of = {sample: n % ranks for n, group in enumerate(waiting) for sample in group}
        owner_of |= zip(state.get("carried", []), owners, strict=True)
        cast("OwnLengths", self.lengths).restart(number, owner_of)
        return super().begin(number, state)
