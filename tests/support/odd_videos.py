"""Video files that are odd, damaged, or no videos, made with PyAV."""

from __future__ import annotations

from fractions import Fraction
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory

import av
import numpy as np
from PIL import Image


def encoded(
    num_frames: int,
    size: tuple[int, int] = (64, 48),
    *,
    container: str = "mp4",
    codec: str = "libx264",
    pixel_format: str = "yuv420p",
    times_ms: list[int] | None = None,
    rotation: int = 0,
    options: dict[str, str] | None = None,
) -> bytes:
    """A video of 24 frames per second, or with its frames at these times."""
    with TemporaryDirectory() as folder:  # an index in front is written by reading the file again
        path = f"{folder}/video"
        with av.open(path, "w", format=container, options=options or {}) as output:
            stream = output.add_stream(codec, rate=24)
            stream.width, stream.height, stream.pix_fmt = *size, pixel_format
            if times_ms:
                stream.codec_context.time_base = Fraction(1, 1000)
            if rotation:
                stream.set_display_rotation(rotation)
            if not num_frames:
                output.start_encoding()
            for number in range(num_frames):
                rng = np.random.default_rng(number)
                pixels = rng.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
                frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
                if times_ms:
                    frame.pts, frame.time_base = times_ms[number], Fraction(1, 1000)
                output.mux(stream.encode(frame))
            output.mux(stream.encode())
        return Path(path).read_bytes()


def cut_without_encoding(content: bytes, hidden: int) -> bytes:
    """An MP4 file whose first frames are still there, but before its first shown one."""
    buffer = BytesIO()
    source = av.open(BytesIO(content))
    (stream,) = source.streams.video
    options = {"avoid_negative_ts": "disabled", "use_editlist": "1"}
    with av.open(buffer, "w", format="mp4", options=options) as output:
        copy = output.add_stream_from_template(stream)
        step = round(1 / (stream.average_rate * stream.time_base))
        for packet in source.demux(stream):
            if packet.dts is None:
                continue
            packet.pts -= hidden * step
            packet.dts -= hidden * step
            packet.stream = copy
            output.mux(packet)
    return buffer.getvalue()


def audio_only(container: str = "mp4") -> bytes:
    """A file of a video's container with sound alone."""
    buffer = BytesIO()
    with av.open(buffer, "w", format=container) as output:
        stream = output.add_stream("aac", rate=44_100)
        for _ in range(5):
            frame = av.AudioFrame.from_ndarray(
                np.zeros((1, 1024), np.float32), format="fltp", layout="mono"
            )
            frame.rate = 44_100
            output.mux(stream.encode(frame))
        output.mux(stream.encode())
    return buffer.getvalue()


def picture(kind: str = "PNG", size: tuple[int, int] = (40, 30), shade: int = 0) -> bytes:
    """An image file."""
    buffer = BytesIO()
    Image.new("RGB", size, (shade, 0, 0)).save(buffer, kind)
    return buffer.getvalue()
