"""`PairCounter`: how often groups of a step shared one in the epoch before too.

For `loaders.stats`. Remembers which step the first groups of an epoch came in, a megabyte at most,
and looks for pairs of them in the next epoch's steps: an estimate of `metrics.repeated_pairs`.
"""

import numpy as np

from isobatch.balance.metrics import num_pairs
from isobatch.common.types import IntArray

REMEMBERED = 1 << 16
"""Groups of an epoch that are looked for in the next."""
_BUILD = 1 << 40
"""Factor that tells groups of several builds apart."""


class PairCounter:
    """Counts pairs of groups, step after step."""

    def __init__(self) -> None:
        self._epoch, self._num_steps, self._num_groups = -1, 0, 0
        # keys and steps of the epoch under way, and of the one before, sorted by key
        self._parts: list[IntArray] = []
        self._keys, self._steps = np.empty((2, 0), np.int64)
        self._chance = self._again = self._by_chance = 0.0

    def add(self, epoch: int, builds: IntArray, numbers: IntArray, sizes: IntArray) -> None:
        """Count steps of `sizes` groups, which have a number in their build."""
        if epoch != self._epoch:
            self._begin(epoch)
        keys = builds * _BUILD + numbers
        steps = self._num_steps + np.repeat(np.arange(len(sizes)), sizes)
        self._num_steps += len(sizes)
        if self._num_groups < REMEMBERED:
            self._parts.append(np.stack([keys, steps]))
            self._num_groups += len(keys)
        if len(self._keys):
            places = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
            is_known = self._keys[places] == keys
            now, before = steps[is_known], self._steps[places[is_known]]
            self._again += num_pairs(now * (len(self._steps) + 1) + before)
            self._by_chance += num_pairs(now) * self._chance

    @property
    def repeated_pairs(self) -> float | None:
        """Pairs that met again, relative to chance; None before two groups could have."""
        return self._again / self._by_chance if self._by_chance else None

    def _begin(self, epoch: int) -> None:
        """The epoch so far becomes the one before, if it is that."""
        parts = self._parts if epoch == self._epoch + 1 else []
        # (2, groups)
        keys, steps = np.concatenate([np.empty((2, 0), np.int64), *parts], axis=1)
        order = np.argsort(keys)
        self._keys, self._steps = keys[order], steps[order]
        total = len(keys) * (len(keys) - 1) // 2
        self._chance = num_pairs(steps) / total if total else 0.0
        self._epoch, self._parts, self._num_steps, self._num_groups = epoch, [], 0, 0
