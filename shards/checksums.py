"""Checksums of groups and files: XXH3, which costs less than reading the bytes.

They find damage, not forgery: who can change a shard can change the manifest too. A group's is
compared whenever a process first reads it; SHA-256 would take ten times as long.
"""

from __future__ import annotations

from typing import IO, TYPE_CHECKING

from xxhash import xxh3_64_intdigest, xxh3_128

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

PIECE_BYTES = 1 << 20


def group_checksum(content: ReadableBuffer) -> int:
    """XXH3 of 64 bits over the byte range of a group: column `checksum` of the index."""
    return xxh3_64_intdigest(content)


class FileChecksum:
    """XXH3 of 128 bits of a file that comes in pieces, as in the manifest and by `xxhsum -H2`.

    >>> checksum = FileChecksum()
    >>> checksum.add(b"abc")
    >>> checksum.hex
    '06b05ab6733a618578af5f94892f3950'
    """

    def __init__(self) -> None:
        self._state = xxh3_128()

    def add(self, piece: ReadableBuffer) -> None:
        """The next bytes."""
        self._state.update(piece)

    @property
    def hex(self) -> str:
        """The checksum of all bytes so far, 32 hexadecimal digits."""
        return self._state.hexdigest()


def file_checksum(file: IO[bytes]) -> tuple[str, int]:
    """(checksum, size) of the rest of a file, which is read in pieces."""
    checksum, size = FileChecksum(), 0
    while piece := file.read(PIECE_BYTES):
        checksum.add(piece)
        size += len(piece)
    return checksum.hex, size
