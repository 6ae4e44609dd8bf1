"""Stored samples to tensors: `collate` makes a `MicroBatch`.

For the loader. Image and audio tokens in `input_ids` were counted at build, and a file that changed
since would no longer fill them. So each image's size and each clip's length is checked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import lru_cache, partial
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from balance.errors import ConfigError, DataError
from balance.loss_weights import LossWeights, sample_weights
from balance.media.audio_tokens import AudioRule, plan_audio
from balance.media.image_tokens import ImagePlan, plan_image
from balance.media.rules import NativeSizeRule, VisionRule
from balance.presets import ModelPreset
from balance.types import LABEL_IGNORE
from loaders.batch.micro_batch import MicroBatch
from loaders.config import AudioForm, LoaderConfig
from loaders.decode import pixels
from loaders.decode.audio import decode_audio
from loaders.decode.image import decode, decode_pixels
from loaders.decode.log_mel import MEL_BINS, log_mel_frames, log_mel_windows
from loaders.decode.resize import Pixels
from loaders.plan.step_plan import StepTotals
from loaders.transforms import SampleSeeds, transform_image
from shards.stored_group import MissingFile, StoredGroup


def collate(
    raw: StoredGroup,
    model: ModelPreset,
    config: LoaderConfig,
    totals: StepTotals,
    seeds: SampleSeeds | None = None,
) -> MicroBatch:
    """The micro-batch of a group.

    `seeds` are for the `image_transform` of `config`, which is not applied without them. DataError
    names a sample with an unusable file; ConfigError if `model` has no rule for clips.
    """
    rule = model.vision
    plan_of, no_pixels = _prepared(rule, config.pixel_dtype)
    counts = _images_in_samples(raw, rule)
    plans = [
        plan_of(width, height, count)
        for (height, width), count in zip(raw.image_sizes.tolist(), counts, strict=True)
    ]
    grids = None
    if isinstance(rule, NativeSizeRule):
        grids = _int64([grid for plan in plans for grid in rule.grids(plan)]).reshape(-1, 3)
    input_ids, labels, position_ids = _tokens(raw)
    broken = _BrokenFiles(raw, config)
    decoder = _Decoder(raw, config, seeds, broken)
    pixel_values, images = _image_fields(raw, plans, rule, config, decoder, no_pixels)
    audio_fields = _audio_fields(raw, model, config.audio, broken)
    for start, end in broken.token_spans():
        labels[start:end] = LABEL_IGNORE
    return MicroBatch(
        sample_ids=raw.sample_ids,
        input_ids=input_ids,
        labels=labels,
        position_ids=position_ids,
        cu_seqlens=torch.from_numpy(raw.cu_seqlens.copy()),
        pixel_values=pixel_values,
        images=images,
        # a copy: samples of a group that is kept in memory may be read again
        extras=deepcopy(dict(raw.extras)) if raw.extras else {},
        patches_per_image=_int64([plan.num_patches for plan in plans]),
        image_sizes=torch.from_numpy(raw.image_sizes.astype(np.int64)),
        image_grid_thw=grids,
        **audio_fields,
        skipped=broken.skipped,
        num_loss_tokens=totals.num_loss_tokens,
        num_step_samples=totals.num_samples,
        loss_normalizer=totals.loss_normalizer,
        loss_weights=_loss_weights(raw, config.loss_weights),
    )


@lru_cache
def _prepared(
    rule: VisionRule, dtype: torch.dtype
) -> tuple[Callable[[int, int, int], ImagePlan], Tensor]:
    """`plan_image` of a rule, cached, since images have few sizes; and `pixel_values` of none."""
    empty = _converted(rule, pixels.empty_patches(rule, 0), dtype)
    return lru_cache(maxsize=1 << 14)(partial(plan_image, rule)), empty


def _images_in_samples(raw: StoredGroup, rule: VisionRule) -> list[int]:
    """For each image, how many its sample has, if that decides what becomes of it; else 1."""
    if not rule.looks_at_sample:
        return [1] * len(raw.image_sizes)
    return np.bincount(raw.image_samples)[raw.image_samples].tolist()  # type: ignore[no-any-return]


def _tokens(raw: StoredGroup) -> tuple[Tensor, Tensor, Tensor]:
    """Input ids, labels and each token's position in its sample, int64."""
    counted, borders = _count(len(raw.input_ids)), raw.cu_seqlens.tolist()
    positions = [counted[: end - start] for start, end in pairwise(borders)] or [counted[:0]]
    return (
        torch.from_numpy(raw.input_ids.astype(np.int64)),
        torch.from_numpy(raw.labels.astype(np.int64)),
        torch.from_numpy(np.concatenate(positions)),
    )


def _loss_weights(raw: StoredGroup, weights: LossWeights) -> Tensor | None:
    """The weight of each token's loss, float32; None if all are 1."""
    if weights == "token":
        return None
    before = np.concatenate([[0], np.cumsum(raw.labels != LABEL_IGNORE)])
    num_labels = np.diff(before[raw.cu_seqlens])
    each = sample_weights(num_labels, weights) / np.maximum(num_labels, 1)
    return torch.from_numpy(np.repeat(each, np.diff(raw.cu_seqlens)).astype(np.float32))


def _count(longest: int) -> NDArray[np.int64]:
    """0, 1, 2, ...: at least `longest` numbers, made again only when more are wanted."""
    global _counted  # noqa: PLW0603
    if len(_counted) < longest:
        _counted = np.arange(2 * longest)
    return _counted


_counted = np.arange(8192)


def _image_fields(
    raw: StoredGroup,
    plans: Sequence[ImagePlan],
    rule: VisionRule,
    config: LoaderConfig,
    decoder: _Decoder,
    no_pixels: Tensor,
) -> tuple[Tensor, Sequence[bytes | memoryview | Tensor]]:
    """`pixel_values` and `images` of a `MicroBatch`, one of them empty."""
    if config.images == "encoded":
        return no_pixels, raw.images
    if not raw.images:
        return no_pixels, ()
    dtype = config.pixel_dtype
    # there may be more plans than images: those of images that are encoded elsewhere
    pairs = list(enumerate(plans[: len(raw.images)]))
    if config.images == "resized":
        images = (
            pixels.resized_image(rule, decoder(number, rule), plan, exact=config.exact_resize)
            for number, plan in pairs
        )
        return no_pixels, tuple(_converted(rule, image, dtype) for image in images)
    rows = [pixels.num_rows(rule, plan) for _, plan in pairs]
    # one tensor for all, because joining one per image would copy every pixel once more
    patches = pixels.empty_patches(rule, sum(rows))
    memory, start = pixels.patch_memory(rule, patches), 0
    for (number, plan), count in zip(pairs, rows, strict=True):
        own = memory[start : start + count]
        target = pixels.decode_target(own, rule, plan, decoder.size(number))
        image = decoder(number, rule, target)
        if image is not target:
            pixels.write_patches(own, rule, image, plan, exact=config.exact_resize)
        start += count
    return _converted(rule, patches, dtype), ()


def _converted(rule: VisionRule, raw: Tensor, dtype: torch.dtype) -> Tensor:
    """Raw pixels in the loader's `pixel_dtype`."""
    return raw if dtype == torch.uint8 else pixels.normalize(rule, raw).to(dtype)


class _BrokenFiles:
    """The samples of a group whose files cannot be used: an error, or to be skipped."""

    def __init__(self, raw: StoredGroup, config: LoaderConfig) -> None:
        self._raw = raw
        # a rank that encodes others' files has no labels to remove
        self._may_skip = config.on_error == "skip" and len(raw.input_ids) > 0
        self._places: set[int] = set()
        self.skipped: dict[str, str] = {}
        """Sample id -> what is wrong with its file."""

    def add(self, error: DataError, sample: int) -> None:
        """Skip a sample; DataError with its name if that is not allowed."""
        raw = self._raw
        named = f"sample {raw.sample_ids[sample]!r} ({raw.where}): {error}"
        if not self._may_skip:
            raise DataError(f"{named}; restore it, or build again without it") from error
        self.skipped[raw.sample_ids[sample]] = named
        self._places.add(sample)

    def token_spans(self) -> list[tuple[int, int]]:
        """The tokens of the skipped samples."""
        borders = self._raw.cu_seqlens
        return [(int(borders[place]), int(borders[place + 1])) for place in sorted(self._places)]


class _Decoder:
    """Decodes and transforms the images of a group."""

    def __init__(
        self,
        raw: StoredGroup,
        config: LoaderConfig,
        seeds: SampleSeeds | None,
        broken: _BrokenFiles,
    ) -> None:
        self._raw, self._config, self._broken = raw, config, broken
        self._on_white = config.transparency == "white"
        self._uses_pillow = config.exact_resize or config.reduced_decode
        self._transform = None
        if config.image_transform is not None and seeds is not None:
            self._transform = partial(transform_image, config.image_transform, raw, seeds)

    def size(self, number: int) -> tuple[int, int]:
        """(width, height) of an image as counted."""
        height, width = self._raw.image_sizes[number].tolist()
        return width, height

    def __call__(
        self, number: int, rule: VisionRule, target: Pixels | None = None
    ) -> Image.Image | Pixels:
        """The image: `target` if it could be decoded there, else valid until the next one.

        DataError names the sample of a file that cannot be decoded, ConfigError that of a failed
        transform. A skipped one is black.
        """
        raw, size = self._raw, self.size(number)
        if self._transform is not None:
            target = np.empty((size[1], size[0], 3), np.uint8)  # the transform may keep it
        content = raw.images[number]
        try:
            if isinstance(content, MissingFile):
                raise DataError(content.reason)
            if self._uses_pillow:
                reduced = rule if self._config.reduced_decode else None
                image: Image.Image | Pixels = decode(
                    content, counted=size, rule=reduced, on_white=self._on_white
                )
            else:
                image = decode_pixels(content, counted=size, target=target, on_white=self._on_white)
        except DataError as error:
            self._broken.add(error, int(raw.image_samples[number]))
            black = np.zeros((size[1], size[0], 3), np.uint8) if target is None else target
            black[:] = 0
            return black
        if self._transform is None:
            return image
        return self._transform(number, image if isinstance(image, np.ndarray) else np.array(image))


def _audio_fields(
    raw: StoredGroup, model: ModelPreset, form: AudioForm, broken: _BrokenFiles
) -> dict[str, Tensor]:
    """The audio fields of a `MicroBatch`; none for a model that has no audio encoder."""
    rule = model.audio
    if rule is None:
        if len(raw.audios):
            raise ConfigError(
                f"{raw.where}: {len(raw.audios)} audio clips, but no audio rule to decode them by; "
                "use the model preset of the build"
            )
        return {}
    clips = [_decode_clip(raw, number, rule, broken) for number in range(len(raw.audios))]
    plans = [plan_audio(rule, int(length), rule.sampling_rate) for length in raw.audio_lengths]
    frames = [
        min(rule.window_frames, plan.num_frames - window * rule.window_frames)
        for plan in plans
        for window in range(plan.num_windows)
    ]
    return {
        "audio_values": _audio_values(clips, model, rule, form),
        "audio_lengths": _int64(raw.audio_lengths),
        "audio_frames": _int64(frames),
    }


def _audio_values(
    clips: Sequence[Tensor], model: ModelPreset, rule: AudioRule, form: AudioForm
) -> Tensor:
    """All clips, in the layout of `MicroBatch.audio_values`."""
    if form == "waveform":
        return torch.cat([torch.empty(0), *clips])
    mel_bins = model.audio_encoder.frame_values if model.audio_encoder else MEL_BINS
    if form == "features":
        convert, empty = log_mel_frames, torch.empty((0, mel_bins))
    else:
        convert, empty = log_mel_windows, torch.empty((0, mel_bins, rule.window_frames))
    return torch.cat([empty, *(convert(rule, clip, mel_bins) for clip in clips)])


def _decode_clip(raw: StoredGroup, number: int, rule: AudioRule, broken: _BrokenFiles) -> Tensor:
    content, length = raw.audios[number], int(raw.audio_lengths[number])
    try:
        if isinstance(content, MissingFile):
            raise DataError(content.reason)
        return decode_audio(rule, content, length)
    except DataError as error:
        broken.add(error, int(raw.audio_samples[number]))
        return torch.zeros(length)


def _int64(values: object) -> Tensor:
    """A copy: stored arrays may be views into a mapped file."""
    return torch.from_numpy(np.array(values, dtype=np.int64))
