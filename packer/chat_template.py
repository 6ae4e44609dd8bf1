"""Chat templates: messages -> the text that the tokenizer gets, and which characters of it the model learns to write.

For `packer.text`. The Jinja environment offers what transformers offers to templates: a sandbox, trimmed blocks, loop
controls, `raise_exception`, `tojson`, `strftime_now` and `{% generation %}`. Pure, but for the date of `strftime_now`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from balance.errors import ConfigError

Message = Mapping[str, Any]
"""`role`, and `content`: a string, or a list of parts `{"type": "text", "text": ...}` and `{"type": "image"}`."""

CharSpan = tuple[int, int]
"""First character, and the one behind the last."""

_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
# Characters that Unicode reserves for use inside a program; two that no message holds enclose what is generated.
_NONCHARACTERS = tuple(map(chr, range(0xFDD0, 0xFDF0)))
# What a template may raise: its own errors, and those of Python expressions in it.
_TEMPLATE_ERRORS = (jinja2.TemplateError, TypeError, ValueError, AttributeError, LookupError, ArithmeticError)


class TemplateRefusedError(Exception):
    """A template raised an error for these messages, or no labels can be derived from what it renders."""


class ChatTemplate:
    """A compiled chat template."""

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        """Compile `source`, for `variables` such as `bos_token`; ConfigError if it is not valid Jinja."""
        self.source = source
        self._variables = dict(variables)
        self._marks_generation = bool(_GENERATION.search(source))
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"chat template, line {error.lineno}: {error.message}") from None

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = False, marks: tuple[str, str] = ("", "")
    ) -> str:
        """The text of `messages`, with `marks` around what the template calls generated; TemplateRefusedError."""
        if not messages and not add_generation_prompt:
            raise TemplateRefusedError("the conversation is empty")
        try:
            return self._template.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                generation_marks=marks,
                **self._variables,
            )
        except _TEMPLATE_ERRORS as error:
            raise TemplateRefusedError(f"the chat template refuses it: {error}") from None

    def render_with_answers(self, messages: Sequence[Message]) -> tuple[str, list[CharSpan]]:
        """The whole conversation, and its character spans that have labels, in order and disjoint.

        These are what `{% generation %}` marks in the template. Without marks: for each assistant message, what it
        adds behind the generation prompt, which needs that every shorter conversation renders to a prefix of this one.
        """
        return self._marked(messages) if self._marks_generation else self._by_prefix(messages)

    def _marked(self, messages: Sequence[Message]) -> tuple[str, list[CharSpan]]:
        used = json.dumps(messages, ensure_ascii=False)
        first, last, *_ = [*(char for char in _NONCHARACTERS if char not in used), "", ""]
        if not last:
            raise TemplateRefusedError("the texts hold all characters that are reserved for marking the answers")
        # pieces: outside, inside, outside, inside, ..., outside
        pieces = re.split(f"[{first}{last}]", self.render(messages, marks=(first, last)))
        ends = [0]
        for piece in pieces:
            ends.append(ends[-1] + len(piece))
        return "".join(pieces), [(ends[i], ends[i + 1]) for i in range(1, len(pieces), 2)]

    def _by_prefix(self, messages: Sequence[Message]) -> tuple[str, list[CharSpan]]:
        full = self.render(messages)
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
        return full, spans


class _GenerationMarks(Extension):
    """`{% generation %} ... {% endgeneration %}`: the body, between the two strings of `generation_marks`."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it as a plain attribute)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    @jinja2.pass_context
    def _mark(self, context: Context, caller: Callable[[], str]) -> str:
        first, last = context["generation_marks"]
        return f"{first}{caller()}{last}"


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
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
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(form: str) -> str:
    """Today; or the day of SOURCE_DATE_EPOCH (reproducible-builds.org), so that a dated template can be repeated."""
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    now = datetime.now() if epoch is None else datetime.fromtimestamp(int(epoch), UTC)
    return now.strftime(form)
