"""Marks of places other than `<image>`, and which file each means. Pure.

For `counting.records.schemas`. A mark is rewritten to the marker of its kind, and the files are put
into the order of the text, so that all that follows knows markers in order and nothing else. Kinds:

- a plain mark (`<IMAGE>`, `<|image|>`, `<img></img>`, `<ImageHere>`, the model's own token) takes
  the next file that no other mark names, as a marker does;
- a numbered one (`<image1>`, `<image 1>`, `<|image_1|>`) means the file of that number, from 1, or
  that of the column `image_1`; from 0 if a 0 is among the numbers and all of them fit;
- one with a path (`<img>a.jpg</img>`) means the file of that name; or is the file, in a record that
  has none.

A mark that means no file, or one that another has taken, cannot be matched: too many marks, a
number twice, a number or a name that the record does not have. Markers come first: next to as many
markers as files, marks are letters about those files (GIMP's menu `<Image>`), but for a number that
none of them has. Files without a mark come before the first question. A record without files of a
kind keeps the letters of its marks.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain

from isobatch.counting.records.fields import Fields
from isobatch.counting.records.media import (
    Media,
    SampleProblem,
    files_of,
    files_under,
    marked_files,
    media_of,
)
from isobatch.counting.records.reading import Reading
from isobatch.counting.text.chat_tokenizer import AUDIO_MARKER, IMAGE_MARKER, VIDEO_MARKER, Turn

MARKERS = {"image": IMAGE_MARKER, "video": VIDEO_MARKER, "audio": AUDIO_MARKER}
_NAMES = {"image": "image|img", "video": "video|vid", "audio": "audio"}
"""Words of marks, in small letters; they are found in any letters."""
_SUFFIXES = {
    "image": ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "avif", "heic"),
    "video": ("mp4", "webm", "mkv", "avi", "mov", "gif", "mpg", "mpeg", "flv", "wmv"),
    "audio": ("wav", "flac", "mp3", "ogg", "opus", "m4a"),
}
"""What tells a path between tags from other words, where a record has no such file."""
_MOST_COLUMNS = 32
NUMBERED_KEYS: Mapping[str, tuple[str, int]] = {
    f"{kind}{between}{number}": (kind, number)
    for kind in MARKERS
    for between in ("", "_")
    for number in range(_MOST_COLUMNS + 1)
}
"""Columns of one file each (MMMU's `image_1`, ...) -> their kind and number."""
_COLUMN_NAMES = frozenset(NUMBERED_KEYS)

Edit = tuple[int, int, str]
"""Start and end of characters, and what replaces them."""


@dataclass(frozen=True, slots=True)
class _Mark:
    turn: int
    start: int
    end: int
    text: str
    is_marker: bool
    number: int | None = None
    path: str | None = None

    @property
    def is_named(self) -> bool:
        """Whether it says which file it means."""
        return self.number is not None or self.path is not None


# --- the files of a record ---


def record_files(record: Fields, kind: str) -> list[Media]:
    """The files of a kind, under a key of FILE_KEYS or in numbered columns; SampleProblem if both.

    Both are taken if the key lists the columns' files too.
    """
    files = files_of(record, kind)
    columns = _columns(record, kind)
    numbered = [file for files in columns.values() for file in files]
    if files and any(file not in files for file in numbered):
        bad = f"`{kind}` and numbered columns hold different files; give all of them under one key"
        raise SampleProblem(f"bad_{kind}_field", bad)
    return files or numbered


def column_numbers(record: Fields) -> dict[str, tuple[int, ...]]:
    """Kind -> numbers of the columns that its files are from, if each is from one of them."""
    numbers = {}
    for key in ("image", "images"):
        if isinstance(value := record.peek(key), Mapping) and (marks := marked_files(value)):
            numbers["image"] = tuple(marks)
    if _COLUMN_NAMES.isdisjoint(record):  # most records
        return numbers
    keys = [key for key in record if key in NUMBERED_KEYS]
    for kind in {NUMBERED_KEYS[key][0] for key in keys}:
        # of a copy, for these files may not be those that are used
        columns = _columns(Fields({key: record.peek(key) for key in keys}), kind)
        if columns and all(len(files) == 1 for files in columns.values()):
            numbers[kind] = tuple(columns)
    return numbers


def _columns(record: Fields, kind: str) -> dict[int, list[Media]]:
    """Number -> the files of that column, by number; none for columns without any."""
    if _COLUMN_NAMES.isdisjoint(record):
        return {}
    keys = [key for key in record if key in NUMBERED_KEYS and NUMBERED_KEYS[key][0] == kind]
    keys.sort(key=lambda key: NUMBERED_KEYS[key])
    columns = {NUMBERED_KEYS[key][1]: files_under(record, key, kind) for key in keys}
    return {number: files for number, files in columns.items() if files}


# --- texts ---


def edited(turn: Turn, edits: Sequence[Edit]) -> Turn:
    """A turn with parts of its text replaced; the characters that are learned move with them.

    `edits` are disjoint and in order. What is learned in part is learned as a whole.

    >>> edited(Turn("user", "a<img>b", learned=((0, 1), (6, 7))), [(1, 6, "<image>")]).learned
    ((0, 1), (8, 9))
    """
    if not edits:
        return turn
    pieces = []
    last = 0
    for start, end, new in edits:
        pieces += [turn.text[last:start], new]
        last = end
    text = "".join([*pieces, turn.text[last:]])
    if not isinstance(turn.learned, tuple):
        return replace(turn, text=text)
    spans = [(_moved(start, edits), _moved(end, edits, is_end=True)) for start, end in turn.learned]
    return replace(turn, text=text, learned=tuple(spans))


def _moved(place: int, edits: Sequence[Edit], *, is_end: bool = False) -> int:
    """Place of a character after the edits; inside of one, its beginning or its end."""
    shift = 0
    for start, end, new in edits:
        if end <= place:
            shift += len(new) - (end - start)
        elif start < place:
            return start + shift + len(new) * is_end
    return place + shift


def place_marks(
    turns: tuple[Turn, ...],
    kind: str,
    files: Sequence[Media],
    reading: Reading,
    numbers: Sequence[int] = (),
) -> tuple[tuple[Turn, ...], Sequence[Media]]:
    """Turns whose marks of a kind are markers, and the files in their order.

    `numbers`: those of the files' columns. There may be fewer markers than files then, as in a text
    that has markers alone. SampleProblem (`unknown_mark`) for a mark that cannot be matched, unless
    `Reading.unknown_marks` keeps it as text.
    """
    if not files:
        return _with_paths(turns, kind)
    tokens = _tokens(kind, reading)
    if not _has_others("\0".join([turn.text for turn in turns]), MARKERS[kind], tokens):
        return turns, files
    by_turn = (_find(turn, number, kind, tokens) for number, turn in enumerate(turns))
    marks = list(chain.from_iterable(by_turn))
    if all(mark.is_marker for mark in marks):
        return turns, files
    named = _named(marks, files, numbers if len(numbers) == len(files) else ())
    taken, unknown, named = _matched(marks, named, len(files))
    if unknown and reading.unknown_marks == "reject":
        raise _problem(unknown[0], kind, files)
    return _placed(turns, kind, files, taken, named)


def _matched(
    marks: Sequence[_Mark], named: dict[_Mark, int], num_files: int
) -> tuple[list[_Mark], list[_Mark], dict[_Mark, int]]:
    """Marks that are places, those that match no file, and the files that some of them name."""
    num_markers = sum(mark.is_marker for mark in marks)
    if num_markers == num_files:  # the other marks are letters about files that have their places
        known = {mark.number for mark in named}
        wrong = (mark for mark in marks if mark.number is not None and mark.number not in known)
        return [mark for mark in marks if mark.is_marker], list(wrong), {}
    num_free = num_files - len(named) - num_markers
    if num_free < 0:  # the markers are places
        num_free += len(named)
        named = {}
    taken: list[_Mark] = []
    unknown: list[_Mark] = []
    for mark in marks:
        if mark.is_marker or mark in named:
            taken.append(mark)
        elif mark.is_named or num_free <= 0:
            unknown.append(mark)
        else:
            taken.append(mark)
            num_free -= 1
    return taken, unknown, named


def _placed(
    turns: tuple[Turn, ...],
    kind: str,
    files: Sequence[Media],
    taken: Sequence[_Mark],
    named: Mapping[_Mark, int],
) -> tuple[tuple[Turn, ...], Sequence[Media]]:
    """Turns with a marker for each mark taken, and the files in the order of the text."""
    marker = MARKERS[kind]
    edits: list[list[Edit]] = [[] for _ in turns]
    for mark in taken:
        edits[mark.turn].append((mark.start, mark.end, marker))
    order: Sequence[Media] = files
    if named:
        # files are not in the order of the text: those without a mark get their places here
        num_missing = max(0, len(files) - len(taken))
        first = first_question(turns)
        edits[first].insert(0, (0, 0, f"{marker}\n" * num_missing))
        meant = [mark for mark in taken if mark.turn < first]
        places = [*meant, *[None] * num_missing, *taken[len(meant) :]]
        are_named = set(named.values())
        rest = iter([index for index in range(len(files)) if index not in are_named])
        order = [
            files[named[mark] if mark is not None and mark in named else next(rest)]
            for mark in places
        ]
    pairs = zip(turns, edits, strict=True)
    return tuple(edited(turn, turn_edits) for turn, turn_edits in pairs), order


def first_question(turns: Sequence[Turn]) -> int:
    """The turn that files without a place go before: the first of the user, or the first."""
    return next((number for number, turn in enumerate(turns) if turn.role == "user"), 0)


def _named(
    marks: Sequence[_Mark], files: Sequence[Media], columns: Sequence[int]
) -> dict[_Mark, int]:
    """The file that each mark with a number or a path means; none that two marks mean."""
    numbers = {mark.number for mark in marks if mark.number is not None}
    begin = 0 if 0 in numbers and max(numbers) < len(files) else 1
    of_files = columns or range(begin, begin + len(files))
    index_of = {number: index for index, number in enumerate(of_files)}
    indices: dict[_Mark, int] = {}
    for mark in marks:
        index = None
        if mark.number is not None:
            index = index_of.get(mark.number)
        elif mark.path is not None:
            index = _index_of_path(mark.path, files)
        if index is not None and index not in indices.values():
            indices[mark] = index
    return indices


def _index_of_path(path: str, files: Sequence[Media]) -> int | None:
    """The only file of this path, or whose path ends with it or is its end."""
    names = [file.name for file in files]
    if path in names:
        return names.index(path)
    ends = [
        index
        for index, name in enumerate(names)
        if name.endswith(f"/{path}") or path.endswith(f"/{name}")
    ]
    return ends[0] if len(ends) == 1 else None


def _problem(mark: _Mark, kind: str, files: Sequence[Media]) -> SampleProblem:
    several = f"{len(files)} {kind} file{'s' * (len(files) != 1)}"
    why = f"the places of its {several} are marked already"
    if mark.path is not None:
        why = f"of its {several}, it names none that has no place yet"
    elif mark.number is not None:
        why = f"of its {several}, none with this number has no place yet"
    said = f"{mark.text[:80]!r} in turn {mark.turn}: {why}; --unknown-marks text keeps the letters"
    return SampleProblem("unknown_mark", said)


# --- a record without files ---


def _with_paths(turns: tuple[Turn, ...], kind: str) -> tuple[tuple[Turn, ...], Sequence[Media]]:
    """Turns whose texts give files by path between tags, with a marker for each, and the files."""
    if "</" not in "\0".join([turn.text for turn in turns]):
        return turns, ()
    files: list[Media] = []
    changed = []
    for number, turn in enumerate(turns):
        edits = []
        for mark in _find(turn, number, kind, ()):
            if mark.path is not None and _is_file_name(mark.path, kind):
                files.append(media_of(mark.path, kind))
                edits.append((mark.start, mark.end, MARKERS[kind]))
        changed.append(edited(turn, edits))
    return tuple(changed), files


def _is_file_name(path: str, kind: str) -> bool:
    return path.rpartition(".")[2].lower() in _SUFFIXES[kind]


# --- finding ---


def _tokens(kind: str, reading: Reading) -> tuple[str, ...]:
    """The model's own strings for a file of a kind, the longest first."""
    strings = {
        "image": reading.image_tokens,
        "video": reading.video_tokens,
        "audio": reading.audio_tokens,
    }[kind]
    markers = MARKERS.values()  # SmolVLM2's token of a video is the marker of an image
    tokens = {token for token in strings if token and token not in markers}
    return tuple(sorted(tokens, key=len, reverse=True))


def _has_others(text: str, marker: str, tokens: tuple[str, ...]) -> bool:
    """Whether texts may have marks next to their markers; most have not, and cost no more."""
    return text.count("<") > text.count(marker) or any(token in text for token in tokens)


def _find(turn: Turn, number: int, kind: str, tokens: tuple[str, ...]) -> Iterator[_Mark]:
    """Marks and markers of a kind in a turn, in order."""
    text = turn.text
    marker = MARKERS[kind]
    for match in _pattern(kind, tokens).finditer(text):
        start, end = match.span()
        path = match["path"]
        if path and match["tag"] == marker[1:-1] and not _is_file_name(path, kind):
            # words between <image> and </image>: a marker, as without the closing tag
            end, path = start + len(marker), None
        is_marker = text[start:end] == marker
        digits = match["number"]
        yield _Mark(
            number,
            start,
            end,
            text[start:end],
            is_marker,
            int(digits) if digits else None,
            path or None,
        )


@lru_cache(maxsize=64)
def _pattern(kind: str, tokens: tuple[str, ...]) -> re.Pattern[str]:
    names = _NAMES[kind]
    exact = [re.escape(token) for token in tokens]
    tagged = rf"(?i:<(?P<tag>{names})>(?P<path>[^<>\n]{{0,1024}})</(?P=tag)>)"
    plain = rf"(?i:<(?P<bar>\|)?(?:{names})(?:[ _#-]?(?P<number>[0-9]{{1,4}}))?(?(bar)\|)>)"
    here = rf"(?i:<(?:{names})[ _-]?(?:here|placeholder)>)"
    return re.compile("|".join([*exact, tagged, plain, here]))
