"""Stored samples to tensors: `make_batch` makes a `MicroBatch`, in any process.

For the loader. Image, video and audio tokens in `input_ids` were counted at build, and a file that
changed since would no longer fill them. So each image's size and each clip's length is checked.
"""

from collections.abc import Sequence
from copy import deepcopy
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from isobatch.balance.loss_weights import LossWeights, sample_weights
from isobatch.common.errors import ConfigError, DataError, IsobatchError
from isobatch.common.types import LABEL_IGNORE
from isobatch.loaders.batch._vision import EncodedFields, ProcessedFields, VisionFields
from isobatch.loaders.batch.broken_files import BrokenFiles
from isobatch.loaders.batch.micro_batch import MicroBatch
from isobatch.loaders.config import AudioForm, LoaderConfig
from isobatch.loaders.decode.audio import decode_audio
from isobatch.loaders.decode.log_mel import MEL_BINS, log_mel_frames, log_mel_windows
from isobatch.loaders.steps.step_plan import StepTotals
from isobatch.loaders.transforms import SampleSeeds, transform_batch
from isobatch.models.audio_tokens import AudioRule, plan_clip
from isobatch.models.image_rules import ProcessorRule
from isobatch.models.presets import ModelPreset
from isobatch.shards.stored_group import MissingFile, StoredGroup


def make_batch(
    model: ModelPreset,
    config: LoaderConfig,
    raw: StoredGroup,
    totals: StepTotals,
    seeds: SampleSeeds,
    are_padded: bool = False,
) -> MicroBatch:
    """The micro-batch of a group; `seeds` name its samples. Errors as of `collate`.

    `are_padded`: whether it is planned to be padded.
    """
    batch = collate(raw, model, config, totals, seeds, are_padded)
    if len(batch.sample_ids) != len(seeds.samples):  # skipped ones are in it, without labels
        raise IsobatchError(
            f"a micro-batch of {len(seeds.samples)} samples has {len(batch.sample_ids)}: that is "
            "an error of Isobatch's; please report it"
        )
    if config.batch_transform is not None:
        batch = transform_batch(config.batch_transform, batch, raw.where, seeds)
    return batch


def collate(
    raw: StoredGroup,
    model: ModelPreset,
    config: LoaderConfig,
    totals: StepTotals,
    seeds: SampleSeeds | None = None,
    are_padded: bool = False,
) -> MicroBatch:
    """The micro-batch of a group.

    `seeds` say the samples' builds, and are for the `image_transform` of `config`, which is not
    applied without them. DataError names a sample with an unusable file; ConfigError if `model` has
    no rule for clips or videos.
    """
    labels = torch.from_numpy(raw.labels.astype(np.int64))
    counted = _count(len(raw.input_ids))
    borders = raw.cu_seqlens.tolist()
    # of each token in its sample
    positions = [counted[: end - start] for start, end in pairwise(borders)] or [counted[:0]]
    broken = BrokenFiles(raw, config)
    is_processed = isinstance(model.vision, ProcessorRule)
    fields_of = ProcessedFields if is_processed else VisionFields
    if raw.arrays is not None:
        fields_of = EncodedFields
    vision = fields_of(raw, model, config, seeds, broken)
    pixel_values, images = vision.pixels()
    grids, seconds = vision.grids, vision.video_seconds
    audio_fields = _audio_fields(raw, model, config.audio, broken)
    for start, end in broken.token_spans():
        labels[start:end] = LABEL_IGNORE
    return MicroBatch(
        sample_ids=raw.sample_ids,
        input_ids=torch.from_numpy(raw.input_ids.astype(np.int64)),
        labels=labels,
        position_ids=torch.from_numpy(np.concatenate(positions)),
        cu_seqlens=torch.from_numpy(raw.cu_seqlens.copy()),
        pixel_values=pixel_values,
        images=images,
        # a copy: samples of a group that is kept in memory may be read again
        extras=deepcopy(dict(raw.extras)) if raw.extras else {},
        patches_per_image=_int64(vision.patch_counts),
        image_sizes=torch.from_numpy(raw.image_sizes.astype(np.int64)),
        image_grid_thw=None if grids is None else _int64(grids).reshape(-1, 3),
        video_seconds=None if seconds is None else torch.tensor(seconds, dtype=torch.float64),
        processed=vision.processed,
        blank_tokens=vision.blank_tokens,
        **audio_fields,
        skipped=broken.skipped,
        num_loss_tokens=totals.num_loss_tokens,
        num_step_samples=totals.num_samples,
        loss_normalizer=totals.loss_normalizer,
        loss_weights=_loss_weights(raw, config.loss_weights),
        # an evaluation has no gradients: its losses are summed over ranks
        num_ranks=config.ranks()[1] if config.shuffle else 1,
        micro_batches_per_step=config.micro_batches_per_step,
        gradients=config.gradients,
        is_padded=are_padded,
        sample_builds=tuple([build for build, *_ in seeds.samples]) if seeds else (),
    )


def _loss_weights(raw: StoredGroup, weights: LossWeights) -> Tensor | None:
    """The weight of each token's loss, float32; None if all are 1."""
    if weights == "token":
        return None
    before = np.concatenate([[0], np.cumsum(raw.labels != LABEL_IGNORE)])
    num_labels = np.diff(before[raw.cu_seqlens])
    label_weights = sample_weights(num_labels, weights) / np.maximum(num_labels, 1)
    return torch.from_numpy(np.repeat(label_weights, np.diff(raw.cu_seqlens)).astype(np.float32))


def _count(longest: int) -> NDArray[np.int64]:
    """0, 1, 2, ...: at least `longest` numbers, made again only when more are wanted."""
    global _counted  # noqa: PLW0603
    if len(_counted) < longest:
        _counted = np.arange(2 * longest)
    return _counted


_counted = np.arange(8192)


def _audio_fields(
    raw: StoredGroup, model: ModelPreset, form: AudioForm, broken: BrokenFiles
) -> dict[str, Any]:
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
    # of each clip, the length of the longest clip of its sample
    max_lengths = np.zeros(len(raw.sample_ids), np.int64)
    np.maximum.at(max_lengths, raw.audio_samples, raw.audio_lengths)
    longest: list[int] = max_lengths[raw.audio_samples].tolist()
    frames: list[int] = []
    for length, max_length in zip(raw.audio_lengths.tolist(), longest, strict=True):
        plan = plan_clip(rule, length, max_length)
        full = plan.num_windows - 1
        frames += [rule.window_frames] * full
        frames.append(plan.num_frames - full * rule.window_frames)
    return {
        "audio_values": _audio_values(clips, longest, model, form),
        "audio_lengths": _int64(raw.audio_lengths),
        "audio_frames": _int64(frames),
    }


def _audio_values(
    clips: Sequence[Tensor], longest: Sequence[int], model: ModelPreset, form: AudioForm
) -> Tensor:
    """All clips, in the layout of `MicroBatch.audio_values`."""
    rule = model.audio
    if form == "waveform" or rule is None:
        return torch.cat([torch.empty(0), *clips])
    mel_bins = model.audio_encoder.frame_values if model.audio_encoder else MEL_BINS
    if form == "features":
        pairs = zip(clips, longest[: len(clips)], strict=True)
        features = [log_mel_frames(rule, clip, mel_bins, max_length) for clip, max_length in pairs]
        return torch.cat([torch.empty((0, mel_bins)), *features])
    if rule.long_clips == "whole":
        raise ConfigError(f"{model.name} takes clips whole; use audio='features', not 'windows'")
    windows = [log_mel_windows(rule, clip, mel_bins) for clip in clips]
    return torch.cat([torch.empty((0, mel_bins, rule.window_frames)), *windows])


def _decode_clip(raw: StoredGroup, number: int, rule: AudioRule, broken: BrokenFiles) -> Tensor:
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
