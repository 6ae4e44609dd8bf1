"""WebDataset shards: plain tars that the `webdataset` library reads unmodified.

One webdataset sample per sample; a group's members are consecutive, so a group is one range of the tar. Owner, times
and modes are fixed: the same samples give the same bytes.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

import numpy as np
from numpy.typing import NDArray

from packer.shards.sample import PackedSample

_IMAGE_SUFFIXES = frozenset({"jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm", "pgm"})
_AUDIO_SUFFIXES = frozenset({"wav", "flac", "mp3", "ogg", "opus", "m4a"})


class WebDatasetShardWriter:
    """Writes one tar shard."""

    def __init__(self, path: Path) -> None:
        self._tar = tarfile.open(path, "w", format=tarfile.USTAR_FORMAT)  # noqa: SIM115 - closed by `close`

    def add(self, group: int, samples: Sequence[PackedSample]) -> tuple[int, int]:
        """Append a group; the range covers its members from the first header to the last one's padding."""
        start = self._tar.offset
        for place, sample in enumerate(samples):
            for suffix, data in _members(sample):
                self._add_member(f"g{group:09d}-s{place:05d}.{suffix}", data)
        return start, self._tar.offset - start

    def close(self) -> None:
        """Write the end of the archive and close the file."""
        self._tar.close()

    def _add_member(self, name: str, data: bytes) -> None:
        member = tarfile.TarInfo(name)
        member.size = len(data)
        member.mode = 0o644
        self._tar.addfile(member, io.BytesIO(data))


def _members(sample: PackedSample) -> list[tuple[str, bytes]]:
    """(suffix behind the sample's key, content) of each member, in order."""
    images = [f"{number}.{_suffix(path, _IMAGE_SUFFIXES, 'img')}" for number, path in enumerate(sample.image_paths)]
    audios = [
        f"audio{number}.{_suffix(path, _AUDIO_SUFFIXES, 'snd')}" for number, path in enumerate(sample.audio_paths)
    ]
    about = {
        "sample_id": sample.sample_id,
        **sample.counts,
        "image_widths": sample.image_widths,
        "image_heights": sample.image_heights,
        "images": images,
        "audio_lengths": sample.audio_lengths,
        "audios": audios,
    }
    return [
        ("json", json.dumps(about, ensure_ascii=False).encode()),
        ("input_ids.npy", _npy(sample.input_ids)),
        ("labels.npy", _npy(sample.labels)),
        *zip(images, sample.images, strict=True),
        *zip(audios, sample.audios, strict=True),
    ]


def _suffix(path: str, known: frozenset[str], neutral: str) -> str:
    """Suffix of a member: readers choose the decoder by it, so an unknown one becomes a neutral one.

    >>> _suffix("a/b.JPG", _IMAGE_SUFFIXES, "img"), _suffix("a/b.php?x=1", _IMAGE_SUFFIXES, "img")
    ('jpg', 'img')
    """
    suffix = PurePosixPath(path).suffix.lower().lstrip(".")
    return suffix if suffix in known else neutral


def _npy(array: NDArray[np.int32]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()
