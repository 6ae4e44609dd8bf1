"""A user's transforms of images and micro-batches, seeded per sample and epoch.

A sample's generator depends on the loader's seed, the epoch, and where the sample is stored. So a
run that is resumed, on another number of ranks or with other threads, changes each sample in the
same way. The bits are NumPy's own, whose distributions may change with its version (NEP 19).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from isobatch.balance.rng import TRANSFORMS
from isobatch.common.errors import ConfigError, first_line
from isobatch.loaders.batch.micro_batch import MicroBatch
from isobatch.loaders.steps.selection import StoredSample
from isobatch.shards.stored_group import StoredGroup

ImageTransform = Callable[[NDArray[np.uint8], np.random.Generator], NDArray[np.uint8]]
"""(image, generator) -> image, both uint8 (height, width, 3), RGB, of the same size."""
BatchTransform = Callable[[MicroBatch, Sequence[np.random.Generator]], MicroBatch]
"""(micro-batch, a generator per sample) -> micro-batch."""


@dataclass(frozen=True, slots=True)
class SampleSeeds:
    """What the random numbers of some samples depend on."""

    seed: int
    epoch: int
    samples: Sequence[StoredSample]

    def generator(self, sample: int, use: int) -> np.random.Generator:
        """A sample's generator: `use` is 0 for the micro-batch, and 1, 2, ... for its images."""
        build, group, place = self.samples[sample]
        key = TRANSFORMS, self.epoch, build, group, place, use
        return np.random.Generator(
            np.random.PCG64(np.random.SeedSequence(self.seed, spawn_key=key))
        )


def transform_image(
    transform: ImageTransform,
    raw: StoredGroup,
    seeds: SampleSeeds,
    number: int,
    pixels: NDArray[np.uint8],
) -> NDArray[np.uint8]:
    """Image `number` of a group, transformed; ConfigError with its sample if that fails."""
    sample = int(raw.image_samples[number])
    # from 0 in each sample, so that it does not depend on the other samples of the micro-batch
    image = number - int(np.searchsorted(raw.image_samples, sample))
    what = f"image {image} of sample {raw.sample_ids[sample]!r} ({raw.where})"
    shape = pixels.shape
    try:
        changed = transform(pixels, seeds.generator(sample, image + 1))
    except Exception as error:
        raise _failed("image_transform", what, error) from error
    is_image = isinstance(changed, np.ndarray) and changed.dtype == np.uint8
    if not is_image or changed.shape != shape:
        raise ConfigError(
            f"image_transform gave {_described(changed)} for {what}; give a uint8 array of the "
            f"image's own shape {shape}, because the number of its patches is fixed by the build"
        )
    return np.ascontiguousarray(changed)


def transform_batch(
    transform: BatchTransform, batch: MicroBatch, where: str, seeds: SampleSeeds
) -> MicroBatch:
    """A micro-batch, transformed; ConfigError with its samples if that fails."""
    what = f"the micro-batch of {', '.join(batch.sample_ids[:3]) or 'no samples'} ({where})"
    generators = [seeds.generator(sample, 0) for sample in range(len(seeds.samples))]
    try:
        changed = transform(batch, generators)
    except Exception as error:
        raise _failed("batch_transform", what, error) from error
    if not isinstance(changed, MicroBatch):
        raise ConfigError(
            f"batch_transform gave {_described(changed)} for {what}; give a MicroBatch, such as "
            "dataclasses.replace(batch, labels=...)"
        )
    return changed


def _failed(option: str, what: str, error: Exception) -> ConfigError:
    return ConfigError(f"{option} failed on {what}: {type(error).__name__}: {first_line(error)}")


def _described(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype} {value.shape}"
    return f"a {type(value).__name__}"
