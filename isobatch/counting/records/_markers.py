"""Markers of files in raw texts: as many as there are files of their kind. Pure.

For `counting.records.schemas`.
"""

from collections.abc import Mapping, Sequence

from isobatch.counting.records.media import Media, SampleProblem
from isobatch.counting.records.places.marks import edited, first_question, place_marks
from isobatch.counting.records.reading import Reading
from isobatch.counting.records.record import Content
from isobatch.counting.text.chat_tokenizer import AUDIO_MARKER, IMAGE_MARKER, VIDEO_MARKER, Turn

MARKERS = {"image": IMAGE_MARKER, "video": VIDEO_MARKER, "audio": AUDIO_MARKER}
Files = Mapping[str, Sequence[Media]]
"""Kind -> files."""


def plain_text(text: str) -> str:
    """A text without markers: its schema says itself where images are."""
    if IMAGE_MARKER in text:
        bad = f"the text holds {IMAGE_MARKER}, and its images have places already"
        raise SampleProblem("marker_without_image", bad)
    return text


def with_files(
    turns: tuple[Turn, ...],
    files: Files,
    reading: Reading,
    numbers: Mapping[str, Sequence[int]] | None = None,
) -> Content:
    """The content of these turns and files, with a marker for each file; SampleProblem if more.

    `numbers`: kind -> those of the columns that its files are from, if they are numbered.
    """
    placed = dict(files)
    # each goes before those that are there: clips, images, videos
    for kind in ("video", "image", "audio"):
        several = (numbers or {}).get(kind, ())
        turns, placed[kind] = place_marks(turns, kind, files[kind], reading, several)
        if placed[kind] or kind == "image":
            turns = _with_markers(turns, MARKERS[kind], len(placed[kind]))
    return content_of(turns, placed)


def content_of(turns: tuple[Turn, ...], files: Files) -> Content:
    """The content of turns with all their markers."""
    images, videos, audios = (tuple(files.get(kind, ())) for kind in MARKERS)
    return Content(turns, images, audios, videos)


def _with_markers(turns: tuple[Turn, ...], marker: str, num_files: int) -> tuple[Turn, ...]:
    """Turns with a marker per file, added before the first user turn; none too many."""
    missing = num_files - sum(turn.text.count(marker) for turn in turns)
    if missing < 0:
        bad = f"{num_files - missing} {marker} markers for {num_files} files"
        raise SampleProblem(f"marker_without_{marker[1:-1]}", bad)
    if missing == 0:
        return turns
    first = first_question(turns)
    marked = edited(turns[first], [(0, 0, f"{marker}\n" * missing)])
    return (*turns[:first], marked, *turns[first + 1 :])
