"""Headers of videos equal what decoding finds, in every container, and damage has a reason.

`ISOBATCH_TEST_DRAWS=300` asks for 300 clips.
"""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from io import BytesIO

import av
import numpy as np
import pytest
from transformers.video_utils import read_video_pyav

from isobatch.counting.headers import video_header
from isobatch.counting.headers.video_header import first_frame, read_video_header
from isobatch.counting.records.media import SampleProblem
from support.clips import CODECS, make_clip
from support.odd_videos import audio_only, cut_without_encoding, encoded, picture

DRAWS = int(os.environ.get("ISOBATCH_TEST_DRAWS", "12"))
RATES = (Fraction(24), Fraction(30000, 1001), Fraction(25), Fraction(15, 2), Fraction(60))
CONTAINERS = {
    "mp4": ("libx264", "yuv420p"),
    "mov": ("mjpeg", "yuvj420p"),
    "matroska": ("libx264", "yuv420p"),
    "webm": ("libvpx", "yuv420p"),
    "avi": ("mpeg4", "yuv420p"),
    "mpegts": ("libx264", "yuv420p"),
    "flv": ("libx264", "yuv420p"),
    "gif": ("gif", "rgb8"),
}


def read(content, **options):
    header = read_video_header(BytesIO(content), "a video", **options)
    return (header.width, header.height, header.num_frames, header.frames_per_second)


def reason_of(content, **options):
    with pytest.raises(SampleProblem) as caught:
        read(content, **options)
    assert caught.value.detail.startswith("a video: ")
    assert "\n" not in caught.value.detail
    return caught.value.reason


def claiming(avi, side):
    """An AVI file with another size in its header of the stream (BITMAPINFOHEADER)."""
    place = avi.index(b"strf") + 8
    size = side.to_bytes(4, "little")
    return avi[: place + 4] + size + size + avi[place + 12 :]


def test_headers_equal_what_decoding_and_transformers_find():
    rng = np.random.default_rng(0)
    for seed in range(DRAWS):
        codec = list(CODECS)[seed % len(CODECS)]
        size = tuple(int(side) * 2 for side in rng.integers(8, 60, 2))
        turned = int(rng.integers(4)) * 90 if CODECS[codec][1] == "mp4" else 0
        rate = RATES[int(rng.integers(len(RATES)))]
        frames = int(rng.integers(1, 40))
        clip = make_clip(frames, size, codec=codec, rate=rate, rotation=turned, seed=seed)
        expected = (*clip.decoded()[0].shape[1::-1], frames, float(rate))
        assert read(clip.content) == read(clip.content, decode=True) == expected, (seed, codec)
        theirs = read_video_pyav(BytesIO(clip.content), lambda metadata: np.array([0]))[1]
        assert theirs.fps == expected[3]
        # transformers takes no frames at all of a WebM file, whose header has no number
        assert theirs.total_num_frames == (0 if codec == "vp9" else frames)


def test_every_container_is_counted():
    for container, (codec, pixels) in CONTAINERS.items():
        content = encoded(9, container=container, codec=codec, pixel_format=pixels)
        width, height, frames, rate = read(content)
        assert (width, height, frames) == (64, 48, 9), container
        assert rate == (25 if container == "gif" else 24), container  # GIF counts 1 / 100 s
    times = [0, 30, 90, 400, 900]
    varying = encoded(5, codec="mjpeg", pixel_format="yuvj420p", times_ms=times)
    width, height, frames, rate = read(varying)
    assert frames == 5
    assert 4 < rate < 6  # the average
    fragments = {"movflags": "frag_keyframe+empty_moov"}
    assert read(encoded(30, options=fragments)) == (64, 48, 30, 24)
    assert read(encoded(4, rotation=90, container="matroska")) == (48, 64, 4, 24)
    assert read(encoded(4, rotation=180)) == read(encoded(4)) == (64, 48, 4, 24)


def test_frames_that_a_cut_hides_are_not_counted():
    content = cut_without_encoding(encoded(30), hidden=7)
    with av.open(BytesIO(content)) as container:
        shown = sum(1 for _ in container.decode(video=0))
    assert read(content)[2] == read(content, decode=True)[2] == shown < 30


def test_truncated_files_are_found_wherever_they_are_cut():
    whole = {
        "MP4": encoded(20),
        "MP4, index first": encoded(20, options={"movflags": "faststart"}),
        "MP4, fragments": encoded(20, options={"movflags": "frag_keyframe+empty_moov"}),
        "MKV": encoded(20, container="matroska"),
        "WebM": encoded(20, container="webm", codec="libvpx"),
        "AVI": encoded(20, container="avi", codec="mpeg4"),
    }
    rng = np.random.default_rng(1)
    for name, content in whole.items():
        assert read(content)[2] == 20
        for end in [0, 1, 40, len(content) - 1, *rng.integers(1, len(content), 12).tolist()]:
            reason = reason_of(content[:end])
            assert reason in {"corrupt_video", "video_format"}, (name, end, reason)


def test_what_is_no_video_has_a_reason(capfd):
    assert reason_of(b"") == "corrupt_video"
    assert reason_of(b"<!DOCTYPE html><p>404" * 40) == "corrupt_video"
    noise = np.random.default_rng(4).bytes(5000)
    assert reason_of(noise) in {"corrupt_video", "video_format"}
    assert reason_of(picture("JPEG")) == "video_format"
    playlist = b"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nhttp://127.0.0.1:9/a.ts\n"
    assert reason_of(playlist) in {"corrupt_video", "video_format"}
    assert reason_of(audio_only()) == "no_video_stream"
    assert reason_of(encoded(0, container="avi")) == "empty_video"
    assert reason_of(encoded(0)) in {"no_video_stream", "corrupt_video"}
    plain = encoded(2, container="avi", codec="rawvideo")
    assert reason_of(claiming(plain, 16_000)) == ("too_many_pixels")
    damaged = bytearray(encoded(20))
    place = damaged.index(b"mdat") + 2000
    damaged[place : place + 1500] = noise[:1500]
    assert read(bytes(damaged)) == (64, 48, 20, 24)
    reason_of(bytes(damaged), decode=True)
    assert capfd.readouterr() == ("", "")  # nor of FFmpeg


def test_the_first_frame_is_upright():
    clip = make_clip(5, (64, 48), rotation=90)
    frame = np.asarray(first_frame(BytesIO(clip.content)))
    assert np.abs(frame.astype(int) - clip.decoded()[0]).max() <= 2


def test_threads_do_not_mix_up_what_ffmpeg_says():
    contents = [encoded(4, rotation=90 * (number % 2)) for number in range(2)] * 40
    with ThreadPoolExecutor(8) as pool:
        sizes = [header[:2] for header in pool.map(read, contents)]
    assert sizes == [(64, 48), (48, 64)] * 40


def test_without_pyav_one_line_says_what_to_install(monkeypatch):
    content = encoded(2)
    monkeypatch.setitem(sys.modules, "av", None)
    video_header._import_av.cache_clear()
    with pytest.raises(SampleProblem, match=r"pip install av"):
        read(content)
    monkeypatch.undo()
    assert read(content)[2] == 2
