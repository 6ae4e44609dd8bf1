"""The members of a tar, by their headers alone: nothing is skipped in silence, and damage is found
where it is.

Python's tarfile decodes the headers (GNU and POSIX long names among them); its own iteration is not
used, because it takes a damaged header in the middle for the end, and a tar behind another tar for
nothing.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO

BLOCK = tarfile.BLOCKSIZE
ZEROS = bytes(BLOCK)


@dataclass(frozen=True, slots=True)
class Member:
    """A file in a tar."""

    name: str
    header: int
    """Where its header begins."""
    offset: int
    """Where its content begins."""
    size: int
    is_file: bool
    """False for links and the like, which have no content of their own."""


class BrokenTarError(ValueError):
    """A tar that is damaged or cut at some place."""

    def __init__(self, what: str, offset: int, *, sample_is_whole: bool = False) -> None:
        super().__init__(f"{what} at byte {offset}; nothing behind it is read")
        self.offset = offset
        self.sample_is_whole = sample_is_whole
        """Whether the members in front of it look like a whole sample."""


def read_members(file: IO[bytes], start: int = 0, end: int | None = None) -> Iterator[Member]:
    """The members whose headers lie in [start, end), folders left out. BrokenTarError where it is
    damaged.

    Tars that stand one behind the other in one file are read as one.
    """
    size = file.seek(0, 2)
    archive = _archive(file)
    offset, ended = start, False
    while end is None or offset < end:
        file.seek(offset)
        block = file.read(BLOCK)
        if not block and not ended:
            # a tar that ends with a whole block may come from a writer that sets no mark
            raise BrokenTarError(
                "the tar has no end mark and may be cut", offset, sample_is_whole=offset == size
            )
        if not block:
            return
        ended = block == ZEROS
        if ended:
            offset += BLOCK
            continue
        file.seek(offset)
        member, following = _member(archive, offset)
        if following <= offset or (member is not None and member.offset + member.size > size):
            raise BrokenTarError(
                "the tar ends inside a file" if following > size else "a damaged header", offset
            )
        if member is not None:
            yield member
        offset = following


def _archive(file: IO[bytes]) -> tarfile.TarFile:
    """Only to decode headers with."""
    file.seek(0)
    try:
        return tarfile.TarFile(fileobj=file)
    except (tarfile.TarError, ValueError, OverflowError) as error:
        raise BrokenTarError(f"a damaged or cut header ({error})", 0) from None


def _member(archive: tarfile.TarFile, offset: int) -> tuple[Member | None, int]:
    """The member at the archive's place, None for a folder, and where the next header begins."""
    try:
        info = tarfile.TarInfo.fromtarfile(archive)
    except (tarfile.TarError, ValueError, OverflowError) as error:
        raise BrokenTarError(f"a damaged or cut header ({error})", offset) from None
    # set by `fromtarfile`: behind the content, whatever kind of member it is
    following = int(archive.offset)
    if info.isdir():
        return None, following
    is_file = info.isreg() and not info.issparse()
    return Member(
        info.name, offset, info.offset_data, info.size if is_file else 0, is_file
    ), following
