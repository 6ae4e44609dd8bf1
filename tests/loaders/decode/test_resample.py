"""Resampling against SciPy's, and the number of samples against the plan."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.signal import resample_poly

from isobatch.loaders.decode._resample import resample
from isobatch.models.audio_tokens import AudioRejected, AudioRule, plan_audio

RATES = [8_000, 11_025, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000, 96_000]
TOLERANCE = 2e-6
"""Measured 2e-7 on noise of standard deviation .3: sums of up to 121 taps in float32, where SciPy
has float64.
"""


@settings(max_examples=120, deadline=None)
@given(
    st.integers(1, 3000),
    st.sampled_from(RATES),
    st.sampled_from([*RATES, 15_999]),
    st.integers(0, 1 << 16),
)
def test_resampling_equals_scipy(count: int, source: int, target: int, seed: int) -> None:
    waveform = np.random.default_rng(seed).normal(0, 0.3, count).astype(np.float32)
    ours = resample(waveform, source, target)
    expected = resample_poly(waveform.astype(np.float64), target, source)
    assert ours.dtype == np.float32
    assert ours.shape == expected.shape
    assert np.abs(ours - expected).max() <= TOLERANCE


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 5000), st.integers(4_000, 50_000))
def test_the_number_of_samples_is_the_planned_one(count: int, rate: int) -> None:
    rule = AudioRule(downsample=1)
    try:
        planned = plan_audio(rule, count, rate).num_samples
    except AudioRejected:
        return
    assert len(resample(np.zeros(count, np.float32), rate, rule.sampling_rate)) == planned


@pytest.mark.parametrize(
    ("source", "target"), [(44_100, 16_000), (8_000, 16_000), (48_000, 16_000)]
)
def test_a_tone_keeps_its_pitch_and_loudness(source: int, target: int) -> None:
    seconds = np.arange(source) / source
    ours = resample(np.sin(2 * np.pi * 440 * seconds).astype(np.float32), source, target)
    expected = np.sin(2 * np.pi * 440 * np.arange(target) / target)
    assert np.abs(ours - expected)[200:-200].max() < 2e-3


def test_the_same_rate_gives_the_same_array() -> None:
    waveform = np.ones(5, np.float32)
    assert resample(waveform, 16_000, 16_000) is waveform
