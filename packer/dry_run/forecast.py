"""Totals of a build by its drawn records, and how sure they are. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from isobatch.common.types import BoolArray, FloatArray, IntArray
from isobatch.packer.count.mixture_sampling import wanted_samples
from isobatch.packer.sources.dataset import Dataset

CERTAINTY = 1.96
"""Standard errors to each side, within which the truth is in 95 of 100 cases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """Batches of drawn records of a dataset, one entry each."""

    dataset: Dataset
    parts: IntArray
    """Part of the dataset that each is of."""
    shares: FloatArray
    """Share of its part's records, about."""
    usable: FloatArray
    """Samples that can be used."""
    costs: Mapping[str, FloatArray] = field(default_factory=dict)
    """Sums over the records of each batch."""
    loads: Mapping[str, FloatArray] = field(default_factory=dict)
    """Sums over its usable samples, of which copies count too."""

    @property
    def is_whole(self) -> bool:
        """Whether everything was drawn."""
        return bool(np.all(self._per_part(self.shares) > 1 - 1e-9))

    def in_parts(self, values: FloatArray, keep: BoolArray | None = None) -> FloatArray:
        """Sum over each part of the dataset, of sums over drawn batches; by those of `keep`."""
        keep = np.ones(len(self.parts), np.bool_) if keep is None else keep
        shares = self._per_part(self.shares * keep)
        sums = self._per_part(values * keep)
        return np.divide(sums, shares, out=np.zeros(len(shares)), where=shares > 0)

    def wanted(self, keep: BoolArray | None = None) -> tuple[FloatArray, FloatArray]:
        """(usable samples, those that go in with their copies) of each part."""
        usable = self.in_parts(self.usable, keep)
        sizes = np.rint(usable).astype(np.int64)
        return usable, np.array(wanted_samples(self.dataset, sizes), float)

    def totals(self, keep: BoolArray | None = None) -> dict[str, float]:
        """Sums over the whole dataset, of all costs and loads."""
        usable, wanted = self.wanted(keep)
        copies = np.divide(wanted, usable, out=np.zeros(len(usable)), where=usable > 0)
        costs = {name: self.in_parts(of, keep).sum() for name, of in self.costs.items()}
        loads = {name: self.in_parts(of, keep) @ copies for name, of in self.loads.items()}
        return {name: float(value) for name, value in (costs | loads).items()}

    def intervals(self) -> dict[str, float]:
        """Half of the 95 % interval of each total, as a share of it: leaves out batch by batch.

        Of a part that was drawn as a whole nothing is uncertain.
        """
        whole = self.totals()
        sizes = self._per_part(np.ones(len(self.parts)))
        unseen = np.maximum(1 - self._per_part(self.shares), 0)
        usable = self._per_part(self.usable)
        variances = dict.fromkeys(whole, 0.0)
        for batch, part in enumerate(self.parts.tolist()):
            # the others of its part must be able to stand for it
            if unseen[part] < 1e-9 or sizes[part] < 2 or self.usable[batch] == usable[part]:
                continue
            without = self.totals(np.arange(len(self.parts)) != batch)
            weight = unseen[part] * (sizes[part] - 1) / sizes[part]
            for name, value in without.items():
                variances[name] += weight * (value - whole[name]) ** 2
        return {
            name: CERTAINTY * variance**0.5 / whole[name] if whole[name] else 0.0
            for name, variance in variances.items()
        }

    def _per_part(self, values: FloatArray) -> FloatArray:
        return np.bincount(self.parts, values, len(self.dataset.parts)).astype(np.float64)
