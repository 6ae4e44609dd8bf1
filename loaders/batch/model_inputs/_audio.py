"""Clips of a micro-batch as arguments of a model: Qwen2.5-Omni's and Qwen3-Omni's thinker.

`MicroBatch.audio_values` are log-mel features without padding (the loader's `audio="features"`), a
clip's by its `audio_frames`. Their tokens have the positions of text.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from balance.errors import ConfigError
from loaders.batch.micro_batch import MicroBatch
from loaders.batch.model_inputs.family import Arguments


def has_clips(batch: MicroBatch) -> bool:
    """Whether a micro-batch has audio clips."""
    return batch.audio_lengths is not None and len(batch.audio_lengths) > 0


def audio_arguments(batch: MicroBatch, config: Any) -> Arguments:
    """`input_features` (clips, mel bins, longest clip) and the mask of their frames.

    The thinkers of transformers take no `audio_feature_lengths` in place of the mask.
    """
    values, frames = _features(batch, config)
    parts = list(torch.split(values, frames.tolist()))
    clips = pad_sequence(parts, batch_first=True).transpose(1, 2)
    places = torch.arange(clips.shape[2], device=frames.device)
    mask = (places < frames[:, None]).long()
    return {"input_features": clips, "feature_attention_mask": mask}


def with_blank_clip(batch: MicroBatch, frames: int, config: Any) -> MicroBatch:
    """`batch`, which has no clips, with one of silence of so many frames: fields of audio alone."""
    values = batch.pixel_values.new_zeros(frames, config.audio_config.num_mel_bins)
    lengths = batch.patches_per_image.new_tensor([frames])
    return replace(batch, audio_values=values, audio_frames=lengths, audio_lengths=lengths)


def _features(batch: MicroBatch, config: Any) -> tuple[Tensor, Tensor]:
    values, frames, bins = batch.audio_values, batch.audio_frames, config.audio_config.num_mel_bins
    if values is None or frames is None or batch.audio_lengths is None or values.ndim != 2:
        raise ConfigError(
            f"{config.model_type} takes log-mel features of clips: open the loader with"
            " audio='features'"
        )
    if values.shape[1] != bins or len(frames) != len(batch.audio_lengths):
        raise ConfigError(
            f"{len(batch.audio_lengths)} clips in {len(frames)} windows of {values.shape[1]} mel"
            f" bins were not made for {config.model_type}, with {bins}; build with that model's"
            " folder"
        )
    if int(frames.sum()) != len(values):
        raise ConfigError(
            f"features of {len(values)} frames for clips of {int(frames.sum())}: a planner gave"
            " some to another rank's encoder"
        )
    return values, frames
