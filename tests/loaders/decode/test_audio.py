"""Decoded clips against soundfile, and damaged clips."""

from __future__ import annotations

import io
import struct
import sys
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import soundfile
from scipy.signal import resample_poly

from isobatch.common.errors import DataError
from isobatch.loaders.decode.audio import decode_audio
from isobatch.models.audio_tokens import AudioRule
from support.cases import for_each

RULE = AudioRule(downsample=2)
RATE = RULE.sampling_rate


def _tone(count: int, channels: int = 1) -> np.ndarray:
    waves = [
        np.sin(np.arange(count) * (0.05 + 0.02 * channel)) * 0.6 for channel in range(channels)
    ]
    return np.stack(waves, axis=1) + np.random.default_rng(count).normal(0, 0.01, (count, channels))


def _encoded(samples: np.ndarray, rate: int = RATE, **options: Any) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate, **options)
    return buffer.getvalue()


WAVS = [
    (form, subtype)
    for form in ("WAV", "WAVEX")
    for subtype in ("PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE")
]


@for_each(("form", "subtype"), WAVS)
@for_each("channels", [1, 2, 5])
def test_wav_samples_are_soundfiles(
    form: str, subtype: str, channels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = _encoded(_tone(777, channels), format=form, subtype=subtype)
    expected, _ = soundfile.read(io.BytesIO(data), dtype="float32", always_2d=True)
    monkeypatch.setitem(sys.modules, "soundfile", None)  # and need no soundfile
    ours = decode_audio(RULE, data, counted=777).numpy()
    assert ours.dtype == np.float32
    assert np.abs(ours - expected.mean(axis=1)).max() <= 1e-7


@pytest.mark.parametrize(
    ("form", "subtype"), [("FLAC", "PCM_16"), ("WAV", "ULAW"), ("OGG", "VORBIS"), ("MP3", None)]
)
def test_other_kinds_are_read_by_soundfile(form: str, subtype: str | None) -> None:
    data = _encoded(_tone(8000, 2), format=form, subtype=subtype)
    expected, _ = soundfile.read(io.BytesIO(data), dtype="float32", always_2d=True)
    ours = decode_audio(RULE, pa.py_buffer(data)).numpy()
    assert np.abs(ours - expected.mean(axis=1)).max() <= 1e-6


@pytest.mark.parametrize("form", ["WAV", "FLAC"])
def test_another_rate_is_resampled_to_the_models(form: str) -> None:
    tone = _tone(44_100)
    data = _encoded(tone, 44_100, format=form, subtype="PCM_24")
    ours = decode_audio(RULE, data, counted=16_000).numpy()
    assert np.abs(ours - resample_poly(tone[:, 0], 160, 441)).max() <= 1e-5


def test_chunks_before_the_samples_and_half_a_frame_behind_them_are_left_out() -> None:
    form = struct.pack("<HHIIHH", 1, 2, RATE, RATE * 4, 4, 16)
    chunks = [
        (b"LIST", b"odd"),
        (b"fmt ", form),
        (b"data", np.arange(8, dtype="<i2").tobytes() + b"\1\2"),
    ]
    body = b"".join(
        kind + struct.pack("<I", len(part)) + part + b"\0" * (len(part) % 2)
        for kind, part in chunks
    )
    data = b"RIFF" + struct.pack("<I", len(body) + 4) + b"WAVE" + body
    assert decode_audio(RULE, data, counted=4).tolist() == [
        (2 * i + 2 * i + 1) / 2 / 32768 for i in range(4)
    ]


def test_a_clip_of_another_length_than_counted_is_a_data_error() -> None:
    data = _encoded(_tone(800), 8_000, format="WAV")
    with pytest.raises(
        DataError, match=r"has 1600 samples at 16000 per second, but had 1599 when it was counted"
    ):
        decode_audio(RULE, data, counted=1599)


def _header(
    channels: int = 1, rate: int = RATE, frame: int = 2, tag: int = 1, size: int = 8
) -> bytes:
    form = struct.pack("<HHIIHH", tag, channels, rate, rate * frame, frame, 16)
    return (
        b"RIFF\0\0\0\0WAVEfmt "
        + struct.pack("<I", 16)
        + form
        + b"data"
        + struct.pack("<I", size)
        + bytes(8)
    )


@for_each(
    ("data", "reason"),
    [
        (b"", "Error|unknown|recogni"),
        (b"RIFF\0\0\0\0WAVE", "ends before its `data`"),
        (_header()[:36], "ends before its `data`"),
        (_header(size=9), "8 of the 9 bytes of its samples are there"),
        (_header(size=0), "no samples"),
        (_header(channels=0), "0 channels"),
        (_header(rate=0), "at 0 samples/s"),
        (_header(channels=3), "3 channels in 2 bytes"),
        (_header(frame=5), "in 5 bytes"),
        (_header(tag=3), "1 channels in 2 bytes"),  # floats of 16 bits
        (b"RIFF\0\0\0\0WAVE" + _header()[36:], "does not say its format"),
        (_encoded(_tone(5000), format="FLAC")[:3000], "cannot be decoded"),
        (b"neither of them", "cannot be decoded"),
    ],
)
def test_damaged_clips_are_a_data_error_of_one_line(data: bytes, reason: str) -> None:
    with pytest.raises(DataError, match=reason) as caught:
        decode_audio(RULE, data)
    assert str(caught.value).startswith(f"audio clip of {len(data):,} bytes cannot be decoded: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("form", ["WAV", "FLAC", "OGG"])
def test_mutated_clips_are_a_data_error_or_a_clip(form: str) -> None:
    rng = np.random.default_rng(3)
    whole = _encoded(_tone(2000), format=form)
    outcomes = set()
    for _ in range(120):
        data = bytearray(whole[: rng.integers(0, len(whole) + 1)])
        for place in rng.integers(0, max(len(data), 1), 3):
            data[place : place + 1] = bytes([rng.integers(0, 256)])
        try:
            clip = decode_audio(RULE, bytes(data), counted=2000)
        except DataError as error:
            outcomes.add("\n" not in str(error))
        else:
            assert clip.shape == (2000,)
    assert outcomes == {True}


def test_without_soundfile_the_message_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(DataError, match=r"pip install soundfile"):
        decode_audio(RULE, _encoded(_tone(100), format="FLAC"))
