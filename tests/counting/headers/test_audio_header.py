"""Lengths from headers equal those of the decoded clips; what is cut, empty or unknown is named."""

from __future__ import annotations

import importlib.util
import io
import json
import struct
import sys
import wave

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.io import wavfile

from isobatch.counting.headers.audio_header import AudioHeader, read_audio_header
from isobatch.counting.records.media import SampleProblem
from support.cases import for_each
from support.corpora import SPEECH, WHOLE

needs_soundfile = pytest.mark.skipif(
    importlib.util.find_spec("soundfile") is None, reason="soundfile is not installed"
)


def read(data: bytes) -> AudioHeader:
    return read_audio_header(io.BytesIO(data), "clip")


def problem(data: bytes) -> SampleProblem:
    with pytest.raises(SampleProblem) as caught:
        read(data)
    assert "clip: " in caught.value.detail
    assert "\n" not in caught.value.detail
    return caught.value


def wav(num_samples: int, dtype: str = "int16", channels: int = 1, rate: int = 16_000) -> bytes:
    buffer = io.BytesIO()
    wavfile.write(buffer, rate, np.zeros((num_samples, channels), dtype=dtype))
    return buffer.getvalue()


def chunk(kind: bytes, data: bytes) -> bytes:
    return kind + struct.pack("<I", len(data)) + data + b"\0" * (len(data) % 2)


def riff(*chunks: bytes) -> bytes:
    body = b"WAVE" + b"".join(chunks)
    return b"RIFF" + struct.pack("<I", len(body)) + body


def form(
    tag: int = 1, channels: int = 1, rate: int = 8000, frame_bytes: int = 2, bits: int = 16
) -> bytes:
    return struct.pack("<HHIIHH", tag, channels, rate, rate * frame_bytes, frame_bytes, bits)


EXTENSIBLE = (
    form(0xFFFE, 2, 48_000, 6, 24)
    + struct.pack("<HHIH", 22, 24, 3, 1)
    + bytes.fromhex("000000001000800000aa00389b71")
)


def flac(
    num_samples: int, rate: int = 44_100, channels: int = 2, min_frame: int = 0, frames: bytes = b""
) -> bytes:
    packed = rate << 44 | channels - 1 << 41 | 15 << 36 | num_samples
    sizes = struct.pack(">HH", 4096, 4096) + min_frame.to_bytes(3, "big") + bytes(3)
    return b"fLaC\x80\0\0\x22" + sizes + packed.to_bytes(8, "big") + bytes(16) + frames


@for_each("dtype", ["uint8", "int16", "int32", "float32", "float64"])
@for_each(
    ("num_samples", "channels", "rate"), [(1, 1, 8000), (999, 2, 44_100), (16_001, 6, 16_000)]
)
def test_a_wav_file_is_as_long_as_what_scipy_reads(
    dtype: str, num_samples: int, channels: int, rate: int
) -> None:
    data = wav(num_samples, dtype, channels, rate)
    read_rate, samples = wavfile.read(io.BytesIO(data))
    expected = AudioHeader(len(samples), read_rate, samples.size // len(samples), len(data))
    assert read(data) == expected == AudioHeader(num_samples, rate, channels, len(data))


def test_chunks_of_odd_length_and_those_behind_the_samples_are_passed_by() -> None:
    plain = riff(chunk(b"fmt ", form()), chunk(b"data", bytes(20)))
    busy = riff(
        chunk(b"LIST", b"odd"),
        chunk(b"fmt ", form()),
        chunk(b"fact", b""),
        chunk(b"data", bytes(20)),
        chunk(b"id3 ", b"x"),
    )
    assert read(plain).num_samples == read(busy).num_samples == 10
    with wave.open(io.BytesIO(busy)) as reference:
        assert reference.getnframes() == 10


def test_24_bits_in_the_extensible_form() -> None:
    data = riff(chunk(b"fmt ", EXTENSIBLE), chunk(b"data", bytes(6 * 7)))
    assert read(data) == AudioHeader(7, 48_000, 2, len(data))
    assert len(wavfile.read(io.BytesIO(data))[1]) == 7


def test_the_streaminfo_of_a_flac_file() -> None:
    assert read(flac(123_456)) == AudioHeader(123_456, 44_100, 2, 42)
    longest = flac((1 << 36) - 1, rate=655_350, channels=8)
    assert read(longest) == AudioHeader((1 << 36) - 1, 655_350, 8, 42)


@for_each(
    ("data", "reason", "detail"),
    [
        (b"", "corrupt_audio", "the file is empty"),
        (wav(1000)[:-1], "corrupt_audio", "cut short, 1999 of the 2000 bytes"),
        (wav(1000)[:40], "corrupt_audio", "ends before its `data`"),
        (
            riff(chunk(b"data", bytes(8)), chunk(b"fmt ", form())),
            "corrupt_audio",
            "does not say its format",
        ),
        (
            riff(chunk(b"fmt ", form()[:14]), chunk(b"data", bytes(8))),
            "corrupt_audio",
            "does not say its format",
        ),
        (
            riff(chunk(b"fmt ", form(frame_bytes=3)), chunk(b"data", bytes(8))),
            "corrupt_audio",
            "of 16 bits in 3 bytes",
        ),
        (
            riff(chunk(b"fmt ", form(frame_bytes=0, bits=0)), chunk(b"data", b"")),
            "corrupt_audio",
            "in 0 bytes",
        ),
        (
            riff(chunk(b"fmt ", form(rate=0)), chunk(b"data", bytes(8))),
            "corrupt_audio",
            "1 channels at 0 samples/s",
        ),
        (riff(bytes(80_000)), "corrupt_audio", "first 1000 chunks"),
        (wav(0), "empty_audio", "no samples"),
        (riff(chunk(b"fmt ", form()), chunk(b"data", b"x")), "empty_audio", "no samples"),
        (flac(10)[:30], "corrupt_audio", "STREAMINFO"),
        (flac(10).replace(b"\x80", b"\x84", 1), "corrupt_audio", "STREAMINFO"),
        (flac(10, rate=0), "corrupt_audio", "at 0 samples/s"),
        (
            flac(40_960, min_frame=50, frames=bytes(499)),
            "corrupt_audio",
            "541 bytes of at least 542",
        ),
    ],
)
def test_what_cannot_be_used_is_named(data: bytes, reason: str, detail: str) -> None:
    found = problem(data)
    assert found.reason == reason
    assert detail in found.detail


def test_a_wav_file_cut_anywhere_is_a_problem() -> None:
    whole = wav(50)
    for length in range(len(whole)):
        assert problem(whole[:length]).reason in ("corrupt_audio", "audio_format")
    assert read(whole).num_samples == 50


OTHER_KINDS = [
    b"ID3\x04" + bytes(40),
    b"OggS" + bytes(40),
    riff(chunk(b"fmt ", form(tag=2)), chunk(b"data", bytes(8))),
]


@pytest.mark.parametrize("data", [*OTHER_KINDS, flac(0)])
def test_other_kinds_without_soundfile_say_what_to_install(
    data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "soundfile", None)
    found = problem(data)
    assert found.reason == "audio_format"
    assert "pip install soundfile" in found.detail


@needs_soundfile
@for_each(
    ("form", "subtype"),
    [
        ("FLAC", "PCM_16"),
        ("OGG", "VORBIS"),
        ("MP3", "MPEG_LAYER_III"),
        ("AIFF", "PCM_16"),
        ("WAV", "ULAW"),
        ("RF64", None),
    ],
)
def test_every_kind_is_as_long_as_what_soundfile_decodes(form: str, subtype: str | None) -> None:
    import soundfile  # noqa: PLC0415

    buffer = io.BytesIO()
    noise = np.random.default_rng(0).normal(0, 0.1, (24_001, 2))
    soundfile.write(buffer, noise, 16_000, format=form, subtype=subtype)
    samples, rate = soundfile.read(io.BytesIO(buffer.getvalue()))
    assert read(buffer.getvalue()) == AudioHeader(len(samples), rate, 2, len(buffer.getvalue()))


@needs_soundfile
def test_flac_of_unknown_length_and_files_of_no_kind_are_named() -> None:
    import soundfile  # noqa: PLC0415

    buffer = io.BytesIO()
    soundfile.write(buffer, np.zeros(9000), 8000, format="FLAC")
    streamed = bytearray(buffer.getvalue())
    streamed[21] &= 0xF0
    streamed[22:26] = bytes(4)
    assert problem(bytes(streamed)).reason == "audio_format"
    assert problem(b"no audio at all, but some text").reason == "audio_format"
    assert problem(OTHER_KINDS[1]).reason == "audio_format"


@given(
    cut=st.integers(0, 200),
    place=st.integers(0, 63),
    byte=st.integers(0, 255),
    kind=st.sampled_from(["wav", "flac"]),
)
@settings(max_examples=400, deadline=None)
def test_a_damaged_header_is_read_or_named(cut: int, place: int, byte: int, kind: str) -> None:
    data = bytearray(wav(80) if kind == "wav" else flac(5000, frames=bytes(100)))
    data[min(place, len(data) - 1)] = byte
    data = data[: len(data) - cut]
    try:
        header = read(bytes(data))
    except SampleProblem:
        return
    assert header.num_samples > 0
    assert header.sampling_rate > 0
    if kind == "wav":
        assert header.num_samples * header.num_channels <= len(data)


def test_a_file_system_error_is_unreadable() -> None:
    class Broken(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            raise OSError(5, "Input/output error")

    with pytest.raises(SampleProblem, match="unreadable_audio: clip: Input/output error"):
        read_audio_header(Broken(b"RIFF"), "clip")


def test_every_clip_of_the_speech_corpus_is_as_long_as_it_is() -> None:
    records = json.loads((SPEECH / "annotations.json").read_text("utf-8"))
    assert len(records) == (320 if WHOLE else 40)
    for record in records:
        path = SPEECH / record["audio"]
        with path.open("rb") as file:
            header = read_audio_header(file, record["audio"])
        with wave.open(str(path)) as reference:
            expected = reference.getnframes(), reference.getframerate(), reference.getnchannels()
        assert (header.num_samples, header.sampling_rate, header.num_channels) == expected
        assert header.num_samples / header.sampling_rate == pytest.approx(
            record["duration"], abs=1e-3
        )
        assert header.num_bytes == path.stat().st_size
