"""Log-mel features against transformers' feature extractor of Whisper."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import WhisperFeatureExtractor

from isobatch.loaders.decode.log_mel import log_mel_frames, log_mel_windows, mel_filters
from isobatch.models.audio_tokens import AudioRule, plan_audio

RULE = AudioRule(downsample=2)
WINDOW = RULE.window_frames * RULE.hop_length
TOLERANCE = 1e-5
LENGTHS = [
    1,
    159,
    160,
    161,
    3_999,
    48_000,
    WINDOW - 400,
    WINDOW - 161,
    WINDOW - 160,
    WINDOW - 1,
    WINDOW,
]


def _clip(count: int) -> torch.Tensor:
    rng = np.random.default_rng(count)
    wave = np.sin(np.arange(count) * 0.05) * np.linspace(0, 0.5, count) + rng.normal(
        0, 0.003, count
    )
    return torch.from_numpy(wave.astype(np.float32))


@pytest.mark.parametrize("mel_bins", [80, 128])
def test_features_equal_whispers(mel_bins: int) -> None:
    extractor = WhisperFeatureExtractor(feature_size=mel_bins)
    for count in LENGTHS:
        clip = _clip(count)
        options = {"sampling_rate": 16_000, "return_attention_mask": True, "return_tensors": "pt"}
        reference = extractor(clip.numpy(), **options)
        expected, frames = reference["input_features"], int(reference["attention_mask"].sum())
        windows, packed = (
            log_mel_windows(RULE, clip, mel_bins),
            log_mel_frames(RULE, clip, mel_bins),
        )
        assert windows.shape == expected.shape, count
        assert packed.shape == (frames, mel_bins) == (plan_frames(count), mel_bins), count
        assert (windows - expected).abs().max() <= TOLERANCE, count
        assert (packed.T - expected[0, :, :frames]).abs().max() <= TOLERANCE, count


def plan_frames(count: int) -> int:
    return -(-count // RULE.hop_length)


@pytest.mark.parametrize("count", [WINDOW + 1, 2 * WINDOW, 2 * WINDOW + 12_345])
def test_each_window_of_a_long_clip_is_like_a_clip_of_its_own(count: int) -> None:
    clip, plan = _clip(count), plan_audio(RULE, count, RULE.sampling_rate)
    windows, packed = log_mel_windows(RULE, clip), log_mel_frames(RULE, clip)
    assert len(windows) == plan.num_windows
    assert len(packed) == plan.num_frames
    alone = [clip[start : start + WINDOW] for start in range(0, count, WINDOW)]
    assert torch.equal(windows, torch.cat([log_mel_windows(RULE, part) for part in alone]))
    assert torch.equal(packed, torch.cat([log_mel_frames(RULE, part) for part in alone]))


def test_silence_is_no_special_case() -> None:
    expected = WhisperFeatureExtractor(feature_size=128)(
        np.zeros(999, np.float32), sampling_rate=16_000
    )
    assert np.array_equal(
        log_mel_windows(RULE, torch.zeros(999)).numpy(), expected["input_features"]
    )


def test_filters_of_another_rate_end_at_its_highest_frequency() -> None:
    filters = mel_filters(8_000, 200, 40)
    assert filters.shape == (40, 101)
    assert bool((filters.sum(dim=1) > 0).all())
    assert filters[-1].nonzero().max() < 101
    assert float(filters[:, -1].sum()) == pytest.approx(0, abs=1e-6)
