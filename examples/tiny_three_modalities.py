"""A model that sees, hears and reads, small enough for one CPU core: `tiny_vlm` with ears.

Three parts: two encoders, batch -> features, and a language model that takes features in the places
of image and audio tokens. So each part can work on other samples than the next one
(`train_three_modalities.py`).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from tiny_vlm import PATCH_SIDE, TOKENS_PER_PATCH, Block, VisionEncoder, token_losses
from torch import Tensor, nn
from torch.nn.functional import pad

from balance.errors import ConfigError
from balance.media.audio_tokens import AudioRule
from balance.presets import TilesRule
from loaders import MicroBatch, StreamingLoader
from loaders.decode.log_mel import MEL_BINS

LLM_WIDTH, ENCODER_WIDTH, DEPTH = 64, 32, 2


class Vision(nn.Module):
    """Images -> features."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = VisionEncoder(ENCODER_WIDTH, LLM_WIDTH, DEPTH)

    def forward(self, batch: MicroBatch) -> Tensor:
        """-> (image tokens, LLM width)."""
        return self.encoder(batch.pixel_values)


class Audio(nn.Module):
    """Clips, as log-mel frames -> features. Every window of 30 s attends within itself, and nothing
    is padded.
    """

    def __init__(self, rule: AudioRule) -> None:
        super().__init__()
        self.rule = rule
        self.join = nn.Linear(rule.frames_per_token * MEL_BINS, ENCODER_WIDTH)
        self.blocks = nn.ModuleList(Block(ENCODER_WIDTH, causal=False) for _ in range(DEPTH))
        self.project = nn.Sequential(
            nn.LayerNorm(ENCODER_WIDTH), nn.Linear(ENCODER_WIDTH, LLM_WIDTH)
        )

    def forward(self, batch: MicroBatch) -> Tensor:
        """-> (audio tokens, LLM width)."""
        frames, joined = batch.audio_values, self.rule.frames_per_token
        windows = frames.split(batch.audio_frames.tolist()) if len(frames) else ()
        counts = [
            -(-len(window) // self.rule.conv_stride) // self.rule.downsample for window in windows
        ]
        # a last token may lack frames, and a rest of too few gives none
        # (`balance.media.audio_tokens.plan_audio`)
        whole = [
            pad(own, (0, 0, 0, joined))[: count * joined]
            for own, count in zip(windows, counts, strict=True)
        ]
        x = self.join(torch.cat([frames[:0], *whole]).view(-1, joined * MEL_BINS))
        lengths = [count for count in counts if count]
        positions = torch.cat([torch.arange(0), *map(torch.arange, lengths)])
        for block in self.blocks:
            x = block(x, lengths, positions)
        return self.project(x)


class Language(nn.Module):
    """A causal LLM over packed samples."""

    def __init__(self, vocab_size: int, tokens: Mapping[str, int]) -> None:
        """`tokens`: by encoder, the id that stands for it in `input_ids`."""
        super().__init__()
        self.tokens = dict(tokens)
        self.embed = nn.Embedding(vocab_size, LLM_WIDTH)
        self.blocks = nn.ModuleList(Block(LLM_WIDTH, causal=True) for _ in range(DEPTH))
        self.norm, self.head = nn.LayerNorm(LLM_WIDTH), nn.Linear(LLM_WIDTH, vocab_size, bias=False)

    def forward(self, batch: MicroBatch, features: Mapping[str, Tensor]) -> Tensor:
        """The sum of the tokens' losses; `features` by encoder, (its tokens in `input_ids`, LLM
        width).
        """
        x = self.embed(batch.input_ids)
        for name, token in self.tokens.items():
            x = x.index_copy(0, (batch.input_ids == token).nonzero().squeeze(1), features[name])
        lengths = batch.cu_seqlens.diff().tolist()
        for block in self.blocks:
            x = block(x, lengths, batch.position_ids)
        return token_losses(self.head(self.norm(x)), batch).sum()


def make_model(loader: StreamingLoader) -> nn.ModuleDict:
    """Parts by name, with random weights, that fit the build. ConfigError if it is for other
    models.
    """
    preset = loader.model
    rule, audio, heard = preset.vision, preset.audio, loader.audio_token_id
    if (
        not isinstance(rule, TilesRule)
        or audio is None
        or heard is None
        or ((rule.image_size, rule.llm_tokens_per_patch) != (PATCH_SIDE, TOKENS_PER_PATCH))
    ):
        raise ConfigError(
            f"the build is for the model {preset.name}; build it with --model tiny_audio"
        )
    tokens = {"vision": loader.image_token_id, "audio": heard}
    return nn.ModuleDict(
        {"vision": Vision(), "audio": Audio(audio), "language": Language(loader.vocab_size, tokens)}
    )
