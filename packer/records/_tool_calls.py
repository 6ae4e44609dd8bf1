"""Calls of tools in conversations, kept for the chat template.

OpenAI's `tool_calls` and `function_call`, ShareGPT's `function_call` turns, and the `tools` that a
record lists. The template gets them as they are, as from `apply_chat_template`. Pure.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from packer.records.media import SampleProblem
from packer.records.record import is_deep
from packer.text.chat_tokenizer import Turn

_KEPT = ("name", "tool_call_id")
"""Keys of a tool's answer that templates may write."""


def read_tool_calls(item: Mapping[str, Any], role: str, text: Any, number: int) -> tuple[Any, str]:
    """(text of a message, what else the template needs as JSON or nothing)."""
    more: dict[str, Any] = {key: item[key] for key in _KEPT if isinstance(item.get(key), str)}
    calls = item.get("tool_calls") or None
    if role == "function_call":  # ShareGPT: the text is the call
        function = _parsed(text, f"a tool call of turn {number}")
        calls, text = [{"type": "function", "function": function}], ""
    elif calls is None and isinstance(item.get("function_call"), Mapping):
        calls = [{"type": "function", "function": item["function_call"]}]
    if calls is not None:
        if not _are_calls(calls):
            raise SampleProblem("bad_turn", f"the tool calls of turn {number} have no names")
        more["tool_calls"] = calls
        if text is None:
            more["content"], text = None, ""
    used = more if calls is not None or role in {"tool", "function"} else {}
    return text, _as_json(used) if used else ""


def with_tools(turns: tuple[Turn, ...], tools: Any) -> tuple[Turn, ...]:
    """Turns whose first one has the tools that the conversation may call.

    A column of this name that defines none, such as a list of hammers and saws, is another matter.
    """
    if isinstance(tools, str) and tools.lstrip().startswith(("[", "{")):
        tools = _parsed(tools, "`tools`")
    listed = tools if isinstance(tools, list) else [tools]
    named = [_has_name(tool) for tool in listed]
    if not any(named):
        return turns
    if not all(named) or not isinstance(tools, list):
        raise SampleProblem("bad_turn", "`tools` is not a list of objects with names")
    more = json.loads(turns[0].more) if turns[0].more else {}
    return (replace(turns[0], more=_as_json(more | {"tools": tools})), *turns[1:])


def _are_calls(calls: Any) -> bool:
    return isinstance(calls, list) and all(map(_has_name, calls))


def _has_name(tool: Any) -> bool:
    """Whether it is an object with a name, its own or its function's."""
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)


def _parsed(text: Any, what: str) -> Any:
    try:
        value = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        value = None
    if value is None or is_deep(value):
        raise SampleProblem("bad_turn", f"{what} is not JSON")
    return value


def _as_json(value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False)
        text.encode()
    except (TypeError, ValueError):
        raise SampleProblem("bad_turn", "a tool call is not JSON, or not valid Unicode") from None
    return text
