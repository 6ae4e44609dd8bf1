"""Damaged files of every kind: used or refused with a reason, by the packer and the loaders."""

import ctypes
import io
import logging
import os
import sys
import wave
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from PIL import Image, features

from isobatch.common.errors import DataError
from isobatch.counting.headers.audio_header import read_audio_header
from isobatch.counting.headers.image_header import check_png, read_header
from isobatch.counting.headers.video_header import read_video_header
from isobatch.counting.records.media import SampleProblem
from isobatch.counting.records.reject_reasons import REASONS
from isobatch.loaders.decode.audio import decode_audio
from isobatch.loaders.decode.image import decode, decode_pixels
from isobatch.loaders.decode.video import decode_frames
from isobatch.media import decoder_faults
from isobatch.media.decoder_faults import fault_of
from isobatch.media.quiet_sounds import quiet_sounds
from isobatch.models.audio_tokens import AudioRule
from isobatch.models.presets import load_model
from isobatch.packer.inspect.view import make_thumbnail
from support.clips import CODECS, make_clip
from support.oracles.reference_processors import random_image

FILES = int(os.environ.get("ISOBATCH_TEST_DRAWS", "1")) * 500
"""Mutated images."""
ODD = [
    *(RuntimeError("x"), NotImplementedError("y"), AttributeError("z"), AssertionError()),
    *(KeyError(7), RecursionError("deep"), MemoryError(), ZeroDivisionError("by 0")),
    *(
        SystemError("error return without exception set"),
        UnicodeDecodeError("utf8", b"", 0, 1, "u"),
    ),
    *(type("OwnError", (Exception,), {})("first\nsecond"), StopIteration(), SyntaxError("PNG")),
]
"""What no list of types would have all of."""


def _written() -> dict[str, bytes]:
    """A file of each kind and mode that Pillow writes and reads."""
    Image.init()
    picture, found = random_image(np.random.default_rng(0), 40, 32), {}
    for kind in sorted(set(Image.SAVE) & set(Image.OPEN)):
        for mode in ("RGB", "P", "1", "RGBA"):
            for more in ({}, {"compression": "tiff_lzw"}) if kind == "TIFF" else ({},):
                buffer = io.BytesIO()
                try:
                    picture.convert(mode).save(buffer, kind, **more)
                except (OSError, ValueError, KeyError, TypeError):
                    continue
                found[f"{kind} {mode} {more}"] = buffer.getvalue()
    return found


def mutated(rng: np.random.Generator, content: bytes) -> bytes:
    """A file cut short, or with some bytes changed, most of them in its header."""
    if rng.random() < 0.15:
        return content[: rng.integers(0, len(content))]
    changed = bytearray(content)
    for _ in range(rng.integers(1, 12)):
        end = len(content) if rng.random() < 0.5 else min(len(content), 120)
        extreme = rng.choice([0, 127, 128, 255])
        changed[rng.integers(0, end)] = extreme if rng.random() < 0.4 else rng.integers(0, 256)
    return bytes(changed)


def _refused(read: Callable[[], object]) -> SampleProblem | DataError | None:
    """Why a file is refused; None if it is used. Anything else is raised."""
    try:
        read()
    except (SampleProblem, DataError) as problem:
        return problem
    return None


def _check(content: bytes, *, whole: bool) -> None:
    """The packer and the loader take a file, or give a reason."""
    reads: list[Callable[[], object]] = [
        lambda: read_header(io.BytesIO(content), "a file", decode=whole),
        lambda: decode(content),
        lambda: decode_pixels(content),
    ]
    if content[:4] == b"\x89PNG":
        reads.append(lambda: check_png("a file", content))
    for read in reads:
        problem = _refused(read)
        assert str(problem).isprintable()
        if isinstance(problem, SampleProblem):
            assert problem.reason in REASONS
            assert problem.detail.startswith("a file: ")
    make_thumbnail(content)


@pytest.mark.filterwarnings("ignore")
def test_mutated_images_of_every_kind_are_used_or_refused_in_silence(capfd: Any) -> None:
    files = _written()
    assert len({name.partition(" ")[0] for name in files}) >= 15
    capfd.readouterr()  # what was written while files were made
    rng, names = np.random.default_rng(0), list(files)
    for number in range(FILES):
        content = mutated(rng, files[names[number % len(names)]])
        _check(content, whole=number % 2 == 0)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("error", ODD, ids=lambda error: type(error).__name__)
def test_whatever_a_decoder_raises_is_the_reason(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise error

    buffer = io.BytesIO()
    random_image(np.random.default_rng(0), 8, 8).save(buffer, "BMP")
    monkeypatch.setattr(Image, "open", broken)
    with pytest.raises(SampleProblem, match=r"corrupt_image: a\.bmp: ."):
        read_header(buffer, "a.bmp")
    with pytest.raises(SampleProblem, match=r"corrupt_image: a\.bmp: ."):
        check_png("a.bmp", b"")
    with pytest.raises(DataError, match=r"cannot be decoded: ."):
        decode(buffer.getvalue())
    assert isinstance(make_thumbnail(buffer.getvalue()), str)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1)])
def test_the_end_of_the_program_is_no_fault_of_a_file(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def ended(*_: object) -> None:
        raise error

    monkeypatch.setattr(Image, "open", ended)
    for read in (lambda: read_header(io.BytesIO(b"BM"), "a"), lambda: decode(b"BM")):
        with pytest.raises(type(error)):
            read()


def test_errors_that_are_not_the_files_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="store"):
        fault_of(DataError("the store cannot be reached"))
    assert fault_of(MemoryError()).kind == "corrupt"
    monkeypatch.setattr(decoder_faults, "_SPARE_BYTES", 1 << 62)
    with pytest.raises(MemoryError):
        fault_of(MemoryError())


def test_a_fault_is_the_files_content_or_the_file_systems() -> None:
    assert fault_of(OSError(5, "Input/output error")) == ("unreadable", "Input/output error")
    assert fault_of(OSError(22, "Invalid argument")).kind == "corrupt"
    assert fault_of(OSError("broken data stream")) == ("corrupt", "broken data stream")
    assert fault_of(Image.DecompressionBombError("large")).kind == "too_many_pixels"
    assert fault_of(ValueError("bad \x1b[31m\x07 text")).detail == "bad  [31m  text"
    assert len(fault_of(ValueError("x" * 10_000)).detail) < 300


@pytest.mark.skipif(not features.check("libtiff"), reason="Pillow without libtiff")
def test_pillow_and_libtiff_are_silent_and_a_programs_own_log_is_not(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    buffer = io.BytesIO()
    random_image(np.random.default_rng(0), 40, 32).save(buffer, "TIFF", compression="tiff_lzw")
    content = bytearray(buffer.getvalue())
    content[8:200] = bytes(192)
    with pytest.raises(DataError):
        decode(bytes(content))
    assert capfd.readouterr() == ("", "")
    with caplog.at_level(logging.ERROR):
        logging.getLogger("PIL.TiffImagePlugin").error("seen by who asks for it")
    assert "seen by who asks" in caplog.text
    print("ours", file=sys.stderr)
    assert capfd.readouterr().err == "ours\n"


def _sounds() -> dict[str, bytes]:
    """A clip of each kind; those of libsndfile only where that is."""
    clips, rng = {}, np.random.default_rng(0)
    for width, rate in ((1, 8000), (2, 16000), (3, 44100), (4, 16000)):
        buffer = io.BytesIO()
        with wave.open(buffer, "wb") as file:
            file.setparams((2, width, rate, 0, "NONE", ""))
            file.writeframes(rng.bytes(480 * width))
        clips[f"WAV {width}"] = buffer.getvalue()
    soundfile = pytest.importorskip("soundfile")
    for kind, subtype in (("FLAC", None), ("OGG", None), ("MP3", None), ("WAV", "MS_ADPCM")):
        buffer = io.BytesIO()
        soundfile.write(buffer, rng.uniform(-1, 1, 4000), 16_000, format=kind, subtype=subtype)
        clips[f"{kind} {subtype}"] = buffer.getvalue()
    return clips


def test_mutated_clips_are_used_or_refused_in_silence(capfd: Any) -> None:
    rule = load_model("tiny_audio").audio
    assert isinstance(rule, AudioRule)
    rng, files = np.random.default_rng(0), list(_sounds().values())
    for number in range(FILES):
        held = mutated(rng, files[number % len(files)])
        problem = _refused(lambda: read_audio_header(io.BytesIO(held), "a clip"))  # noqa: B023
        assert not isinstance(problem, SampleProblem) or problem.reason in REASONS
        _refused(lambda: decode_audio(rule, held, 240))  # noqa: B023
    assert capfd.readouterr() == ("", "")


def test_a_rate_that_no_recorder_has_is_not_resampled_from() -> None:
    rule = load_model("tiny_audio").audio
    assert isinstance(rule, AudioRule)
    content = bytearray(_sounds()["WAV 2"])
    content[24:28] = (3_000_000_019).to_bytes(4, "little")  # it took 24 GB
    with pytest.raises(SampleProblem, match=r"corrupt_audio: a clip: .*3000000019 samples/s"):
        read_audio_header(io.BytesIO(content), "a clip")
    with pytest.raises(DataError, match="3000000019 samples/s"):
        decode_audio(rule, bytes(content))
    content[24:28] = (1).to_bytes(4, "little")  # counted before: as many samples are not made
    with pytest.raises(DataError, match="had 240 when it was counted"):
        decode_audio(rule, bytes(content), 240)


def test_a_decoder_of_c_is_silent_and_what_others_write_is_not(capfd: Any) -> None:
    program = ctypes.CDLL(None)
    program.perror(b"before")
    with quiet_sounds(), ThreadPoolExecutor(2) as pool:
        pool.submit(_say_quietly, program).result()
        program.perror(b"hidden")
        print("ours", file=sys.stderr)
    program.perror(b"after")
    lines = capfd.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["before", "ours", "after"]


def _say_quietly(program: Any) -> None:
    with quiet_sounds():
        program.perror(b"hidden in a thread")


def test_mutated_videos_are_used_or_refused_in_silence(capfd: Any) -> None:
    clips, rng = [make_clip(6, codec=codec) for codec in CODECS], np.random.default_rng(0)
    for number in range(FILES // 10):
        clip = clips[number % len(clips)]
        held = mutated(rng, clip.content)
        for whole in (False, True):
            problem = _refused(
                lambda: read_video_header(io.BytesIO(held), "a film", decode=whole)  # noqa: B023
            )
            assert not isinstance(problem, SampleProblem) or problem.reason in REASONS
        _refused(lambda: list(decode_frames(held, clip.facts, [0, 3, 5])))  # noqa: B023
        make_thumbnail(held, is_video=True)
    assert capfd.readouterr() == ("", "")
