"""Turns of a conversation, with calls of tools, as a template's messages. Pure."""

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from packer.text.chat_template import Message, TemplateRefusedError

if TYPE_CHECKING:
    from packer.text.chat_tokenizer import Turn


def messages_of(
    turns: "Sequence[Turn]", write: Callable[[str], Any]
) -> tuple[list[dict[str, Any]], Any]:
    """(messages, the tools that they may call or None); `write` makes a content of a text."""
    messages: list[dict[str, Any]] = [
        {"role": turn.role, "content": write(turn.text)}
        | (json.loads(turn.more) if turn.more else {})
        for turn in turns
    ]
    return messages, messages[0].pop("tools", None) if messages else None


def require_shown(text: str, messages: Sequence[Message]) -> None:
    """TemplateRefusedError if the rendered text lacks a tool's answer or the name of a call."""
    for number, message in enumerate(messages):
        calls = message.get("tool_calls") or ()
        words = [call.get("function", call)["name"] for call in calls]
        if message["role"] == "tool" and isinstance(message["content"], str):
            words.append(message["content"].strip())
        for word in words:
            if word not in text and json.dumps(word, ensure_ascii=False)[1:-1] not in text:
                left_out = f"the chat template leaves out turn {number} ({message['role']})"
                raise TemplateRefusedError(f"{left_out}; give one that knows tools")
