"""Checksums of groups and files: XXH3, which costs less than reading the bytes.

They find damage, not forgery: who can change a shard can change the manifest too. A group's is
compared whenever a process first reads it; SHA-256 would take ten times as long.
"""

from typing import IO, Any

from xxhash import xxh3_64_intdigest, xxh3_128

PIECE_BYTES = 1 << 20

group_checksum = xxh3_64_intdigest
"""XXH3 of 64 bits over the byte range of a group: column `checksum` of the index."""


FileChecksum = xxh3_128
"""XXH3 of 128 bits of a file that comes in pieces: in hexadecimal digits in the manifest and by
`xxhsum -H2`.
"""


def file_checksum(file: IO[bytes]) -> tuple[str, int]:
    """(checksum, size) of the rest of a file, which is read in pieces.

    >>> from io import BytesIO
    >>> file_checksum(BytesIO(b"abc"))
    ('06b05ab6733a618578af5f94892f3950', 3)
    """
    checksum = FileChecksum()
    size = 0
    while piece := file.read(PIECE_BYTES):
        checksum.update(piece)
        size += len(piece)
    return checksum.hexdigest(), size


def wrong_bytes(checksum: int, whose: str, content: Any) -> str:
    """What is wrong with bytes that should have `checksum`; empty if they have it.

    >>> wrong_bytes(0x78AF5F94892F3950, "the index says", b"abc")
    ''
    """
    if group_checksum(content) == checksum:
        return ""
    return f"its bytes have another checksum than {whose}"
