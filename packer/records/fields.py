"""Objects of raw records, which note what is read of them: `Fields`.

Every schema reads records, turns and parts through these, so that a key that none reads is known
without any list of keys that a new schema could forget.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

NO_MEANING = frozenset(
    {"id", "__key__", "__url__", "source", "url", "URL", "width", "height", "split"}
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

    def inner(self, values: Any, key: str) -> Any:
        """An object inside of this one, at `key`, as fields of its own; other values as they are.

        >>> record = Fields({"messages": [{"role": "user", "name": "Eve"}]})
        >>> record.inner(record["messages"][0], "messages[]")["role"]
        'user'
        >>> list(record.unread())
        [('messages[].name', '"Eve"')]
        """
        if not isinstance(values, Mapping) or isinstance(values, Fields):
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
    ('["A", "B"]', 'bytes of 2', ' word wor...')
    """
    if isinstance(value, bytes):
        return f"bytes of {len(value):,}"
    try:
        text = json.dumps(_cut(value), ensure_ascii=False, default=lambda each: type(each).__name__)
    except (ValueError, TypeError, RecursionError):
        text = type(value).__name__
    text = text.encode("utf-8", "replace").decode()
    return text if len(text) <= MOST_EXAMPLE else f"{text[: MOST_EXAMPLE - 3]}..."


def _cut(value: Any) -> Any:
    """The beginning of a long value, for its text is cut anyway."""
    if isinstance(value, str):
        return value[:MOST_EXAMPLE]
    if isinstance(value, list | tuple):
        return [_cut(each) for each in value[:MOST_EXAMPLE]]
    return value


# --- over many records ---

MOST_PATHS = 200
"""Paths to tell apart, of a source: records whose keys are data would have millions."""
OTHERS = "(other keys)"


class UnreadCounts:
    """Paths that were never read: number of records, and the first value."""

    def __init__(self, found: Mapping[str, tuple[int, str]] | None = None) -> None:
        self._found: dict[str, tuple[int, str]] = dict(found or {})

    def add(self, path: str, number: int, example: str) -> None:
        """Count `number` more records with this path."""
        if path not in self._found and len(self._found) >= MOST_PATHS:
            path = OTHERS
        before, first = self._found.get(path, (0, example))
        self._found[path] = before + number, first

    def add_record(self, unread: Iterable[Unread]) -> None:
        """Count the unread paths of a record, each once."""
        for path, example in dict(reversed(list(unread))).items():
            self.add(path, 1, example)

    def update(self, others: "UnreadCounts") -> None:
        """Count those of more records, which come after."""
        for path, (number, example) in others._found.items():
            self.add(path, number, example)

    def without(self, takes: Callable[[str], bool]) -> "UnreadCounts":
        """Those whose path is not taken otherwise."""
        return UnreadCounts({p: each for p, each in self._found.items() if not takes(p)})

    def as_json(self) -> dict[str, list[Any]]:
        """Path -> [records, example], in the order of appearance."""
        return {path: list(each) for path, each in self._found.items()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "UnreadCounts":
        """What `as_json` gave."""
        return cls({path: (int(number), str(first)) for path, (number, first) in values.items()})

    def __bool__(self) -> bool:
        return bool(self._found)


def unread_line(found: Mapping[str, Mapping[str, Any]], most: int = 4) -> str:
    """One line of what was never read, by source -> path -> [records, example].

    >>> unread_line({"vqa": {"options": [3040, '["A", "B"]'], "level": [12, '"hard"']}})
    'never read: options (3,040 records, e.g. ["A", "B"]), level (12 records, e.g. "hard")'
    """
    joined = UnreadCounts()
    for paths in found.values():
        joined.update(UnreadCounts.from_json(paths))
    listed = sorted(joined.as_json().items(), key=lambda each: -each[1][0])
    told = [f"{path} ({_records(number)}, e.g. {first})" for path, (number, first) in listed]
    if len(told) > most:
        told[most:] = [f"and {len(told) - most} more"]
    return f"never read: {', '.join(told)}" if told else ""


def _records(number: int) -> str:
    return "1 record" if number == 1 else f"{number:,} records"
