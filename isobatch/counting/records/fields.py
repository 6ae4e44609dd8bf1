"""Objects of raw records, which note what is read of them: `Fields`.

Every schema reads records, turns and parts through these, so that a key that none reads is known
without any list of keys that a new schema could forget.
"""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from math import inf
from typing import Any

NO_MEANING = frozenset(
    {"id", "__key__", "__url__", "source", "url", "URL", "split"}
    | {"width", "height", "width_list", "height_list", "image_wh"}
)
"""Keys that say nothing about what is learned: they are never reported."""
MOST_EXAMPLE = 60
"""Characters of an example."""

Unread = tuple[str, str]
"""Path of a key, such as `messages[].name`, and its value as a short text."""


class Fields(Mapping[str, Any]):
    """An object of a record: `[]` and `get` note the key as read, `peek` and `in` do not."""

    __slots__ = ("_children", "_path", "_read", "_values")

    def __init__(self, values: Mapping[str, Any], path: str = "") -> None:
        """`path` is empty for the record itself, else for example `messages[]`."""
        self._values = values
        self._path = path
        self._read: set[str] = set()
        self._children: list[Fields] = []

    def __getitem__(self, key: str) -> Any:
        self._read.add(key)
        return self._values[key]

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key, which is noted as read."""
        self._read.add(key)
        return self._values.get(key, default)

    def peek(self, key: str) -> Any:
        """The value of a key or None; the key is not noted."""
        return self._values.get(key)

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def overlaid(self, values: Mapping[str, Any]) -> "Fields":
        """These fields with some values replaced; what is read of them is read of these."""
        other = copy(self)
        other._values = {**self._values, **values}
        return other

    def inner(self, values: Any, key: str) -> Any:
        """An object inside of this one, at `key`, as fields of its own; other values as they are.

        >>> record = Fields({"messages": [{"role": "user", "name": "Eve"}]})
        >>> record.inner(record["messages"][0], "messages[]")["role"]
        'user'
        >>> list(record.unread())
        [('messages[].name', '"Eve"')]
        """
        if type(values) is not dict and (  # a test for `Mapping` takes ten times as long
            not isinstance(values, Mapping) or isinstance(values, Fields)
        ):
            return values
        fields = Fields(values, f"{self._path}.{key}" if self._path else key)
        self._children.append(fields)
        return fields

    def path(self, key: str) -> str:
        """Path of a key, for messages."""
        return f"{self._path}.{key}" if self._path else key

    def unread(self) -> Iterator[Unread]:
        """The keys with a value that were never read, here and in the objects inside."""
        for key, value in self._values.items():
            if key not in self._read and key not in NO_MEANING and not is_empty(value):
                yield self.path(str(key)), example_of(value)
        for fields in self._children:
            yield from fields.unread()


def is_empty(value: Any) -> bool:
    """Whether a value says nothing: None, which pads tables, and what holds nothing."""
    return value is None or (isinstance(value, str | bytes | list | tuple | dict) and not value)


def example_of(value: Any) -> str:
    """A value as a short text: JSON, as far as it is that.

    >>> example_of(["A", "B"]), example_of(b"xy"), example_of("word " * 40)[-9:]
    ('["A", "B"]', 'bytes of 2', 'word w...')
    """
    if isinstance(value, bytes):
        return f"bytes of {len(value):,}"
    try:
        text = json.dumps(_cut(value), ensure_ascii=False, default=lambda item: type(item).__name__)
    except (ValueError, TypeError, RecursionError):
        text = type(value).__name__
    text = text.encode("utf-8", "replace").decode()
    return text if len(text) <= MOST_EXAMPLE else f"{text[: MOST_EXAMPLE - 3]}..."


def _cut(value: Any) -> Any:
    """The beginning of a long value, for its text is cut anyway."""
    if isinstance(value, str):
        return value[:MOST_EXAMPLE]
    if isinstance(value, list | tuple):
        return [_cut(item) for item in value[:MOST_EXAMPLE]]
    return value


# --- over many records ---

MOST_PATHS = 200
"""Paths to tell apart, of a source: records whose keys are data would have millions."""
OTHERS = "(other keys)"

NeverRead = dict[str, tuple[int | None, str]]
"""Path -> records that have it, and its first value, in the order of appearance.

None for a column of a table that was not opened, so that nobody knows how many rows have a value;
0 for a key of what describes the dataset.
"""


def unread_texts(unread: Sequence[Unread]) -> tuple[str, str] | None:
    """The unread paths of a record and their values, as JSON each; None without any.

    Two texts, because those of the paths are the same few in all records of a source.
    """
    by_path = dict(reversed(unread))
    if not by_path:
        return None
    paths, values = zip(*reversed(by_path.items()), strict=True)
    # a key may hold half of a surrogate pair, which no table takes
    valid = [path.encode("utf-8", "backslashreplace").decode() for path in paths]
    return json.dumps(valid, ensure_ascii=False), json.dumps(values, ensure_ascii=False)


def never_read(rows: Iterable[tuple[str, int, str]]) -> NeverRead:
    """What records have that was never read.

    `rows`: paths as `unread_texts` gives them, the records with these, and the values of the first;
    in the order of those first records.
    """
    known: NeverRead = {}
    for paths, number, values in rows:
        pairs = zip(json.loads(paths), json.loads(values), strict=True)
        add_never_read(known, {path: (number, value) for path, value in pairs})
    return known


def add_never_read(known: NeverRead, more: NeverRead) -> None:
    """Add what later records have."""
    for path, (number, example) in more.items():
        name = path if path in known or len(known) < MOST_PATHS else OTHERS
        before, first = known.get(name, (0, ""))
        total = None if before is None or number is None else before + number
        known[name] = total, first or example


def join_never_read(parts: Iterable[Mapping[str, NeverRead]]) -> dict[str, NeverRead]:
    """What was never read of each source, in several parts of a dataset."""
    joined: dict[str, NeverRead] = {}
    for part in parts:
        for name, paths in part.items():
            add_never_read(joined.setdefault(name, {}), paths)
    return joined


def add_columns(
    known: NeverRead, columns: Mapping[str, str], keep_columns: Collection[str]
) -> None:
    """Add columns that were not opened, each with a value; not those of `keep_columns`."""
    names = [name for name in columns if name not in NO_MEANING and name not in keep_columns]
    add_never_read(known, {name: (None, columns[name]) for name in names})


def add_described(known: NeverRead, unread: Iterable[Unread]) -> None:
    """Add keys of what describes the dataset."""
    add_never_read(known, {path: (0, value) for path, value in unread})


def never_read_line(by_source: Mapping[str, NeverRead], max_paths: int | None = 4) -> str:
    """One line of what was never read, the most frequent first; empty without any.

    >>> never_read_line({"vqa": {"options": (3040, '["A", "B"]'), "level": (12, '"hard"')}})
    'never read: options (3,040 records, e.g. ["A", "B"]), level (12 records, e.g. "hard")'
    """
    joined: NeverRead = {}
    for paths in by_source.values():
        add_never_read(joined, paths)
    listed = sorted(joined.items(), key=lambda item: -inf if item[1][0] is None else -item[1][0])
    texts = [f"{path} ({_records(number)}, e.g. {first})" for path, (number, first) in listed]
    if max_paths is not None and len(texts) > max_paths + 1:
        texts[max_paths:] = [f"and {len(texts) - max_paths} more"]
    return f"never read: {', '.join(texts)}" if texts else ""


def _records(number: int | None) -> str:
    if not number:
        return "a column" if number is None else "of the dataset"
    return "1 record" if number == 1 else f"{number:,} records"
