"""Chat templates: messages -> text to tokenise, and its learned characters.

For `packer.text.chat_tokenizer`. The Jinja environment offers what transformers offers to
templates: a sandbox, trimmed blocks, loop controls, `raise_exception`, `tojson`, `strftime_now`
and `{% generation %}`. Pure, except for the date of `strftime_now`.
"""

import itertools
import json
import os
import re
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
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
MANY_ANSWERS = 48
"""From here on not each answer's place is rendered, which takes the square of their number."""

_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
# Unicode reserves these characters for use inside a program. Two that no message contains enclose
# what is generated.
_NONCHARACTERS = tuple(map(chr, range(0xFDD0, 0xFDF0)))
_STAND_IN = re.compile(f"{_NONCHARACTERS[2]}([0-9]+){_NONCHARACTERS[3]}")
# What a template may raise: its own errors, and those of Python expressions in it.
_ERRORS = (TemplateError, TypeError, ValueError, AttributeError, LookupError, ArithmeticError)
_DICT_ATTRIBUTES = frozenset(dir(dict))


_PLAIN_KEYS = {"role", "content"}


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
        tools: Any = None,
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
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                generation_marks=marks,
            )
        except _ERRORS as error:
            raise TemplateRefusedError(f"the chat template refuses it: {error}") from None

    def render_with_answers(
        self, messages: Sequence[Message], tools: Any = None
    ) -> tuple[str, list[Span]]:
        """The whole conversation, and its character spans with labels, in order and disjoint.

        These are what `{% generation %}` marks in the template. Without marks: what each assistant
        message adds after the generation prompt, if shorter conversations render to prefixes.
        """
        if self._marks_generation:
            return self._marked(messages, tools)
        if tools is None and all(message.keys() == _PLAIN_KEYS for message in messages):
            return self._by_prefix(messages)
        full = self.render(messages, tools=tools)
        return full, self._by_renders(messages, full, tools=tools)

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
        return full, self._by_renders(messages, full) if spans is None else spans

    def _outline(self, messages: Sequence[Message]) -> "_Outline | None":
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
            found = list(_STAND_IN.finditer(text))
            if [match[1] for match in found] != [str(i) for i in range(next(number))]:
                return None
            spans = self._by_context(stand_ins, text, [match.span() for match in found])
        except TemplateRefusedError:
            return None
        ends = [0, *(match.end() for match in found)]
        lengths = [0, *itertools.accumulate(len(match[0]) for match in found)]
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
