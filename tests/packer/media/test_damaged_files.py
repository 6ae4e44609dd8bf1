"""Damaged files of every kind: the sample is used or refused, whatever their decoder raises.

`ISOBATCH_TEST_DAMAGED=300` damages each kind of image 300 times, and each clip as often.
"""

import io
import os
import warnings
import wave
from unittest.mock import Mock

import numpy as np
import pytest
from PIL import Image

from balance.errors import DataError
from balance.media.audio_tokens import AudioRule
from balance.media.decoder_faults import fault_of
from loaders.decode.audio import decode_audio
from loaders.decode.image import decode, decode_pixels
from loaders.decode.video import decode_frames
from packer.inspect._thumbnails import make_thumbnail
from packer.media.audio_header import read_audio_header
from packer.media.image_header import check_png, read_header
from packer.media.video_header import read_video_header
from packer.records.media import SampleProblem
from packer.records.record import REASONS
from support.clips import CODECS, make_clip

TIMES = int(os.environ.get("ISOBATCH_TEST_DAMAGED", "8"))
NOT_WRITTEN_HERE = {"PDF", "HDF5", "GRIB", "BUFR", "WMF", "PALM", "EPS"}
"""What Pillow writes and does not read, or that needs another program or library."""


def written_kinds():
    """A small file of each kind that Pillow writes, in each mode that the kind takes."""
    Image.init()
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 48, 3), dtype=np.uint8))
    files = {}
    for kind in sorted(Image.SAVE.keys() - NOT_WRITTEN_HERE):
        for mode in ("RGB", "P", "L", "1", "RGBA"):
            if kind == "ICNS" and mode != "RGB":  # a megabyte each
                continue
            buffer = io.BytesIO()
            try:
                noise.convert(mode).save(buffer, kind)
            except (OSError, ValueError, KeyError):  # no such mode in this kind
                continue
            files[f"{kind} {mode}"] = buffer.getvalue()
    for form in ("tiff_lzw", "tiff_deflate", "jpeg"):
        buffer = io.BytesIO()
        noise.save(buffer, "TIFF", compression=form)
        files[f"TIFF {form}"] = buffer.getvalue()
    return files


def damaged(content, rng):
    """The file with some bytes changed, and cut or longer than it was."""
    changed = bytearray(content)
    places = len(changed) if rng.random() < 0.5 else min(len(changed), 128)  # or its header
    for place in rng.integers(0, places, rng.integers(1, 9)):
        changed[place] = rng.choice([0, 1, 127, 128, 255, int(rng.integers(256))])
    if rng.random() < 0.3:
        del changed[int(rng.integers(len(changed))) :]
    elif rng.random() < 0.1:
        changed[-1:] = rng.bytes(20)
    return bytes(changed)


def outcome(read, *args, **options):
    """What became of a file; any other exception fails the test."""
    problem = None
    try:
        read(*args, **options)
    except (SampleProblem, DataError) as error:
        problem = error
    if problem is None:
        return "used"
    assert getattr(problem, "reason", "corrupt_image") in REASONS
    assert str(problem).isprintable()
    return "refused"


def test_a_damaged_image_is_used_or_refused_by_the_packer_and_the_loader(capfd):
    kinds, found = written_kinds(), set()
    assert len({name.split()[0] for name in kinds}) >= 20
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed, (name, content) in enumerate(kinds.items()):
            rng = np.random.default_rng(seed)
            assert outcome(read_header, io.BytesIO(content), "a", decode=True) == "used", name
            for _ in range(TIMES):
                data = damaged(content, rng)
                found.add(outcome(read_header, io.BytesIO(data), "a"))
                whole = outcome(read_header, io.BytesIO(data), "a", decode=True)
                assert (whole == "used") == (outcome(decode, data) == "used"), name
                assert outcome(decode_pixels, data, on_white=True) == outcome(decode, data)
                if name.startswith("PNG"):
                    outcome(check_png, "a", data)
                make_thumbnail(data)
    assert found == {"used", "refused"}
    assert capfd.readouterr() == ("", "")  # libtiff too


def sound(num_bytes=2):
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setparams((1, num_bytes, 16_000, 0, "NONE", "NONE"))
        file.writeframes(np.random.default_rng(0).bytes(400 * num_bytes))
    return buffer.getvalue()


def sounds():
    soundfile = pytest.importorskip("soundfile")
    clips = {f"WAV {size}": sound(size) for size in (1, 2, 3, 4)}
    for kind, subtype in (("FLAC", None), ("OGG", None), ("MP3", None), ("WAV", "MS_ADPCM")):
        buffer = io.BytesIO()
        values = np.random.default_rng(0).uniform(-1, 1, 4000)
        soundfile.write(buffer, values, 16_000, format=kind, subtype=subtype)
        clips[f"{kind} {subtype}"] = buffer.getvalue()
    return clips


def test_a_damaged_sound_is_used_or_refused_by_the_packer_and_the_loader(capfd):
    rule, found = AudioRule(downsample=2), set()
    for seed, (name, content) in enumerate(sounds().items()):
        rng = np.random.default_rng(seed)
        assert outcome(read_audio_header, io.BytesIO(content), "a") == "used", name
        for _ in range(TIMES):
            data = damaged(content, rng)
            found.add(outcome(read_audio_header, io.BytesIO(data), "a"))
            outcome(decode_audio, rule, data, 400)
    assert found == {"used", "refused"}
    assert capfd.readouterr() == ("", "")


def test_a_damaged_video_is_used_or_refused_by_the_packer_and_the_loader(capfd):
    found = set()
    for seed, codec in enumerate(CODECS):
        clip, rng = make_clip(6, codec=codec), np.random.default_rng(seed)
        for _ in range(TIMES):
            data = damaged(clip.content, rng)
            found.add(outcome(read_video_header, io.BytesIO(data), "a"))
            outcome(read_video_header, io.BytesIO(data), "a", decode=True)
            outcome(lambda: list(decode_frames(data, clip.facts, [0, 3, 5])))  # noqa: B023
            make_thumbnail(data, is_video=True)
    assert found == {"used", "refused"}
    assert capfd.readouterr() == ("", "")


def test_what_a_decoder_raises_has_a_kind_and_one_printable_line():
    for error, kind, detail in (
        (RuntimeError("Failed to decode\nframe"), "corrupt", "Failed to decode"),
        (NotImplementedError("Unimplemented pixel format 99"), "corrupt", "pixel format 99"),
        (KeyError(7), "corrupt", "KeyError: 7"),
        (MemoryError(), "corrupt", "more memory than there is"),
        (RecursionError("too deep"), "corrupt", "too deep"),
        (SyntaxError("\x1b[31mred"), "corrupt", "red"),
        (OSError("broken data stream"), "corrupt", "broken data stream"),
        (OSError(22, "Invalid argument"), "corrupt", "Invalid argument"),
        (PermissionError(13, "Permission denied"), "unreadable", "Permission denied"),
        (Image.DecompressionBombError("too large"), "too_many_pixels", "too large"),
    ):
        fault = fault_of(error)
        assert (fault.kind, detail in fault.detail) == (kind, True), error
        assert fault.detail.isprintable()


def test_what_is_not_the_files_fault_is_raised_again(monkeypatch):
    with pytest.raises(DataError, match="store"):
        fault_of(DataError("the store cannot be reached"))
    monkeypatch.setattr("balance.media.decoder_faults._has_memory_left", lambda: False)
    with pytest.raises(MemoryError):
        fault_of(MemoryError())
    for stop in (KeyboardInterrupt, SystemExit):
        monkeypatch.setattr(Image, "open", Mock(side_effect=stop))
        with pytest.raises(stop):
            read_header(io.BytesIO(b"GIF89a"), "a")
