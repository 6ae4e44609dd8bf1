"""Which samples a loader uses: split, filter and limit, as masks over builds.

For the loader, once when it opens. By the samples' ids and columns alone, so all ranks agree, and
so does a build that was made again: a validation sample stays one, in whatever group it is.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from isobatch.common.errors import ConfigError
from isobatch.common.types import BoolArray
from isobatch.loaders.steps.build_groups import PlannedBuild

Split = Literal["train", "validation"]


class ListedBuild(PlannedBuild, Protocol):
    """A build whose samples can be told apart."""

    def sample_values(self, name: str) -> NDArray[Any]:
        """A column of counts.parquet for all samples, in stored order."""

    def id_hashes(self) -> NDArray[np.uint64]:
        """XXH3 (64 bits) of each sample's id, in stored order."""


class SampleColumns(dict[str, NDArray[Any]]):
    """Columns of a build's samples in stored order, each read when it is first asked for.

    Those of counts.parquet: the counts (int64), `sample_id` and `source` (str objects), ...
    ConfigError names the columns there are.
    """

    def __init__(self, build: ListedBuild) -> None:
        super().__init__()
        self._build = build

    def __missing__(self, name: str) -> NDArray[Any]:
        values = self[name] = self._build.sample_values(name)
        return values


SampleFilter = Callable[[SampleColumns], NDArray[Any]]
"""Columns of a build's samples -> which samples to keep, bool, shape (num_samples,)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleChoice:
    """Options of a loader; the split is made first, and the limit last."""

    split: Split | None = None
    validation_fraction: float = 0.01
    filter: SampleFilter | None = None
    limit: int | None = None

    @property
    def is_all(self) -> bool:
        """Whether no sample is left out."""
        return self.split is None and self.filter is None and self.limit is None


def choose_samples(builds: Sequence[ListedBuild], choice: SampleChoice) -> list[BoolArray] | None:
    """For each build, whether each sample is chosen, in stored order; None if all are.

    ConfigError if none is, or if the filter gives something else than a mask.
    """
    if choice.is_all:
        return None
    chosen = [_chosen(build, choice) for build in builds]
    if choice.limit is not None:
        chosen = _limit(builds, chosen, choice.limit)
    if not any(mask.any() for mask in chosen):
        total = sum(map(len, chosen))
        raise ConfigError(f"split, filter and limit leave none of {total} samples; change them")
    return chosen


def _chosen(build: ListedBuild, choice: SampleChoice) -> BoolArray:
    """The samples of a build that split and filter leave."""
    chosen = np.ones(int(build.samples.offsets[-1]), bool)
    if choice.split is not None:
        is_validation = build.id_hashes() < choice.validation_fraction * 2.0**64
        chosen &= is_validation == (choice.split == "validation")
    if choice.filter is not None:
        mask = np.asarray(choice.filter(SampleColumns(build)))
        if mask.dtype != np.bool_ or mask.shape != chosen.shape:
            raise ConfigError(
                f"filter gave {mask.dtype} of shape {mask.shape} for {build.manifest.place}; return"
                f" a bool for each of its {len(chosen)} samples"
            )
        chosen &= mask
    return chosen


def _limit(
    builds: Sequence[ListedBuild], chosen: Sequence[BoolArray], limit: int
) -> list[BoolArray]:
    """The `limit` samples of the smallest hashes, over all builds: drawn, and always the same."""
    candidates = np.flatnonzero(np.concatenate(chosen))
    hashes = np.concatenate([build.id_hashes() for build in builds])[candidates]
    drawn = np.zeros(sum(map(len, chosen)), bool)
    drawn[candidates[np.argsort(hashes, kind="stable")[:limit]]] = True
    return np.split(drawn, np.cumsum([len(mask) for mask in chosen])[:-1])
