"""How records are read, as far as a user may choose: `Reading`."""

from dataclasses import dataclass
from typing import Literal

Choices = Literal["report", "letters"]
Answers = Literal["first", "drawn", "all"]
UnknownMarks = Literal["reject", "text"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Options of reading records."""

    choices: Choices = "report"
    """Options of a question: never read, and reported; or appended as lettered lines."""
    answers: Answers = "first"
    """Of several answers or captions: the first, one drawn by the seed, or a sample for each."""
    unknown_marks: UnknownMarks = "reject"
    """Marks of places that match no file: reject the sample, or keep them as text."""
    image_tokens: tuple[str, ...] = ()
    """The model's own strings for an image, which mark places too."""
    video_tokens: tuple[str, ...] = ()
    audio_tokens: tuple[str, ...] = ()
    seed: int = 0
    """Of answers that are drawn."""
