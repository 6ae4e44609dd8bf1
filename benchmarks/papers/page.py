"""What sections of docs/results/papers.md are made of: Markdown tables and ratios. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

WIDTH = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part of the page."""

    title: str
    body: tuple[str, ...]
    """Paragraphs and tables, in Markdown."""

    def __str__(self) -> str:
        return "\n\n".join([f"## {self.title}", *(fill(part) for part in self.body)])


def fill(part: str) -> str:
    """A paragraph or a list of items, wrapped; tables stay as they are.

    >>> print(fill("- one\\n- two"))
    - one
    - two
    """
    if part.startswith("|"):
        return part
    lines = part.splitlines() if part.startswith("- ") else [part]
    return "\n".join(wrap(line) for line in lines)


def wrap(line: str) -> str:
    """A paragraph or an item, at 100 columns."""
    indent = "  " if line.startswith("- ") else ""
    wrapped = textwrap.wrap(line, WIDTH, subsequent_indent=indent, break_on_hyphens=False)
    return "\n".join(wrapped)


def table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; numbers are given as strings, as they should appear.

    >>> print(table(["what", "ms"], [["all", "3.1"]]))
    | what | ms |
    |---|---|
    | all | 3.1 |
    """
    lines = ["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def times(ratio: float) -> str:
    """A ratio as it is read.

    >>> times(2.904)
    '2.90x'
    """
    return f"{ratio:.2f}x"


def percent(share: float, digits: int = 1) -> str:
    """A share as it is read.

    >>> percent(0.3149)
    '31.5 %'
    """
    return f"{100 * share:.{digits}f} %"


def listed(values: Iterable[object]) -> str:
    """Numbers side by side.

    >>> listed([22, 23])
    '[22, 23]'
    """
    return "[" + ", ".join(str(value) for value in values) + "]"
