"""Markers of images and clips in raw text -> placeholders in tokenised text.

For `packer.text.chat_tokenizer`. A marker becomes the model's markup, written into the text; or a
part of its own, where the chat template writes the markup. Pure, except for `add_markup`.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from tokenizers import Tokenizer

from balance.presets import MediaMarkup
from packer.text.chat_template import Span

Part = dict[str, str]
Guard = Callable[[str], str]
"""Protects text of the user's own."""


@dataclass(frozen=True, slots=True)
class Medium:
    """A kind of file that a model takes next to text."""

    kind: Literal["image", "audio"]
    marker: str
    """Place of such a file in a raw text."""
    markup: MediaMarkup
    token_id: int
    by_template: bool
    """Whether the chat template writes the markup, given a part."""


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

    def content(self, text: str, guard: Guard) -> str | list[Part]:
        """The content of a message, as the chat template wants it."""
        if not self._takes_parts and not any(marker in text for marker in self._media):
            return guard(text)  # most turns: searching for a word is far quicker than the pattern
        first, *rest = self._pieces.split(text)
        parts: list[Part] = []
        run = guard(first)
        for marker, piece in zip(rest[::2], rest[1::2], strict=True):
            medium = self._media[marker]
            if not medium.by_template:
                run += medium.markup.text + guard(piece)
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
            markup = self._media[marker].markup.text
            spans.append((len(written), len(written) + len(markup)))
            written += markup + guard(piece)
        return written, spans


def text_part(text: str) -> Part:
    """Text as a part of a message."""
    return {"type": "text", "text": text}


def add_markup(backend: Tokenizer, markup: MediaMarkup) -> dict[str, int]:
    """Make the markup's strings special tokens of `backend`; returns those that are new to it."""
    tokens = [token for token in (markup.prefix, markup.suffix, markup.token) if token]
    known = backend.get_vocab()
    backend.add_special_tokens(tokens)
    vocab = backend.get_vocab()
    return {token: vocab[token] for token in tokens if token not in known}
