"""Audio file -> one channel of float32 at the model's sampling rate.

For the loader. WAV files of integers or floats are read here, everything else by the `soundfile`
library (the extra `audio`), to the same numbers as `soundfile` would give. Channels are averaged;
`loaders.decode._resample` changes the rate.
"""

from __future__ import annotations

import struct
from io import BytesIO
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from balance.errors import DataError, first_line
from balance.media.audio_tokens import AudioRule

if TYPE_CHECKING:
    pass

Channels = NDArray[np.float32]
"""(samples, channels), full scale 1."""

PCM, FLOAT, EXTENSIBLE = 0x0001, 0x0003, 0xFFFE
"""Formats of a WAV file (Microsoft's mmreg.h); the last one's real format is the beginning of a
GUID.
"""


def decode_audio(
    rule: AudioRule, audio_bytes: bytes | memoryview, counted: int | None = None
) -> Tensor:
    """The clip as float32, (samples,) at the rule's rate, full scale 1; as many samples as
    `plan_audio` says.

    DataError if it cannot be decoded, or has not `counted` samples at the rule's rate.
    """
    content = memoryview(audio_bytes)
    channels, sampling_rate = _read_wav(content) or _read_other(content)
    if len(channels) == 0:
        raise _broken(content, "it has no samples")
    mono = channels[:, 0] if channels.shape[1] == 1 else channels.mean(axis=1, dtype=np.float32)
    clip = np.ascontiguousarray(mono)
    if sampling_rate != rule.sampling_rate:
        from loaders.decode._resample import resample  # noqa: PLC0415  (see `loaders`)

        clip = resample(clip, sampling_rate, rule.sampling_rate)
    if counted is not None and len(clip) != counted:
        raise DataError(
            f"audio clip has {len(clip)} samples at {rule.sampling_rate} per second, but had {counted} when it was "
            "counted"
        )
    return torch.from_numpy(clip)


def _read_wav(content: memoryview) -> tuple[Channels, int] | None:
    """Samples and sampling rate; None if it is not a WAV file, or one whose samples are
    compressed.
    """
    if bytes(content[:4]) != b"RIFF" or bytes(content[8:12]) != b"WAVE":
        return None
    form, offset = b"", 12
    while offset + 8 <= len(content):
        kind, size = struct.unpack_from("<4sI", content, offset)
        start = offset + 8
        if kind == b"fmt ":
            form = bytes(content[start : start + min(size, 40)])
        if kind == b"data":
            if size > len(content) - start:
                raise _broken(
                    content, f"{len(content) - start} of the {size} bytes of its samples are there"
                )
            return _wav_samples(content, form, content[start : start + size])
        offset = start + size + size % 2  # chunks begin at even places
    raise _broken(content, "a WAV file that ends before its samples")


def _wav_samples(content: memoryview, form: bytes, data: memoryview) -> tuple[Channels, int] | None:
    if len(form) < 16:
        raise _broken(content, "a WAV file that does not say its format before its samples")
    tag, num_channels, sampling_rate, _, frame_bytes, _ = struct.unpack("<HHIIHH", form[:16])
    if tag == EXTENSIBLE and len(form) >= 26:
        (tag,) = struct.unpack("<H", form[24:26])
    if tag not in (PCM, FLOAT):
        return None
    num_bytes, rest = divmod(frame_bytes, max(num_channels, 1))
    known = (1, 2, 3, 4) if tag == PCM else (4, 8)
    if num_channels < 1 or sampling_rate < 1 or rest or num_bytes not in known:
        what = f"{num_channels} channels in {frame_bytes} bytes at {sampling_rate} samples/s"
        raise _broken(content, f"its header says {what}")
    # the packer counts whole frames too
    values = np.frombuffer(data[: len(data) // frame_bytes * frame_bytes], dtype=np.uint8)
    samples = _from_floats(values, num_bytes) if tag == FLOAT else _from_integers(values, num_bytes)
    return samples.reshape(-1, num_channels), sampling_rate


def _from_integers(values: NDArray[np.uint8], num_bytes: int) -> NDArray[np.float32]:
    """Integers of 1 to 4 bytes, least first; one byte has its zero at 128."""
    if num_bytes == 1:
        return (values.astype(np.float32) - 128) / np.float32(128)
    if num_bytes == 2:
        return values.view("<i2").astype(np.float32) / np.float32(1 << 15)
    if num_bytes == 3:  # as the upper bytes of four
        wide = np.zeros((len(values) // 3, 4), dtype=np.uint8)
        wide[:, 1:] = values.reshape(-1, 3)
        values = wide.ravel()
    return values.view("<i4").astype(np.float32) / np.float32(1 << 31)


def _from_floats(values: NDArray[np.uint8], num_bytes: int) -> NDArray[np.float32]:
    return values.view("<f4" if num_bytes == 4 else "<f8").astype(np.float32)


def _read_other(content: memoryview) -> tuple[Channels, int]:
    try:
        import soundfile  # noqa: PLC0415  (an optional dependency)
    except (ImportError, OSError):  # OSError: the library that it loads is not there
        raise _broken(
            content, "it is no WAV file of plain samples; pip install 'isobatch[audio]'"
        ) from None
    try:
        with soundfile.SoundFile(BytesIO(content)) as file:
            channels: Channels = file.read(dtype="float32", always_2d=True)
            if file.frames != len(channels):
                raise _broken(content, f"{len(channels)} of its {file.frames} samples are there")
            return channels, file.samplerate
    except (soundfile.SoundFileError, RuntimeError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise _broken(content, first_line(error)) from None


def _broken(content: memoryview, reason: str) -> DataError:
    return DataError(f"audio clip of {len(content):,} bytes cannot be decoded: {reason}")
