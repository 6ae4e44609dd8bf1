"""The shapes that records come in, whatever file they stand in: a record's keys say which one it
has.

Each shape becomes the same thing: turns with `<image>` and `<audio>` markers, and the files behind
them. A plain text, a caption and an interleaved document are one turn with the role `document`:
every token of it is learned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from packer.records.content import Content, Record, RecordProblem, plain_text, with_markers
from packer.records.document import (
    CAPTION_KEYS,
    PAIR_KEYS,
    URL_KEYS,
    read_caption,
    read_mmc4,
    read_obelics,
    read_text,
)
from packer.records.media import Media, MediaProblem
from packer.records.media_fields import FILE_KEYS, files_of, media_of_part
from packer.text.chat_tokenizer import AUDIO_MARKER, IMAGE_MARKER, Turn

__all__ = ["CONTENT_KEYS", "RECORD_KEYS", "ROLES", "Content", "RecordProblem", "read_content"]

ROLES: dict[str, str] = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "system": "system",
    "developer": "system",
}
"""Roles of LLaVA, InternVL, ShareGPT, OpenAI and Gemma."""
QUESTIONS_AND_ANSWERS = (
    ("inputs", "targets"),
    ("instruction", "output"),
    ("instruction", "response"),
    ("prompt", "response"),
    ("prompt", "completion"),
    ("question", "answer"),
)
"""Keys of a record that is one question and its answer: FLAN's, Alpaca's, Dolly's, and others in
use.
"""
INPUT_KEYS = ("input", "context")
"""What an instruction is about, in Alpaca's and in Dolly's words."""
CONTENT_KEYS: frozenset[str] = frozenset(
    {"conversations", "messages", "text_list", "texts", "text", *CAPTION_KEYS}
    | {key for keys in QUESTIONS_AND_ANSWERS for key in keys}
)
"""A record without any of these has none of the shapes."""
RECORD_KEYS: frozenset[str] = frozenset(
    {"id", "__key__", "source", "system", "image_info", "status", "error_message"}
    | {*CONTENT_KEYS, *INPUT_KEYS, *PAIR_KEYS, *URL_KEYS}
    | {key for keys in FILE_KEYS.values() for key in keys}
)
"""Every key that is read: the columns worth reading of a table."""


def read_content(record: Record) -> Content:
    """The content of a record of any known shape; RecordProblem if it has none of them or is
    damaged.
    """
    for fits, read in _SHAPES:
        if fits(record):
            try:
                return read(record)
            except MediaProblem as problem:
                raise RecordProblem(problem.reason, problem.detail) from None
    known = "`conversations`, `messages`, `text`, a caption, or a question and an answer"
    raise RecordProblem(
        "no_conversation", f"it has the keys {', '.join(map(str, record))[:200]}; expected {known}"
    )


def _conversation(record: Record) -> Content:
    """LLaVA's `conversations` and ShareGPT's, OpenAI's `messages` with text or with parts."""
    raw = record.get("conversations")
    raw = _rows(record.get("messages") if raw is None else raw)
    if not isinstance(raw, Sequence) or isinstance(raw, str) or not raw:
        raise RecordProblem("no_conversation", "`conversations` is missing, empty or not a list")
    parts: dict[str, list[Media]] = {"image": [], "audio": []}
    turns = _with_system(
        record.get("system"), tuple(_turn(item, number, parts) for number, item in enumerate(raw))
    )
    images, audios = (tuple(parts[kind] or files_of(record, kind)) for kind in ("image", "audio"))
    _require_answer(turns)
    turns = with_markers(turns, IMAGE_MARKER, len(images))
    return Content(
        with_markers(turns, AUDIO_MARKER, len(audios)) if audios else turns, images, audios
    )


def _pairs(record: Record) -> Content:
    """The Cauldron's `texts`: a list of one user and one assistant text each."""
    pairs = _rows(record["texts"])
    messages = [
        {"role": role, "content": pair.get(role)}
        for pair in pairs
        for role in ("user", "assistant")
    ]
    return _conversation({**record, "messages": messages, "conversations": None})


def _question(record: Record) -> Content:
    """One question and its answer, as in FLAN; an `instruction` may have an `input`."""
    keys = next(keys for keys in QUESTIONS_AND_ANSWERS if _has(record, keys))
    question, answer = (record[key] for key in keys)
    if keys[0] == "instruction" and isinstance(question, str):
        inputs = [record.get(key) for key in INPUT_KEYS]
        question = "\n".join(
            [question, *(given for given in inputs if isinstance(given, str) and given)]
        )
    if _are_objects(question) and _are_objects(answer):  # both are lists of messages
        messages = [*question, *answer]
    else:
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return _conversation({**record, "messages": messages, "conversations": None})


def _has(record: Record, keys: Sequence[str]) -> bool:
    return all(record.get(key) is not None for key in keys)


def _has_one(record: Record, keys: Sequence[str]) -> bool:
    return any(record.get(key) is not None for key in keys)


def _are_objects(given: Any) -> bool:
    return (
        isinstance(given, list) and bool(given) and all(isinstance(item, Mapping) for item in given)
    )


def _is_linked_pair(record: Record) -> bool:
    return _has(record, ("url", "text")) and _has_one(record, PAIR_KEYS)


_SHAPES: tuple[tuple[Callable[[Record], bool], Callable[[Record], Content]], ...] = (
    (lambda record: _has_one(record, ("conversations", "messages")), _conversation),
    (lambda record: _has(record, ("text_list",)), read_mmc4),
    (lambda record: _are_objects(_rows(record.get("texts"))), _pairs),
    (
        lambda record: (
            isinstance(record.get("texts"), list) and isinstance(record.get("images"), list)
        ),
        read_obelics,
    ),
    (lambda record: any(_has(record, keys) for keys in QUESTIONS_AND_ANSWERS), _question),
    (lambda record: _has_one(record, CAPTION_KEYS) or _is_linked_pair(record), read_caption),
    (lambda record: "text" in record, read_text),
)
"""In the order in which they are tried: what is more particular comes first."""


def _rows(raw: Any) -> Any:
    """A list of objects that `datasets` stored as an object of lists (its `Sequence` of objects),
    as it was meant.
    """
    if (
        not isinstance(raw, Mapping)
        or not raw
        or not all(isinstance(column, list) for column in raw.values())
    ):
        return raw
    if len({len(column) for column in raw.values()}) > 1:
        return raw
    return [dict(zip(raw, row, strict=True)) for row in zip(*raw.values(), strict=True)]


def _turn(item: Any, number: int, parts: dict[str, list[Media]]) -> Turn:
    if not isinstance(item, Mapping):
        raise RecordProblem("bad_turn", f"turn {number} is a {type(item).__name__}, not an object")
    # in a table, keys that a record does not have are nulls
    given = item.get("from") if item.get("from") is not None else item.get("role")
    text = item.get("value") if item.get("value") is not None else item.get("content")
    role = ROLES.get(given) if isinstance(given, str) else None
    if role is None:
        raise RecordProblem(
            "bad_turn", f"turn {number} has the role {str(given)[:80]!r}; known: {', '.join(ROLES)}"
        )
    if isinstance(text, list):
        text = "".join(_part(part, number, parts) for part in text)
    if not isinstance(text, str):
        raise RecordProblem("bad_turn", f"the text of turn {number} is a {type(text).__name__}")
    return Turn(role, text)


def _part(part: Any, number: int, parts: dict[str, list[Media]]) -> str:
    """A part of an OpenAI message as text; its file is added to `parts`."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in ("text", "input_text", "output_text") and isinstance(part.get("text"), str):
        return plain_text(part["text"])
    for name, marker in (("image", IMAGE_MARKER), ("audio", AUDIO_MARKER)):
        keys = (f"{name}_url", f"input_{name}", name)
        if kind in keys:
            if (media := media_of_part(part, keys, name)) is not None:
                parts[name].append(media)
            return marker
    raise RecordProblem(
        "bad_turn",
        f"a part of turn {number} has the type {str(kind)[:80]!r}; known: text, image, audio",
    )


def _with_system(system: Any, turns: tuple[Turn, ...]) -> tuple[Turn, ...]:
    """ShareGPT's `system` beside the turns goes in front of them, if they have none of their
    own.
    """
    if system is None or system == "" or turns[0].role == "system":
        return turns
    if not isinstance(system, str):
        raise RecordProblem("bad_turn", f"`system` is a {type(system).__name__}")
    return (Turn("system", system), *turns)


def _require_answer(turns: tuple[Turn, ...]) -> None:
    if not any(turn.role == "assistant" for turn in turns):
        raise RecordProblem("no_answer", f"{len(turns)} turns, none by the assistant")
