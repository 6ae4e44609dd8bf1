"""WebDataset shards: plain tars that the `webdataset` library reads unmodified.

One webdataset sample per sample; a group's members are consecutive, so a group is one range of the
tar. Owner, times and modes are fixed: the same samples give the same bytes.
"""

from __future__ import annotations

import io
import json
import tarfile
from itertools import pairwise
from pathlib import Path, PurePosixPath

import numpy as np
from numpy.typing import NDArray

from shards.block import GroupPlace, PackedBlock, PackedFiles

_IMAGE_SUFFIXES = frozenset(
    {"jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm", "pgm"}
)
_AUDIO_SUFFIXES = frozenset({"wav", "flac", "mp3", "ogg", "opus", "m4a"})


class TarShardWriter:
    """Writes one tar shard."""

    def __init__(self, path: Path) -> None:
        self._tar = tarfile.open(path, "w", format=tarfile.USTAR_FORMAT)  # noqa: SIM115 - closed by `close`

    def add(self, block: PackedBlock, groups: list[GroupPlace]) -> list[tuple[int, int]]:
        """Append groups; a range covers a group's members from the first header to the last one's
        padding.
        """
        places = []
        for group in groups:
            start = self._tar.offset
            for row in range(group.first, group.last):
                for suffix, data in _members(block, row):
                    self._add_member(f"g{group.number:09d}-s{row - group.first:05d}.{suffix}", data)
            places.append((start, self._tar.offset - start))
        return places

    def close(self) -> None:
        """Write the end of the archive and close the file."""
        self._tar.close()

    def _add_member(self, name: str, data: bytes) -> None:
        member = tarfile.TarInfo(name)
        member.size = len(data)
        member.mode = 0o644
        self._tar.addfile(member, io.BytesIO(data))


def _members(block: PackedBlock, row: int) -> list[tuple[str, bytes]]:
    """(suffix behind the sample's key, content) of each member of a sample, in order."""
    tokens = slice(*block.token_offsets[row : row + 2])
    images, audios = (
        slice(*files.offsets[row : row + 2]) for files in (block.images, block.audios)
    )
    image_names = [
        f"{n}.{_suffix(path, _IMAGE_SUFFIXES, 'img')}"
        for n, path in enumerate(block.images.paths[images])
    ]
    audio_names = [
        f"audio{n}.{_suffix(path, _AUDIO_SUFFIXES, 'snd')}"
        for n, path in enumerate(block.audios.paths[audios])
    ]
    about = {
        "sample_id": block.sample_ids[row],
        **{name: int(values[row]) for name, values in block.counts.items()},
        "image_widths": block.images.numbers["width"][images].tolist(),
        "image_heights": block.images.numbers["height"][images].tolist(),
        "images": image_names,
        "audio_lengths": block.audios.numbers["length"][audios].tolist(),
        "audios": audio_names,
    }
    return [
        ("json", json.dumps(about, ensure_ascii=False).encode()),
        ("input_ids.npy", _npy(block.input_ids[tokens])),
        ("labels.npy", _npy(block.labels[tokens])),
        *zip(image_names, _contents(block.images, images), strict=True),
        *zip(audio_names, _contents(block.audios, audios), strict=True),
    ]


def _contents(files: PackedFiles, places: slice) -> list[bytes]:
    borders = files.content_offsets[places.start : places.stop + 1].tolist()
    return [files.content[a:b].tobytes() for a, b in pairwise(borders)]


def _suffix(path: str, known: frozenset[str], neutral: str) -> str:
    """Suffix of a member: readers choose the decoder by it, so an unknown one becomes a neutral
    one.

    >>> _suffix("a/b.JPG", _IMAGE_SUFFIXES, "img"), _suffix("a/b.php?x=1", _IMAGE_SUFFIXES, "img")
    ('jpg', 'img')
    """
    suffix = PurePosixPath(path).suffix.lower().lstrip(".")
    return suffix if suffix in known else neutral


def _npy(array: NDArray[np.int32]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()
