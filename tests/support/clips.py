"""Small video files, made with PyAV: moving colours, with the frame's number in a corner."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from io import BytesIO

import av
import numpy as np
from numpy.typing import NDArray

from isobatch.models.video_tokens import VideoFacts

CODECS = {
    "h264": ("libx264", "mp4", "yuv420p", {"g": "12", "bf": "2"}),
    "vp9": ("libvpx-vp9", "webm", "yuv420p", {"g": "15", "deadline": "realtime", "cpu-used": "8"}),
    "mjpeg": ("mjpeg", "avi", "yuvj420p", {}),
    "mpeg4": ("mpeg4", "mp4", "yuv420p", {"g": "10", "bf": "2"}),
}
"""Name -> encoder, container, pixel format and options."""


@dataclass(frozen=True)
class Clip:
    """A video file."""

    content: bytes
    facts: VideoFacts
    """Of upright frames."""

    def decoded(self) -> list[NDArray[np.uint8]]:
        """All frames as transformers' reading with PyAV has them, turned upright."""
        with av.open(BytesIO(self.content)) as container:
            frames = list(container.decode(video=0))
        turned = [round(frame.rotation / 90) for frame in frames]
        arrays = (frame.to_ndarray(format="rgb24") for frame in frames)
        return [np.rot90(array, turns) for array, turns in zip(arrays, turned, strict=True)]


def make_clip(
    num_frames: int,
    size: tuple[int, int] = (64, 48),
    *,
    codec: str = "h264",
    rate: Fraction = Fraction(30000, 1001),
    rotation: int = 0,
    seed: int = 0,
) -> Clip:
    """`size`: (width, height) as stored, even; `rotation` in degrees against the clock."""
    encoder, container_format, pixel_format, options = CODECS[codec]
    blocks = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    base = blocks[::8, ::8].repeat(8, 0).repeat(8, 1)[: size[1], : size[0]]
    buffer = BytesIO()
    with av.open(buffer, "w", format=container_format) as container:
        stream = container.add_stream(encoder, rate=rate, options=options)
        stream.width, stream.height = size
        stream.pix_fmt = pixel_format
        if rotation:
            stream.set_display_rotation(rotation)
        for number in range(num_frames):
            image = np.roll(base, (number, 2 * number), (0, 1))
            image[:8, :8] = number * 5 % 256
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(image), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    upright = size[::-1] if rotation % 180 else size
    return Clip(buffer.getvalue(), VideoFacts(*upright, num_frames, float(rate)))
