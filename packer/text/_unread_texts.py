"""Does a chat template only copy the texts of messages, or does it look into them? For
`packer.text.chat_template`.

A template that never looks writes the same around any texts of messages with the same roles: one
rendering then tells all others, and rendering is a tenth of the time that a sample takes. So it is
rendered once with texts that raise TextReadError on whatever could tell one text from another.
Where such a text would pass through code that reads it unseen (a filter, a call, a block that is
joined to a plain string) the answer is "it looks".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

from jinja2 import Environment, TemplateError, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment


class TextReadError(Exception):
    """A template looks into a text."""


def _refuse(*_: object, **__: object) -> Any:
    raise TextReadError


class UnreadText(str):
    """A text that can be copied and joined by `+`, and nothing else; what it is joined to cannot be
    read either.
    """

    __slots__ = ()

    def __add__(self, other: str) -> UnreadText:
        return UnreadText(str.__add__(self, other))

    def __radd__(self, other: str) -> UnreadText:
        return UnreadText(str.__add__(other, self))

    def __str__(self) -> str:
        return self

    def __bool__(self) -> bool:
        raise TextReadError


_HARMLESS = {
    *(
        "__add__",
        "__radd__",
        "__str__",
        "__new__",
        "__init__",
        "__class__",
        "__doc__",
        "__getattribute__",
    ),
    *("__setattr__", "__delattr__", "__init_subclass__", "__subclasshook__", "__dir__"),
}
for _name in set(dir(str)) - _HARMLESS:
    setattr(UnreadText, _name, _refuse)

_JOINING = (nodes.Concat, nodes.AssignBlock, nodes.Macro, nodes.CallBlock, nodes.FilterBlock)
"""Make a plain string of what is written inside, which could be read afterwards."""
_TYPE_TESTS = frozenset(
    {
        "defined",
        "undefined",
        "none",
        "string",
        "mapping",
        "number",
        "integer",
        "boolean",
        "callable",
    }
)
"""Tests that look at the type alone, which is part of a conversation's shape."""


class _ProbeEnvironment(ImmutableSandboxedEnvironment):
    """An environment whose filters, tests and calls take no unread text."""

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        if _holds_unread(args) or _holds_unread(kwargs):
            raise TextReadError
        return super().call(context, obj, *args, **kwargs)


def copies_texts(
    environment: Environment, source: str, variables: Mapping[str, Any], depends: Sequence[str]
) -> bool:
    """Whether `source`, rendered with `variables`, looks into none of the UnreadTexts among them.

    `environment` is the one that the template is really rendered in; `depends` names its globals
    whose results differ from call to call.
    """
    if any(next(environment.parse(source).find_all(kind), None) for kind in _JOINING):
        return False
    probe = _ProbeEnvironment(
        trim_blocks=environment.trim_blocks, lstrip_blocks=environment.lstrip_blocks
    )
    for extension in environment.extensions.values():
        probe.add_extension(type(extension))
    filters: dict[str, Any] = environment.filters
    tests: dict[str, Any] = environment.tests
    probe.filters = {name: _guarded(function) for name, function in filters.items()}
    probe.tests = {
        name: test if name in _TYPE_TESTS else _guarded(test) for name, test in tests.items()
    }
    probe.globals = {**environment.globals, **dict.fromkeys(depends, _refuse)}
    try:
        probe.from_string(source).render(**variables)
    except (
        TextReadError,
        TemplateError,
        TypeError,
        ValueError,
        AttributeError,
        LookupError,
        ArithmeticError,
    ):
        return False
    return True


def _guarded(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)  # with what tells Jinja to pass the context
    def guarded(*args: Any, **kwargs: Any) -> Any:
        if _holds_unread(args) or _holds_unread(kwargs):
            raise TextReadError
        return function(*args, **kwargs)

    return guarded


def _holds_unread(value: Any) -> bool:
    if isinstance(value, UnreadText):
        return True
    if isinstance(value, Mapping):
        return any(map(_holds_unread, value.values()))
    if isinstance(value, list | tuple | set):
        return any(map(_holds_unread, value))
    # what is computed as it is read (generators of filters) may hold anything
    return hasattr(value, "__next__")
