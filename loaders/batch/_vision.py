"""Stored images and videos -> rows of pixels, for `loaders.batch.collate`.

Both are in `StoredGroup.images`, in the order of their places in `input_ids`. What each becomes is
a plan: `models.image_tokens` or `models.video_tokens`. Or they are as a processor of transformers
makes them, or a user's function.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from isobatch.common.errors import ConfigError, DataError
from isobatch.loaders.batch.broken_files import BrokenFiles
from isobatch.loaders.config import LoaderConfig
from isobatch.loaders.decode import pixels
from isobatch.loaders.decode.image import decode, decode_pixels
from isobatch.loaders.decode.resize import Pixels
from isobatch.loaders.decode.video import decode_frames
from isobatch.loaders.transforms import SampleSeeds, transform_image
from isobatch.models.hf_processor import open_processor
from isobatch.models.image_rules import NativeSizeRule, ProcessorRule, VisionRule
from isobatch.models.image_tokens import ImagePlan, plan_image
from isobatch.models.presets import ModelPreset
from isobatch.models.video_rules import VideoRule
from isobatch.models.video_tokens import VideoFacts, VideoPlan, plan_video
from isobatch.shards.stored_group import MissingFile, StoredGroup

JPEG_START = b"\xff\xd8"


class VisionFields:
    """What a group's images and videos add to a `MicroBatch`."""

    processed: dict[str, Tensor] | None = None
    """What a processor of transformers gives."""
    blank_tokens: int = 0

    def __init__(
        self,
        raw: StoredGroup,
        model: ModelPreset,
        config: LoaderConfig,
        seeds: SampleSeeds | None,
        broken: BrokenFiles,
    ) -> None:
        self._raw = raw
        self._rule = model.vision
        self._config = config
        self._broken = broken
        self._video: VideoRule | None = model.video
        self.plans = self._plan_all()
        self._on_white = config.transparency == "white"
        self._keep_colour = not self._rule.convert_rgb
        self._uses_pillow = config.exact_resize or config.reduced_decode
        self._transform = None
        if config.image_transform is not None and seeds is not None:
            self._transform = partial(transform_image, config.image_transform, raw, seeds)

    @property
    def grids(self) -> list[tuple[int, int, int]] | None:
        """Frames, rows and columns of ViT patches at native resolution."""
        rule = self._rule
        if not isinstance(rule, NativeSizeRule):
            return None
        grids: list[tuple[int, int, int]] = []
        for plan in self.plans:
            is_video = isinstance(plan, VideoPlan)
            grid = (plan.num_patches, plan.rows, plan.columns)
            grids += [grid] if is_video else rule.grids(plan)
        return grids

    @property
    def patch_counts(self) -> list[int]:
        """Patches of each image or video; at native resolution its grids."""
        is_native = isinstance(self._rule, NativeSizeRule)
        videos = (is_native and isinstance(plan, VideoPlan) for plan in self.plans)
        return [
            1 if is_one else plan.num_patches
            for plan, is_one in zip(self.plans, videos, strict=True)
        ]

    @property
    def video_seconds(self) -> list[float] | None:
        """Seconds per frame of each grid, as `MicroBatch` has them."""
        seconds = [getattr(plan, "seconds_per_grid", 0.0) for plan in self.plans]
        return seconds if any(seconds) else None

    def pixels(self) -> tuple[Tensor, Sequence[bytes | memoryview | Tensor]]:
        """`pixel_values` and `images` of a `MicroBatch`, one of them empty."""
        raw, rule, config = self._raw, self._rule, self._config
        dtype = config.pixel_dtype
        if config.images == "encoded":
            return _no_pixels(rule, dtype), raw.images
        if not raw.images:
            return _no_pixels(rule, dtype), ()
        # there may be more plans than images: those of images that are encoded elsewhere
        pairs = list(enumerate(self.plans[: len(raw.images)]))
        if config.images == "resized":
            images = (self._resized(number, plan) for number, plan in pairs)
            return _no_pixels(rule, dtype), tuple(
                _converted(rule, image, dtype) for image in images
            )
        rows = [pixels.num_rows(rule, plan) for _, plan in pairs]
        # one tensor for all, because joining one per image would copy every pixel once more
        has_videos = any(isinstance(plan, VideoPlan) for _, plan in pairs)
        patches = pixels.empty_patches(rule, sum(rows), videos=has_videos)
        memory = pixels.patch_memory(rule, patches)
        start = 0
        for (number, plan), count in zip(pairs, rows, strict=True):
            self._write(memory[start : start + count], number, plan)
            start += count
        return _converted(rule, patches, dtype), ()

    def _plan_all(self) -> list[ImagePlan]:
        raw = self._raw
        plan_of = _planner(self._rule)
        counts = _images_in_samples(raw, self._rule)
        sizes, frames, rates = raw.image_sizes.tolist(), raw.image_frames, raw.image_rates
        if frames.any() and self._video is None:
            raise ConfigError(
                f"{raw.where}: {np.count_nonzero(frames)} videos, but no video rule to decode them "
                "by; use the model preset of the build"
            )
        plans: list[ImagePlan] = []
        numbers = zip(frames.tolist(), rates.tolist(), counts, strict=True)
        for (height, width), (num_frames, rate, count) in zip(sizes, numbers, strict=True):
            if num_frames:
                facts = VideoFacts(width, height, num_frames, rate)
                plans.append(plan_video(self._video, facts))
            else:
                plans.append(plan_of(width, height, count))
        return plans

    def _write(self, memory: Pixels, number: int, plan: ImagePlan) -> None:
        rule, exact = self._rule, self._config.exact_resize
        if isinstance(plan, VideoPlan) and self._video is not None:
            try:
                frames, filter_ = self._frames(number, plan), self._video.resample
                pixels.write_frames(memory, rule, frames, plan, resample=filter_, exact=exact)
            except DataError as error:
                self._broken.add(error, int(self._raw.image_samples[number]))
                memory[:] = 0
            return
        size = self._size(number)
        target = None if memory.ndim > 4 else pixels.decode_target(memory, rule, plan, size)
        image = self._image(number, target)
        if image is not target:
            pixels.write_patches(memory, rule, image, plan, exact=exact)

    def _resized(self, number: int, plan: ImagePlan) -> Tensor:
        if isinstance(plan, VideoPlan):
            raise ConfigError(
                f"{self._raw.where}: images='resized' gives images whole, and there are videos; "
                "use images='patches'"
            )
        return pixels.resized_image(
            self._rule, self._image(number), plan, exact=self._config.exact_resize
        )

    def _size(self, number: int) -> tuple[int, int]:
        """(width, height) of an image as counted."""
        height, width = self._raw.image_sizes[number].tolist()
        return width, height

    def _content(self, number: int) -> bytes | memoryview:
        content = self._raw.images[number]
        if isinstance(content, MissingFile):
            raise DataError(content.reason)
        return content

    def _frames(self, number: int, plan: VideoPlan) -> Iterator[Pixels]:
        """The frames of a video that are used. DataError if one cannot be decoded."""
        raw = self._raw
        num_frames, rate = int(raw.image_frames[number]), float(raw.image_rates[number])
        facts = VideoFacts(*self._size(number), num_frames, rate)
        for frame in decode_frames(self._content(number), facts, plan.frame_indices):
            # each with the same random numbers: what a transform turns, it turns in all frames
            yield frame if self._transform is None else self._transform(number, frame.copy())

    def _decoded(
        self, content: bytes | memoryview, size: tuple[int, int], target: Pixels | None
    ) -> Image.Image | Pixels:
        on_white, keep_colour = self._on_white, self._keep_colour
        if self._uses_pillow:
            reduced = self._rule if self._config.reduced_decode else None
            return decode(
                content, counted=size, rule=reduced, on_white=on_white, keep_colour=keep_colour
            )
        return decode_pixels(
            content, counted=size, target=target, on_white=on_white, keep_colour=keep_colour
        )

    def _image(self, number: int, target: Pixels | None = None) -> Image.Image | Pixels:
        """The image: `target` if it could be decoded there, else valid until the next one.

        DataError names the sample of a file that cannot be decoded, ConfigError that of a failed
        transform. A skipped one is black.
        """
        size = self._size(number)
        if self._transform is not None:
            target = np.empty((size[1], size[0], 3), np.uint8)  # the transform may keep it
        try:
            image = self._decoded(self._content(number), size, target)
        except DataError as error:
            self._broken.add(error, int(self._raw.image_samples[number]))
            black = np.zeros((size[1], size[0], 3), np.uint8) if target is None else target
            black[:] = 0
            return black
        if self._transform is None:
            return image
        return self._transform(number, image if isinstance(image, np.ndarray) else np.array(image))


@lru_cache
def _no_pixels(rule: VisionRule, dtype: torch.dtype) -> Tensor:
    """`pixel_values` of no images."""
    return _converted(rule, pixels.empty_patches(rule, 0), dtype)


@lru_cache
def _planner(rule: VisionRule) -> Callable[[int, int, int], ImagePlan]:
    """`plan_image` of a rule, cached, since images have few sizes."""
    return lru_cache(maxsize=1 << 14)(partial(plan_image, rule))


def _images_in_samples(raw: StoredGroup, rule: VisionRule) -> list[int]:
    """Number of images in each image's sample, if that decides what becomes of it; else 1."""
    if not rule.looks_at_sample:
        return [1] * len(raw.image_sizes)
    images = raw.image_samples[raw.image_frames == 0]
    counts = np.bincount(images, minlength=len(raw.sample_ids))
    per_image: list[int] = counts[raw.image_samples].tolist()
    return per_image


def _converted(rule: VisionRule, raw: Tensor, dtype: torch.dtype) -> Tensor:
    """Raw pixels in the loader's `pixel_dtype`."""
    return raw if dtype == torch.uint8 else pixels.normalize(rule, raw).to(dtype)


# --- as a processor of transformers makes them, or a user's function ---


class ProcessedFields(VisionFields):
    """What a group's images add to a `MicroBatch`, without plans.

    All images of a group go through the processor together, as those of one text do: what it pads
    is padded as its model wants it.
    """

    grids = None

    @property
    def patch_counts(self) -> list[int]:
        """A patch for each image."""
        return [1] * len(self._raw.image_sizes)

    def pixels(self) -> tuple[Tensor, Sequence[bytes | memoryview | Tensor]]:
        """No rows of pixels; `processed` is made instead, unless files are wanted as they are.

        DataError if the processor makes other numbers of tokens than were packed.
        """
        raw, rule, config = self._raw, self._rule, self._config
        _check_processed(config)
        no_pixels = torch.empty(0, 3, 1, 1)
        if config.images == "encoded" or not isinstance(rule, ProcessorRule):
            return no_pixels, raw.images
        processor = open_processor(rule.description)
        if not raw.images:
            arrays, self.blank_tokens = processor.blank
        else:
            expected = None  # of images that are encoded for other ranks
            if len(raw.input_ids):
                expected = int(np.count_nonzero(raw.input_ids == processor.token_id))
            pictures = [_picture(self._image(number)) for number in range(len(raw.images))]
            try:
                arrays = processor.pixels(pictures, expected)
            except (ValueError, RuntimeError, DataError) as error:
                raise DataError(f"{raw.where}: {error}") from None
        self.processed = {
            name: value.to(config.pixel_dtype) if value.is_floating_point() else value
            for name, value in arrays.items()
        }
        return no_pixels, ()

    def _decoded(
        self, content: bytes | memoryview, size: tuple[int, int], target: Pixels | None
    ) -> Image.Image | Pixels:
        """The image with its one transparent colour: not every processor puts that on white.

        A JPEG has none, and goes the short way; so does what a transform takes, which is pixels.
        """
        if target is not None or bytes(content[:2]) == JPEG_START:
            return super()._decoded(content, size, target)
        return decode(content, counted=size, on_white=self._on_white, keep_colour=True)

    def _plan_all(self) -> list[ImagePlan]:
        """No plans: of some processors they take as long as an image."""
        return []


class EncodedFields(ProcessedFields):
    """What arrays of a user's function add: `processed`, each name's joined along dimension 0."""

    def pixels(self) -> tuple[Tensor, Sequence[bytes | memoryview | Tensor]]:
        """No rows of pixels. DataError for arrays that differ in more than dimension 0."""
        raw = self._raw
        owners = dict[str, list[int]]()
        if raw.sample_ids and not len(raw.input_ids):
            raise DataError("a planner gives images to other ranks, but encode= has arrays of them")
        for place, arrays in enumerate(raw.arrays or ()):
            for name in arrays:
                owners.setdefault(name, []).append(place)
        self.processed = {}
        for name, places in owners.items():
            parts = [raw.arrays[place][name] for place in places] if raw.arrays else []
            kinds = [f"{str(part.dtype)[6:]} (n, {str([*part.shape[1:]])[1:-1]})" for part in parts]
            if len(set(kinds)) > 1:
                other = next(at for at, kind in enumerate(kinds) if kind != kinds[0])
                first, second = (raw.sample_ids[places[at]] for at in (0, other))
                raise DataError(
                    f"{name} of sample {first!r} is {kinds[0]}, and of {second!r} {kinds[other]}; "
                    "arrays of a name must differ in dimension 0 only"
                )
            self.processed[name] = torch.cat(parts)
        return torch.empty(0, 3, 1, 1), ()


def _picture(image: Image.Image | Pixels) -> Image.Image:
    """A copy: the decoder writes the next image into the same memory."""
    return image.copy() if isinstance(image, Image.Image) else Image.fromarray(np.array(image))


def _check_processed(config: LoaderConfig) -> None:
    """ConfigError for options that the processor knows nothing of."""
    reason = "the build's images go through its model's own processor"
    if config.images == "resized":
        raise ConfigError(f"images='resized': {reason}; use 'patches' or 'encoded'")
    if not config.pixel_dtype.is_floating_point:
        raise ConfigError(f"pixel_dtype=torch.uint8: {reason}, which gives no raw pixels")
    if config.reduced_decode:
        raise ConfigError(f"reduced_decode: {reason}, which must see all of them; leave it out")
