"""Video file -> its upright size, frames and rate, from its container alone.

PyAV (FFmpeg) reads the container. MP4 and AVI have a table of all frames. Where that does not tell
(WebM and MKV, MPEG, damaged files) the packets are counted, for which the whole file is read.
"""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import IO, Any

from PIL import Image

from isobatch.counting.headers.file_problem import file_problem
from isobatch.counting.records.media import SampleProblem
from isobatch.media.containers import open_container

_ROTATION = re.compile(r"rotation of (-?[\d.]+) degrees")
_STREAM = re.compile(r"^\s*Stream #\d+:(\d+)", re.MULTILINE)
_EBML, _SEGMENT = b"\x1a\x45\xdf\xa3", b"\x18\x53\x80\x67"
"""First bytes of a Matroska file, and of the element that holds all the rest."""
_FIRST_BOXES = {b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide", b"styp"}
"""Boxes that an MP4 or MOV file may begin with."""
MOST_PIXELS = 2 * 1024**3 // 4 // 3
"""Pixels of a frame at most: as many as Pillow decodes of an image."""
_HIDDEN = 2
"""AVINDEX_DISCARD_FRAME in the flags of an entry of FFmpeg's table."""
_describing = threading.Lock()


@dataclass(frozen=True, slots=True)
class VideoHeader:
    """What the container of a video says."""

    width: int
    """Width of an upright frame in pixels."""
    height: int
    num_frames: int
    frames_per_second: float
    """Average, as transformers counts; 0 for a list of images."""
    num_bytes: int


def read_video_header(file: IO[bytes], name: str, *, decode: bool = False) -> VideoHeader:
    """Size, frames and rate of a seekable video file; SampleProblem names it as `name`.

    `decode`: every frame, a thousand times the work, which also finds damage inside.
    """
    try:
        num_bytes = file.seek(0, 2)
        if num_bytes == 0:
            raise SampleProblem("corrupt_video", "the file is empty")
        if (said := _said_to_end(file, num_bytes)) > num_bytes:
            there = f"{num_bytes:,} of {said:,} bytes are there"
            raise SampleProblem("corrupt_video", f"cut short, {there}")
        with _opened(file) as (container, stream):
            width, height = stream.codec_context.width, stream.codec_context.height
            if width * height > MOST_PIXELS:
                raise SampleProblem("too_many_pixels", f"frames of {width:,} x {height:,} pixels")
            rate = stream.average_rate or stream.guessed_rate
            if _is_turned(container, stream.index):
                width, height = height, width
            if decode:
                num_frames = _decode_frames(container, stream)
            else:
                num_frames = _count_frames(container, stream, num_bytes)
            if min(width, height, num_frames) < 1:
                what = f"{num_frames} frames of {width} x {height} pixels"
                raise SampleProblem("empty_video", what)
            if not rate:
                why = "its container does not say how many frames a second has"
                raise SampleProblem("frame_rate", why)
            return VideoHeader(width, height, num_frames, float(rate), num_bytes)
    except Exception as error:  # of any type: decoders raise what they like
        raise file_problem(error, "video", name) from None


def first_frame(file: IO[bytes]) -> Image.Image:
    """The first frame of a video file, upright; SampleProblem if there is none."""
    with _opened(file) as (container, stream):
        for frame in container.decode(stream):
            picture: Image.Image = frame.to_image()
            return picture.rotate(round(frame.rotation / 90) * 90, expand=True)
    raise SampleProblem("empty_video", "no frame can be decoded")


@contextmanager
def _opened(file: IO[bytes]) -> Iterator[tuple[Any, Any]]:
    """The container and the stream of video of a file."""
    av = _import_av()
    file.seek(0)
    try:
        with open_container(av, file) as container:
            if not len(container.streams):
                raise SampleProblem("corrupt_video", "cut short, or without any stream")
            stream = container.streams.video[0] if container.streams.video else None
            if stream is None or stream.disposition & av.stream.Disposition.attached_pic:
                kinds = ", ".join(sorted({track.type for track in container.streams}))
                raise SampleProblem("no_video_stream", f"no stream of video; its streams: {kinds}")
            if stream.codec_context is None:
                raise SampleProblem("video_format", "PyAV has no decoder for its codec")
            yield container, stream
    except av.ArgumentError:  # a container that is not on the list
        raise SampleProblem("video_format", "not a container of videos") from None
    except av.FFmpegError as error:
        why = f"cut short, or not a video that FFmpeg knows ({error.strerror})"
        raise SampleProblem("corrupt_video", why) from None


@cache
def _import_av() -> Any:
    try:
        import av  # noqa: PLC0415 - an extra, needed only here
    except ImportError:
        advice = "reading videos needs PyAV: pip install av"
        raise SampleProblem("video_format", advice) from None
    # one of two equal lines would be missing in what FFmpeg says of a file
    av.logging.set_skip_repeated(False)
    return av


def _is_turned(container: Any, stream: int) -> bool:
    """Whether the stream's display matrix turns frames by a quarter.

    PyAV gives the matrix of decoded frames only. FFmpeg's description of a container, made for
    people, has it without decoding; PyAV takes it from the log, so the log is switched on for it.
    """
    av = _import_av()
    with _describing, av.logging.Capture(local=False):  # of other threads too: dropped
        av.logging.set_level(av.logging.INFO)
        try:
            said = container.dumps_format()
        finally:
            av.logging.set_level(None)
    parts = _STREAM.split(said)[1:]  # number, description, number, description, ...
    rotation = _ROTATION.search(
        dict(zip(parts[::2], parts[1::2], strict=True)).get(str(stream), "")
    )
    return rotation is not None and round(float(rotation[1]) / 90) % 2 == 1


def _count_frames(container: Any, stream: Any, num_bytes: int) -> int:
    """Frames that are shown: by the container's table, else by its packets.

    An MP4 file that was cut without encoding it again hides those before its first shown frame.
    SampleProblem if some are gone.
    """
    table = stream.index_entries
    listed = int(stream.frames)
    if container.format.name == "gif":
        return listed  # FFmpeg counts them when it opens the file
    entries = len(table)
    if entries and entries == listed and table[-1].pos + table[-1].size <= num_bytes:
        return sum(not entry.flags & _HIDDEN for entry in table)
    packets = [packet.is_discard for packet in container.demux(stream) if packet.size]
    if len(packets) < entries:
        there = f"{len(packets):,} of {entries:,} frames are there"
        raise SampleProblem("corrupt_video", f"cut short, {there}")
    return packets.count(False)


def _decode_frames(container: Any, stream: Any) -> int:
    """Frames that decode, all of them; SampleProblem if one is damaged."""
    count = 0
    for frame in container.decode(stream):
        if frame.is_corrupt:
            raise SampleProblem("corrupt_video", f"frame {count} is damaged")
        count += 1
    return count


def _said_to_end(file: IO[bytes], num_bytes: int) -> int:
    """End of an MP4, AVI, MKV or WebM file by its own headers; 0 if they do not say."""
    file.seek(0)
    head = file.read(4096)
    if head[:4] == b"RIFF":
        return 8 + int.from_bytes(head[4:8], "little")
    if head[:4] == _EBML:
        return _end_of_segment(head)
    return _end_of_boxes(file, num_bytes) if head[4:8] in _FIRST_BOXES else 0


def _end_of_boxes(file: IO[bytes], num_bytes: int) -> int:
    """End of the last box of an MP4 or MOV file: a size of 4 bytes, or after the type of 8."""
    end = 0
    while end <= num_bytes - 8:
        file.seek(end)
        head = file.read(16)
        size = int.from_bytes(head[:4], "big")
        size = int.from_bytes(head[8:], "big") if size == 1 else size
        if size < 8:  # 0: to the end of the file
            return num_bytes
        end += size
    return end


def _end_of_segment(head: bytes) -> int:
    """End of the element of a Matroska file that holds all the rest; 0 if it is not known.

    An element is an id, a size, and so many bytes. The first byte of a size has as many leading
    zeros as bytes follow; all other bits set mean an unknown size, as in a live stream.
    """
    start = head.find(_SEGMENT) + len(_SEGMENT)
    if start < len(_SEGMENT) or start >= len(head) or not head[start]:
        return 0
    width = 9 - head[start].bit_length()
    unknown = (1 << 7 * width) - 1
    size = int.from_bytes(head[start : start + width], "big") & unknown
    return 0 if size == unknown else start + width + size
