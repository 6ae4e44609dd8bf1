"""WebDataset tars: members with one key are one sample.

The webdataset library's rule: the key is a member's path up to the first dot of its last part, and
neighbours with one key belong together. Only headers, `.json` and texts are read; images and audio
files stay where they are, as byte ranges. Compressed tars have no such ranges: webdataset reads
them, and the files' contents come with the records.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import IO

from packer.records.record import RawRecord
from packer.sources._tar_records import (
    BrokenTarError,
    Member,
    broken_record,
    key_of,
    make_record,
    read_compressed,
    read_members,
)
from packer.sources.base import Chunk, Located, Source, cut, opened, prefix_under
from shards.folders import open_folder

WHOLE_TAR_BYTES = 512 << 20
"""Size of a tar that is one chunk at most, so that its headers are read where it is counted."""


@dataclass(frozen=True, slots=True)
class TarChunk:
    """A tar, or successive samples of one."""

    folder: str
    name: str
    container: str
    """Name of the tar under the data root."""
    start: int = 0
    """Offset of the first member's header."""
    end: int | None = None
    """Offset of the first member after the chunk; None: the end of the tar."""
    first: int = 0
    """Number of samples before the chunk."""

    def records(self) -> Iterator[RawRecord]:
        """The samples, in order. A damaged place is one broken record, and ends the tar."""
        with opened(open_folder(self.folder, follow_links=True), self.name) as file:
            compressed = _is_compressed(self.name)
            members = (
                read_compressed(file) if compressed else read_members(file, self.start, self.end)
            )
            for position, sample in enumerate(_samples(members), self.first):
                if sample.broken:
                    yield broken_record(sample.key, sample.broken, self.container, position)
                else:
                    yield make_record(sample.key, sample.members, file, self.container, position)


class TarSource(Source):
    """Samples of tar files."""

    def __init__(self, located: Located, name: str, data_root: str) -> None:
        """ConfigError for tars outside the data root."""
        super().__init__(located, name, data_root)
        self._prefix = prefix_under(located.folder, data_root, "tars")

    def chunks(self, num_records: int, on_bytes: Callable[[int], None]) -> Iterator[Chunk]:
        """Tars, or `num_records` samples of large ones; compressed tars are read here."""
        for info in self.files():
            whole = TarChunk(self.located.folder, info.name, self._prefix + info.name)
            if _is_compressed(info.name):
                yield from cut(whole.records(), num_records)
                on_bytes(info.size)
            elif info.size <= WHOLE_TAR_BYTES:
                yield whole
                on_bytes(info.size)
            else:
                yield from self._cut(whole, num_records, info.size, on_bytes)

    def _cut(
        self, whole: TarChunk, num_records: int, size: int, on_bytes: Callable[[int], None]
    ) -> Iterator[Chunk]:
        start = first = 0
        with opened(self.folder, whole.name) as file:
            for number, border in enumerate(_borders(file)):
                if number - first == num_records:
                    yield replace(whole, start=start, end=border, first=first)
                    on_bytes(border - start)
                    start, first = border, number
        yield replace(whole, start=start, first=first)
        on_bytes(size - start)


@dataclass(slots=True)
class _Sample:
    key: str
    members: list[Member] = field(default_factory=list)
    broken: str = ""


def _is_compressed(name: str) -> bool:
    return name.endswith((".gz", ".tgz"))


def _samples(members: Iterator[Member]) -> Iterator[_Sample]:
    """Neighbours with one key; a damaged place ends them with a broken sample."""
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
    """Offset of the first header of each sample, up to a damaged place."""
    last: str | None = None
    try:
        for member in read_members(file):
            key = key_of(member.name)
            if key is not None and key != last:
                yield member.header
                last = key
    except BrokenTarError:
        return  # the chunk that has it reports it
