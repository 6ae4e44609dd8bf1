"""Chat templates: messages -> text to tokenise, and its learned characters.

For `counting.text.chat_tokenizer`. Three ways to find the answers in a text, the cheapest that
holds: a rendering of stand-ins, which is remembered for all conversations of that shape; renderings
of the conversation up to each answer; and marks that the template's loop over the messages writes
(`counting.text._turn_places`), for templates that write earlier turns otherwise than the last.
Pure.
"""

import itertools
import json
import re
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from typing import Any

import jinja2
from jinja2 import TemplateError

from isobatch.counting.text import template_environment
from isobatch.counting.text._turn_places import (
    PlaceMarks,
    Places,
    edge,
    holds_marks,
    merged,
    prompt_end,
    read_marks,
    split_by_turn,
)
from isobatch.counting.text.template_environment import compile_template, reads_the_date
from isobatch.counting.text.turn import Span

Message = Mapping[str, Any]
"""`role`, and `content`: a string, or a list of `{"type": "text", "text": ...}` and
`{"type": "image"}`."""

Learned = bool | Sequence[Span] | None
"""What is learned of a message, as `Turn.learned`."""

DEFAULT_DATE = date(2026, 1, 1)
"""What `strftime_now` gives where no date is given: the same text on any day."""
MOST_SAID = 2000
"""Characters of an error that a template raises."""
MOST_OUTLINES = 4096
"""Shapes of conversations to remember."""
MANY_ANSWERS = 48
"""Answers from which on not each place is rendered, which takes the square of their number."""

_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
# Unicode reserves these characters for use inside a program. Two that no message contains enclose
# what is generated.
_NONCHARACTERS = tuple(map(chr, range(0xFDD0, 0xFDF0)))
_STAND_IN = re.compile(f"{_NONCHARACTERS[2]}([0-9]+){_NONCHARACTERS[3]}")
# What a template may raise: its own errors, and those of Python expressions in it.
_ERRORS = (
    *(TemplateError, TypeError, ValueError, AttributeError, LookupError, ArithmeticError),
    *(AssertionError, RuntimeError),
)
_PROBE = "probe"
_PROBE_PARTS = [{"type": "text", "text": _PROBE}]
_MARK_THEM = "mark the answers with {% generation %} in the template"
_PLAIN_KEYS = {"role", "content"}


class TemplateRefusedError(Exception):
    """A template raises an error for these messages, or its text gives no labels."""


class ChatTemplate:
    """A compiled chat template."""

    def __init__(self, source: str, variables: Mapping[str, str], day: date = DEFAULT_DATE) -> None:
        """Compile `source` for variables such as `bos_token`; ConfigError if it is not Jinja.

        `day` is what `strftime_now` writes.
        """
        self._source = source
        self._day = day
        self._variables = dict(variables)
        self._marks_generation = bool(_GENERATION.search(source))
        self._outlines: dict[tuple[Any, ...], _Outline | None] = {}
        self._template = compile_template(source, day)
        self.reads_date = reads_the_date(source)
        """Whether the text depends on the day."""

    @cached_property
    def _marking_template(self) -> jinja2.Template:
        """The template that marks turns; compiled when it is first needed."""
        return compile_template(self._source, self._day, marks_turns=True)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Any = None,
        add_generation_prompt: bool = False,
        marks: tuple[str, str] = ("", ""),
        place_marks: PlaceMarks | None = None,
    ) -> str:
        """The text of `messages`, with `marks` around generated text. TemplateRefusedError.

        With `place_marks`, turns are marked too.
        """
        if not messages and not add_generation_prompt:
            raise TemplateRefusedError("the conversation is empty")
        variables = dict(
            self._variables,
            messages=messages,
            tools=tools,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            generation_marks=marks,
            isobatch_turn=place_marks,
        )
        template = self._template if place_marks is None else self._marking_template
        try:
            return template_environment.render(template, variables)
        except _ERRORS as error:
            said = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(error)[:MOST_SAID])
            raise TemplateRefusedError(f"the chat template refuses it: {said}") from None

    def render_with_answers(
        self, messages: Sequence[Message], tools: Any = None
    ) -> tuple[str, list[Span]]:
        """The whole conversation, and its character spans with labels, in order and disjoint.

        These are what `{% generation %}` marks in the template. Without marks: what each assistant
        message adds after the generation prompt, up to where the next message begins.
        """
        if self._marks_generation:
            return self._marked(messages, tools)
        if tools is None and all(message.keys() == _PLAIN_KEYS for message in messages):
            return self._by_prefix(messages)
        full = self.render(messages, tools=tools)
        return full, self._answers(messages, full, tools)

    def render_as_learned(
        self,
        messages: Sequence[Message],
        learned: Sequence[Learned],
        edged: Sequence[Message],
        tools: Any = None,
    ) -> tuple[str, list[Span]]:
        """Render as `render_with_answers`, with labels as `learned` says for each message.

        `edged` are the messages with the marks `edge(2 * i)` and `edge(2 * i + 1)` in their texts:
        around all that has labels in message `i` because its author says so, once for each range.
        """
        text = self.render(messages, tools=tools)
        by_role = {i for i, m in enumerate(messages) if m["role"] == "assistant"}
        whole = {i for i in by_role if learned[i] is None or learned[i] is True}
        spans = []
        if whole:
            spans = [span for i, span in self._by_message(messages, tools) if i in whole]
        in_parts = [i for i, value in enumerate(learned) if value and i not in whole]
        if in_parts:
            spans += self._between_edges(text, edged, in_parts, tools)
        return text, merged(spans)

    def _by_message(self, messages: Sequence[Message], tools: Any) -> list[tuple[int, Span]]:
        """The spans with labels by role, and the message of each."""
        text, spans = self.render_with_answers(messages, tools)
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not self._marks_generation:
            return list(zip(answers, spans, strict=True))
        parts = split_by_turn(spans, self._places(messages, text, tools).turns)
        if any(i is None for i, _ in parts):
            raise TemplateRefusedError(
                "the chat template does not tell whose text {% generation %} encloses, and the"
                " record says which turns are learned"
            )
        return [(i, span) for i, span in parts if i is not None]

    def _between_edges(
        self, text: str, edged: Sequence[Message], numbers: Sequence[int], tools: Any
    ) -> list[Span]:
        """What is between the edges of the messages of these `numbers`."""
        places = read_marks(self.render(edged, tools=tools))
        if places.text != text:
            raise TemplateRefusedError(
                "the chat template reads the texts that it writes, so the parts that the record"
                " says are learned have no place of their own in the text"
            )
        spans = []
        for i in numbers:
            starts, ends = places.edges.get(2 * i, []), places.edges.get(2 * i + 1, [])
            meant = edged[i]
            number = json.dumps(meant, ensure_ascii=False).count(edge(2 * i))
            if not len(starts) == len(ends) == number:
                raise TemplateRefusedError(
                    f"the chat template leaves out or repeats text of turn {i} that the record"
                    " says is learned"
                )
            spans += list(zip(starts, ends, strict=True))
        return spans

    def _marked(self, messages: Sequence[Message], tools: Any) -> tuple[str, list[Span]]:
        used = json.dumps([messages, tools], ensure_ascii=False)
        first, last, *_ = [*(char for char in _NONCHARACTERS if char not in used), "", ""]
        if not last:
            raise TemplateRefusedError("the texts contain every character that can mark answers")
        # pieces: outside, inside, outside, inside, ..., outside
        marked = self.render(messages, tools=tools, marks=(first, last))
        pieces = re.split(f"[{first}{last}]", marked)
        ends = [0, *itertools.accumulate(map(len, pieces))]
        return "".join(pieces), [(ends[i], ends[i + 1]) for i in range(1, len(pieces), 2)]

    def _by_prefix(self, messages: Sequence[Message]) -> tuple[str, list[Span]]:
        shape, texts = _shape_and_texts(messages)
        full = self.render(messages)
        if shape not in self._outlines:
            if len(self._outlines) >= MOST_OUTLINES:
                self._outlines.clear()
            self._outlines[shape] = self._outline(messages)
        spans = _fit_outline(self._outlines[shape], texts, full)
        return full, self._answers(messages, full) if spans is None else spans

    def _answers(self, messages: Sequence[Message], full: str, tools: Any = None) -> list[Span]:
        """The spans of all answers, by whichever way finds them."""
        try:
            return self._by_renders(messages, full, tools=tools)
        except TemplateRefusedError as refusal:
            return self._by_turns(messages, full, tools, refusal)

    def _outline(self, messages: Sequence[Message]) -> "_Outline | None":
        """What the template writes around the texts of such messages; None if that cannot be told.

        Labels take one rendering per turn. But most templates copy the texts unread: then one of
        stand-ins gives the answers' places for all conversations of that shape, and one rendering
        of a conversation proves it.
        """
        number = itertools.count()

        def stand_in() -> str:
            return f"{_NONCHARACTERS[2]}{next(number)}{_NONCHARACTERS[3]}"

        stand_ins = [
            {**message, "content": _with_texts(message["content"], stand_in)}
            for message in messages
        ]
        try:
            text = self.render(stand_ins)
            matches = list(_STAND_IN.finditer(text))
            if [match[1] for match in matches] != [str(i) for i in range(next(number))]:
                return None
            try:
                spans = self._by_context(stand_ins, text, [match.span() for match in matches])
            except TemplateRefusedError as refusal:
                spans = self._by_turns(stand_ins, text, None, refusal)
        except TemplateRefusedError:
            return None
        ends = [0, *(match.end() for match in matches)]
        lengths = [0, *itertools.accumulate(len(match[0]) for match in matches)]
        places = [(_place(a, ends, lengths), _place(b, ends, lengths)) for a, b in spans]
        roles = [m["role"] for m in messages for _ in range(_num_texts(m["content"]))]
        return _Outline(_STAND_IN.split(text)[::2], places, roles)

    def _by_context(self, messages: Sequence[Message], full: str, texts: list[Span]) -> list[Span]:
        """The answers in `full`, in which the stand-ins of the messages are at `texts`.

        Of many answers with the same roles and literals around them, the first, the last, and some
        between are rendered; the others begin and end as these do. (Only a template that writes
        another text for some number of messages, such as 1,000, could go unnoticed.)
        """
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        around = _contexts(messages, full, texts)
        if len(answers) < MANY_ANSWERS or around is None:
            return self._by_renders(messages, full)
        offsets: dict[tuple[str, ...], Span] = {}
        spans = []
        for number, i in enumerate(answers):
            key, before, after = around[i]
            # the first ones, then the 16th, 32nd, 64th, ..., and the last
            if key not in offsets or number < 8 or number & (number - 1) == 0 or i == answers[-1]:
                ((start, end),) = self._by_renders(messages, full, [i])
                if offsets.setdefault(key, (start - before, end - after)) != (
                    start - before,
                    end - after,
                ):
                    return self._by_renders(messages, full)
            first, last = offsets[key]
            spans.append((before + first, after + last))
        return spans

    def _by_renders(
        self,
        messages: Sequence[Message],
        full: str,
        of: Sequence[int] | None = None,
        tools: Any = None,
    ) -> list[Span]:
        """The spans of all answers, or of the messages `of`: two renderings each."""
        spans = []
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        for i in answers if of is None else of:
            before = self.render(messages[:i], tools=tools, add_generation_prompt=True)
            last = i + 1 == len(messages)
            after = full if last else self.render(messages[: i + 1], tools=tools)
            if not (full.startswith(after) and after.startswith(before)):
                raise TemplateRefusedError(
                    f"the chat template rewrites earlier turns, so turn {i} has no place of its own"
                    f" in the text; {_MARK_THEM}"
                )
            spans.append((len(before), len(after)))
        return spans

    # --- places of turns, for templates that write earlier turns otherwise than the last ---

    def _places(self, messages: Sequence[Message], full: str, tools: Any) -> Places:
        """What the template's loop writes for each message of `full`."""
        # by identity, so the same object must not be two messages
        copies = [dict(message) for message in messages]
        places = read_marks(self.render(copies, tools=tools, place_marks=PlaceMarks(copies)))
        if places.text != full:
            raise TemplateRefusedError("the chat template reads the text that it has written")
        return places

    def _by_turns(
        self,
        messages: Sequence[Message],
        full: str,
        tools: Any,
        refusal: TemplateRefusedError,
    ) -> list[Span]:
        """The spans of all answers: what is written for each after the generation prompt.

        `refusal` is raised where they cannot be told.
        """
        if holds_marks([messages, tools]):
            raise refusal
        places = self._places(messages, full, tools)
        if not places.turns:
            raise refusal
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        prompts: dict[tuple[str, ...], str] = {}
        spans = []
        for i in answers:
            if not (pieces := places.turns.get(i)):
                raise TemplateRefusedError(f"the chat template leaves out turn {i}, an answer")
            roles = tuple(str(message["role"]) for message in messages[max(0, i - 2) : i])
            if len(answers) < MANY_ANSWERS or roles not in prompts:
                prompts[roles] = self._prompt(messages, i, tools)
            (first, end), *later = pieces
            begin = prompt_end(full[first:end], prompts[roles], is_first=first == 0)
            # a turn that goes on after a tool's answer or another of its own has no header
            if begin is None and roles[-1:] not in (("assistant",), ("tool",)):
                raise refusal
            spans += [(first + (begin or 0), end), *later]
        if messages[-1]["role"] == "assistant" and spans[-1][1] >= places.end_of_turns:
            spans[-1] = (spans[-1][0], len(full))
        return spans

    def _prompt(self, messages: Sequence[Message], i: int, tools: Any) -> str:
        """What the template writes before an answer is generated, for the answer `i`."""
        before = [dict(message) for message in messages[:i]]
        others = [[dict(message)] for message in messages if message["role"] == "user"][:1]
        probes = ([{"role": "user", "content": content}] for content in (_PROBE, _PROBE_PARTS))
        for start in (before, *others, *probes):
            if not start:
                continue
            try:
                marked = self.render(
                    start,
                    tools=tools,
                    add_generation_prompt=True,
                    place_marks=PlaceMarks(start),
                )
                plain = self.render(start, tools=tools)
            except TemplateRefusedError:
                continue
            asked = read_marks(marked)
            if prompt := asked.text[asked.end_of_turns :]:
                return prompt
            same = (n for n, (a, b) in enumerate(zip(asked.text, plain, strict=False)) if a != b)
            return asked.text[next(same, min(len(asked.text), len(plain))) :]
        return ""


_Place = tuple[int, int]
"""Literal characters and texts before a place."""


@dataclass(frozen=True, slots=True)
class _Outline:
    """A conversation's rendering with stand-ins for its texts."""

    literals: list[str]
    """What the template writes before each text and after the last."""
    spans: list[tuple[_Place, _Place]]
    """Begin and end of each answer."""
    roles: list[str]
    """Role of each text's message."""

    def fill(self, texts: list[str]) -> tuple[str, list[Span]]:
        """The rendering with `texts`, and the answers in it."""
        pairs = zip(self.literals, [*texts, ""], strict=True)
        before = [0, *itertools.accumulate(map(len, texts))]
        spans = [(a + before[i], b + before[j]) for (a, i), (b, j) in self.spans]
        return "".join(itertools.chain.from_iterable(pairs)), spans


def _place(char: int, ends: list[int], lengths: list[int]) -> _Place:
    """The place of a character; stand-ins end at `ends`, and have so many characters together."""
    number = bisect_right(ends, char) - 1
    return char - lengths[number], number


def _contexts(
    messages: Sequence[Message], full: str, texts: list[Span]
) -> dict[int, tuple[tuple[str, ...], int, int]] | None:
    """What is around each answer: roles and literals, and where these begin. None without a text.

    Message -> (roles and literals, end of the text before, end of its own last text).
    """
    counts = [_num_texts(message["content"]) for message in messages]
    if not all(counts):
        return None
    last = list(itertools.accumulate(counts))
    roles = ["", *(str(message["role"]) for message in messages), ""]
    borders = [(0, 0), *texts, (len(full), len(full))]
    around = {}
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        first = last[i] - counts[i]
        before, after = borders[first][1], borders[last[i]][1]
        literals = full[before : borders[first + 1][0]], full[after : borders[last[i] + 1][0]]
        around[i] = (*roles[i : i + 3], *literals, str(counts[i])), before, after
    return around


def _num_texts(content: Any) -> int:
    return 1 if isinstance(content, str) else sum(part["type"] == "text" for part in content)


def _fit_outline(outline: _Outline | None, texts: list[str], full: str) -> list[Span] | None:
    """The answers in `full`; None if that is not the outline with these texts."""
    if outline is None:
        return None
    ways: list[Collection[str]] = [(), set(outline.roles)]
    if len(texts) >= MANY_ANSWERS:  # then one rendering per answer would take too long
        ways += ({role} for role in sorted(set(outline.roles)))
    for stripped in ways:
        pairs = zip(texts, outline.roles, strict=True)
        written, spans = outline.fill([t.strip() if role in stripped else t for t, role in pairs])
        if written == full:
            return spans
    return None


def _shape_and_texts(messages: Sequence[Message]) -> tuple[tuple[Any, ...], list[str]]:
    """What the messages are made of, and their texts in order."""
    shape: list[Any] = []
    texts: list[str] = []
    for message in messages:
        content = message["content"]
        shape.append(message["role"])
        if isinstance(content, str):
            texts.append(content)
        else:
            shape.append(tuple(part["type"] for part in content))
            texts += [part["text"] for part in content if part["type"] == "text"]
    return tuple(shape), texts


def _with_texts(content: Any, new: Callable[[], str]) -> Any:
    """A message's content with each text replaced by `new()`."""
    if isinstance(content, str):
        return new()
    return [{**part, "text": new()} if part["type"] == "text" else part for part in content]
