"""JSON annotations, streamed in constant memory, past broken records.

A file is read in blocks of 1 MiB and decoded record by record, so memory has one record and one
block, whatever the size of the file: about 100 MB/s, far above what the tokenizer can take. Invalid
JSON costs its record: in JSON lines the line, in an array all up to where the next record begins.
"""

import codecs
import gzip
import hashlib
import json
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import compress, islice
from typing import IO, Any

from isobatch.common.errors import DataError
from isobatch.counting.records.record import MOST_DEPTH, TOO_DEEP, Chunk, RawRecord, is_deep
from isobatch.counting.records.schemas import CONTENT_KEYS
from isobatch.packer.sources.base import (
    FIRST_RECORDS,
    FilePiece,
    OnBytes,
    Source,
    cut,
    even_pieces,
    opened,
    pieces_between,
)
from isobatch.packer.sources.trainers.sampling import Sampling
from isobatch.packer.sources.trainers.subset import Subset
from isobatch.shards.folders import Folder, join

BLOCK_BYTES = 1 << 20
LINE_BYTES = 1 << 14
"""Bytes that are read at a time to find the end of a line."""
MAX_RECORD_CHARS = 64 << 20
"""Length of a record at most; what looks longer is a quote that never closes."""

MAX_BRACKETS = 1_000_000
"""Depth from which on the end of a value is not looked for."""

Parsed = tuple[Any, str]
"""A value, and why it is broken: empty if it is not."""

_SEPARATORS = re.compile(r"[\s,\ufeff]*")
_NEXT_OBJECT = re.compile(r"(?<=[\n,\[])\s*(?=\{)")
_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*+"|[\[{]|[\]}]', re.DOTALL)


class AnnotationSource(Source):
    """Records of JSON files."""

    def raw_chunks(self, num_records: int, on_bytes: OnBytes) -> Iterator[Chunk]:
        """The records, read here: only a parser finds where one ends."""
        options = dict(self.located.options)
        sampling: Sampling | None = options.get("sampling")
        subset: Subset | None = options.get("subset")
        if sampling is not None or subset is not None:
            total = sum(1 for name in self.located.names for _ in self._records(name))
            names = self.located.names
            records: Iterator[RawRecord]
            records = (record for name in names for record in self._records(name, on_bytes))
            if sampling is not None:
                records = iter(compress(records, sampling.chosen(total)))
            if subset is not None:
                records = iter(islice(records, *subset.borders(total, self.located.folder)))
            yield from cut(records, num_records)
            return
        for piece in self.pieces():
            yield from cut(read_json_records(self.folder, piece, on_bytes=on_bytes), num_records)

    def _records(self, name: str, on_bytes: OnBytes = lambda _: None) -> Iterator[RawRecord]:
        return read_json_records(self.folder, FilePiece(name), on_bytes=on_bytes)

    def cut(self, num_bytes: int) -> list[FilePiece] | None:
        """JSON lines by bytes, arrays between records, compressed files whole.

        An array is read for it, since only a parser finds where a record begins.
        """
        if {"sampling", "subset"} & dict(self.located.options).keys():
            return None
        pieces: list[FilePiece] = []
        for file in self.pieces():
            even = even_pieces(file, num_bytes)
            if file.name.endswith(".gz") or len(even) == 1:
                pieces.append(file)
            elif _has_lines(self.folder, file.name):
                pieces += even
            else:
                pieces += _array_pieces(self.folder, file, num_bytes)
        return pieces

    def aligned(self, piece: FilePiece) -> FilePiece:
        """Pieces of JSON lines between lines; those of arrays are between records already."""
        # of an array, `first` is the number of a record
        if piece.is_file or piece.first != piece.start:
            return piece
        if piece.start == 0 and not _has_lines(self.folder, piece.name):
            return piece
        ends = piece.start, piece.start + piece.size
        with opened(self.folder, piece.name) as raw:
            start, stop = (_line_start(raw, at) for at in ends)
        return replace(piece, start=start, first=start, stop=stop, size=stop - start)

    def bytes_per_record(self) -> float:
        """By the first records of the first file."""
        first = islice(self._records(self.located.names[0]), FIRST_RECORDS)
        lengths = [len(json.dumps(record.value, ensure_ascii=False)) + 2 for record in first]
        packed = 8 if self.located.names[0].endswith(".gz") else 1
        return max(1.0, sum(lengths) / max(1, len(lengths)) / packed)

    def describe(self) -> list[dict[str, Any]]:
        """Name, size and SHA-256 of each file."""
        described = []
        for info in self.files():
            with self.folder.open(info.name) as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
            described.append({"name": info.name, "size": info.size, "sha256": digest})
        return described


def read_json_records(
    folder: Folder, piece: FilePiece, *, on_bytes: OnBytes = lambda _: None
) -> Iterator[RawRecord]:
    """Records of a JSON array or of JSON lines (its first character tells), in file order.

    Of a whole file, or of a part as `AnnotationSource.cut` gives it. Their positions begin at its
    `first`: of JSON lines a byte, for nobody has counted those before. A `.gz` is decompressed.
    `on_bytes` is told of bytes read. DataError for any other file.
    """
    path = join(folder.uri, piece.name)
    try:
        with folder.open(piece.name) as raw:
            file: Any = gzip.GzipFile(fileobj=raw) if piece.name.endswith(".gz") else raw
            beginning = _Window(file, lambda: None)
            has_lines = _lines_in(beginning, path)
            in_brackets = beginning.skip(_SEPARATORS) == "["
            part: Any = _Lines(file, piece) if has_lines else _Range(file, piece)
            window = _Window(part, _progress_in(raw, on_bytes))
            if in_brackets and piece.start == 0:
                window.skip(_SEPARATORS)
                window.advance(1)
            values = (
                _line_records(window)
                if has_lines
                else _array_records(window, in_brackets=in_brackets and piece.stop is None)
            )
            where = f"after byte {piece.start:,}, " if piece.start else ""
            for position, (value, broken) in enumerate(values, piece.first):
                yield RawRecord(position, value, broken and where + broken)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{path}: cannot be read: {reason}") from None


class _Range:
    """The bytes of a piece."""

    def __init__(self, file: IO[bytes], piece: FilePiece) -> None:
        self._file = file
        self._stop = piece.stop
        file.seek(piece.start)

    def read(self, size: int) -> bytes:
        if self._stop is not None:
            size = min(size, self._stop - self._file.tell())
        return self._file.read(size)


class _Lines:
    """The lines that begin in a piece."""

    def __init__(self, file: IO[bytes], piece: FilePiece) -> None:
        self._file = file
        self._stop = piece.stop
        begin = _line_start(file, piece.start)
        file.seek(begin)
        self._has_ended = self._stop is not None and begin >= self._stop

    def read(self, size: int) -> bytes:
        if self._has_ended:
            return b""
        begin = self._file.tell()
        block = self._file.read(size)
        if self._stop is not None and begin + len(block) >= self._stop:
            # the last line begins before `stop`, and ends at the first break from there on
            end = block.find(b"\n", max(self._stop - 1 - begin, 0))
            if end >= 0:
                self._has_ended = True
                self._file.seek(begin + end + 1)  # what is read is where the piece ends
                return block[: end + 1]
        return block


def _line_start(file: IO[bytes], at: int) -> int:
    """Where the first line begins that does not begin before `at`."""
    if at == 0:
        return 0
    file.seek(at - 1)
    while block := file.read(LINE_BYTES):
        if (end := block.find(b"\n")) >= 0:
            return file.tell() - len(block) + end + 1
    return file.tell()


def _has_lines(folder: Folder, name: str) -> bool:
    with opened(folder, name) as raw:
        return _lines_in(_Window(raw, lambda: None), join(folder.uri, name))


def _array_pieces(folder: Folder, file: FilePiece, num_bytes: int) -> list[FilePiece]:
    """An array in pieces of about `num_bytes`: reads it once."""
    borders = [(0, 0)]
    with opened(folder, file.name) as raw:
        window = _Window(raw, lambda: None)
        in_brackets = window.skip(_SEPARATORS) == "["
        window.advance(in_brackets)
        for number, _ in enumerate(_array_records(window, in_brackets=in_brackets), 1):
            # what was read is a little ahead of what was parsed
            if window.num_read >= borders[-1][0] + num_bytes:
                place = window.place()
                if place >= borders[-1][0] + num_bytes and file.size - place > num_bytes // 2:
                    borders.append((place, number))
    return pieces_between(file, borders)


def _progress_in(raw: IO[bytes], on_bytes: OnBytes) -> Callable[[], None]:
    """Tells of bytes of the file, which are fewer than those that come out of it if unpacked."""
    last = raw.tell()

    def report() -> None:
        nonlocal last
        on_bytes(raw.tell() - last)
        last = raw.tell()

    return report


def _lines_in(window: "_Window", path: str) -> bool:
    """Whether a file has JSON lines, by its beginning; DataError for any other content."""
    first = window.skip(_SEPARATORS)
    if first == "[":
        return False
    if first == "{":
        return _is_one_line(window)
    problem = f"begins with {first!r}" if first else "is empty"
    raise DataError(f"{path}: {problem}; a JSON array or JSON lines of records are expected")


class _Window:
    """The undecoded rest of the file: `text[start:]` and what `fill` appends to it."""

    def __init__(self, file: IO[bytes], on_read: Callable[[], None]) -> None:
        # bad bytes become lone surrogates: only the record with them is rejected
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape")
        self._file = file
        self._on_read = on_read
        self.text = ""
        self.start = 0
        self.at_end = False
        self.line = 1
        self.num_read = 0

    def place(self) -> int:
        """Byte of the file at which the undecoded rest begins."""
        rest = self.text[self.start :].encode("utf-8", "surrogateescape")
        pending: bytes = self._decoder.getstate()[0]
        return self.num_read - len(rest) - len(pending)

    def fill(self, at_least: int = 1) -> bool:
        """Append at least so many characters if the file has them; False at its end."""
        wanted = len(self.text) - self.start + at_least
        parts = [self.text[self.start :]]
        self.start = 0
        size = len(parts[0])
        while not self.at_end and size < wanted:
            block = self._file.read(BLOCK_BYTES)
            self.num_read += len(block)
            self._on_read()
            self.at_end = not block
            parts.append(self._decoder.decode(block, self.at_end))
            size += len(parts[-1])
        self.text = "".join(parts)
        return size >= wanted

    def advance(self, count: int) -> None:
        self.line += self.text.count("\n", self.start, self.start + count)
        self.start += count

    def skip(self, pattern: re.Pattern[str]) -> str:
        """Skip what matches and return the next character, empty at the end of the file."""
        while True:
            match = pattern.match(self.text, self.start)
            self.advance(match.end() - self.start if match else 0)
            if self.start < len(self.text):
                return self.text[self.start]
            if not self.fill():
                return ""


# --- a JSON array ---


def _array_records(window: _Window, *, in_brackets: bool = True) -> Iterator[Parsed]:
    decoder = json.JSONDecoder()
    while True:
        first = window.skip(_SEPARATORS)
        if first == "]":
            window.advance(1)
            if window.skip(_SEPARATORS):
                yield None, f"line {window.line}: there is more after the end of the array"
            return
        if first == "":
            if in_brackets:
                yield None, f"line {window.line}: the file ends before the array does"
            return
        line = window.line
        value, error = _decode_one(decoder, window)
        broken = f"line {line}: {error}" if error else ""
        if error and error != TOO_DEEP:  # where that ends is known
            _resynchronise(decoder, window)
        yield value, broken


def _decode_one(decoder: json.JSONDecoder, window: _Window) -> Parsed:
    """Decode the value at the window's start and skip it; reads on while it may be incomplete."""
    while True:
        start, length = window.start, len(window.text) - window.start
        try:
            (value, end), deep = decoder.raw_decode(window.text, start), False
        except ValueError as error:
            if not _may_continue(error, window) or length > MAX_RECORD_CHARS:
                return None, str(error).split(": line ", 1)[0]
            window.fill(length)
            continue
        except RecursionError:
            value, end, deep = None, _end_of_brackets(window.text, start), True
            if end <= start:
                if end < start or window.at_end or length > MAX_RECORD_CHARS:
                    return None, f"{TOO_DEEP}, and does not end"
                window.fill(length)
                continue
        if end == len(window.text) and window.fill():
            continue
        deep = deep or _is_deep(value, window.text, start, end)
        window.advance(end - start)
        return (None, TOO_DEEP) if deep else (value, "")


def _is_deep(value: Any, text: str, start: int, end: int) -> bool:
    """`is_deep` of what was decoded; few texts have so many brackets at all."""
    brackets = text.count("[", start, end) + text.count("{", start, end)
    return brackets > MOST_DEPTH and is_deep(value)


def _end_of_brackets(text: str, start: int) -> int:
    """Where the value that begins with a bracket ends; `start` if not in this text.

    -1 for one that is MAX_BRACKETS deep: to look for its end in a gigabyte takes minutes.
    """
    depth = 0
    for match in _BRACKETS.finditer(text, start):
        depth += (match[0] in "[{") - (match[0] in "]}")
        if depth == 0:
            return match.end()
        if depth > MAX_BRACKETS:
            return -1
    return start


def _may_continue(error: ValueError, window: _Window) -> bool:
    """Whether the rest of the file could make it valid (an open string may continue)."""
    if window.at_end or not isinstance(error, json.JSONDecodeError):
        return False
    return error.msg.startswith("Unterminated string") or len(window.text) - error.pos < 32


def _resynchronise(decoder: json.JSONDecoder, window: _Window) -> None:
    """Move to the next record: an object that decodes and has content; else to the file's end."""
    window.advance(1)
    while True:
        for match in _NEXT_OBJECT.finditer(window.text, window.start):
            if _is_record(decoder, window.text, match.end()):
                window.advance(match.end() - window.start)
                return
        length = len(window.text) - window.start
        if window.at_end or length > MAX_RECORD_CHARS:
            window.advance(length)
        if window.at_end:
            return
        window.fill(max(length, BLOCK_BYTES))  # doubling keeps the repeated scans linear in total


def _is_record(decoder: json.JSONDecoder, text: str, start: int) -> bool:
    try:
        value, _ = decoder.raw_decode(text, start)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and any(key in value for key in CONTENT_KEYS)


# --- JSON lines ---


def _is_one_line(window: _Window) -> bool:
    """Whether the first line is a whole record (JSON lines), or only the beginning of one."""
    end = _line_end(window)  # first: it may read on
    line = window.text[window.start : end]
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        # a broken first record of JSON lines also has braces at both ends
        return line.rstrip().endswith("}")
    return True


def _line_end(window: _Window) -> int:
    """End of the line at the window's start; reads as much as needed, up to MAX_RECORD_CHARS."""
    searched = 0
    while (end := window.text.find("\n", window.start + searched)) < 0:
        searched = len(window.text) - window.start
        if window.at_end or searched > MAX_RECORD_CHARS:
            return len(window.text)
        window.fill(max(searched, BLOCK_BYTES))
    return end


def _line_records(window: _Window) -> Iterator[Parsed]:
    while window.skip(_SEPARATORS):
        end = _line_end(window)
        line = window.text[window.start : end]
        number = window.line
        window.advance(end - window.start)
        try:
            value, broken = json.loads(line), ""
            if _is_deep(value, line, 0, len(line)):
                value, broken = None, TOO_DEEP
        except (ValueError, RecursionError) as error:
            if len(line) > MAX_RECORD_CHARS:  # the rest of it
                while (end := _line_end(window)) == len(window.text) and not window.at_end:
                    window.advance(end - window.start)
                window.advance(end - window.start)
            is_value = isinstance(error, ValueError)
            value, broken = None, str(error).split(": line ", 1)[0] if is_value else TOO_DEEP
        yield value, f"line {number}: {broken}" if broken else ""
