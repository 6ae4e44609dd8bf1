"""Length of an audio clip and the model's rule -> encoder and LLM tokens.

The packer counts with `plan_audio` from the headers of audio files. The numbers are those of the
clip alone: an audio encoder's convolutions need padded batches, and what that costs depends on the
batch (`balance.steps.post_balancing`). Pure.
"""

from dataclasses import dataclass

from balance.config import check_positive
from balance.errors import ConfigError, MediaRejected


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioRule:
    """Whisper: a frame per `hop_length` samples, a strided convolution, fewer tokens for the LLM.

    A clip longer than a window goes through the encoder as several: full ones, and one with the
    rest. A window is a whole number of LLM tokens, so cutting loses none. Every number is positive.
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

    def __post_init__(self) -> None:
        check_positive(self)
        if self.window_frames % self.frames_per_token:
            raise ConfigError(
                f"window_frames = {self.window_frames}: must be a multiple of conv_stride *"
                f" downsample = {self.frames_per_token}, so that cutting long clips loses no tokens"
            )

    @property
    def frames_per_token(self) -> int:
        """Frames per LLM token."""
        return self.conv_stride * self.downsample


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


def plan_audio(rule: AudioRule, num_samples: int, sampling_rate: int) -> AudioPlan:
    """What a clip of `num_samples` per channel at `sampling_rate` per second becomes under `rule`.

    Resampling gives ceil(num_samples * up / down) samples, as `scipy.signal.resample_poly` does;
    the last frame and encoder token may be incomplete, as Whisper's attention mask counts them.
    Raises AudioRejected (`empty_audio`) for a clip without samples, or too short for one token.

    >>> plan = plan_audio(AudioRule(downsample=2), 8_000 * 31, 8_000)
    >>> plan.num_samples, plan.num_windows, plan.num_frames
    (496000, 2, 3100)
    >>> plan.num_encoder_tokens, plan.num_audio_tokens
    (1550, 775)
    """
    if sampling_rate < 1:
        raise ValueError(f"sampling_rate is {sampling_rate}; give the clip's samples per second")
    if num_samples < 1:
        raise AudioRejected("empty_audio", "the clip has no samples; remove it")
    resampled = -(-num_samples * rule.sampling_rate // sampling_rate)
    num_frames = -(-resampled // rule.hop_length)
    # windows hold whole LLM tokens, so the sums over them are those of the clip in one piece
    num_encoder_tokens = -(-num_frames // rule.conv_stride)
    num_audio_tokens = num_encoder_tokens // rule.downsample
    if num_audio_tokens == 0:
        raise AudioRejected(
            "empty_audio",
            f"the clip of {1e3 * num_samples / sampling_rate:.3g} ms is too short: the model makes"
            f" one token of {rule.downsample} encoder tokens, and it has {num_encoder_tokens};"
            " remove it",
        )
    return AudioPlan(
        num_samples=resampled,
        num_windows=-(-num_frames // rule.window_frames),
        num_frames=num_frames,
        num_encoder_tokens=num_encoder_tokens,
        num_audio_tokens=num_audio_tokens,
    )
