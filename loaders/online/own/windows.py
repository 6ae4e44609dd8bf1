"""`OwnWindows`: windows of which each rank packs what it has loaded.

For `loaders.plan.steps`. Groups are numbered in rounds, one of every rank, which cost about the
same.
"""

from typing import Any, cast

import numpy as np

from isobatch.balance.rng import PLANNED, random_permutation
from isobatch.common.errors import ConfigError
from isobatch.common.types import Groups, IntArray, Limits
from isobatch.loaders.online.own._rounds import deal, make_rounds
from isobatch.loaders.online.own.lengths import MORE, OwnLengths
from isobatch.loaders.plan.window_order import WindowOrder
from isobatch.loaders.plan.windows import Loads, WindowEpoch, WindowGroups
from isobatch.loaders.ranks.exchange import Cancelled


class OwnEpoch(WindowEpoch):
    """The groups of an epoch, of all ranks."""

    _forgotten = 0

    @property
    def lengths(self) -> OwnLengths:
        """What ranks have loaded."""
        return cast("OwnLengths", self.source.lengths)

    def forget(self, before: int, consumed: int, live: IntArray) -> None:
        """Drop the groups before that number, and what was loaded for them."""
        planned = self._planned
        numbers = np.arange(max(self._forgotten, planned.first), before)
        self.lengths.drop(planned.members(numbers).samples, consumed, live)
        self._forgotten = before
        super().forget(before, consumed, live)

    def close(self) -> None:
        """End what is under way, and wait until it has: a stream has one reader."""
        super().close()
        with self._making:
            pass

    def own_state(self, consumed: int, live: IntArray, carried: IntArray) -> dict[str, Any]:
        """Which ranks there are, and what each is to load again."""
        return self.lengths.state(consumed, live, carried)

    def _order(self, consumed: int, carried: IntArray) -> IntArray:
        """Each sample for a rank: those that keep many get few."""
        lengths, settings = self.lengths, self.source.settings
        if self._closed:  # what ranks are to load is another epoch's now
            raise Cancelled
        held = np.bincount(lengths.rank_of(carried), minlength=settings.ranks)
        if lengths.stream is None:
            samples = super()._order(consumed, carried)
            counts = deal(len(samples), held.tolist())
        else:  # at least one of each rank that may have more
            read, ended, _ = lengths.marks[-1]
            size = min(settings.window, max(settings.first_window, consumed))
            given = deal(size, np.where(ended, MORE, held).tolist())
            counts = np.where(ended, 0, np.maximum(1, given)).tolist()
            begun = zip(read, counts, strict=True)
            own = [(n + np.arange(m)) * len(read) + rank for rank, (n, m) in enumerate(begun)]
            samples = np.concatenate(own)
        owners = np.repeat(np.arange(settings.ranks), counts)
        lengths.owners |= dict(zip(samples.tolist(), owners.tolist(), strict=True))
        return samples

    def _pack(
        self, samples: IntArray, loads: Loads, limits: Limits, consumed: int, *, is_last: bool
    ) -> tuple[Groups, IntArray]:
        """Groups that each rank has of its samples, in rounds; others wait."""
        lengths, made = self.lengths, list[Groups]()
        owners, ranks = lengths.rank_of(samples), lengths.ranks[1]
        ended = [False] * ranks if lengths.stream is None else lengths.marks[-1][1]
        for rank in range(ranks):
            rows = np.flatnonzero(owners == rank)
            own = loads[0][rows], loads[1][rows]
            groups, _ = super()._pack(samples[rows], own, limits, consumed, is_last=is_last)
            made.append(Groups(rows[groups.samples], groups.offsets))
        # as many rounds as any rank has groups for at the end, before that as all that still read
        reading = [len(each) for each, is_over in zip(made, ended, strict=True) if not is_over]
        count = max(map(len, made)) if is_last else min(reading)
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
        """An epoch, and its order after a position. ConfigError for a stream's of other ranks."""
        lengths, ranks = cast("OwnLengths", self.lengths), self.settings.ranks
        waiting, owners = state.get("waiting", []), state.get("owners", [])
        if state.get("ranks", ranks) != ranks:  # dealt in turn; empty groups fill the last round
            if lengths.stream is not None:
                raise ConfigError(
                    f"state is of a stream on {state['ranks']} ranks, and this loader has {ranks}: "
                    "resume on as many, or begin an epoch (`set_epoch`)"
                )
            waiting = [group for group in waiting if group]
            waiting += [[]] * (-len(waiting) % ranks)
            owners = [n % ranks for n in range(len(owners))]
            state = {**state, "waiting": waiting}
        if self._epoch is not None:
            self._epoch.close()
        owner_of = {sample: n % ranks for n, group in enumerate(waiting) for sample in group}
        owner_of |= zip(state.get("carried", []), owners, strict=True)
        lengths.restart(number, owner_of, state.get("marks"))
        return super().begin(number, state)
