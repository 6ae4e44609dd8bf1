"""Audio files -> one channel of float32 at the model's sampling rate.

For the loader. WAV files of integers or floats are read here, to the numbers of `soundfile`;
everything else by `soundfile` (the extra `audio`). `loaders.decode._resample` changes the rate.
"""

from io import BytesIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from isobatch.common.errors import DataError
from isobatch.media.decoder_faults import fault_of
from isobatch.media.quiet_sounds import quiet_sounds
from isobatch.media.wav import FLOAT, HIGHEST_RATE, PCM, WavError, is_wav, wav_header
from isobatch.models.audio_tokens import AudioRule, resampled_length

Channels = NDArray[np.float32]
"""(samples, channels), full scale 1."""


def decode_audio(
    rule: AudioRule, audio_bytes: bytes | memoryview, counted: int | None = None
) -> Tensor:
    """The clip as float32, (samples,) at the rule's rate, full scale 1.

    Channels are averaged. DataError if it cannot be decoded, or has not `counted` samples.
    """
    content = memoryview(audio_bytes)
    channels, sampling_rate = _read_wav(content) or _read_other(content)
    if len(channels) == 0:
        raise _broken(content, "it has no samples")
    if not 1 <= sampling_rate <= HIGHEST_RATE:
        raise _broken(content, f"its header says {sampling_rate} samples/s")
    length = resampled_length(rule, len(channels), sampling_rate)
    if counted is not None and length != counted:  # first: a damaged rate may ask for terabytes
        raise DataError(
            f"audio clip has {length} samples at {rule.sampling_rate} per second, but had "
            f"{counted} when it was counted"
        )
    mono = channels[:, 0] if channels.shape[1] == 1 else channels.mean(axis=1, dtype=np.float32)
    clip = np.ascontiguousarray(mono)
    if sampling_rate != rule.sampling_rate:
        from isobatch.loaders.decode._resample import resample  # noqa: PLC0415  (see `loaders`)

        clip = resample(clip, sampling_rate, rule.sampling_rate)
    return torch.from_numpy(clip)


def _read_wav(content: memoryview) -> tuple[Channels, int] | None:
    """Samples and sampling rate; None if not a WAV file, or one whose samples are compressed."""
    if not is_wav(bytes(content[:12])):
        return None
    try:
        header = wav_header(lambda offset, size: bytes(content[offset : offset + size]))
    except WavError as error:
        raise _broken(content, str(error)) from None
    there = len(content) - header.data_start
    if header.data_bytes > there:
        raise _broken(content, f"{there} of the {header.data_bytes} bytes of its samples are there")
    if header.format not in (PCM, FLOAT):
        return None
    num_channels, frame_bytes = header.num_channels, header.frame_bytes
    num_bytes, rest = divmod(frame_bytes, max(num_channels, 1))
    known = (1, 2, 3, 4) if header.format == PCM else (4, 8)
    if num_channels < 1 or header.sampling_rate < 1 or rest or num_bytes not in known:
        frame = f"{num_channels} channels in {frame_bytes} bytes"
        raise _broken(content, f"its header says {frame} at {header.sampling_rate} samples/s")
    # the packer counts whole frames too
    end = header.data_start + header.data_bytes // frame_bytes * frame_bytes
    values = np.frombuffer(content[header.data_start : end], dtype=np.uint8)
    if header.format == PCM:
        samples = _from_integers(values, num_bytes)
    else:
        samples = values.view(f"<f{num_bytes}").astype(np.float32)
    return samples.reshape(-1, num_channels), header.sampling_rate


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


def _read_other(content: memoryview) -> tuple[Channels, int]:
    try:
        import soundfile  # noqa: PLC0415  (an optional dependency)
    except (ImportError, OSError):  # OSError: the library that it loads is not there
        raise _broken(content, "it is no plain WAV; pip install soundfile") from None
    try:
        with quiet_sounds(), soundfile.SoundFile(BytesIO(content)) as file:
            channels: Channels = file.read(dtype="float32", always_2d=True)
    except Exception as error:  # of any type: decoders raise what they like
        raise _broken(content, fault_of(error).detail) from None
    if file.frames != len(channels):
        raise _broken(content, f"{len(channels)} of its {file.frames} samples are there")
    return channels, file.samplerate


def _broken(content: memoryview, reason: str) -> DataError:
    return DataError(f"audio clip of {len(content):,} bytes cannot be decoded: {reason}")
