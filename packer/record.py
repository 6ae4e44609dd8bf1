"""The raw sample, and what can be wrong with it.

A source yields `RawRecord`s exactly as it finds them, damaged ones included. `parse_record` turns one into a
`RawSample` or a `Rejected` with a reason from `REASONS`; nothing is dropped on the way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from packer.text import IMAGE_MARKER, Turn

REASONS: dict[str, str] = {
    "broken_json": "the record is not valid JSON",
    "not_an_object": "the record is not a JSON object",
    "invalid_utf8": "the text is not valid Unicode",
    "no_conversation": "there is no list of turns, or it is empty",
    "bad_turn": "a turn has no text or an unknown role",
    "no_answer": "there is no assistant turn, so nothing to learn from",
    "bad_image_field": "`image` is neither a path nor a list of paths",
    "marker_without_image": "the text has more <image> markers than the sample has images",
    "chat_template": "the tokenizer's chat template refuses the conversation",
    "control_token": "the text holds a control token's string and cannot be told apart from it",
    "outside_data_root": "an image path leads out of the data root",
    "image_url": "an image is given by URL, not by path",
    "missing_image": "an image file is not there",
    "unreadable_image": "an image file cannot be read",
    "corrupt_image": "an image is damaged, cut short or of an unknown kind",
    "too_many_pixels": "an image is so large that decoding it is not safe",
    "empty_image": "an image has no pixels",
    "aspect_ratio": "the model's processor refuses an image of this shape",
    "longer_than_max_seq_len": "the sample is longer than max_seq_len",
    "more_than_max_vision": "the images are more than the vision cap",
    "image_changed": "an image file changed between counting and writing",
}
"""Every reason for which a sample can be rejected, in words."""

ROLES: dict[str, str] = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
}


@dataclass(frozen=True, slots=True)
class RawRecord:
    """One record as the source holds it: its value, or why it cannot be parsed."""

    position: int
    """0-based place among the records of the source."""
    value: Any
    broken: str = ""
    """Where and why it is not valid, empty for a record that is."""


@dataclass(frozen=True, slots=True)
class RawSample:
    """A sample as its author meant it: turns with `<image>` markers, and as many image paths as markers."""

    position: int
    sample_id: str
    source: str
    turns: tuple[Turn, ...]
    images: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Rejected:
    """A sample that cannot be used, and why."""

    position: int
    sample_id: str
    source: str
    reason: str
    """A key of `REASONS`."""
    detail: str


class RecordProblem(ValueError):
    """Something in a record that makes it unusable: a key of `REASONS`, and the particulars."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


def parse_record(record: RawRecord, source: str) -> RawSample | Rejected:
    """The sample in a LLaVA-like record of the dataset `source`.

    Reads `id`, `source` (which part of a mixture it comes from; absent: the dataset's name), `image` (path, list of
    paths or absent) and `conversations` with `from`/`value` or `role`/`content`. An image without a marker stands in
    front of the first user turn; a marker without an image rejects the sample.
    """
    sample_id = _sample_id(record.value, f"{source}:{record.position}")
    source = _text(record.value, "source") or source
    try:
        if record.broken:
            raise RecordProblem("broken_json", record.broken)
        if not isinstance(record.value, Mapping):
            raise RecordProblem("not_an_object", f"it is a {type(record.value).__name__}")
        turns = _turns(record.value)
        images = _images(record.value)
        return RawSample(record.position, sample_id, source, _with_markers(turns, len(images)), images)
    except RecordProblem as problem:
        return Rejected(record.position, sample_id, source, problem.reason, problem.detail)


def _sample_id(value: Any, fallback: str) -> str:
    given = value.get("id") if isinstance(value, Mapping) else None
    if isinstance(given, int | float) and not isinstance(given, bool):
        return str(given)
    return _text(value, "id") or fallback


def _text(value: Any, key: str) -> str:
    """The string under a key, empty if there is none."""
    given = value.get(key) if isinstance(value, Mapping) else None
    # surrogates would break every writer downstream; the text itself is checked by the tokenizer
    return given.encode("utf-8", "replace").decode("utf-8") if isinstance(given, str) else ""


def _turns(value: Mapping[str, Any]) -> tuple[Turn, ...]:
    raw = value.get("conversations", value.get("messages"))
    if not isinstance(raw, Sequence) or isinstance(raw, str) or not raw:
        raise RecordProblem("no_conversation", "`conversations` is missing, empty or not a list")
    turns = tuple(_turn(item, number) for number, item in enumerate(raw))
    if not any(turn.role == "assistant" for turn in turns):
        raise RecordProblem("no_answer", f"{len(turns)} turns, none by the assistant")
    return turns


def _turn(item: Any, number: int) -> Turn:
    if not isinstance(item, Mapping):
        raise RecordProblem("bad_turn", f"turn {number} is a {type(item).__name__}, not an object")
    given = item.get("from", item.get("role"))
    role = ROLES.get(given) if isinstance(given, str) else None
    text = item.get("value", item.get("content"))
    if role is None:
        raise RecordProblem("bad_turn", f"turn {number} has the role {given!r}; known: {', '.join(ROLES)}")
    if not isinstance(text, str):
        raise RecordProblem("bad_turn", f"the text of turn {number} is a {type(text).__name__}")
    return Turn(role, text)


def _images(value: Mapping[str, Any]) -> tuple[str, ...]:
    given = value.get("image")
    if given is None or given in ("", []):
        return ()
    paths = [given] if isinstance(given, str) else given
    if not isinstance(paths, list) or not all(isinstance(path, str) and path for path in paths):
        raise RecordProblem("bad_image_field", f"`image` is {str(given)[:80]!r}; give a path or a list of paths")
    return tuple(paths)


def _with_markers(turns: tuple[Turn, ...], num_images: int) -> tuple[Turn, ...]:
    missing = num_images - sum(turn.text.count(IMAGE_MARKER) for turn in turns)
    if missing < 0:
        raise RecordProblem("marker_without_image", f"{num_images - missing} markers for {num_images} images")
    if missing == 0:
        return turns
    first_user = next((i for i, turn in enumerate(turns) if turn.role == "user"), 0)
    turn = turns[first_user]
    marked = Turn(turn.role, f"{IMAGE_MARKER}\n" * missing + turn.text)
    return (*turns[:first_user], marked, *turns[first_user + 1 :])
