"""What a record says, in the one form that all shapes become, and what they share.

Turns with `<image>` and `<audio>` markers, and the files behind the markers. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from packer.records.media import Media
from packer.text.chat_tokenizer import IMAGE_MARKER, Turn


class RecordProblem(ValueError):
    """Something in a record that makes it unusable: a key of `record.REASONS`, and the
    particulars.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True, slots=True)
class Content:
    """What a record says: its turns, and the files in the order of their markers."""

    turns: tuple[Turn, ...]
    images: tuple[Media, ...] = ()
    audios: tuple[Media, ...] = ()


Record = Mapping[str, Any]


def plain_text(text: str) -> str:
    """A text in which no marker may stand: its shape says itself where images are, so it would be
    one too many.
    """
    if IMAGE_MARKER in text:
        raise RecordProblem(
            "marker_without_image",
            f"the text holds {IMAGE_MARKER}, and its images have places already",
        )
    return text


def with_markers(turns: tuple[Turn, ...], marker: str, num_files: int) -> tuple[Turn, ...]:
    """Files without a marker stand in front of the first user turn; a marker without a file has no
    meaning.
    """
    missing = num_files - sum(turn.text.count(marker) for turn in turns)
    if missing < 0:
        kind = marker[1:-1]
        raise RecordProblem(
            f"marker_without_{kind}",
            f"{num_files - missing} {marker} markers for {num_files} files",
        )
    if missing == 0:
        return turns
    first = next((i for i, turn in enumerate(turns) if turn.role == "user"), 0)
    marked = Turn(turns[first].role, f"{marker}\n" * missing + turns[first].text)
    return (*turns[:first], marked, *turns[first + 1 :])
