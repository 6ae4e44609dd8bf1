"""Marks in a rendered text -> the places of its turns, of what is generated, and of edges.

For `packer.text.chat_template`. A template's own loop over the messages says which turn it is
writing (`template_environment.compile_template` with `marks_turns`), so each turn has its place in
the whole text whatever the template makes of earlier turns. Marks are characters that Unicode
reserves for use inside a program, with numbers between them, so no letter of a text counts. Pure.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Span = tuple[int, int]
"""First character or token, and the one after the last."""

# Unicode reserves these characters for use inside a program: no text for others has them.
_OPEN, _CLOSE = "\ufdd8", "\ufdd9"
_MARK = re.compile(f"{_OPEN}([a-z]+)([0-9]*),?([0-9]*){_CLOSE}")
GENERATION = (f"{_OPEN}g{_CLOSE}", f"{_OPEN}h{_CLOSE}")
"""Around what `{% generation %}` encloses."""


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
    """Where the last loop over messages ends."""


def read_marks(marked: str) -> Places:
    """What the marks of a rendered text say."""
    pieces: list[str] = []
    turns: dict[int, list[Span]] = {}
    generated: list[Span] = []
    edges: dict[int, list[int]] = {}
    open_loops: list[tuple[int, int]] = []  # (loop, message), outer ones first
    begin = length = done = end_of_turns = 0
    for match in _MARK.finditer(marked):
        piece = marked[done : match.start()]
        done = match.end()
        if piece:
            pieces.append(piece)
            _add(turns, open_loops, (length, length + len(piece)))
            length += len(piece)
        kind = match[1]
        if kind == "e":
            edges.setdefault(int(match[2]), []).append(length)
        elif kind == "g":
            begin = length
        elif kind == "h":
            generated.append((begin, length))
        else:
            # the end of a loop, and a new round, end all that is inside of the round before
            loops = [loop for loop, _ in open_loops]
            if (loop := int(match[2])) in loops:
                del open_loops[loops.index(loop) :]
                end_of_turns = length if kind == "z" else end_of_turns
            if kind == "t":
                open_loops.append((loop, int(match[3])))
    if piece := marked[done:]:
        pieces.append(piece)
        _add(turns, open_loops, (length, length + len(piece)))
    return Places("".join(pieces), turns, generated, edges, end_of_turns)


def _add(turns: dict[int, list[Span]], open_loops: Sequence[tuple[int, int]], span: Span) -> None:
    if not open_loops:
        return
    written = turns.setdefault(open_loops[-1][1], [])
    if written and written[-1][1] == span[0]:
        written[-1] = (written[-1][0], span[1])
    else:
        written.append(span)


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
    if is_first and (found := turn.find(prompt)) >= 0:
        return found + len(prompt)
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
