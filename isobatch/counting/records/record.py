"""The raw sample, its content, and every reason to reject one. Pure.

A source yields `RawRecord`s exactly as it finds them, damaged ones included.
`counting.records.schemas` turns each into a `RawSample` or a `Rejected`; none is dropped on the
way.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from isobatch.counting.records.fields import Unread
from isobatch.counting.records.media import Media
from isobatch.counting.records.places.grounding import Objects
from isobatch.counting.text.turn import Turn

MOST_DEPTH = 200
"""Nesting of a record at most: it is sent to other processes, some frames of the stack a level."""
TOO_DEEP = f"it is nested more than {MOST_DEPTH} deep"

REASONS: dict[str, str] = {
    "broken_json": "the record is not valid JSON",
    "broken_member": "a file of the sample in its container cannot be read",
    "unreadable_record": "the dataset in memory raises an error instead of giving the record",
    "not_an_object": "the record is not a JSON object",
    "invalid_utf8": "the text is not valid Unicode",
    "no_conversation": "there are no turns and no text",
    "bad_turn": "a turn has no text or an unknown role",
    "no_answer": "there is no assistant turn, so nothing to learn from",
    "not_learned": "the record says that it is not to be learned",
    "bad_loss": "a weight of the loss is neither 0 nor 1, or does not fit the turns",
    "bad_image_field": "`image` is neither a path nor a list of paths",
    "bad_video_field": "`video` is neither a path nor a list of paths",
    "bad_audio_field": "`audio` is neither a path nor a list of paths",
    "bad_column": "a column of --keep-columns holds what is not JSON",
    "marker_without_image": "the text has more <image> markers than the sample has images",
    "marker_without_video": "the text has more <video> markers than the sample has videos",
    "marker_without_audio": "the text has more <audio> markers than the sample has audio files",
    "unknown_mark": "a mark of a place, such as <image2>, matches no file of the sample",
    "grounding": "the boxes of `objects` cannot be written into the text",
    "chat_template": "the tokenizer's chat template refuses the conversation",
    "control_token": "the text holds a control token's string and cannot be told apart from it",
    "outside_data_root": "a path leads out of the data root",
    "image_url": "an image is given by URL, not by path",
    "video_url": "a video is given by URL, not by path",
    "audio_url": "an audio file is given by URL, not by path",
    "missing_image": "an image file is not there",
    "missing_video": "a video file is not there, or a folder has no images",
    "missing_audio": "an audio file is not there",
    "unreadable_image": "an image file cannot be read",
    "unreadable_video": "a video file cannot be read",
    "unreadable_audio": "an audio file cannot be read",
    "corrupt_image": "an image is damaged, cut short or of an unknown kind",
    "corrupt_video": "a video is damaged, cut short or not a video at all",
    "corrupt_audio": "an audio file is damaged or cut short",
    "video_format": "a video is of a container or codec that cannot be read here",
    "no_video_stream": "a file has no video in it, only audio or the like",
    "frame_rate": "nothing says how many frames of a video are a second",
    "asked_size": "a part of a message asks for another size than the model's rule makes",
    "frame_sizes": "the images that are a video differ in size",
    "short_video": "a video has fewer frames than the model needs",
    "audio_format": "an audio file is of a kind that cannot be read here",
    "no_video": "the model preset takes no videos",
    "no_audio_encoder": "the model preset has no audio encoder",
    "no_vision_encoder": "no model was given that takes images",
    "too_many_pixels": "an image or a frame is so large that decoding it is not safe",
    "too_many_bytes": "the files of a sample are more than an Arrow shard holds in a group",
    "empty_image": "an image has no pixels",
    "empty_video": "a video has no frames, or no pixels",
    "empty_audio": "an audio file has no sound in it, or too little for a token",
    "long_audio": "an audio file is longer than the model's processor takes",
    "aspect_ratio": "the model's processor refuses an image or a video of this shape",
    "longer_than_max_seq_len": "the sample is longer than max_seq_len",
    "more_than_max_vision": "the images and videos are more than the vision cap",
    "media_changed": "an image, a video or an audio file changed between counting and writing",
    "record_changed": "the dataset gave another record than when it was measured",
    "encode_failed": "the function of encode= fails, or gives no sample",
    "left_out": "the function of --map leaves it out",
    "map_failed": "the function of --map fails, or gives no record",
    "not_drawn": "left out by the mixture's weights",
}
"""Every reason for which a sample can be rejected, in words."""

BY_CHOICE = frozenset({"left_out", "not_drawn", "not_learned"})
"""Reasons that are the user's wish and nothing wrong with the data."""


@dataclass(frozen=True, slots=True)
class RawRecord:
    """One record as the source has it: its value, or why it cannot be parsed."""

    position: int
    """0-based place among the records of its file, for the id of a record without one."""
    value: Any
    broken: str = ""
    """Place and cause of a record that is not valid, else empty."""
    reason: str = "broken_json"
    """Key of `REASONS` for such a record."""
    renamed: tuple[tuple[str, str], ...] = ()
    """Its dataset's own names of columns, and ours, which the value has."""


@dataclass(frozen=True, slots=True)
class Content:
    """Turns with markers, and the files of each kind in the order of their markers."""

    turns: tuple[Turn, ...]
    images: tuple[Media, ...] = ()
    audios: tuple[Media, ...] = ()
    videos: tuple[Media, ...] = ()
    turns_path: str = ""
    """Path of the turns in the record, such as `messages[]`."""
    objects: Objects | None = None
    """What the texts' `<ref-object>` and `<bbox>` mean, until the images' sizes are known."""


@dataclass(frozen=True, slots=True)
class RawSample:
    """A sample as its author meant it, with as many files as markers."""

    sample_id: str
    source: str
    turns: tuple[Turn, ...]
    images: tuple[Media, ...]
    audios: tuple[Media, ...] = ()
    videos: tuple[Media, ...] = ()
    objects: Objects | None = None
    """Objects as of `Content`."""
    extras: str = ""
    """Columns of `--keep-columns` as one JSON object; empty without that."""
    turns_path: str = field(default="", compare=False)
    """Path of the turns, as in `Content`."""
    unread: tuple[Unread, ...] = field(default=(), compare=False)
    """Keys of the record that were never read."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """A sample that cannot be used; `reason` is a key of `REASONS`."""

    sample_id: str
    source: str
    reason: str
    detail: str


def is_deep(value: Any, max_depth: int = MOST_DEPTH) -> bool:
    """Whether lists and objects are nested more than `max_depth` deep.

    >>> is_deep([[1]], 1), is_deep([[1]], 2)
    (True, False)
    """
    level = [value] if isinstance(value, list | dict) else []
    for _ in range(max_depth):
        inside = (item.values() if isinstance(item, dict) else item for item in level)
        level = [x for values in inside for x in values if isinstance(x, list | dict)]
    return bool(level)


class Chunk(Protocol):
    """Some records of a source; plain values, so that other processes and machines can read it."""

    def records(self) -> Iterator[RawRecord]:
        """The records, in order. DataError if the file under them cannot be read."""
