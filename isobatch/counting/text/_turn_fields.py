"""Turns of a conversation, with all their fields, as a template's messages. Pure.

For `counting.text.chat_tokenizer`.
"""

import json
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from isobatch.counting.text.chat_template import ChatTemplate, Message, TemplateRefusedError
from isobatch.counting.text.turn import Span, Turn

Field = tuple[int, str]
"""Number of a turn, and the key of a field."""

DROPPED_THOUGHT = "<think>"
"""Key of a field that stands for a thought in a turn's text that the template leaves out."""
_TOOLS = "tools"
_MOST_HALVINGS = 7
"""Halvings of a conversation's fields of one key; what is not told apart then counts as used."""
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's thought; the first one counts."""
_CALL = {"key of a probe": "value"}


def messages_of(
    turns: Sequence[Turn], write: Callable[[str], Any], guard: Callable[[str], str]
) -> tuple[list[dict[str, Any]], Any]:
    """(messages, the tools that they may call or None); `write` makes a content of a text.

    `guard` protects the control strings in all other values.
    """
    messages: list[dict[str, Any]] = []
    for turn in turns:
        message = {"role": turn.role, "content": write(turn.text)}
        if turn.more:
            message |= _guarded(json.loads(turn.more), guard)
            if message["content"] is None:  # as transformers does, for many templates write "None"
                del message["content"]
        messages.append(message)
    return messages, messages[0].pop(_TOOLS, None) if messages else None


def _guarded(value: Any, guard: Callable[[str], str]) -> Any:
    if guard is str:
        return value
    if isinstance(value, str):
        return guard(value)
    if isinstance(value, list):
        return [_guarded(item, guard) for item in value]
    if isinstance(value, dict):
        return {guard(key): _guarded(item, guard) for key, item in value.items()}
    return value


class MessageFields:
    """What a template makes of messages' fields beyond role and content."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template

    def read(
        self, messages: list[dict[str, Any]], tools: Any
    ) -> tuple[list[dict[str, Any]], Any, tuple[Field, ...]]:
        """(messages and tools as the template wants them, the fields that it does not use).

        The messages are without the fields that are not used, for the text is the same then.
        """
        messages = [self._with_arguments(message) for message in messages]
        full = self._template.render(list(map(_with_thought, messages)), tools=tools)
        fields = [(i, key) for i, m in enumerate(messages) for key in m if key not in _OWN_KEYS]
        if tools is not None:
            fields.append((0, _TOOLS))
        # one after the other: of two fields that say the same a template may read either
        unused: list[Field] = []
        if self._without([*fields], messages, tools) == full:
            unused = fields
        else:
            for key in dict.fromkeys(key for _, key in fields):
                group = [field for field in fields if field[1] == key]
                unused += self._unused(group, unused, full, messages, tools)
        used, used_tools = _without_fields(unused, messages, tools)
        said = [(i, key) for i, key in unused if key == _TOOLS or messages[i][key] not in _EMPTY]
        return list(map(_with_thought, used)), used_tools, tuple(sorted(said))

    def _unused(
        self,
        group: list[Field],
        before: list[Field],
        full: str,
        messages: list[dict[str, Any]],
        tools: Any,
        halvings: int = 0,
    ) -> list[Field]:
        """The fields of a group that change nothing, when those `before` are left out too."""
        if self._without([*before, *group], messages, tools) == full:
            return group
        if len(group) == 1 or halvings == _MOST_HALVINGS:
            return []
        middle = len(group) // 2
        first = self._unused(group[:middle], before, full, messages, tools, halvings + 1)
        before = [*before, *first]
        return first + self._unused(group[middle:], before, full, messages, tools, halvings + 1)

    def _without(
        self, fields: Sequence[Field], messages: list[dict[str, Any]], tools: Any
    ) -> str | None:
        """The text without some fields; None if the template refuses that."""
        try:
            used, tools = _without_fields(fields, messages, tools)
            return self._template.render(list(map(_with_thought, used)), tools=tools)
        except TemplateRefusedError:
            return None

    def _with_arguments(self, message: dict[str, Any]) -> dict[str, Any]:
        """A message whose calls have arguments of the kind that the template writes."""
        calls = message.get("tool_calls")
        if not isinstance(calls, list) or self._wants is None:
            return message
        return {**message, "tool_calls": [_with_arguments(call, self._wants) for call in calls]}

    @cached_property
    def _wants(self) -> type | None:
        """Whether the template wants arguments as an object (dict) or JSON text (str).

        None if both are well: templates that ask what they are given, and those that write none.
        """
        as_text = json.dumps(_CALL)
        shown = {
            kind: self._shows_call(arguments) for kind, arguments in ((dict, _CALL), (str, as_text))
        }
        if shown[dict] is None and shown[str] is not None:
            return str
        # the text of a text: its quotes are escaped
        is_double = '\\"' in (shown[str] or "")
        return dict if shown[dict] is not None and (shown[str] is None or is_double) else None

    def _shows_call(self, arguments: Any) -> str | None:
        function = {"name": "probe", "arguments": arguments}
        call = {"id": "probe00id", "type": "function", "function": function}
        for content in ("probe", [{"type": "text", "text": "probe"}]):
            asked = {"role": "user", "content": content}
            for text in (None, "", content):
                called = {"role": "assistant", "content": text, "tool_calls": [call]}
                try:
                    shown = self._template.render([asked, called])
                except TemplateRefusedError:
                    continue
                return shown if "key of a probe" in shown else None
        return None


_OWN_KEYS = ("role", "content")
_EMPTY: tuple[Any, ...] = ("", [], {}, None)


def _without_fields(
    unused: Sequence[Field], messages: list[dict[str, Any]], tools: Any
) -> tuple[list[dict[str, Any]], Any]:
    """Messages and tools without some fields."""
    dropped = set(unused)
    rest = [
        {key: value for key, value in message.items() if (i, key) not in dropped}
        for i, message in enumerate(messages)
    ]
    return rest, None if (0, _TOOLS) in dropped else tools


def _with_thought(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose thought is under all names that templates read, as transformers gives it."""
    thought = next((message[key] for key in _THOUGHTS if message.get(key) is not None), None)
    if thought is None:
        return message
    return {"thinking": thought, **message, "reasoning_content": thought}


def _with_arguments(call: Any, kind: type) -> Any:
    """A call of a tool with arguments of a kind, where they can be brought to it."""
    if not isinstance(call, dict):
        return call
    if isinstance(function := call.get("function"), dict):
        return {**call, "function": _with_arguments(function, kind)}
    arguments = call.get("arguments")
    if kind is dict and isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            return call
        return {**call, "arguments": arguments} if isinstance(arguments, dict) else call
    if kind is str and isinstance(arguments, dict):
        return {**call, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return call


def dropped_thoughts(
    turns: Sequence[Turn],
    text: str,
    guard: Callable[[str], str],
    markers_in: Callable[[str], Sequence[Span]],
) -> tuple[Field, ...]:
    """The thoughts in the texts of turns that the rendered text does not have.

    Templates leave out earlier ones: of several with the same words, the first are missing.
    """
    dropped = []
    for i, turn in enumerate(turns):
        if "</think>" in turn.text:
            thought = turn.text.split("</think>")[0].split("<think>")[-1]
            borders = [0, *(place for span in markers_in(thought) for place in span), len(thought)]
            # of what is between markers, which become something else
            pieces = zip(borders[::2], borders[1::2], strict=True)
            words = max((thought[start:end].strip() for start, end in pieces), key=len)
            counts = [other.text.count(words) for other in turns] if words else [0]
            if sum(counts[:i]) < sum(counts) - text.count(guard(words)):
                dropped.append((i, DROPPED_THOUGHT))
    return tuple(dropped)


def require_shown(text: str, messages: Sequence[Message]) -> None:
    """TemplateRefusedError if the rendered text lacks a tool's answer or the name of a call."""
    for number, message in enumerate(messages):
        calls = message.get("tool_calls") or ()
        words = [call.get("function", call)["name"] for call in calls]
        if message["role"] == "tool" and isinstance(content := message.get("content"), str):
            words.append(content.strip())
        for word in words:
            if word not in text and json.dumps(word, ensure_ascii=False)[1:-1] not in text:
                left_out = f"the chat template leaves out turn {number} ({message['role']})"
                raise TemplateRefusedError(f"{left_out}; give one that knows tools")
