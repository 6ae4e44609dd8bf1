"""Chat templates: messages -> text to tokenise, and its learned characters.

For `packer.text.chat_tokenizer`. The Jinja environment offers what transformers offers to
templates: a sandbox, trimmed blocks, loop controls, `raise_exception`, `tojson`, `strftime_now`
and `{% generation %}`. Pure, except for the date of `strftime_now`.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import jinja2
from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from balance.errors import ConfigError

Message = Mapping[str, Any]
"""`role`, and `content`: a string, or a list of `{"type": "text", "text": ...}` and
`{"type": "image"}`."""

Span = tuple[int, int]
"""First character or token, and the one after the last."""

MOST_OUTLINES = 4096
"""Shapes of conversations to remember."""

_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
# Unicode reserves these characters for use inside a program. Two that no message contains enclose
# what is generated.
_NONCHARACTERS = tuple(map(chr, range(0xFDD0, 0xFDF0)))
_STAND_IN = re.compile(f"{_NONCHARACTERS[2]}([0-9]+){_NONCHARACTERS[3]}")
# What a template may raise: its own errors, and those of Python expressions in it.
_ERRORS = (TemplateError, TypeError, ValueError, AttributeError, LookupError, ArithmeticError)
_DICT_ATTRIBUTES = frozenset(dir(dict))


class TemplateRefusedError(Exception):
    """A template raises an error for these messages, or its text gives no labels."""


class ChatTemplate:
    """A compiled chat template."""

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        """Compile `source` for variables such as `bos_token`; ConfigError if it is not Jinja."""
        self._variables = dict(variables)
        self._marks_generation = bool(_GENERATION.search(source))
        self._outlines: dict[tuple[Any, ...], _Outline | None] = {}
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"chat template, line {error.lineno}: {error.message}") from None

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = False,
        marks: tuple[str, str] = ("", ""),
    ) -> str:
        """The text of `messages`, with `marks` around generated text. TemplateRefusedError."""
        if not messages and not add_generation_prompt:
            raise TemplateRefusedError("the conversation is empty")
        try:
            return self._template.render(
                self._variables,
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                generation_marks=marks,
            )
        except _ERRORS as error:
            raise TemplateRefusedError(f"the chat template refuses it: {error}") from None

    def render_with_answers(self, messages: Sequence[Message]) -> tuple[str, list[Span]]:
        """The whole conversation, and its character spans with labels, in order and disjoint.

        These are what `{% generation %}` marks in the template. Without marks: what each assistant
        message adds after the generation prompt, if shorter conversations render to prefixes.
        """
        return self._marked(messages) if self._marks_generation else self._by_prefix(messages)

    def _marked(self, messages: Sequence[Message]) -> tuple[str, list[Span]]:
        used = json.dumps(messages, ensure_ascii=False)
        first, last, *_ = [*(char for char in _NONCHARACTERS if char not in used), "", ""]
        if not last:
            raise TemplateRefusedError("the texts contain every character that can mark answers")
        # pieces: outside, inside, outside, inside, ..., outside
        pieces = re.split(f"[{first}{last}]", self.render(messages, marks=(first, last)))
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
        return full, self._by_renders(messages, full) if spans is None else spans

    def _outline(self, messages: Sequence[Message]) -> _Outline | None:
        """What the template writes around the texts of such messages; None if that cannot be told.

        Labels take one rendering per turn. But most templates copy the texts unread: then one of
        stand-ins gives the answers' places for all conversations of that shape, and one rendering
        of a conversation proves it.
        """
        number = itertools.count()
        stand_ins = [
            {**message, "content": _with_texts(message["content"], lambda: _stand_in(next(number)))}
            for message in messages
        ]
        try:
            text = self.render(stand_ins)
            spans = self._by_renders(stand_ins, text)
        except TemplateRefusedError:
            return None
        # literals and numbers of stand-ins in turn
        pieces = _STAND_IN.split(text)
        if pieces[1::2] != [str(i) for i in range(next(number))]:
            return None
        ends = [match.end() for match in _STAND_IN.finditer(text)]
        return _Outline(pieces[::2], [(_place(a, ends), _place(b, ends)) for a, b in spans])

    def _by_renders(self, messages: Sequence[Message], full: str) -> list[Span]:
        spans = []
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self.render(messages[:i], add_generation_prompt=True)
            after = full if i + 1 == len(messages) else self.render(messages[: i + 1])
            if not (full.startswith(after) and after.startswith(before)):
                raise TemplateRefusedError(
                    f"the chat template rewrites earlier turns, so turn {i} has no place of its own"
                    " in the text; mark the answers with {% generation %} in the template"
                )
            spans.append((len(before), len(after)))
        return spans


_Place = tuple[int, int]
"""Literal characters and texts before a place."""


@dataclass(frozen=True, slots=True)
class _Outline:
    """A conversation's rendering with stand-ins for its texts."""

    literals: list[str]
    """What the template writes before each text and after the last."""
    spans: list[tuple[_Place, _Place]]
    """Begin and end of each answer."""

    def fill(self, texts: list[str]) -> tuple[str, list[Span]]:
        """The rendering with `texts`, and the answers in it."""
        pairs = zip(self.literals, [*texts, ""], strict=True)
        before = [0, *itertools.accumulate(map(len, texts))]
        spans = [(a + before[i], b + before[j]) for (a, i), (b, j) in self.spans]
        return "".join(itertools.chain.from_iterable(pairs)), spans


def _place(char: int, ends: list[int]) -> _Place:
    """The place of a character after the stand-ins that end at `ends`."""
    number = bisect_right(ends, char)
    return char - sum(len(_stand_in(i)) for i in range(number)), number


def _fit_outline(outline: _Outline | None, texts: list[str], full: str) -> list[Span] | None:
    """The answers in `full`; None if that is not the outline with these texts."""
    if outline is None:
        return None
    for candidate in (texts, [text.strip() for text in texts]):
        written, spans = outline.fill(candidate)
        if written == full:
            return spans
    return None


def _stand_in(number: int) -> str:
    return f"{_NONCHARACTERS[2]}{number}{_NONCHARACTERS[3]}"


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


class _GenerationMarks(Extension):
    """`{% generation %}`: its body, between the two strings of `generation_marks`."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it as a plain attribute)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    @jinja2.pass_context
    def _mark(self, context: Context, caller: Callable[[], str]) -> str:
        first, last = context["generation_marks"]
        return f"{first}{caller()}{last}"


class _Environment(ImmutableSandboxedEnvironment):
    """transformers' environment, quicker with messages."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        """`message.content`: Jinja tries an attribute and, an exception later, the key."""
        if type(obj) is dict and attribute not in _DICT_ATTRIBUTES:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)


def _environment() -> ImmutableSandboxedEnvironment:
    extensions = [_GenerationMarks, loopcontrols]
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
    # Jinja's own filter escapes HTML, which is wrong in a prompt.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)


def _strftime_now(form: str) -> str:
    """Today; or the day of SOURCE_DATE_EPOCH (reproducible-builds.org), to repeat a build."""
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    now = datetime.now() if epoch is None else datetime.fromtimestamp(int(epoch), UTC)
    return now.strftime(form)
