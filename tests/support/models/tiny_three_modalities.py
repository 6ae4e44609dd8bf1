"""A tiny model for images, audio and text in three parts, so that a dispatcher can place each.

Two encoders map a batch to features; a language model takes features in place of image and audio
tokens. So each part can run on other samples than the next one (OrchMLLM).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from isobatch.common.errors import ConfigError
from isobatch.engine.runtime.stage_io import LOSS, Batch, StageTensors
from isobatch.engine.train.models.tiny_vlm import (
    DEPTH,
    LLM_TOKENS,
    TILE_SIDE,
    VIT_WIDTH,
    WIDTH,
    TinyBlock,
    TinyHead,
    TinyLanguageLayer,
    TinyPatchEmbedding,
    TinyProjector,
    TinyVisionLayer,
)
from isobatch.engine.train.step_source import StepSource
from isobatch.models.audio_tokens import AudioRule
from isobatch.models.image_rules import TilesRule

MEL_BINS = 128
"""Bins of a log-mel frame, as Whisper's and `loaders.decode.log_mel`'s."""


class VisionEncoder(nn.Module):
    """Images -> features."""

    def __init__(self) -> None:
        super().__init__()
        layers = [TinyPatchEmbedding(), *(TinyVisionLayer() for _ in range(DEPTH)), TinyProjector()]
        self.layers = nn.ModuleList(layers)

    def forward(self, batch: Batch) -> Tensor:
        """-> (image tokens, LLM width)."""
        tensors: StageTensors = {}
        for layer in self.layers:
            tensors = layer(tensors, batch)
        return tensors["features"]


class AudioEncoder(nn.Module):
    """Log-mel frames -> features. Windows of 30 s attend within themselves; nothing is padded."""

    def __init__(self, rule: AudioRule) -> None:
        super().__init__()
        self.rule = rule
        self.join = nn.Linear(rule.frames_per_token * MEL_BINS, VIT_WIDTH)
        self.blocks = nn.ModuleList(TinyBlock(VIT_WIDTH, causal=False) for _ in range(DEPTH))
        self.project = nn.Sequential(nn.LayerNorm(VIT_WIDTH), nn.Linear(VIT_WIDTH, WIDTH))

    def forward(self, batch: Batch) -> Tensor:
        """-> (audio tokens, LLM width)."""
        frames, joined = batch.audio_values, self.rule.frames_per_token
        windows = frames.split(batch.audio_frames.tolist()) if len(frames) else ()
        counts = [
            -(-len(window) // self.rule.conv_stride) // self.rule.downsample for window in windows
        ]
        # the last token may lack frames, and too few frames at the end give no token
        # (`models.audio_tokens.plan_audio`)
        whole = [
            pad(window, (0, 0, 0, joined))[: count * joined]
            for window, count in zip(windows, counts, strict=True)
        ]
        x = self.join(torch.cat([frames[:0], *whole]).view(-1, joined * MEL_BINS))
        lengths = [count for count in counts if count]
        positions = torch.cat([torch.arange(0), *map(torch.arange, lengths)])
        for block in self.blocks:
            x = block(x, lengths, positions)
        features: Tensor = self.project(x)
        return features


class Language(nn.Module):
    """A causal LLM over packed samples."""

    def __init__(self, vocab_size: int, tokens: Mapping[str, int]) -> None:
        """`tokens`: by encoder, the id that stands for it in `input_ids`."""
        super().__init__()
        self.tokens = dict(tokens)
        self.embed = nn.Embedding(vocab_size, WIDTH)
        layers = [*(TinyLanguageLayer() for _ in range(DEPTH)), TinyHead(vocab_size)]
        self.layers = nn.ModuleList(layers)

    def forward(self, batch: Batch, features: Mapping[str, Tensor]) -> Tensor:
        """Sum of the tokens' losses; `features` by encoder, (its tokens, LLM width)."""
        x = self.embed(batch.input_ids)
        for name, token in self.tokens.items():
            x = x.index_copy(0, (batch.input_ids == token).nonzero().squeeze(1), features[name])
        tensors: StageTensors = {"hidden": x}
        for layer in self.layers:
            tensors = layer(tensors, batch)
        return tensors[LOSS]


def make_three_modalities(source: StepSource) -> nn.ModuleDict:
    """`vision`, `audio` and `language`, random weights. ConfigError if the build does not fit."""
    preset, audio_token_id = source.model, source.audio_token_id
    rule, audio = preset.vision, preset.audio
    fits = isinstance(rule, TilesRule) and (
        (rule.image_size, rule.llm_tokens_per_patch) == (TILE_SIDE, LLM_TOKENS)
    )
    if not fits or audio is None or audio_token_id is None:
        raise ConfigError(
            f"the build is for the model {preset.name}; build it with --model tiny_audio"
        )
    tokens = {"vision": source.image_token_id, "audio": audio_token_id}
    language = Language(source.vocab_size, tokens)
    return nn.ModuleDict(
        {"vision": VisionEncoder(), "audio": AudioEncoder(audio), "language": language}
    )
