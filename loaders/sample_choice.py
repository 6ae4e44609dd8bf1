"""Which samples a loader uses: split, filter and limit, as masks over builds.

For the loader, once when it opens. By the samples' ids and columns alone, so all ranks agree, and
so does a build that was made again: a validation sample stays one, in whatever group it is.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from isobatch.common.errors import ConfigError
from isobatch.common.types import BoolArray
from isobatch.loaders.read.build import Build

Split = Literal["train", "validation"]


class SampleColumns(dict[str, NDArray[Any]]):
    """Columns of a build's samples in stored order, each read when it is first asked for.

    Those of counts.parquet: the counts (int64), `sample_id` and `source` (str objects), ...
    ConfigError names the columns there are.
    """

    def __init__(self, build: Build) -> None:
        super().__init__()
        self._build = build

    def __missing__(self, name: str) -> NDArray[Any]:
        values = self[name] = self._build.sample_values(name)
        return values


SampleFilter = Callable[[SampleColumns], NDArray[Any]]
"""Columns of a build's samples -> which samples to keep, bool, shape (num_samples,)."""


def choose_samples(
    builds: Sequence[Build],
    *,
    split: Split | None,
    validation_fraction: float,
    filter: SampleFilter | None,
    limit: int | None,
) -> list[BoolArray] | None:
    """For each build, whether each sample is chosen, in stored order; None if all are.

    The split is made first, and the limit last. ConfigError if no sample is chosen, or if the
    filter gives something else than a mask.
    """
    if split is None and filter is None and limit is None:
        return None
    chosen = []
    for build in builds:
        mask = np.ones(int(build.samples.offsets[-1]), bool)
        if split is not None:
            is_validation = build.id_hashes() < validation_fraction * 2.0**64
            mask &= is_validation == (split == "validation")
        if filter is not None:
            mask &= _filtered(build, filter, len(mask))
        chosen.append(mask)
    if limit is not None:
        chosen = _limit(builds, chosen, limit)
    if not any(mask.any() for mask in chosen):
        total = sum(map(len, chosen))
        raise ConfigError(f"split, filter and limit leave none of {total} samples; change them")
    return chosen


def _filtered(build: Build, filter: SampleFilter, num_samples: int) -> BoolArray:
    mask = np.asarray(filter(SampleColumns(build)))
    if mask.dtype != np.bool_ or mask.shape != (num_samples,):
        raise ConfigError(
            f"filter gave {mask.dtype} of shape {mask.shape} for {build.manifest.place}; return"
            f" a bool for each of its {num_samples} samples"
        )
    return mask


def _limit(builds: Sequence[Build], chosen: Sequence[BoolArray], limit: int) -> list[BoolArray]:
    """The `limit` samples of the smallest hashes, over all builds: drawn, and always the same."""
    candidates = np.flatnonzero(np.concatenate(chosen))
    hashes = np.concatenate([build.id_hashes() for build in builds])[candidates]
    drawn = np.zeros(sum(map(len, chosen)), bool)
    drawn[candidates[np.argsort(hashes, kind="stable")[:limit]]] = True
    return np.split(drawn, np.cumsum([len(mask) for mask in chosen])[:-1])
