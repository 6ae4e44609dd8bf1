"""Videos -> upright RGB frames, chosen by their numbers.

For the loader, which decodes in its own threads. PyAV (the extra `video`) decodes files of codecs;
a list of images is decoded as images are. Frames are those of `VideoFrame.to_ndarray("rgb24")`,
turned as the stream's display matrix says. From a keyframe near a wanted frame on, instead of from
the first frame, wherever that gives the same frames.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from io import BytesIO
from typing import Any

import numpy as np

from isobatch.common.errors import ConfigError, DataError
from isobatch.loaders.decode.image import decode_pixels
from isobatch.loaders.decode.resize import Pixels
from isobatch.media.containers import open_container
from isobatch.media.decoder_faults import fault_of
from isobatch.media.frame_archive import is_frame_archive, unpack_frames
from isobatch.models.video_tokens import VideoFacts

_SEEKABLE = {"h264", "hevc", "mjpeg", "mpeg4", "vp8", "vp9", "av1"}
"""Codecs whose frames after a keyframe do not need those before it."""
_WORTH_SEEKING = 16
"""Frames that a seek must save."""


def decode_frames(
    content: bytes | memoryview, facts: VideoFacts, indices: Sequence[int]
) -> Iterator[Pixels]:
    """The frames of `indices`, which ascend; each is (height, width, 3) and valid until the next.

    `facts` are those that were counted. DataError if a frame cannot be decoded, is damaged, or has
    another size; ConfigError without PyAV.
    """
    if is_frame_archive(content):
        images = unpack_frames(content)
        if len(images) != facts.num_frames:
            raise _changed(f"{len(images)} images", f"{facts.num_frames}")
        return (
            decode_pixels(images[index], counted=facts[:2], keep_colour=True) for index in indices
        )
    return _decode_file(content, facts, indices)


def _decode_file(
    content: bytes | memoryview, facts: VideoFacts, indices: Sequence[int]
) -> Iterator[Pixels]:
    try:
        import av  # noqa: PLC0415  (an extra)
    except ImportError:
        raise ConfigError("videos are decoded by PyAV: pip install av") from None
    size = f"video of {len(content):,} bytes"
    place = 0
    try:
        for frames in (_sought, _from_the_start):
            for number, frame in frames(av, content, facts, indices[place:]):
                while place < len(indices) and indices[place] == number:
                    yield _upright(frame, facts, number)
                    place += 1
                if place == len(indices):
                    return
    except DataError:
        raise
    except Exception as error:  # of any type: decoders raise what they like
        raise DataError(f"{size} cannot be decoded: {fault_of(error).detail}") from error
    raise DataError(f"{size} cannot be decoded: frame {indices[place]} is not there")


def _open(av: Any, content: bytes | memoryview) -> tuple[Any, Any]:
    """A container and its video stream."""
    container = open_container(av, BytesIO(content))
    stream = container.streams.video[0]
    if stream.codec_context is None:
        container.close()
        raise ValueError("PyAV has no decoder for its codec")
    stream.codec_context.thread_count = 1  # the loader has threads of its own
    return container, stream


def _from_the_start(
    av: Any, content: bytes | memoryview, _: VideoFacts, __: Sequence[int]
) -> Iterator[tuple[int, Any]]:
    """All frames with their numbers."""
    container, stream = _open(av, content)
    with container:
        yield from enumerate(container.decode(stream))


def _sought(
    av: Any, content: bytes | memoryview, facts: VideoFacts, indices: Sequence[int]
) -> Iterator[tuple[int, Any]]:
    """Frames with their numbers, those of `indices` among them; none where seeking is not exact."""
    times = _Times.of(av, content, facts) if facts.num_frames > _WORTH_SEEKING else None
    if times is None:
        return
    wanted = deque(indices)
    container, stream = _open(av, content)
    with container:
        while wanted:
            key = times.keyframe_before(wanted[0])
            container.seek(times.all[key], stream=stream)
            for frame in container.decode(stream):
                number = times.number(frame.pts)
                if number < key:  # it may refer to frames that were not decoded
                    continue
                if number > wanted[0]:
                    return
                yield number, frame
                while wanted and wanted[0] == number:
                    wanted.popleft()
                if not wanted or times.is_worth_seeking(number, wanted[0]):
                    break
            else:
                return


class _Times:
    """When each frame of a stream is shown, from its packets, without decoding."""

    def __init__(self, times: list[int], keys: list[int]) -> None:
        self.all = times
        self._keys = keys
        self._numbers = {time: number for number, time in enumerate(times)}

    @classmethod
    def of(cls, av: Any, content: bytes | memoryview, facts: VideoFacts) -> "_Times | None":
        """Times of a file; None where seeking might give other frames than decoding all."""
        container, stream = _open(av, content)
        with container:
            packets = [packet for packet in container.demux(stream) if packet.size]
        shown = [packet.pts for packet in packets]
        is_plain = (
            stream.codec_context.name in _SEEKABLE
            and len(set(shown)) == len(shown) == facts.num_frames
            and None not in shown
            and not any(packet.is_discard for packet in packets)
        )
        if not is_plain:
            return None
        times = sorted(shown)
        numbers = {time: number for number, time in enumerate(times)}
        keys = sorted(numbers[packet.pts] for packet in packets if packet.is_keyframe)
        return cls(times, keys) if keys[:1] == [0] else None

    def keyframe_before(self, number: int) -> int:
        """The last keyframe up to a frame."""
        return self._keys[bisect_right(self._keys, number) - 1]

    def is_worth_seeking(self, now: int, wanted: int) -> bool:
        """Whether a keyframe is far behind the frame that was just decoded."""
        return self.keyframe_before(wanted) - now > _WORTH_SEEKING

    def number(self, time: int | None) -> int:
        """The frame that is shown at a time; LookupError if there is none."""
        if time not in self._numbers:
            raise LookupError(f"a frame at {time}, where its packets have none")
        return self._numbers[time]


def _upright(frame: Any, facts: VideoFacts, number: int) -> Pixels:
    if frame.is_corrupt:
        raise ValueError(f"frame {number} is damaged")
    pixels: Pixels = frame.to_ndarray(format="rgb24")
    if turns := round(frame.rotation / 90) % 4:  # against the clock
        pixels = np.ascontiguousarray(np.rot90(pixels, turns))
    height, width = pixels.shape[:2]
    if (width, height) != facts[:2]:
        raise _changed(f"{width} x {height} pixels", f"{facts.width} x {facts.height}")
    return pixels


def _changed(current: str, before: str) -> DataError:
    return DataError(f"video has {current}, but had {before} when it was counted")
