"""How records are read, as far as a user may choose: `Reading`."""

from dataclasses import dataclass, fields
from typing import Literal

Choices = Literal["report", "letters"]
Answers = Literal["first", "drawn", "all"]
UnknownMarks = Literal["reject", "text"]
READING_OPTIONS = ("choices", "answers", "unknown_marks")
"""Fields of `Reading` that a user chooses; the rest follows from the model and the seed."""


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
    keep_columns: tuple[str, ...] = ()
    """Columns that the loader gives with each sample: they say nothing here, by whatever name."""
    video_tokens: tuple[str, ...] = ()
    audio_tokens: tuple[str, ...] = ()
    seed: int = 0
    """Seed of answers that are drawn."""

    def identity(self) -> dict[str, str]:
        """What a build's manifest says: the options that are not the defaults."""
        options = [field for field in fields(self) if field.name in READING_OPTIONS]
        values = {field.name: str(getattr(self, field.name)) for field in options}
        return {
            field.name: values[field.name]
            for field in options
            if values[field.name] != field.default
        }


DEFAULT_READING = Reading()
