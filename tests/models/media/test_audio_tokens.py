"""Counts of audio against SciPy's resampling, transformers' Whisper features and Qwen2-Audio's
encoder lengths.
"""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.signal import resample_poly
from transformers import Qwen2AudioEncoderConfig, WhisperFeatureExtractor
from transformers.models.qwen2_audio.modeling_qwen2_audio import Qwen2AudioEncoder

from isobatch.common.errors import DataError
from isobatch.models.audio_tokens import AudioRejected, AudioRule, plan_audio
from isobatch.models.presets import load_model
from support.cases import for_each

RULE = AudioRule(downsample=2)
RATES = [8000, 11_025, 16_000, 22_050, 44_100, 48_000]


@for_each("rate", RATES)
def test_resampled_length_is_that_of_resample_poly(rate: int) -> None:
    for num_samples in [
        2000,
        2001,
        4409,
        4410,
        4411,
        *np.random.default_rng(0).integers(2000, 9000, 30),
    ]:
        plan = plan_audio(RULE, int(num_samples), rate)
        assert plan.num_samples == len(resample_poly(np.zeros(num_samples), 16_000, rate))


def qwen2_audio_lengths(num_samples: int) -> tuple[int, int, int]:
    """Frames, encoder tokens and LLM tokens of a clip, by the mask of its features and the
    encoder's own formula.
    """
    extractor = WhisperFeatureExtractor(feature_size=8)
    features = extractor(
        np.zeros(num_samples, np.float32),
        sampling_rate=16_000,
        padding="max_length",
        return_attention_mask=True,
    )
    frames = int(features["attention_mask"].sum())
    encoder, llm = Qwen2AudioEncoder._get_feat_extract_output_lengths(None, torch.tensor(frames))
    return frames, int(encoder), int(llm)


@for_each("num_samples", [481, 640, 641, 959, 960, 961, 15_999, 16_000, 16_001, 479_999, 480_000])
def test_lengths_equal_those_of_qwen2_audio(num_samples: int) -> None:
    plan = plan_audio(RULE, num_samples, 16_000)
    assert (plan.num_frames, plan.num_encoder_tokens, plan.num_audio_tokens) == qwen2_audio_lengths(
        num_samples
    )
    assert plan.num_windows == 1


def test_a_window_is_what_the_encoder_takes_and_makes_as_many_tokens() -> None:
    config = Qwen2AudioEncoderConfig(
        d_model=8, encoder_layers=1, encoder_attention_heads=1, encoder_ffn_dim=8
    )
    encoder = Qwen2AudioEncoder(config).eval()
    with torch.no_grad():
        features = encoder(
            torch.zeros(1, config.num_mel_bins, RULE.window_frames)
        ).last_hidden_state
    assert features.shape[1] == plan_audio(RULE, 480_000, 16_000).num_audio_tokens == 750


@given(
    num_samples=st.integers(1, 16_000 * 200),
    rate=st.sampled_from(RATES),
    downsample=st.sampled_from([1, 2, 4]),
    window=st.integers(1, 400),
)
@settings(max_examples=300, deadline=None)
def test_a_long_clip_counts_as_its_windows_one_by_one(
    num_samples: int, rate: int, downsample: int, window: int
) -> None:
    rule = AudioRule(downsample=downsample, window_frames=window * 2 * downsample)
    resampled = -(-num_samples * 16_000 // rate)
    left, windows, frames, encoder, llm = resampled, 0, 0, 0, 0
    while left > 0:
        piece = min(left, rule.window_frames * 160)
        columns = len(range(0, piece, 160))
        tokens = len(range(0, columns, 2))
        windows, frames, encoder, llm = (
            windows + 1,
            frames + columns,
            encoder + tokens,
            llm + tokens // downsample,
        )
        left -= piece
    if llm == 0:
        with pytest.raises(AudioRejected, match="too short"):
            plan_audio(rule, num_samples, rate)
        return
    plan = plan_audio(rule, num_samples, rate)
    assert (plan.num_windows, plan.num_frames, plan.num_encoder_tokens, plan.num_audio_tokens) == (
        windows,
        frames,
        encoder,
        llm,
    )


def test_the_papers_rates_apply_behind_the_encoder() -> None:
    for name, tokens in (("orchmllm_10b", 250), ("orchmllm_18b", 250), ("orchmllm_84b", 125)):
        rule = load_model(name).audio
        assert rule is not None
        assert plan_audio(rule, 80_000, 8000).num_encoder_tokens == 500
        assert plan_audio(rule, 80_000, 8000).num_audio_tokens == tokens


@pytest.mark.parametrize(
    ("num_samples", "detail"), [(0, "no samples"), (320, "20 ms is too short"), (1, "too short")]
)
def test_a_clip_without_a_token_is_rejected_by_an_error_that_survives_pickling(
    num_samples: int, detail: str
) -> None:
    with pytest.raises(DataError) as caught:
        plan_audio(RULE, num_samples, 16_000)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(copy, AudioRejected)
    assert (copy.reason, str(copy)) == ("empty_audio", str(caught.value))
    assert detail in str(copy)
    assert plan_audio(RULE, 321, 16_000).num_audio_tokens == 1


def test_a_sampling_rate_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="sampling_rate is 0"):
        plan_audio(RULE, 100, 0)
