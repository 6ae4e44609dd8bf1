"""Raw record -> sample: its keys say which known schema it has. Pure.

Each schema becomes the same: turns with `<image>` and `<audio>` markers, and their files. A plain
text, a caption and an interleaved document are one turn with the role `document`: every token of it
is learned.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from packer.records._document import (
    CAPTION_KEYS,
    PAIR_KEYS,
    URL_KEYS,
    read_caption,
    read_mmc4,
    read_obelics,
    read_text,
)
from packer.records.media import Media, SampleProblem
from packer.records.media_fields import FILE_KEYS, files_of, media_of_part
from packer.records.record import (
    Content,
    RawRecord,
    RawSample,
    Record,
    Rejected,
    plain_text,
    with_markers,
)
from packer.text.chat_tokenizer import AUDIO_MARKER, IMAGE_MARKER, Turn

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
"""Keys of a record with one question and its answer: FLAN's, Alpaca's, Dolly's, and others."""
INPUT_KEYS = ("input", "context")
"""What an instruction is about, in Alpaca's and in Dolly's words."""
CONTENT_KEYS: frozenset[str] = frozenset(
    {"conversations", "messages", "text_list", "texts", "text", *CAPTION_KEYS}
    | {key for keys in QUESTIONS_AND_ANSWERS for key in keys}
)
"""A record without any of these has none of the schemas."""
RECORD_KEYS: frozenset[str] = frozenset(
    {"id", "__key__", "source", "system", "image_info", "status", "error_message"}
    | {*CONTENT_KEYS, *INPUT_KEYS, *PAIR_KEYS, *URL_KEYS}
    | {key for keys in FILE_KEYS.values() for key in keys}
)
"""Every key that is read: the columns worth reading of a table."""


def parse_record(record: RawRecord, source: str) -> RawSample | Rejected:
    """The sample in a record of the dataset `source`.

    Reads `id` or `__key__` (without either: the record's place) and `source` (which part of a
    mixture it comes from; by default the dataset's name).
    """
    sample_id = _sample_id(record.value, f"{source}:{record.position}")
    source = _text(record.value, "source") or source
    try:
        if record.broken:
            raise SampleProblem(record.reason, record.broken)
        if not isinstance(record.value, Mapping):
            raise SampleProblem("not_an_object", f"it is a {type(record.value).__name__}")
        content = _content(record.value)
        return RawSample(sample_id, source, content.turns, content.images, content.audios)
    except SampleProblem as problem:
        return Rejected(sample_id, source, problem.reason, problem.detail)


def _sample_id(value: Any, fallback: str) -> str:
    for key in ("id", "__key__"):
        given = value.get(key) if isinstance(value, Mapping) else None
        if isinstance(given, int | float) and not isinstance(given, bool):
            return str(given)
        if text := _text(value, key):
            return text
    return fallback


def _text(value: Any, key: str) -> str:
    """The string under a key, empty if there is none."""
    given = value.get(key) if isinstance(value, Mapping) else None
    # surrogates would break every writer downstream; the text itself is checked by the tokenizer
    return given.encode("utf-8", "replace").decode("utf-8") if isinstance(given, str) else ""


def _content(record: Record) -> Content:
    for fits, read in _SCHEMAS:
        if fits(record):
            return read(record)
    known = "`conversations`, `messages`, `text`, a caption, or a question and an answer"
    has = ", ".join(map(str, record))[:200]
    raise SampleProblem("no_conversation", f"it has the keys {has}; expected {known}")


# --- conversations ---


def _conversation(record: Record) -> Content:
    """LLaVA's `conversations` and ShareGPT's, OpenAI's `messages` with text or with parts."""
    raw = record.get("conversations")
    raw = _rows(record.get("messages") if raw is None else raw)
    if not isinstance(raw, Sequence) or isinstance(raw, str) or not raw:
        raise SampleProblem("no_conversation", "`conversations` is missing, empty or not a list")
    parts: dict[str, list[Media]] = {"image": [], "audio": []}
    turns = tuple(_turn(item, number, parts) for number, item in enumerate(raw))
    turns = _with_system(record.get("system"), turns)
    images, audios = (tuple(parts[kind] or files_of(record, kind)) for kind in ("image", "audio"))
    if not any(turn.role == "assistant" for turn in turns):
        raise SampleProblem("no_answer", f"{len(turns)} turns, none by the assistant")
    turns = with_markers(turns, IMAGE_MARKER, len(images))
    turns = with_markers(turns, AUDIO_MARKER, len(audios)) if audios else turns
    return Content(turns, images, audios)


def _pairs(record: Record) -> Content:
    """The Cauldron's `texts`: a list of one user and one assistant text each."""
    messages = [
        {"role": role, "content": pair.get(role)}
        for pair in _rows(record["texts"])
        for role in ("user", "assistant")
    ]
    return _conversation({**record, "messages": messages, "conversations": None})


def _question(record: Record) -> Content:
    """One question and its answer, as in FLAN; an `instruction` may have an `input`."""
    keys = next(keys for keys in QUESTIONS_AND_ANSWERS if _has(record, keys))
    question, answer = (record[key] for key in keys)
    if keys[0] == "instruction" and isinstance(question, str):
        inputs = (record.get(key) for key in INPUT_KEYS)
        given = [text for text in inputs if isinstance(text, str) and text]
        question = "\n".join([question, *given])
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
    if not isinstance(given, list) or not given:
        return False
    return all(isinstance(item, Mapping) for item in given)


def _is_interleaved(record: Record) -> bool:
    return all(isinstance(record.get(key), list) for key in ("texts", "images"))


def _is_linked_pair(record: Record) -> bool:
    return _has(record, ("url", "text")) and _has_one(record, PAIR_KEYS)


_SCHEMAS: tuple[tuple[Callable[[Record], bool], Callable[[Record], Content]], ...] = (
    (lambda record: _has_one(record, ("conversations", "messages")), _conversation),
    (lambda record: _has(record, ("text_list",)), read_mmc4),
    (lambda record: _are_objects(_rows(record.get("texts"))), _pairs),
    (_is_interleaved, read_obelics),
    (lambda record: any(_has(record, keys) for keys in QUESTIONS_AND_ANSWERS), _question),
    (lambda record: _has_one(record, CAPTION_KEYS) or _is_linked_pair(record), read_caption),
    (lambda record: "text" in record, read_text),
)
"""Schemas in the order in which they are tried: the most particular first."""


def _rows(raw: Any) -> Any:
    """A list of objects, also if `datasets` stored it as an object of equally long lists."""
    if not isinstance(raw, Mapping) or not raw:
        return raw
    columns = raw.values()
    if not all(isinstance(column, list) for column in columns) or len(set(map(len, columns))) > 1:
        return raw
    return [dict(zip(raw, row, strict=True)) for row in zip(*columns, strict=True)]


# --- turns ---


def _turn(item: Any, number: int, parts: dict[str, list[Media]]) -> Turn:
    if not isinstance(item, Mapping):
        raise SampleProblem("bad_turn", f"turn {number} is a {type(item).__name__}, not an object")
    # in a table, keys that a record does not have are nulls
    given = item.get("from") if item.get("from") is not None else item.get("role")
    text = item.get("value") if item.get("value") is not None else item.get("content")
    role = ROLES.get(given) if isinstance(given, str) else None
    if role is None:
        bad = f"turn {number} has the role {str(given)[:80]!r}; known: {', '.join(ROLES)}"
        raise SampleProblem("bad_turn", bad)
    if isinstance(text, list):
        text = "".join(_part(part, number, parts) for part in text)
    if not isinstance(text, str):
        raise SampleProblem("bad_turn", f"the text of turn {number} is a {type(text).__name__}")
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
    bad = f"a part of turn {number} has the type {str(kind)[:80]!r}; known: text, image, audio"
    raise SampleProblem("bad_turn", bad)


def _with_system(system: Any, turns: tuple[Turn, ...]) -> tuple[Turn, ...]:
    """Turns after ShareGPT's separate `system`, unless they have one of their own."""
    if system is None or system == "" or turns[0].role == "system":
        return turns
    if not isinstance(system, str):
        raise SampleProblem("bad_turn", f"`system` is a {type(system).__name__}")
    return (Turn("system", system), *turns)
