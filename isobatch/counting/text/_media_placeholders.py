"""Markers of images, videos and clips in raw text -> placeholders in tokens.

For `counting.text.chat_tokenizer`. A marker becomes the model's markup, written into the text; or a
part of its own, where the chat template writes the markup. Pure, except for `add_markup`.
"""

import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

from tokenizers import Tokenizer

from isobatch.counting.text.turn import Span
from isobatch.models.presets import MediaMarkup

Part = dict[str, str]
MediumKind = Literal["image", "video", "audio"]
Guard = Callable[[str], str]
"""Protects text of the user's own."""


@dataclass(frozen=True, slots=True)
class Medium:
    """A kind of file that a model takes next to text."""

    kind: MediumKind
    marker: str
    """Place of such a file in a raw text."""
    markup: MediaMarkup
    token_id: int
    by_template: bool
    """Whether the chat template writes the markup, given a part."""

    @property
    def in_text(self) -> str:
        """What is once in a rendered text for each file."""
        return self.markup.placeholder or self.markup.token


class MediaWriter:
    """Writes the markers of a model's media into messages and documents."""

    def __init__(self, media: Sequence[Medium], *, takes_parts: bool) -> None:
        """`takes_parts`: the chat template accepts no plain strings as content."""
        self._media = {medium.marker: medium for medium in media}
        self._takes_parts = takes_parts
        # with a group, so that `split` gives the markers too: text, marker, text, ..., marker, text
        self._pieces = re.compile(f"({'|'.join(map(re.escape, self._media))})")

    def count(self, text: str) -> tuple[int, ...]:
        """Markers in a raw text, for each medium."""
        return tuple(text.count(marker) for marker in self._media)

    def blank(self, text: str) -> str:
        """A raw text without its markers, which may be control strings (LLaVA's `<image>`)."""
        for marker in self._media:
            text = text.replace(marker, "\0")
        return text

    def markers_in(self, text: str) -> list[Span]:
        """The places of the markers in a raw text."""
        return [match.span() for match in self._pieces.finditer(text)]

    def content(self, text: str, guard: Guard) -> str | list[Part]:
        """The content of a message, as the chat template wants it."""
        if not self._takes_parts and "<" not in text:
            return guard(text)  # most turns: searching for a letter is far quicker
        first, *rest = self._pieces.split(text)
        parts: list[Part] = []
        run = guard(first)
        for marker, piece in zip(rest[::2], rest[1::2], strict=True):
            medium = self._media[marker]
            if not medium.by_template:
                run += medium.markup.template_text + guard(piece)
                continue
            parts += [text_part(run)] if run else []
            parts.append({"type": medium.kind})
            run = guard(piece)
        if not parts and not self._takes_parts:
            return run
        return [*parts, text_part(run)] if run or not parts else parts

    def document(self, text: str, guard: Guard) -> tuple[str, list[Span]]:
        """A document with all markup written out, and where the markup is."""
        first, *rest = self._pieces.split(text)
        written = guard(first)
        spans = []
        for marker, piece in zip(rest[::2], rest[1::2], strict=True):
            markup = self._media[marker].markup.template_text
            spans.append((len(written), len(written) + len(markup)))
            written += markup + guard(piece)
        return written, spans


def text_part(text: str) -> Part:
    """Text as a part of a message."""
    return {"type": "text", "text": text}


def write_markups(
    text: str, spans: Sequence[Span], markups: Mapping[str, Sequence[str] | None]
) -> tuple[str, list[Span], list[str]]:
    """A rendered text with markup in place of its placeholders, its spans, and the placeholders.

    `markups` of a placeholder are put in its places in their order; None leaves them as they are.
    A span that begins or ends at a placeholder has all of the markup. The placeholders are in the
    order of the text. ValueError unless there are as many of each as markups.
    """
    longest_first = sorted(markups, key=len, reverse=True)
    first, *rest = re.split(f"({'|'.join(map(re.escape, longest_first))})", text)
    placeholders, pieces = rest[::2], rest[1::2]
    for placeholder, of_files in markups.items():
        if of_files is not None and placeholders.count(placeholder) != len(of_files):
            there = f"{placeholders.count(placeholder)} {placeholder}"
            raise ValueError(f"{there} for {len(of_files)} files")
    following = {
        placeholder: iter(of_files) for placeholder, of_files in markups.items() if of_files
    }
    written = [next(following[name]) if name in following else name for name in placeholders]
    old = new = len(first)
    # (a place in the old text, how far all after it moves)
    moves = [(0, 0)]
    for placeholder, markup, piece in zip(placeholders, written, pieces, strict=True):
        moves.append((old + len(placeholder), new + len(markup) - old - len(placeholder)))
        old += len(placeholder) + len(piece)
        new += len(markup) + len(piece)
    places = [place for place, _ in moves]
    text = first + "".join(chain.from_iterable(zip(written, pieces, strict=True)))

    def moved(place: int) -> int:
        return place + moves[bisect_right(places, place) - 1][1]

    return text, [(moved(start), moved(end)) for start, end in spans], placeholders


def add_markup(
    backend: Tokenizer, markup: MediaMarkup, *, is_video: bool = False
) -> dict[str, int]:
    """Make the markup's strings special tokens of `backend`; returns those that are new to it.

    Of markup that is put in place of a placeholder only these two are: the rest is text. A video's
    placeholder is its marker in raw text, or of tokens that the tokenizer has.
    """
    strings = (markup.prefix, markup.suffix, markup.token)
    if markup.placeholder:
        strings = ("" if is_video else markup.placeholder, markup.token, "")
    tokens = [token for token in dict.fromkeys(strings) if token]
    known = backend.get_vocab()
    backend.add_special_tokens(tokens)
    vocab = backend.get_vocab()
    return {token: vocab[token] for token in tokens if token not in known}
