"""A message's role, and its fields beyond that and its text, for the template.

All of them, as `apply_chat_template` would get them: `reasoning_content`, `thinking`, `name`,
`tool_call_id`, and whatever else a template may read. Which ones it does not read is found when it
is rendered. OpenAI's `function_call` and ShareGPT's `function_call` turns become `tool_calls`; a
record's `tools` go with its first turn. Nulls in calls and tools are left out, since Arrow gives
every object the keys of all. Pure.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import date, time
from decimal import Decimal
from typing import Any

from isobatch.counting.records.fields import Fields, is_empty
from isobatch.counting.records.loss import LOSS_KEYS
from isobatch.counting.records.media import SampleProblem
from isobatch.counting.records.record import is_deep
from isobatch.counting.text.turn import Turn

CALL_ROLES = ("function_call", "tool_call")
"""Roles of a turn whose text is a call of a tool, or a list of them: ShareGPT's, ms-swift's."""
ROLES: dict[str, str] = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "model", "bot", "chatgpt", "bing", "bard"), "assistant"),
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("tool", "function", "observation", "observations"), "tool"),
    **dict.fromkeys(("ipython", "tool_response", "function_response"), "tool"),
    **dict.fromkeys(CALL_ROLES, "assistant"),
}
"""Roles of LLaVA, InternVL, ShareGPT, OpenAI, Gemma and ms-swift, in small letters; also used in
capitals."""
_PLAIN_ROLES = {role: ours for role, ours in ROLES.items() if role not in CALL_ROLES}
"""Those whose text is no call."""
_OWN = frozenset({"role", "from", "content", "value", "tools", *LOSS_KEYS})
"""Keys that are read otherwise. `tools` are those of a record."""
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""A turn may have one of these, or calls, and no text."""
_DEFINITION = frozenset({"function", "parameters", "input_schema", "inputSchema", "description"})
"""A tool has one of these next to its name."""


def plain_turns(raw: Sequence[Any]) -> tuple[Turn, ...] | None:
    """Turns that are a role and a text alone, of which nothing stays unread; None for others.

    As the schemas read any message, in a third of the time: so are nearly all.
    """
    turns = []
    for item in raw:
        if type(item) is not dict or len(item) != 2:
            return None
        role, text = item.get("from"), item.get("value")
        if role is None:
            role, text = item.get("role"), item.get("content")
        known = _PLAIN_ROLES.get(role) if type(role) is str else None
        if known is None or type(text) is not str:
            return None
        turns.append(Turn(known, text))
    return tuple(turns)


def read_fields(item: Fields, role: str, text: Any, number: int) -> tuple[Any, str]:
    """(text of a message, its other fields as JSON or nothing); their keys are noted as read.

    `role` is as the record has it. SampleProblem for what is not JSON.
    """
    if role not in CALL_ROLES and text is not None and _OWN.issuperset(item):
        return text, ""  # nearly all
    more = {
        key: item[key]
        for key in item
        if isinstance(key, str) and key not in _OWN and item.peek(key) is not None
    }
    calls = None if is_empty(more.get("tool_calls")) else more["tool_calls"]
    more.pop("tool_calls", None)
    function_call = more.pop("function_call", None)
    if role in CALL_ROLES:
        is_parsed = isinstance(text, Mapping)
        value = text if is_parsed else _parsed(text, f"a tool call of turn {number}")
        several = value if isinstance(value, list) else [value]
        calls = [{"type": "function", "function": call} for call in several]
        text = ""
    elif calls is None and isinstance(function_call, Mapping):
        calls = [{"type": "function", "function": function_call}]
    elif not is_empty(function_call):
        more["function_call"] = function_call
    if calls is not None:
        if not isinstance(calls, list) or not all(map(_has_name, calls)):
            raise SampleProblem("bad_turn", f"the tool calls of turn {number} have no names")
        more["tool_calls"] = without_nulls(calls)
    if text is None and (calls or any(isinstance(more.get(key), str) for key in _THOUGHTS)):
        more["content"] = None
        text = ""
    return text, _as_json(more, f"turn {number}") if more else ""


def joined_calls(turns: tuple[Turn, ...], items: Sequence[Any]) -> tuple[Turn, ...]:
    """Turns, where ms-swift's calls of one step, and what was said before them, are one turn.

    `items` have the roles as the record has them. SampleProblem if only a part is learned.
    """
    if not any(turn.more for turn in turns):  # nearly all
        return turns
    joined: list[Turn] = []
    for turn, item in zip(turns, items, strict=True):
        is_call = str(item.peek("role") or item.peek("from")).strip().lower() == "tool_call"
        last = joined[-1] if joined else None
        if not is_call or last is None or last.role != turn.role:
            joined.append(turn)
            continue
        if last.learned != turn.learned:
            bad = "a call of a tool and the answer that it belongs to differ in what is learned"
            raise SampleProblem("bad_loss", bad)
        before, more = (json.loads(one.more or "{}") for one in (last, turn))
        calls = [*before.pop("tool_calls", []), *more.pop("tool_calls")]
        joined[-1] = replace(last, more=_as_json({**before, **more, "tool_calls": calls}, "a turn"))
    return tuple(joined)


def with_tools(turns: tuple[Turn, ...], tools: Any, key: str) -> tuple[Turn, ...]:
    """Turns whose first one has the tools that the conversation may call.

    A column of this name that defines none, such as a list of hammers and saws, stays unread.
    """
    if isinstance(tools, str) and tools.lstrip().startswith(("[", "{")):
        try:
            tools = _parsed(tools, f"`{key}`")
        except SampleProblem:
            if any(turn.role == "tool" or '"tool_calls"' in turn.more for turn in turns):
                raise
            return turns  # nobody calls any: a text of another kind
    listed = tools if isinstance(tools, list) else [tools]
    # a definition names a function, and says what that is for or takes
    defined = [_has_name(tool) and bool(_DEFINITION & {*tool}) for tool in listed]
    if not any(defined):
        return turns
    if not all(defined) or not isinstance(tools, list):
        raise SampleProblem("bad_turn", f"`{key}` is not a list of definitions alone")
    if key == "functions":
        tools = [{"type": "function", "function": function} for function in tools]
    more = json.loads(turns[0].more) if turns[0].more else {}
    more["tools"] = without_nulls(tools)
    return (replace(turns[0], more=_as_json(more, "`tools`")), *turns[1:])


def without_nulls(value: Any) -> Any:
    """A value without the keys of its objects that have no value.

    >>> without_nulls([{"unit": None, "of": [None, {"x": None}]}])
    [{'of': [None, {}]}]
    """
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [without_nulls(item) for item in value]
    return value


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


def _as_json(value: Any, where: str) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, default=_plain)
        text.encode()
    except (TypeError, ValueError, RecursionError):
        bad = f"a field of {where} is not JSON, or not valid Unicode"
        raise SampleProblem("bad_turn", bad) from None
    return text


def _plain(value: Any) -> Any:
    """What tables hold and JSON does not, as a text or a list. TypeError for anything else."""
    if isinstance(value, date | time | Decimal):
        return str(value)
    if hasattr(value, "tolist"):  # NumPy's
        return value.tolist()
    raise TypeError(type(value).__name__)
