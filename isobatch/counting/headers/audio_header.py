"""Audio file -> its length, from the header alone.

WAV and FLAC are read here, a few hundred bytes of a file without decoding; other kinds through the
`soundfile` library, if it is installed. A truncated WAV file is found by its size. A truncated FLAC
file is found only where less is left than its shortest frames would take.
"""

from dataclasses import dataclass
from typing import BinaryIO

from isobatch.common.errors import first_line
from isobatch.counting.headers.file_problem import file_problem
from isobatch.counting.records.media import SampleProblem
from isobatch.media.quiet_sounds import quiet_sounds
from isobatch.media.wav import FLOAT, HIGHEST_RATE, PCM, WavError, is_wav, wav_header

UNKNOWN_LENGTH = (1 << 63) - 1
"""libsndfile's SF_COUNT_MAX: the header gives no length."""


@dataclass(frozen=True, slots=True)
class AudioHeader:
    """What the header of an audio file says."""

    num_samples: int
    """Samples of one channel."""
    sampling_rate: int
    """Samples per second."""
    num_channels: int
    num_bytes: int


def read_audio_header(file: BinaryIO, name: str) -> AudioHeader:
    """Length, rate and channels of a seekable audio file; SampleProblem names it as `name`."""
    try:
        num_bytes = file.seek(0, 2)
        if num_bytes == 0:
            raise SampleProblem("corrupt_audio", "the file is empty")
        file.seek(0)
        start = file.read(12)
        header = None
        if is_wav(start):
            header = _read_wav(file, num_bytes)
        elif start[:4] == b"fLaC":
            header = _read_flac(file, num_bytes)
        header = header or _read_other(file, num_bytes)
        if header.num_channels < 1 or not 1 <= header.sampling_rate <= HIGHEST_RATE:
            what = f"{header.num_channels} channels at {header.sampling_rate} samples/s"
            raise SampleProblem("corrupt_audio", f"the header says {what}")
        if header.num_samples < 1:
            raise SampleProblem("empty_audio", "no samples")
    except Exception as error:  # of any type: decoders raise what they like
        raise file_problem(error, "audio", name) from None
    return header


def _read_wav(file: BinaryIO, num_bytes: int) -> AudioHeader | None:
    """The header of a WAV file; None if its samples are compressed."""

    def read(offset: int, size: int) -> bytes:
        file.seek(offset)
        return file.read(size)

    try:
        header = wav_header(read)
    except WavError as error:
        raise SampleProblem("corrupt_audio", str(error)) from None
    if header.format not in (PCM, FLOAT):
        return None
    frame_bytes, size = header.frame_bytes, header.data_bytes
    if frame_bytes < 1 or frame_bytes != header.num_channels * -(-header.bits // 8):
        what = f"{header.num_channels} channels of {header.bits} bits in {frame_bytes} bytes"
        raise SampleProblem("corrupt_audio", f"the header says {what}")
    if size > num_bytes - header.data_start:
        there = f"{num_bytes - header.data_start} of the {size} bytes of samples are there"
        raise SampleProblem("corrupt_audio", f"cut short, {there}")
    return AudioHeader(size // frame_bytes, header.sampling_rate, header.num_channels, num_bytes)


def _read_flac(file: BinaryIO, num_bytes: int) -> AudioHeader | None:
    """The STREAMINFO block, which comes first (RFC 9639, 8.2); None if it gives no length."""
    file.seek(4)
    block = file.read(38)
    if len(block) < 38 or block[0] & 0x7F != 0 or int.from_bytes(block[1:4], "big") != 34:
        raise SampleProblem("corrupt_audio", "a FLAC file that does not begin with its STREAMINFO")
    max_block, min_frame = int.from_bytes(block[6:8], "big"), int.from_bytes(block[8:11], "big")
    # 20 bits rate, 3 bits channels - 1, 5 bits sample size - 1, 36 bits length
    packed = int.from_bytes(block[14:22], "big")
    sampling_rate, num_channels = packed >> 44, (packed >> 41 & 7) + 1
    num_samples = packed & ((1 << 36) - 1)
    if num_samples == 0:
        return None
    needed = 42 + num_samples // max(max_block, 1) * min_frame
    if num_bytes < needed:
        there = f"{num_bytes} bytes of at least {needed} are there"
        raise SampleProblem("corrupt_audio", f"cut short, {there}")
    return AudioHeader(num_samples, sampling_rate, num_channels, num_bytes)


def _read_other(file: BinaryIO, num_bytes: int) -> AudioHeader:
    try:
        import soundfile  # noqa: PLC0415  (an optional dependency)
    except (ImportError, OSError):  # OSError: the library that it loads is not there
        advice = "for MP3, Ogg and others: pip install soundfile"
        what = f"not PCM in a WAV file, nor FLAC; {advice}"
        raise SampleProblem("audio_format", what) from None
    file.seek(0)
    try:
        with quiet_sounds():
            info = soundfile.info(file)
    except soundfile.SoundFileError as error:
        what = f"not audio that libsndfile can read: {first_line(error)}"
        raise SampleProblem("audio_format", what) from None
    if info.frames == UNKNOWN_LENGTH:
        what = "its header does not say how long it is; write it again"
        raise SampleProblem("audio_format", what)
    return AudioHeader(info.frames, info.samplerate, info.channels, num_bytes)
