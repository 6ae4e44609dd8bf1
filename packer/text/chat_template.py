"""Chat templates: messages -> the text that the tokenizer gets, and which characters of it the
model learns to write.

For `packer.text.chat_tokenizer`. The Jinja environment offers what transformers offers to
templates: a sandbox, trimmed blocks, loop controls, `raise_exception`, `tojson`, `strftime_now` and
`{% generation %}`. Pure, but for the date of `strftime_now`.
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
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from balance.errors import ConfigError
from packer.text._unread_texts import UnreadText, copies_texts

Message = Mapping[str, Any]
"""`role`, and `content`: a string, or a list of parts `{"type": "text", "text": ...}` and `{"type":
"image"}`.
"""

CharSpan = tuple[int, int]
"""First character, and the one behind the last."""

MOST_OUTLINES = 4096
"""Shapes of conversations to remember."""

_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
# Characters that Unicode reserves for use inside a program; two that no message holds enclose what
# is generated.
_NONCHARACTERS = tuple(map(chr, range(0xFDD0, 0xFDF0)))
_STAND_IN = re.compile(f"{_NONCHARACTERS[2]}([0-9]+){_NONCHARACTERS[3]}")
# What a template may raise: its own errors, and those of Python expressions in it.
_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    AttributeError,
    LookupError,
    ArithmeticError,
)


class TemplateRefusedError(Exception):
    """A template raised an error for these messages, or no labels can be derived from what it
    renders.
    """


class ChatTemplate:
    """A compiled chat template."""

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        """Compile `source`, for `variables` such as `bos_token`; ConfigError if it is not valid
        Jinja.
        """
        self.source = source
        self._variables = dict(variables)
        self._marks_generation = bool(_GENERATION.search(source))
        self._outlines: dict[tuple[Any, ...], _Outline | None] = {}
        try:
            self._environment = _environment()
            self._template = self._environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"chat template, line {error.lineno}: {error.message}") from None

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = False,
        marks: tuple[str, str] = ("", ""),
    ) -> str:
        """The text of `messages`, with `marks` around what the template calls generated;
        TemplateRefusedError.
        """
        if not messages and not add_generation_prompt:
            raise TemplateRefusedError("the conversation is empty")
        try:
            given = self._given(messages)
            return self._template.render(
                given, add_generation_prompt=add_generation_prompt, generation_marks=marks
            )
        except _TEMPLATE_ERRORS as error:
            raise TemplateRefusedError(f"the chat template refuses it: {error}") from None

    def _given(self, messages: Sequence[Message]) -> dict[str, Any]:
        return {
            "messages": messages,
            "tools": None,
            "documents": None,
            "add_generation_prompt": False,
            **self._variables,
        }

    def render_with_answers(self, messages: Sequence[Message]) -> tuple[str, list[CharSpan]]:
        """The whole conversation, and its character spans that have labels, in order and disjoint.

        These are what `{% generation %}` marks in the template. Without marks: for each assistant
        message, what it adds behind the generation prompt, which needs that every shorter
        conversation renders to a prefix of this one.
        """
        return self._marked(messages) if self._marks_generation else self._by_prefix(messages)

    def _marked(self, messages: Sequence[Message]) -> tuple[str, list[CharSpan]]:
        used = json.dumps(messages, ensure_ascii=False)
        first, last, *_ = [*(char for char in _NONCHARACTERS if char not in used), "", ""]
        if not last:
            raise TemplateRefusedError(
                "the texts hold all characters that are reserved for marking the answers"
            )
        # pieces: outside, inside, outside, inside, ..., outside
        pieces = re.split(f"[{first}{last}]", self.render(messages, marks=(first, last)))
        ends = [0]
        for piece in pieces:
            ends.append(ends[-1] + len(piece))
        return "".join(pieces), [(ends[i], ends[i + 1]) for i in range(1, len(pieces), 2)]

    def _by_prefix(self, messages: Sequence[Message]) -> tuple[str, list[CharSpan]]:
        shape = tuple((message["role"], _kinds(message["content"])) for message in messages)
        outline = self._outlines.get(shape)
        if outline is not None and outline.is_certain:
            return outline.fill(_texts(messages))
        full = self.render(messages)
        if shape not in self._outlines:
            if len(self._outlines) >= MOST_OUTLINES:
                self._outlines.clear()
            self._outlines[shape] = self._outline(messages)
        spans = _fit_outline(self._outlines[shape], _texts(messages), full)
        return full, self._by_renders(messages, full) if spans is None else spans

    def _outline(self, messages: Sequence[Message]) -> _Outline | None:
        """What the template writes around the texts of such messages; None if it cannot be told.

        One rendering per turn is what labels cost, and the template is half of the time that a
        sample takes. But most templates copy the texts unread: then the renderings of stand-ins
        give the places of the answers once and for all conversations of that shape. One rendering
        more proves it for a conversation; and if the template can be seen not to look into the
        texts, it is proved for all.
        """
        number = itertools.count()
        stand_ins = [
            {
                **message,
                "content": _replace_texts(message["content"], lambda _: _stand_in(next(number))),
            }
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
        return _Outline(pieces[::2], ends, spans, self._copies(messages))

    def _copies(self, messages: Sequence[Message]) -> bool:
        """Whether the template can be seen not to look into the texts of messages with these
        roles.
        """
        unread = [
            {**message, "content": _replace_texts(message["content"], UnreadText)}
            for message in messages
        ]
        return copies_texts(self._environment, self.source, self._given(unread), ["strftime_now"])

    def _by_renders(self, messages: Sequence[Message], full: str) -> list[CharSpan]:
        spans = []
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self.render(messages[:i], add_generation_prompt=True)
            after = full if i + 1 == len(messages) else self.render(messages[: i + 1])
            if not (full.startswith(after) and after.startswith(before)):
                raise TemplateRefusedError(
                    f"the chat template rewrites earlier turns, so turn {i} has no place of its own in the text;"
                    " mark the answers with {% generation %} in the template"
                )
            spans.append((len(before), len(after)))
        return spans


@dataclass(frozen=True, slots=True)
class _Outline:
    """A conversation's rendering without its texts, which stand-ins replace."""

    literals: list[str]
    """What the template writes before each text and behind the last."""
    ends: list[int]
    """Where each stand-in ends in the rendering."""
    spans: list[CharSpan]
    """The answers in the rendering."""
    is_certain: bool
    """Whether other texts of messages with the same roles surely give the same outline."""

    def fill(self, texts: list[str]) -> tuple[str, list[CharSpan]]:
        """The rendering with `texts`, and the answers in it."""
        written = [part for pair in zip(self.literals, [*texts, ""], strict=True) for part in pair]
        # by how much everything behind each text is further back than behind its stand-in
        shifts = [
            0,
            *itertools.accumulate(len(text) - len(_stand_in(i)) for i, text in enumerate(texts)),
        ]
        spans = [
            (
                start + shifts[bisect_right(self.ends, start)],
                end + shifts[bisect_right(self.ends, end)],
            )
            for start, end in self.spans
        ]
        return "".join(written), spans


def _fit_outline(outline: _Outline | None, texts: list[str], full: str) -> list[CharSpan] | None:
    """The answers of a conversation of the outline's shape; None if its rendering is not the
    outline with its texts.
    """
    if outline is None:
        return None
    for candidate in (texts, [text.strip() for text in texts]):
        written, spans = outline.fill(candidate)
        if written == full:
            return spans
    return None


def _stand_in(number: int) -> str:
    return f"{_NONCHARACTERS[2]}{number}{_NONCHARACTERS[3]}"


def _kinds(content: Any) -> Any:
    """What a message's content is made of."""
    return None if isinstance(content, str) else tuple(part["type"] for part in content)


def _texts(messages: Sequence[Message]) -> list[str]:
    """All texts of all contents, in order."""
    texts = []
    for message in messages:
        content = message["content"]
        parts = (
            [content]
            if isinstance(content, str)
            else [part["text"] for part in content if part["type"] == "text"]
        )
        texts += parts
    return texts


def _replace_texts(content: Any, replace: Callable[[str], str]) -> Any:
    """The content with other texts."""
    if isinstance(content, str):
        return replace(content)
    return [
        {**part, "text": replace(part["text"])} if part["type"] == "text" else part
        for part in content
    ]


class _GenerationMarks(Extension):
    """`{% generation %} ... {% endgeneration %}`: the body, between the two strings of
    `generation_marks`.
    """

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
        """`message.content`: Jinja looks for an attribute first and then, an exception later, for
        the key.
        """
        if type(obj) is dict and attribute in obj and not hasattr(dict, attribute):
            return obj[attribute]
        return super().getattr(obj, attribute)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationMarks, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which is wrong in a prompt.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(form: str) -> str:
    """Today; or the day of SOURCE_DATE_EPOCH (reproducible-builds.org), so that a dated template
    can be repeated.
    """
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    now = datetime.now() if epoch is None else datetime.fromtimestamp(int(epoch), UTC)
    return now.strftime(form)
