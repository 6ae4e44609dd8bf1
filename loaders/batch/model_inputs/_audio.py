"""Clips of a micro-batch as arguments of Qwen2.5-Omni's and Qwen3-Omni's thinkers.

`MicroBatch.audio_values` are log-mel features without padding (the loader's `audio="features"`), a
clip's by its `audio_frames`. Their tokens have the positions of text.
"""

from dataclasses import replace
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from isobatch.common.errors import ConfigError
from isobatch.loaders.batch.micro_batch import MicroBatch
from isobatch.loaders.batch.model_inputs.family import Arguments


def has_clips(batch: MicroBatch) -> bool:
    """Whether a micro-batch has audio clips."""
    return batch.audio_lengths is not None and len(batch.audio_lengths) > 0


def audio_arguments(batch: MicroBatch, config: Any) -> Arguments:
    """`input_features` (clips, mel bins, longest clip) and the mask of their frames.

    The thinkers of transformers take no `audio_feature_lengths` in place of the mask. ConfigError
    for clips in another form, or of another model.
    """
    values, frames, bins = batch.audio_values, batch.audio_frames, config.audio_config.num_mel_bins
    if values is None or frames is None or values.ndim != 2:
        raise ConfigError(f"{config.model_type}: open the loader with audio='features'")
    clips = 0 if batch.audio_lengths is None else len(batch.audio_lengths)
    if (values.shape[1], len(frames), len(values)) != (bins, clips, int(frames.sum())):
        contents = f"{len(values)} frames of {values.shape[1]} mel bins, {clips} clips"
        raise ConfigError(
            f"{contents} in {len(frames)} windows of {int(frames.sum())} frames: not made for"
            f" {config.model_type}, or a planner gave clips to another rank's encoder"
        )
    parts = list(torch.split(values, frames.tolist()))
    features = pad_sequence(parts, batch_first=True).transpose(1, 2)
    mask = torch.arange(features.shape[2], device=frames.device) < frames[:, None]
    return {"input_features": features, "feature_attention_mask": mask.long()}


def with_blank_clip(batch: MicroBatch, frames: int, config: Any) -> MicroBatch:
    """`batch`, which has no clips, with one of silence of so many frames: fields of audio alone."""
    values = batch.pixel_values.new_zeros(frames, config.audio_config.num_mel_bins)
    lengths = batch.patches_per_image.new_tensor([frames])
    return replace(batch, audio_values=values, audio_frames=lengths, audio_lengths=lengths)
