"""Waveform -> log-mel features, as Whisper's extractor; on any device. Pure.

A clip is cut into windows of `AudioRule.window_frames` (30 s), each with its own maximum, as if it
were a clip of its own, or stays whole (`AudioRule.long_clips`). The extractor pads windows with
silence to the full length. Here frames of pure silence are filled in, not computed: 30 s take 6 ms
on one core, 3 s a sixth of that.
"""

from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from isobatch.models.audio_tokens import AudioRule, plan_clip

MEL_BINS = 128
"""Mel bins of Whisper's large-v3 and of Qwen2-Audio; smaller Whispers have 80."""

_TOP_HZ = 8_000.0
"""Highest frequency of Whisper's filters."""
_FLOOR, _RANGE = 1e-10, 8.0
"""Smallest power, and largest distance below the window's maximum in powers of ten."""


def log_mel_frames(
    rule: AudioRule, waveform: Tensor, mel_bins: int = MEL_BINS, longest: int = 0
) -> Tensor:
    """float32 (frames, mel_bins) of a clip: a row per started `hop_length`, without padding.

    `longest`: samples of the longest clip of its sample, for rules whose clips stay whole.
    """
    if rule.long_clips == "whole":
        longest = max(longest, len(waveform))
        plan = plan_clip(rule, len(waveform), longest)
        features, _ = _features(rule, pad(waveform, (0, longest - len(waveform))), mel_bins)
        return features[:, : plan.num_frames].T.contiguous()
    parts = [
        _log_mel(rule, window, mel_bins)[0][:, :frames]
        for window, frames in _windows(rule, waveform)
    ]
    return torch.cat(parts, dim=1).T.contiguous()


def log_mel_windows(rule: AudioRule, waveform: Tensor, mel_bins: int = MEL_BINS) -> Tensor:
    """float32 (windows, mel_bins, window_frames) of a clip: Whisper's `input_features`."""
    windows = []
    for window, _ in _windows(rule, waveform):
        features, silence = _log_mel(rule, window, mel_bins)
        padded = silence.expand(mel_bins, rule.window_frames).clone()
        padded[:, : features.shape[1]] = features
        windows.append(padded)
    return torch.stack(windows)


def _windows(rule: AudioRule, waveform: Tensor) -> list[tuple[Tensor, int]]:
    """The samples of each window of a clip, and the number of frames that start in it."""
    windows = torch.split(waveform, rule.window_frames * rule.hop_length)
    return [(window, -(-len(window) // rule.hop_length)) for window in windows]


def _log_mel(rule: AudioRule, window: Tensor, mel_bins: int) -> tuple[Tensor, Tensor]:
    """Features (mel_bins, frames), up to the last frame with sound, and the value of silence."""
    hop, length = rule.hop_length, rule.frame_length
    # the last sample is part of frames that are centred up to half a length after it
    frames = min(-(-len(window) // hop) + -(-length // hop), rule.window_frames)
    return _features(rule, pad(window, (0, frames * hop - len(window))), mel_bins)


def _features(rule: AudioRule, samples: Tensor, mel_bins: int) -> tuple[Tensor, Tensor]:
    """Features of a whole waveform, (mel_bins, frames), and the value of silence."""
    length = rule.frame_length
    hann = torch.hann_window(length, device=samples.device)
    spectrum = torch.stft(samples, length, rule.hop_length, window=hann, return_complex=True)
    power = spectrum[:, :-1].abs().square()  # the last frame is centred on the end
    mel = mel_filters(rule.sampling_rate, length, mel_bins).to(samples.device) @ power
    logs = mel.clamp(min=_FLOOR).log10()
    floor = (logs.max() - _RANGE).clamp(min=-10.0)  # log10(_FLOOR)
    return (logs.maximum(floor) + 4) / 4, (floor + 4) / 4


@lru_cache(maxsize=8)
def mel_filters(sampling_rate: int, frame_length: int, mel_bins: int) -> Tensor:
    """Whisper's mel filters, float32 (mel_bins, frame_length // 2 + 1).

    Triangles of equal area, evenly spaced on Slaney's mel scale.
    """
    top = min(_TOP_HZ, sampling_rate / 2)
    edges = _to_hz(np.linspace(0.0, _to_mel(top), mel_bins + 2))
    frequencies = np.linspace(0.0, sampling_rate // 2, frame_length // 2 + 1)
    # (mel_bins, frequencies): rising from the edge before, falling to the one after
    rising = (frequencies - edges[:-2, None]) / np.diff(edges)[:-1, None]
    falling = (edges[2:, None] - frequencies) / np.diff(edges)[1:, None]
    filters = np.minimum(rising, falling).clip(min=0) * (2 / (edges[2:] - edges[:-2]))[:, None]
    return torch.from_numpy(filters.astype(np.float32))


# Slaney's scale: linear up to 1 kHz (15 mel), then 27 mel for each factor 6.4
_KNEE_HZ, _KNEE_MEL = 1_000.0, 15.0
_MEL_PER_LOG = 27 / np.log(6.4)


def _to_mel(hz: float) -> float:
    linear = hz * _KNEE_MEL / _KNEE_HZ
    return float(linear if hz < _KNEE_HZ else _KNEE_MEL + np.log(hz / _KNEE_HZ) * _MEL_PER_LOG)


def _to_hz(mel: NDArray[np.float64]) -> NDArray[np.float64]:
    linear = mel * _KNEE_HZ / _KNEE_MEL
    return np.where(mel < _KNEE_MEL, linear, _KNEE_HZ * np.exp((mel - _KNEE_MEL) / _MEL_PER_LOG))
