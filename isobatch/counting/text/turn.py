"""One message of a conversation: `Turn`, for records and for the tokenizer."""

from collections.abc import Iterable
from dataclasses import dataclass

Span = tuple[int, int]
"""First character or token, and the one after the last."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One message of a conversation."""

    role: str
    """`user`, `assistant`, `system` or `tool`; or `DOCUMENT`, then it is the only turn."""
    text: str
    """Raw text with a marker for each image, video and clip."""
    more: str = ""
    """JSON object of the message's other keys; in the first turn also the record's `tools`."""
    learned: bool | tuple[Span, ...] | None = None
    """Whether it has labels: None as its role says; or the characters of `text` that have them."""
    tokens: tuple[str, ...] = ()
    """Control strings that are tokens where `text` has them, and no letters: of boxes."""

    @property
    def ranges(self) -> tuple[Span, ...]:
        """The characters of `text` that have labels because its author says so."""
        if isinstance(self.learned, tuple):
            return self.learned
        return ((0, len(self.text)),) if self.learned and self.role != "assistant" else ()


def widened(ranges: Iterable[Span], whole: Iterable[Span]) -> list[Span]:
    """Ranges that have all of each of the `whole` spans that they touch.

    >>> widened([(0, 2), (6, 9)], [(1, 4)])
    [(0, 4), (6, 9)]
    """
    spans = list(whole)
    wide = []
    for start, end in ranges:
        touched = [span for span in spans if span[0] < end and start < span[1]]
        starts, ends = [start, *(a for a, _ in touched)], [end, *(b for _, b in touched)]
        wide.append((min(starts), max(ends)))
    return wide
