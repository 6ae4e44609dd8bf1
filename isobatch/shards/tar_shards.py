"""WebDataset and Energon shards, written and read: plain tars for these libraries.

One webdataset sample per sample, or per group for Energon. A group's members are consecutive, so a
group is one range of the tar. Owner, times and modes are fixed: the same samples give the same
bytes.
"""

import io
import json
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isobatch.shards.stored_group import (
    EXTRAS,
    ByteRange,
    GroupBytes,
    Int32Array,
    PackedBlock,
    PackedFiles,
    StoredGroup,
    closed_on_error,
)

BUFFER_BYTES = 1 << 20
_IMAGE_SUFFIXES = frozenset(
    {"jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm", "pgm"}
)
_VIDEO_SUFFIXES = frozenset({"mp4", "m4v", "mov", "webm", "mkv", "avi", "mpg", "mpeg", "ts"})
_AUDIO_SUFFIXES = frozenset({"wav", "flac", "mp3", "ogg", "opus", "m4a"})


Member = tuple[str, bytes]
"""What follows the sample's key in the name of a file of a sample, and its content."""


class TarShardWriter:
    """Writes one tar shard."""

    def __init__(self, path: Path, *, key_per_group: bool = False) -> None:
        """`key_per_group`: make one webdataset sample of all samples of a group."""
        self._separator = "." if key_per_group else "-"  # a key ends at the first dot
        # here, because it imports torch where that is installed: 1.7 s and 220 MB
        from webdataset import TarWriter  # noqa: PLC0415

        self._file = path.open("wb", buffering=BUFFER_BYTES)
        self._tar = TarWriter(self._file, user="", group="", mode=0o644, mtime=0, encoder=False)

    def add(self, block: PackedBlock) -> list[ByteRange]:
        """Append groups; a range is from a group's first header to its last member's padding."""
        borders = zip(block.groups, pairwise(block.group_offsets.tolist()), strict=True)
        return [
            self.add_samples(group, [_packed_members(block, row) for row in range(first, last)])
            for group, (first, last) in borders
        ]

    def add_samples(self, group: int, samples: Iterable[Iterable[Member]]) -> ByteRange:
        """Append a group of samples: of a block, or of `stored_samples`."""
        start = self._tar.tarstream.offset
        with closed_on_error(self._tar.tarstream.fileobj, self._file):
            for number, members in enumerate(samples):
                key = f"g{group:09d}{self._separator}s{number:05d}"
                for suffix, content in members:
                    # one by one: TarWriter sorts the members of a sample by name
                    self._tar.write({"__key__": key, suffix: content})
        return start, self._tar.tarstream.offset - start

    def close(self) -> None:
        """Write the end of the archive and close the file."""
        with closed_on_error(self._tar.tarstream.fileobj, self._file):
            self._tar.close()
            self._file.close()


def _packed_members(block: PackedBlock, row: int) -> Iterator[Member]:
    """The members of a sample, in order."""
    tokens, images, audios = (
        slice(*offsets[row : row + 2])
        for offsets in (block.token_offsets, block.images.offsets, block.audios.offsets)
    )
    frames, rates = (block.images.numbers[name][images].tolist() for name in ("num_frames", "rate"))
    about_images = zip(block.images.paths[images], frames, rates, strict=True)
    image_names = [f"{n}.{_visual_suffix(*visual)}" for n, visual in enumerate(about_images)]
    suffixes = [_suffix(path, _AUDIO_SUFFIXES, "snd") for path in block.audios.paths[audios]]
    audio_names = [f"audio{n}.{suffix}" for n, suffix in enumerate(suffixes)]
    about = {
        "sample_id": block.sample_ids[row],
        **{name: int(values[row]) for name, values in block.counts.items()},
        "image_widths": block.images.numbers["width"][images].tolist(),
        "image_heights": block.images.numbers["height"][images].tolist(),
        "images": image_names,
        **({"image_frames": frames, "image_rates": rates} if any(frames) else {}),
        "audio_lengths": block.audios.numbers["length"][audios].tolist(),
        "audios": audio_names,
    }
    if block.extras:
        about[EXTRAS] = {name: values[row] for name, values in block.extras.items()}
    yield "json", json.dumps(about, ensure_ascii=False).encode()
    yield "input_ids.npy", _to_npy(block.input_ids[tokens])
    yield "labels.npy", _to_npy(block.labels[tokens])
    yield from zip(image_names, _contents(block.images, images), strict=True)
    yield from zip(audio_names, _contents(block.audios, audios), strict=True)


def _contents(files: PackedFiles, places: slice) -> list[bytes]:
    borders = files.content_offsets[places.start : places.stop + 1].tolist()
    return [files.content[a:b].tobytes() for a, b in pairwise(borders)]


def _visual_suffix(path: str, num_frames: int, rate: float) -> str:
    """Suffix of an image, a video or, without a rate, an archive of a video's frames."""
    if num_frames:
        return _suffix(path, _VIDEO_SUFFIXES, "video") if rate else "zip"
    return _suffix(path, _IMAGE_SUFFIXES, "img")


def _suffix(path: str, known: frozenset[str], neutral: str) -> str:
    """Suffix of a member, a neutral one if it is unknown: readers choose the decoder by it.

    >>> _suffix("a/b.JPG", _IMAGE_SUFFIXES, "img"), _suffix("a/b.php?x=1", _IMAGE_SUFFIXES, "img")
    ('jpg', 'img')
    """
    suffix = PurePosixPath(path).suffix.lower().lstrip(".")
    return suffix if suffix in known else neutral


def _to_npy(array: Int32Array) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()


def stored_samples(content: GroupBytes) -> list[list[Member]]:
    """The members of each sample of a group, as they are stored. DECODE_ERRORS if damaged."""
    samples: dict[str, list[Member]] = {}
    for name, member in _stored_members(content).items():
        key, _, suffix = name.partition(".")
        samples.setdefault(key, []).append((suffix, member))
    return list(samples.values())


def decode_tar(content: GroupBytes, where: str) -> StoredGroup:
    """The samples in a byte range of whole tar members; DECODE_ERRORS if it is damaged."""
    return decode_members(_stored_members(content), where)


def decode_members(members: Mapping[str, bytes], where: str) -> StoredGroup:
    """The samples of a group by its members' names -> contents; DECODE_ERRORS for damaged ones.

    The names may lack a first part that all have, such as a group's key. They are in stored order.
    """
    keys = [name.removesuffix(".json") for name in members if name.endswith(".json")]
    infos: list[dict[str, Any]] = [json.loads(members[f"{key}.json"]) for key in keys]
    input_ids = [_from_npy(members[f"{key}.input_ids.npy"]) for key in keys]
    sizes = [zip(info["image_heights"], info["image_widths"], strict=True) for info in infos]
    audio_lengths = [length for info in infos for length in info.get("audio_lengths", ())]
    image_names, image_samples = _full_names(keys, [info["images"] for info in infos])
    none = [[0] * len(info["images"]) for info in infos]  # in samples without videos
    frames, rates = (
        [*chain(*(info.get(name, zeros) for info, zeros in zip(infos, none, strict=True)))]
        for name in ("image_frames", "image_rates")
    )
    if not len(frames) == len(rates) == len(image_names):
        raise ValueError("videos and their numbers do not belong together")
    audio_names, audio_samples = _full_names(keys, [info.get("audios", ()) for info in infos])
    if len(audio_names) != len(audio_lengths):
        raise ValueError("audio files and their numbers do not belong together")
    extras = dict.fromkeys(name for info in infos for name in info.get(EXTRAS, ()))
    return StoredGroup(
        where=where,
        sample_ids=tuple(info["sample_id"] for info in infos),
        input_ids=np.concatenate(input_ids),
        labels=np.concatenate([_from_npy(members[f"{key}.labels.npy"]) for key in keys]),
        cu_seqlens=np.cumsum([0, *map(len, input_ids)]).astype(np.int32),
        images=[members[name] for name in image_names],
        image_sizes=np.array([*chain(*sizes)], dtype=np.int32).reshape(-1, 2),
        image_samples=image_samples,
        image_frames=np.array(frames, dtype=np.int32),
        image_rates=np.array(rates, dtype=np.float64),
        image_names=image_names,
        audios=[members[name] for name in audio_names],
        audio_lengths=np.array(audio_lengths, dtype=np.int32),
        audio_samples=audio_samples,
        extras={name: [info[EXTRAS][name] for info in infos] for name in extras},
    )


def _stored_members(content: GroupBytes) -> dict[str, bytes]:
    """Name -> content of the members, in order."""
    members = {}
    with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as archive:
        for member in archive:
            file = archive.extractfile(member)
            if file is None:
                raise ValueError(f"member {member.name} is not a file")
            members[member.name] = file.read()
    return members


def _full_names(
    keys: Sequence[str], names: Sequence[Sequence[str]]
) -> tuple[list[str], NDArray[np.int32]]:
    """The members that the samples name, and the place of each one's sample."""
    full = [
        f"{key}.{name}"
        for key, member_names in zip(keys, names, strict=True)
        for name in member_names
    ]
    return full, np.repeat(
        np.arange(len(keys), dtype=np.int32), [len(member_names) for member_names in names]
    )


def _from_npy(content: bytes) -> Int32Array:
    """A one-dimensional int32 .npy file; np.load takes 23 us for what takes 1 us here."""
    # magic, version, length of the header, header
    start = 10 + int.from_bytes(content[8:10], "little")
    if not content.startswith(b"\x93NUMPY\x01\x00") or b"'descr': '<i4'" not in content[10:start]:
        raise ValueError("tokens are not an .npy file of int32")
    return np.frombuffer(content, dtype="<i4", offset=start)
