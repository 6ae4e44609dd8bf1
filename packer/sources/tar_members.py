"""Members of a tar, read past what tarfile takes for its end.

Python's tarfile decodes the headers (GNU and POSIX long names among them). Its own iteration is not
used, because it takes a damaged header in the middle for the end, and skips a tar that follows
another tar.
"""

import gzip
import re
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO

BLOCK = tarfile.BLOCKSIZE
ZEROS = bytes(BLOCK)
MOST_PACKED_BYTES = 256 << 20
"""Bytes of a sample's files in a compressed tar, which are in memory at once."""
_META = re.compile(r"__[^/]*__($|/)")
"""Names of members that webdataset leaves out."""


@dataclass(frozen=True, slots=True)
class Member:
    """A file in a tar; `header` and `offset` are where its header and its content begin."""

    name: str
    header: int
    offset: int
    size: int
    is_file: bool
    """False for links and the like, which have no content of their own."""
    data: bytes | None = None
    """Content, in a compressed tar."""


class BrokenTarError(ValueError):
    """A tar that is damaged or cut at some place."""

    def __init__(self, what: str, offset: int, *, sample_is_whole: bool = False) -> None:
        super().__init__(f"{what} at byte {offset}; nothing after it is read")
        self.offset = offset
        self.sample_is_whole = sample_is_whole
        """Whether the members before it look like a whole sample."""


def read_members(file: IO[bytes], start: int = 0, end: int | None = None) -> Iterator[Member]:
    """The members whose headers are in [start, end), without folders.

    BrokenTarError where the tar is damaged. Several tars in one file are read as one.
    """
    size = file.seek(0, 2)
    archive = _archive(file)
    offset = start
    ended = False
    while end is None or offset < end:
        file.seek(offset)
        block = file.read(BLOCK)
        if not block and not ended:
            # a tar that ends with a whole block may come from a writer that sets no mark
            what = "the tar has no end mark and may be cut"
            raise BrokenTarError(what, offset, sample_is_whole=offset == size)
        if not block:
            return
        ended = block == ZEROS
        if ended:
            offset += BLOCK
            continue
        file.seek(offset)
        member, following = _member(archive, offset)
        if following <= offset or (member is not None and member.offset + member.size > size):
            what = "the tar ends inside a file" if following > size else "a damaged header"
            raise BrokenTarError(what, offset)
        if member is not None:
            yield member
        offset = following


def read_compressed(file: IO[bytes]) -> Iterator[Member]:
    """The members of a compressed tar, with their contents. BrokenTarError where it is damaged.

    A file of more than MOST_PACKED_BYTES ends it: a few kilobytes would be unpacked to as many GB.
    """
    unpacked = gzip.GzipFile(fileobj=file)
    try:
        archive = tarfile.open(fileobj=unpacked, mode="r|")  # noqa: SIM115 - ends with the file
        for info in archive:
            if not info.isreg() or _META.match(info.name):
                continue
            if info.size > MOST_PACKED_BYTES:
                what = f"a file of {info.size:,} bytes in a compressed tar, which is too large,"
                raise BrokenTarError(what, file.tell())
            content = archive.extractfile(info)
            data = content.read() if content else b""
            yield Member(info.name, 0, 0, len(data), True, data)
            archive.members.clear()  # type: ignore[attr-defined]
        while unpacked.read(1 << 20):
            pass  # up to the checksum: tarfile takes damage in the middle for the end
    except (tarfile.TarError, zlib.error, EOFError, OSError, OverflowError) as error:
        raise BrokenTarError(f"damaged or cut ({error})", file.tell()) from None


def _archive(file: IO[bytes]) -> tarfile.TarFile:
    """The tar as tarfile opens it, only to decode headers with."""
    file.seek(0)
    try:
        return tarfile.TarFile(fileobj=file)
    except (tarfile.TarError, ValueError, OverflowError) as error:
        raise BrokenTarError(f"a damaged or cut header ({error})", 0) from None


def _member(archive: tarfile.TarFile, offset: int) -> tuple[Member | None, int]:
    """The member at the archive's place, None for a folder, and the offset of the next header."""
    try:
        info = tarfile.TarInfo.fromtarfile(archive)
    except (tarfile.TarError, ValueError, OverflowError) as error:
        raise BrokenTarError(f"a damaged or cut header ({error})", offset) from None
    # set by `fromtarfile`: after the content, whatever kind of member it is
    following = int(archive.offset)
    if info.isdir():
        return None, following
    is_file = info.isreg() and not info.issparse()
    size = info.size if is_file else 0
    return Member(info.name, offset, info.offset_data, size, is_file), following
