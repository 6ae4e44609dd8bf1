"""Marks in a rendered text -> places of its turns, and of what is generated.

For `counting.text.chat_template`. A template's own loop over the messages says which turn it is
writing (`template_environment.compile_template` with `marks_turns`), so each turn has its place in
the whole text whatever the template makes of earlier turns. Marks are characters that Unicode
reserves for use inside a program, with numbers between them, so no letter of a text counts. Pure.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from isobatch.counting.text.turn import Span

# Unicode reserves these characters for use inside a program: no text for others has them.
_OPEN, _CLOSE = "\ufdd8", "\ufdd9"
_MARK = re.compile(f"{_OPEN}([a-z]+)([0-9]*),?([0-9]*){_CLOSE}")


def holds_marks(value: Any) -> bool:
    """Whether messages or tools hold the characters that marks are made of."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return _OPEN in text or _CLOSE in text


def edge(number: int) -> str:
    """A mark to put into a message's text, whose place in the rendered text is wanted."""
    return f"{_OPEN}e{number}{_CLOSE}"


class PlaceMarks:
    """What a template writes where it begins a message: a function for its variables."""

    def __init__(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Messages are known by identity: the same text may be that of several."""
        self._numbers = {id(message): number for number, message in enumerate(messages)}

    def __call__(self, value: object, loop: int) -> str:
        """The mark of a message in the loop `loop`, or with None that of the loop's end."""
        if value is None:
            return f"{_OPEN}z{loop}{_CLOSE}"
        number = self._numbers.get(id(value))
        return "" if number is None else f"{_OPEN}t{loop},{number}{_CLOSE}"


@dataclass(frozen=True, slots=True)
class Places:
    """A rendered text without its marks, and what they say."""

    text: str
    turns: dict[int, list[Span]]
    """Message -> the pieces of the text that were written for it, in order, none empty."""
    generated: list[Span]
    """What `{% generation %}` encloses."""
    edges: dict[int, list[int]] = field(default_factory=dict)
    """Number of an edge -> its places."""
    end_of_turns: int = 0
    """End of the last loop over messages."""


def read_marks(marked: str) -> Places:
    """What the marks of a rendered text say."""
    # text, kind, number, message, text, kind, number, message, ..., text
    split = _MARK.split(marked)
    turns: dict[int, list[Span]] = {}
    edges: dict[int, list[int]] = {}
    borders: dict[str, list[int]] = {"g": [], "h": [], "z": [0]}
    open_loops: dict[int, int] = {}  # loop -> message, outer ones first
    length = 0
    marks = zip(split[1::4], split[2::4], split[3::4], strict=True)
    for piece, (kind, number, message) in zip(split[::4], [*marks, ("", "", "")], strict=True):
        if piece and open_loops:
            written = turns.setdefault(next(reversed(open_loops.values())), [])
            _add(written, (length, length + len(piece)))
        length += len(piece)
        if kind == "e":
            edges.setdefault(int(number), []).append(length)
        elif kind == "t":
            _close(open_loops, int(number))
            open_loops[int(number)] = int(message)
        elif kind in ("g", "h") or (kind == "z" and _close(open_loops, int(number))):
            borders[kind].append(length)
    generated = list(zip(borders["g"], borders["h"], strict=True))
    return Places("".join(split[::4]), turns, generated, edges, borders["z"][-1])


def _close(open_loops: dict[int, int], loop: int) -> bool:
    """Whether a loop was open; its new round, or its end, ends all loops inside of it too."""
    if loop not in open_loops:
        return False
    while open_loops.popitem()[0] != loop:
        pass
    return True


def _add(spans: list[Span], span: Span) -> None:
    if spans and spans[-1][1] == span[0]:
        spans[-1] = (spans[-1][0], span[1])
    else:
        spans.append(span)


_BORDER = re.compile(r"[\n>\]:]")


def prompt_end(turn: str, prompt: str, *, is_first: bool) -> int | None:
    """How much of the text of an answer's turn is the generation prompt; None if none of it is.

    A template may write an earlier turn with a part of the prompt only: Qwen3.5's prompt opens a
    thought, which earlier turns do not have. Then that part ends at a border of the prompt, for
    the answer may begin with the same letters. What the template writes before the first turn may
    be before the prompt.

    >>> prompt_end("<assistant>\\n<b>", "<assistant>\\n<think>\\n", is_first=False)
    12
    """
    if turn.startswith(prompt):
        return len(prompt)
    if is_first and (start := turn.find(prompt)) >= 0:
        return start + len(prompt)
    same = next((i for i, (a, b) in enumerate(zip(turn, prompt, strict=False)) if a != b), None)
    if same is None:
        same = min(len(turn), len(prompt))
    ends = [match.end() for match in _BORDER.finditer(prompt) if match.end() <= same]
    return ends[-1] if ends else None


def split_by_turn(
    spans: Sequence[Span], turns: Mapping[int, Sequence[Span]]
) -> list[tuple[int | None, Span]]:
    """Parts of spans with the message that each was written for; None for what is no message's."""
    owned = sorted((start, end, number) for number, ones in turns.items() for start, end in ones)
    parts: list[tuple[int | None, Span]] = []
    for start, end in spans:
        place = start
        for first, last, number in owned:
            if last <= place or first >= end:
                continue
            if first > place:
                parts.append((None, (place, first)))
            parts.append((number, (max(first, place), min(last, end))))
            place = min(last, end)
        if place < end:
            parts.append((None, (place, end)))
    return parts


def merged(spans: Sequence[Span]) -> list[Span]:
    """Spans in order, of which those that overlap are one; none is empty.

    >>> merged([(4, 6), (0, 2), (1, 3), (3, 3)])
    [(0, 3), (4, 6)]
    """
    joined: list[Span] = []
    for start, end in sorted(spans):
        if joined and start < joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        elif start < end:
            joined.append((start, end))
    return joined
