"""Stored samples to tensors: `collate` makes a `MicroBatch`.

For the loader. Image and audio tokens in `input_ids` were counted at build, and a file that changed
since would no longer fill them. So each image's size and each clip's length is checked.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from operator import sub

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from balance.errors import ConfigError, DataError
from balance.loss_weights import LossWeights, sample_weights
from balance.media.audio_tokens import AudioRule, plan_audio
from balance.media.image_tokens import ImagePlan, plan_image
from balance.presets import ModelPreset, NativeRule, VisionRule
from balance.types import LABEL_IGNORE
from loaders.batch.micro_batch import MicroBatch
from loaders.config import AudioForm, LoaderConfig
from loaders.decode import pixels
from loaders.decode.audio import decode_audio
from loaders.decode.image import decode, decode_pixels
from loaders.decode.log_mel import MEL_BINS, log_mel_frames, log_mel_windows
from loaders.decode.resize import Pixels
from loaders.plan.steps import StepTotals
from shards.stored_group import EMPTY_GROUP, StoredGroup


def collate(
    raw: StoredGroup | None, model: ModelPreset, config: LoaderConfig, totals: StepTotals
) -> MicroBatch:
    """The micro-batch of a group, or an empty one for None.

    DataError names a sample with an unusable file; ConfigError if `model` has no rule for clips.
    """
    rule, raw = model.vision, EMPTY_GROUP if raw is None else raw
    plan_of = _cached_plans(rule)
    plans = [plan_of(width, height) for height, width in raw.image_sizes.tolist()]
    is_native = isinstance(rule, NativeRule)
    grids = [(1, plan.rows, plan.columns) for plan in plans] if is_native else []
    input_ids, labels, position_ids = _tokens(raw)
    return MicroBatch(
        sample_ids=raw.sample_ids,
        input_ids=input_ids,
        labels=labels,
        position_ids=position_ids,
        cu_seqlens=torch.from_numpy(raw.cu_seqlens.copy()),
        pixel_values=_pixel_values(raw, plans, rule, config),
        images=() if config.decode_images else raw.images,
        patches_per_image=_int64([plan.num_patches for plan in plans]),
        image_sizes=_int64(raw.image_sizes),
        image_grid_thw=_int64(grids).reshape(-1, 3) if is_native else None,
        **_audio_fields(raw, model, config.audio),
        num_loss_tokens=totals.num_loss_tokens,
        num_step_samples=totals.num_samples,
        loss_normalizer=totals.loss_normalizer,
        loss_weights=_loss_weights(raw, config.loss_weights),
    )


@lru_cache
def _cached_plans(rule: VisionRule) -> Callable[[int, int], ImagePlan]:
    """`plan_image` of a rule, cached: images have few sizes, and tile grids take time."""
    return lru_cache(maxsize=1 << 14)(partial(plan_image, rule))


def _tokens(raw: StoredGroup) -> tuple[Tensor, ...]:
    """Input ids, labels and each token's position in its sample, int64; rows of one tensor."""
    tokens = np.empty((3, len(raw.input_ids)), np.int64)
    tokens[0], tokens[1] = raw.input_ids, raw.labels
    if raw.sample_ids:
        borders = raw.cu_seqlens.tolist()
        lengths = list(map(sub, borders[1:], borders))
        counted = _count(max(lengths))
        np.concatenate([counted[:length] for length in lengths], out=tokens[2])
    return torch.from_numpy(tokens).unbind()


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


def _pixel_values(
    raw: StoredGroup, plans: Sequence[ImagePlan], rule: VisionRule, config: LoaderConfig
) -> Tensor:
    """Pixels of all images, in the layout of `MicroBatch.pixel_values`; no rows without images."""
    # there may be more sizes than images: those of images that are encoded elsewhere
    num_images, dtype = len(raw.images) if config.decode_images else 0, config.pixel_dtype
    rows = [pixels.num_rows(rule, plan) for plan in plans[:num_images]]
    if not rows:
        return _no_pixels(rule, dtype)
    # one tensor for all, because joining one per image would copy every pixel once more
    patches = pixels.empty_patches(rule, sum(rows))
    memory, start = pixels.patch_memory(rule, patches), 0
    for image, count in enumerate(rows):
        _write_image(memory[start : start + count], raw, image, plans[image], rule, config)
        start += count
    return patches if dtype == torch.uint8 else pixels.normalize(rule, patches).to(dtype)


@lru_cache
def _no_pixels(rule: VisionRule, dtype: torch.dtype) -> Tensor:
    empty = pixels.empty_patches(rule, 0)
    return empty if dtype == torch.uint8 else pixels.normalize(rule, empty).to(dtype)


def _write_image(
    memory: Pixels,
    raw: StoredGroup,
    number: int,
    plan: ImagePlan,
    rule: VisionRule,
    config: LoaderConfig,
) -> None:
    """Write the raw patches of one image into `memory`."""
    height, width = raw.image_sizes[number].tolist()
    size, content = (width, height), raw.images[number]
    try:
        if config.exact_resize or config.reduced_decode:
            reduced = rule if config.reduced_decode else None
            image: Image.Image | Pixels = decode(content, counted=size, rule=reduced)
        else:
            target = pixels.decode_target(memory, rule, plan, size)
            image = decode_pixels(content, counted=size, target=target)
            if target is not None:
                return
    except DataError as error:
        raise _named(error, raw, raw.image_samples[number]) from error
    pixels.write_patches(memory, rule, image, plan, exact=config.exact_resize)


def _audio_fields(raw: StoredGroup, model: ModelPreset, form: AudioForm) -> dict[str, Tensor]:
    """The audio fields of a `MicroBatch`; none for a model that has no audio encoder."""
    rule = model.audio
    if rule is None:
        if len(raw.audios):
            raise ConfigError(
                f"{raw.where}: {len(raw.audios)} audio clips, but no audio rule to decode them by; "
                "use the model preset of the build"
            )
        return {}
    clips = [_decode_clip(raw, number, rule) for number in range(len(raw.audios))]
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


def _decode_clip(raw: StoredGroup, number: int, rule: AudioRule) -> Tensor:
    try:
        return decode_audio(rule, raw.audios[number], int(raw.audio_lengths[number]))
    except DataError as error:
        raise _named(error, raw, raw.audio_samples[number]) from error


def _named(error: DataError, raw: StoredGroup, sample: int) -> DataError:
    """The error of a file, with the sample that it belongs to."""
    return DataError(
        f"sample {raw.sample_ids[sample]!r} ({raw.where}): {error}; restore it, or build again "
        "without it"
    )


def _int64(values: object) -> Tensor:
    """A copy: stored arrays may be views into a mapped file."""
    return torch.from_numpy(np.array(values, dtype=np.int64))
