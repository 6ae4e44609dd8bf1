"""Length of an audio clip and the model's rule -> encoder and LLM tokens.

The packer counts with `plan_clip` from the headers of audio files, the loader cuts by the same
plans. The numbers are those of the clip alone: an audio encoder's convolutions need padded batches,
and what that costs depends on the batch (`balance.dispatching.post_balancing`). Pure.
"""

from dataclasses import dataclass
from typing import Literal, TypeVar

from isobatch.common.config import check_positive
from isobatch.common.errors import ConfigError, MediaRejected
from isobatch.common.types import IntArray

Frames = TypeVar("Frames", int, IntArray)


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioRule:
    """Whisper: a frame per `hop_length` samples, a strided convolution, fewer tokens for the LLM.

    A window is a whole number of LLM tokens, so cutting loses none. Every number is positive.
    """

    sampling_rate: int = 16_000
    """Samples per second that the encoder expects; clips are resampled to it."""
    hop_length: int = 160
    """Samples from one frame of the spectrogram to the next: 10 ms."""
    conv_stride: int = 2
    """Frames per encoder token: the stride of the encoder's own convolutions."""
    downsample: int
    """Encoder tokens per LLM token; a rest of fewer gives none (Qwen2-Audio)."""
    window_frames: int = 3000
    """Frames that the encoder takes together: 30 s, Whisper's 1,500 positions."""
    long_clips: Literal["cut", "reject", "whole"] = "cut"
    """Clips longer than a window: "cut" into several; "reject", where the model's processor would
    drop the rest (Qwen2.5-Omni); "whole": a window is as long as its sample's longest clip."""
    chunk_frames: int | None = None
    """Frames that the convolutions take together, whose last token may be incomplete; None: all of
    a window."""
    attention_frames: int | None = None
    """Frames whose tokens attend to each other, whole chunks; None: all of a window."""

    def __post_init__(self) -> None:
        check_positive(self, max_integer=2**31 - 1)
        if self.window_frames % self.frames_per_token:
            raise ConfigError(
                f"window_frames = {self.window_frames}: must be a multiple of conv_stride *"
                f" downsample = {self.frames_per_token}, so that cutting long clips loses no tokens"
            )
        if (self.attention_frames or 0) % (chunk := self.chunk_frames or self.conv_stride):
            raise ConfigError(f"attention_frames must be a multiple of {chunk}, a chunk's frames")

    @property
    def frames_per_token(self) -> int:
        """Frames per LLM token."""
        return self.conv_stride * self.downsample

    @property
    def frame_length(self) -> int:
        """Samples that a frame is made of: 25 ms, Whisper's Fourier transform."""
        return self.sampling_rate // 40

    def encoder_tokens(self, frames: Frames) -> Frames:
        """Encoder tokens of one window, or of each."""
        if self.chunk_frames is None:
            return -(-frames // self.conv_stride)
        chunks, rest = frames // self.chunk_frames, frames % self.chunk_frames
        return chunks * -(-self.chunk_frames // self.conv_stride) - (-rest // self.conv_stride)

    def attention_squares(self, tokens: IntArray) -> IntArray:
        """Sum of the squared lengths of what attends together, of windows of so many tokens."""
        if self.attention_frames is None:
            return tokens**2
        span = self.encoder_tokens(self.attention_frames)
        return tokens // span * span**2 + (tokens % span) ** 2


class AudioRejected(MediaRejected):
    """The model cannot use a clip."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioPlan:
    """What one audio clip becomes."""

    num_samples: int
    """Samples of one channel, at the rule's sampling rate."""
    num_windows: int
    """Inputs of the encoder: all but the last are full."""
    num_frames: int
    """Columns of the spectrogram, over all windows."""
    num_encoder_tokens: int
    """Tokens of the encoder's layers, over all windows; without the padding of a batch."""
    num_audio_tokens: int
    """Positions of the LLM sequence that audio features fill, wrappers not included."""


def resampled_length(rule: AudioRule, num_samples: int, sampling_rate: int) -> int:
    """Samples at the rule's rate: ceil(num_samples * up / down), as SciPy's `resample_poly`."""
    if sampling_rate < 1:
        raise ValueError(f"sampling_rate is {sampling_rate}; give the clip's samples per second")
    return -(-num_samples * rule.sampling_rate // sampling_rate)


def plan_audio(rule: AudioRule, num_samples: int, sampling_rate: int) -> AudioPlan:
    """What a clip of `num_samples` at `sampling_rate`, alone in its sample, becomes under `rule`.

    The last frame and encoder token may be incomplete, as Whisper's attention mask counts them.
    Raises AudioRejected: `empty_audio` for a clip without samples, or too short for one token,
    `long_audio` for one that the model's processor would cut off.
    """
    length = resampled_length(rule, num_samples, sampling_rate)
    return plan_clip(rule, length, length)


def plan_clip(rule: AudioRule, length: int, longest: int) -> AudioPlan:
    """What a clip becomes, in samples at the rule's rate; `longest`: of all clips of its sample.

    Raises as `plan_audio` does.
    """
    if length < 1:
        raise AudioRejected("empty_audio", "the clip has no samples; remove it")
    num_frames = -(-length // rule.hop_length)
    num_windows = 1
    if rule.long_clips == "whole":
        # the longest clip has no frame of its last, incomplete hop
        num_frames = min(num_frames, longest // rule.hop_length)
        # the first frame is half of a clip's reflection, which must be that long
        num_frames = num_frames if longest > rule.frame_length // 2 else 0
    else:
        num_windows = -(-num_frames // rule.window_frames)
    if num_windows > 1 and rule.long_clips == "reject":
        max_seconds = rule.window_frames * rule.hop_length / rule.sampling_rate
        too_long = (
            f"the clip of {length / rule.sampling_rate:,.1f} s is longer than {max_seconds:g} s"
        )
        raise AudioRejected("long_audio", f"{too_long}, the model's longest; cut it into several")
    # windows hold whole LLM tokens, so the sums over them are those of the clip in one piece
    num_encoder_tokens = rule.encoder_tokens(num_frames)
    num_audio_tokens = num_encoder_tokens // rule.downsample
    if num_audio_tokens == 0:
        raise AudioRejected(
            "empty_audio",
            f"the clip of {1e3 * length / rule.sampling_rate:.3g} ms is too short: the model makes"
            f" one token of {rule.downsample} encoder tokens, and it has {num_encoder_tokens};"
            " remove it",
        )
    return AudioPlan(
        num_samples=length,
        num_windows=num_windows,
        num_frames=num_frames,
        num_encoder_tokens=num_encoder_tokens,
        num_audio_tokens=num_audio_tokens,
    )
