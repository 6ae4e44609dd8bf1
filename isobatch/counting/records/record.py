"""The raw record and sample, as sources and schemas give them. Pure.

A source yields `RawRecord`s exactly as it finds them, damaged ones included.
`counting.records.schemas` turns each into a `RawSample` or a `Rejected`; none is dropped on the
way.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from isobatch.counting.records.fields import Unread
from isobatch.counting.records.media import Media
from isobatch.counting.records.places.grounding import Objects
from isobatch.counting.text.stored_tokens import StoredTokens
from isobatch.counting.text.turn import Turn

MOST_DEPTH = 200
"""Nesting of a record at most: it is sent to other processes, some frames of the stack a level."""
STORED = "__tokens__"
"""Key of the `StoredTokens` in a record of a build."""
TOO_DEEP = f"it is nested more than {MOST_DEPTH} deep"


@dataclass(frozen=True, slots=True)
class RawRecord:
    """One record as the source has it: its value, or why it cannot be parsed."""

    position: int
    """0-based place among the records of its file, for the id of a record without one."""
    value: Any
    broken: str = ""
    """Place and cause of a record that is not valid, else empty."""
    reason: str = "broken_json"
    """Key of `REASONS` for such a record."""
    renamed: tuple[tuple[str, str], ...] = ()
    """Its dataset's own names of columns, and ours, which the value has."""


@dataclass(frozen=True, slots=True)
class Content:
    """Turns with markers, and the files of each kind in the order of their markers."""

    turns: tuple[Turn, ...]
    images: tuple[Media, ...] = ()
    audios: tuple[Media, ...] = ()
    videos: tuple[Media, ...] = ()
    turns_path: str = ""
    """Path of the turns in the record, such as `messages[]`."""
    objects: Objects | None = None
    """What the texts' `<ref-object>` and `<bbox>` mean, until the images' sizes are known."""
    stored: StoredTokens | None = None
    """Tokens of a sample of a build, which has no turns."""


@dataclass(frozen=True, slots=True)
class RawSample:
    """A sample as its author meant it, with as many files as markers."""

    sample_id: str
    source: str
    turns: tuple[Turn, ...]
    images: tuple[Media, ...]
    audios: tuple[Media, ...] = ()
    videos: tuple[Media, ...] = ()
    objects: Objects | None = None
    """Objects as of `Content`."""
    stored: StoredTokens | None = None
    """Tokens as of `Content`."""
    extras: str = ""
    """Columns of `--keep-columns` as one JSON object; empty without that."""
    turns_path: str = field(default="", compare=False)
    """Path of the turns, as in `Content`."""
    unread: tuple[Unread, ...] = field(default=(), compare=False)
    """Keys of the record that were never read."""


def is_deep(value: Any, max_depth: int = MOST_DEPTH) -> bool:
    """Whether lists and objects are nested more than `max_depth` deep.

    >>> is_deep([[1]], 1), is_deep([[1]], 2)
    (True, False)
    """
    level = [value] if isinstance(value, list | dict) else []
    for _ in range(max_depth):
        inside = (item.values() if isinstance(item, dict) else item for item in level)
        level = [x for values in inside for x in values if isinstance(x, list | dict)]
    return bool(level)


class Chunk(Protocol):
    """Some records of a source; plain values, so that other processes and machines can read it."""

    def records(self) -> Iterator[RawRecord]:
        """The records, in order. DataError if the file under them cannot be read."""
