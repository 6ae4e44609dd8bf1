"""Header of a WAV file: its format, and where its samples are.

For the packer, which counts from headers, and the loaders, which decode the samples. Reads through
a function of the caller's, a few hundred bytes of a file. Pure otherwise.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass

PCM, FLOAT, EXTENSIBLE = 0x0001, 0x0003, 0xFFFE
"""Formats (Microsoft's mmreg.h); the last one's real format is the beginning of a GUID."""
MAX_CHUNKS = 1000
"""Chunks to look through: a damaged file may hold millions of empty ones."""


class WavError(ValueError):
    """A WAV header that cannot be used; the text says why."""


HIGHEST_RATE = 1 << 20
"""Samples per second: all that FLAC can say, and more than recorders make. To resample from a
damaged header's 4 * 10^9 would take more memory than a machine has."""


@dataclass(frozen=True, slots=True)
class WavHeader:
    """What a WAV file says of its samples; nothing is checked against the file's size."""

    format: int
    """Number of the format: `PCM`, `FLOAT`, or a compressed one."""
    num_channels: int
    sampling_rate: int
    frame_bytes: int
    """Bytes of one sample of all channels."""
    bits: int
    """Bits of one sample of one channel."""
    data_start: int
    """Offset of the first sample in the file."""
    data_bytes: int


def is_wav(start: bytes) -> bool:
    """Whether a file that begins with these 12 bytes is a WAV file."""
    return start[:4] == b"RIFF" and start[8:12] == b"WAVE"


def wav_header(read: Callable[[int, int], bytes]) -> WavHeader:
    """The header of a WAV file; `read(offset, size)` gives its bytes, fewer where the file ends.

    Raises WavError for a file that has no format or no samples.
    """
    form = b""
    offset = 12
    for _ in range(MAX_CHUNKS):
        head = read(offset, 8)
        if len(head) < 8:
            raise WavError("a WAV file without samples: it ends before its `data`")
        kind, size = struct.unpack("<4sI", head)
        if kind == b"fmt ":
            form = read(offset + 8, min(size, 40))
        if kind == b"data":
            return _parse_format(form, offset + 8, size)
        offset += 8 + size + size % 2  # chunks begin at even places
    raise WavError(f"a WAV file with no samples in its first {MAX_CHUNKS} chunks")


def _parse_format(form: bytes, data_start: int, data_bytes: int) -> WavHeader:
    if len(form) < 16:
        raise WavError("a WAV file that does not say its format before its samples")
    tag, num_channels, sampling_rate, _, frame_bytes, bits = struct.unpack("<HHIIHH", form[:16])
    if tag == EXTENSIBLE and len(form) >= 26:
        (tag,) = struct.unpack("<H", form[24:26])
    return WavHeader(tag, num_channels, sampling_rate, frame_bytes, bits, data_start, data_bytes)
