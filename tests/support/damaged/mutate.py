"""Changes to a file's bytes and structure, drawn by a generator: for `scripts/fuzz.py`.

Bytes are flipped, removed, repeated, spliced with another file's, or a number in them becomes an
extreme one. Where a file is JSON, its values change too (`support.damaged.changes`). Pure.
"""

import gzip
import json
import random
import struct
import zlib

from support.damaged.changes import ONLY_JSON, damaged_values

EXTREMES = (0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 1 << 62)
FORMATS = (">H", "<H", ">I", "<I", ">Q", "<Q")
MOST_BYTES = 1 << 20
"""Bytes of a case at most: more only takes time."""
JSON_STARTS = (b"{", b"[")
DEEP = ("[" * 100_000, '{"a":' * 100_000, "[" * 300 + "]" * 300)
"""Nesting beyond every parser's stack, and just beyond our own limit."""


def mutate(content: bytes, rng: random.Random, others: list[bytes], tokens: tuple[bytes, ...]):
    """A changed copy of a file; `others` are files to splice, `tokens` what the format knows."""
    if content[:2] == b"\x1f\x8b" and rng.random() < 0.8:
        try:
            inside = gzip.decompress(content)
        except (OSError, EOFError, zlib.error):
            inside = b""
        if inside:
            return gzip.compress(mutate(inside, rng, others, tokens), 1)
    if content.lstrip()[:1] in JSON_STARTS and rng.random() < 0.6:
        changed = _mutate_json(content, rng)
        if changed is not None:
            return changed[:MOST_BYTES]
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 3, 6))):
        _change(data, rng, others, tokens)
    return bytes(data[:MOST_BYTES])


def _mutate_json(content: bytes, rng: random.Random) -> bytes | None:
    """A file of JSON, or of JSON lines, with other values; None if it is neither."""
    if rng.random() < 0.02:
        text = content.decode("utf-8", "replace")
        place = rng.randrange(len(text) + 1)
        return (text[:place] + rng.choice(DEEP) + text[place:]).encode()
    try:
        values = json.loads(content)
        is_lines = False
    except (ValueError, RecursionError):
        try:
            values = [json.loads(line) for line in content.splitlines() if line.strip()]
            is_lines = True
        except (ValueError, RecursionError):
            return None
    try:
        changed = damaged_values(values, rng, ONLY_JSON)
        if is_lines and isinstance(changed, list):
            return "\n".join(map(json.dumps, changed)).encode()
        return json.dumps(changed).encode()
    except (ValueError, RecursionError, TypeError):
        return None


def _change(data: bytearray, rng: random.Random, others: list[bytes], tokens) -> None:
    size = len(data)
    place = rng.randrange(size + 1)
    match rng.randrange(11):
        case 0 | 1 if place < size:
            data[place] ^= 1 << rng.randrange(8)
        case 2 if place < size:
            data[place] = rng.choice((0, 1, 0x7F, 0x80, 0xFE, 0xFF, rng.randrange(256)))
        case 3:
            del data[place : place + rng.choice((1, 2, 4, 16, 100, 1000))]
        case 4:
            start = rng.randrange(size + 1)
            data[place:place] = data[start : start + rng.choice((1, 4, 16, 512, 2000))]
        case 5:
            del data[place:]
        case 6 | 7:
            form = rng.choice(FORMATS)
            value = rng.choice(EXTREMES) + rng.choice((0, 0, -1, 1))
            packed = struct.pack(form, value % (1 << 8 * struct.calcsize(form)))
            data[place : place + len(packed)] = packed
        case 8 if others:
            other = rng.choice(others)
            start = rng.randrange(len(other) + 1)
            data[place : place + rng.choice((0, 50, size))] = other[start : start + 2000]
        case 9 if tokens:
            token = rng.choice(tokens)
            end = place + (len(token) if rng.random() < 0.5 else 0)
            data[place:end] = token
        case _:
            start = rng.randrange(size + 1)
            piece = data[start : start + rng.choice((1, 3, 8, 40))]
            data[place:place] = piece * rng.choice((2, 10, 100))
