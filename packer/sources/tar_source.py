"""WebDataset tars, img2dataset's image-text pairs among them: members with one key are one sample.

The webdataset library's rule: the key is a member's path up to the first dot of its last part, and
neighbours with one key belong together. Only headers, `.json` and texts are read; images and audio
files stay where they are, as byte ranges. `packer.sources._tar_samples` makes a record of a
sample's members.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from balance.errors import ConfigError
from packer.records.record import RawRecord
from packer.sources._tar_members import BrokenTarError, Member, read_members
from packer.sources._tar_samples import key_of, make_record
from packer.sources.base import Chunk
from packer.sources.files import file_infos, name_and_size, opened
from shards.folders import FileInfo, Folder, is_uri, open_folder

WHOLE_TAR_BYTES = 512 << 20
"""A tar up to this size is one chunk, so that its headers are read where it is counted; a larger
one is cut here.
"""


@dataclass(frozen=True, slots=True)
class TarChunk:
    """A tar, or a run of samples in one."""

    folder: str
    name: str
    container: str
    """Name of the tar under the data root."""
    start: int = 0
    """Where the first member's header begins."""
    end: int | None = None
    """Where the first member behind the run begins; None: at the end of the tar."""
    first: int = 0
    """Samples in front of the run."""

    def records(self) -> Iterator[RawRecord]:
        """The samples, in order. A damaged place is one broken record, and ends the tar."""
        with opened(open_folder(self.folder, follow_links=True), self.name) as file:
            samples = _samples(read_members(file, self.start, self.end))
            for position, sample in enumerate(samples, self.first):
                yield make_record(
                    sample.key, sample.members, file, self.container, position, broken=sample.broken
                )


class TarSource:
    """Samples of tar files."""

    def __init__(self, name: str, folder: str, names: Sequence[str], data_root: str) -> None:
        """ConfigError for compressed tars, and for tars outside the data root."""
        packed = next((one for one in names if one.endswith((".gz", ".tgz"))), None)
        if packed is not None:
            raise ConfigError(
                f"{folder}/{packed}: images in a compressed tar have no place of their own; gunzip it"
            )
        self.name = name
        self.data_root = data_root
        self._folder = folder
        self._prefix = _under(folder, data_root)
        self._root: Folder = open_folder(folder, follow_links=True)
        self._names = names

    def files(self) -> list[FileInfo]:
        """The tars."""
        return file_infos(self._root, self._names)

    def chunks(self, num_records: int, on_bytes: Callable[[int], None]) -> Iterator[Chunk]:
        """Tars, or runs of `num_records` samples of large ones."""
        for info in self.files():
            whole = TarChunk(self._folder, info.name, self._prefix + info.name)
            if info.size <= WHOLE_TAR_BYTES:
                yield whole
                on_bytes(info.size)
            else:
                yield from self._cut(whole, num_records, info.size, on_bytes)

    def describe(self) -> list[dict[str, Any]]:
        """Name and size of each tar."""
        return name_and_size(self.files())

    def _cut(
        self, whole: TarChunk, num_records: int, size: int, on_bytes: Callable[[int], None]
    ) -> Iterator[Chunk]:
        start = first = 0
        with opened(self._root, whole.name) as file:
            for number, border in enumerate(_borders(file)):
                if number - first == num_records:
                    yield TarChunk(whole.folder, whole.name, whole.container, start, border, first)
                    on_bytes(border - start)
                    start, first = border, number
        yield TarChunk(whole.folder, whole.name, whole.container, start, None, first)
        on_bytes(size - start)


@dataclass(slots=True)
class _Sample:
    key: str
    members: list[Member] = field(default_factory=list)
    broken: str = ""


def _samples(members: Iterator[Member]) -> Iterator[_Sample]:
    """Neighbours with one key; if the tar is damaged, the sample at that place as the last one,
    broken.
    """
    sample: _Sample | None = None
    try:
        for member in members:
            key = key_of(member.name)
            if key is None:
                continue
            if sample is None or sample.key != key:
                if sample is not None:
                    yield sample
                sample = _Sample(key)
            sample.members.append(member)
    except BrokenTarError as error:
        if sample is not None and error.sample_is_whole:
            yield sample
            sample = None
        yield _Sample(sample.key if sample else f"byte {error.offset}", broken=str(error))
        return
    if sample is not None:
        yield sample


def _borders(file: IO[bytes]) -> Iterator[int]:
    """Where the first header of each sample begins; a damaged place is left to the chunk that it
    lies in.
    """
    last: str | None = None
    try:
        for member in read_members(file):
            key = key_of(member.name)
            if key is not None and key != last:
                yield member.header
                last = key
    except BrokenTarError:
        return


def _under(folder: str, data_root: str) -> str:
    """What leads from the data root to a folder under it, with a slash at the end unless it is
    empty.
    """
    if not is_uri(folder) and not is_uri(data_root):
        folder, data_root = str(Path(folder).resolve()), str(Path(data_root).resolve())
    folder, data_root = folder.rstrip("/") + "/", data_root.rstrip("/") + "/"
    if not folder.startswith(data_root):
        raise ConfigError(
            f"{folder}: tars hold their own images, so they must lie under the data root {data_root}"
        )
    return folder[len(data_root) :]
