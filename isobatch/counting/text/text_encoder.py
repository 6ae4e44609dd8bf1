"""Texts and spans of characters -> token ids and spans of tokens.

By `tokenizers`, whose ids are those of transformers, or by `gigatoken` if it is installed: the same
ids tens of times faster. That is never taken on trust. It is used for byte-level BPE only, after it
has given the ids of `tokenizers` for texts of all kinds of ASCII characters and of the vocabulary;
for texts in normal form whose other characters have each been compared in several contexts; and a
text of every batch is compared as well. Any other text goes the slower way.
"""

import json
import random
import unicodedata
from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain, pairwise, product
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer

from isobatch.common.errors import ConfigError
from isobatch.counting.text.turn import Span
from isobatch.shards.stored_group import Int32Array

Encoded = tuple[Int32Array, list[Span]]
"""The ids of a text, and the token spans of its character spans."""

WORTH = 4_000_000
"""Characters that `tokenizers` encodes in about the second that loading `gigatoken` takes."""
_RENEWED = 64_000_000
"""Characters after which it is made again: it remembers every word, a gigabyte of random ones."""
_CONTEXTS = ("{}", "{0}{0}{0}", "a{}b", "A{}a", "1{}1", " {}", "{} a", ".{}\n", "'{}", "\n{}'s")
"""A character among others, which tell its kind: letter, mark, digit, sign or space."""
_KINDS = "aZs'1 \t\n\r._-\x00\x0b"
_NUM_PROBED = 2000
"""Tokens of the vocabulary that are compared, alone and after the one before."""


class TextEncoder:
    """A tokenizer for many texts."""

    def __init__(self, backend: Tokenizer) -> None:
        """Encode as `backend` does, without special tokens around a text."""
        self._backend = backend
        self._seen = 0

    def encode(self, texts: Sequence[str], spans: Sequence[Sequence[Span]]) -> list[Encoded]:
        """The ids of texts, on all cores, and the tokens of each one's spans.

        Spans are in order and disjoint, and so are the results: every token that has at least one
        of the characters belongs to the first span that it is part of.
        """
        quick: list[Encoded | None] = [None] * len(texts)
        if self._seen >= WORTH and self._proven is not None:
            quick = self._proven.encode(texts, spans)
        self._seen += sum(map(len, texts))
        rest = [number for number, result in enumerate(quick) if result is None]
        slow = encode_slowly(
            self._backend, [texts[number] for number in rest], [spans[number] for number in rest]
        )
        return [next(slow) if result is None else result for result in quick]

    @cached_property
    def _proven(self) -> "ProvenEncoder | None":
        return ProvenEncoder.of(self._backend)


class ProvenEncoder:
    """`gigatoken` for the texts for which it gives the ids of `tokenizers`."""

    @classmethod
    def of(cls, backend: Tokenizer) -> "ProvenEncoder | None":
        """None if it is not installed, or for a tokenizer that it does not read or reads wrong."""
        try:
            import gigatoken  # noqa: F401, PLC0415 - an extra
        except ImportError:
            return None
        as_json = backend.to_str()
        if not _is_byte_level(json.loads(as_json)):
            return None
        try:
            encoder = cls(backend, as_json)
            return encoder if encoder.is_right() else None
        except Exception:  # the Rust side raises plain Exception for what it does not know
            return None

    def __init__(self, backend: Tokenizer, as_json: str) -> None:
        """Read a byte-level BPE tokenizer; `of` compares it."""
        self._backend = backend
        self._json = as_json
        self._num_bytes = _token_bytes(backend)
        self._right = {chr(code) for code in range(128)}
        """Characters that need no comparison any more."""
        self._wrong: set[str] = set()
        """Characters whose texts go the slower way."""
        self._renew()

    def _renew(self) -> None:
        from gigatoken import Tokenizer as Gigatoken  # noqa: PLC0415

        self._gigatoken: Any = Gigatoken.from_json(self._json)
        self._remembered = 0

    def is_right(self) -> bool:
        """Whether ids and spans of the probes are those of `tokenizers`."""
        num_ids = len(self._num_bytes)
        drawn = random.Random(0).sample(range(num_ids), min(_NUM_PROBED, num_ids))
        added = [token.content for token in self._backend.get_added_tokens_decoder().values()]
        words = [self._backend.decode([index]) for index in drawn]
        texts = [
            *self._in_contexts(self._right),
            *map("".join, product(_KINDS, repeat=3)),
            *words,
            *(first + second for first, second in pairwise(words)),
            *(text.format(token) for token in added for text in _CONTEXTS),
        ]
        texts = [text for text in texts if text.isascii()]
        return all(self._compare(texts))

    def encode(self, texts: Sequence[str], spans: Sequence[Sequence[Span]]) -> list[Encoded | None]:
        """The ids and token spans of each text, None for one that is not proven.

        ConfigError if the text of the batch that is compared has other ids.
        """
        sure = self._sure(texts)
        results: list[Encoded | None] = [None] * len(texts)
        chosen = [texts[number] for number in sure]
        for number, result in zip(
            sure, self._encode(chosen, [spans[number] for number in sure]), strict=True
        ):
            results[number] = result
        if not all(self._compare(chosen[:1])):
            raise ConfigError(
                f"gigatoken gives other ids than tokenizers for {chosen[0][:200]!r}:"
                " uninstall gigatoken, and build again"
            )
        return results

    def _sure(self, texts: Sequence[str]) -> list[int]:
        """The numbers of texts whose characters are all compared, in normal form."""
        others = {number: set(text) for number, text in enumerate(texts) if not text.isascii()}
        # marks are ordered and joined by tables of Unicode that libraries have of several years
        unknown = set().union(*others.values()) - self._right - self._wrong
        marks = set(filter(unicodedata.combining, unknown))
        compared = sorted(unknown - marks)
        equal = self._compare(list(self._in_contexts(compared)))
        width = len(_CONTEXTS)
        right = {char for k, char in enumerate(compared) if all(equal[k * width :][:width])}
        self._right |= right
        self._wrong |= unknown - right
        return [
            number
            for number, text in enumerate(texts)
            if number not in others
            or (self._wrong.isdisjoint(others[number]) and unicodedata.is_normalized("NFC", text))
        ]

    def _in_contexts(self, chars: Iterable[str]) -> Iterator[str]:
        return (context.format(char) for char in chars for context in _CONTEXTS)

    def _compare(self, texts: Sequence[str]) -> list[bool]:
        """Whether ids and the span of the middle of each text are those of `tokenizers`."""
        spans = [[(len(text) // 3, len(text) - len(text) // 3)] for text in texts]
        expected = encode_slowly(self._backend, texts, spans)
        return [
            result is not None and np.array_equal(result[0], ids) and result[1] == of_middle
            for result, (ids, of_middle) in zip(self._encode(texts, spans), expected, strict=True)
        ]

    def _encode(
        self, texts: Sequence[str], spans: Sequence[Sequence[Span]]
    ) -> Iterator[Encoded | None]:
        """As `encode`, of any texts; None for one whose tokens do not have all its bytes."""
        if not texts:
            return
        if self._remembered > _RENEWED:
            self._renew()
        self._remembered += sum(map(len, texts))
        tokens = self._gigatoken.encode_batch(list(texts)).layout
        ids = np.asarray(tokens.content.data).astype(np.int32)
        firsts = np.asarray(tokens.offsets.data).astype(np.int64)
        lengths = self._num_bytes[ids]
        token_ends = np.cumsum(lengths)
        starts = np.concatenate([[0], token_ends])[firsts].tolist()
        edges = [
            _byte_places(text, chain.from_iterable(of))
            for text, of in zip(texts, spans, strict=True)
        ]
        places = np.array(
            [start + edge for start, of in zip(starts, edges, strict=False) for edge in of],
            dtype=np.int64,
        )
        at = np.searchsorted(token_ends, places, side="right")  # the token with that byte
        cut = np.concatenate([token_ends - lengths, [0]])[at] < places
        done = 0
        for number, (text, of) in enumerate(zip(texts, edges, strict=True)):
            first, last = firsts[number], firsts[number + 1]
            here = slice(done, done + len(of))
            done += len(of)
            if starts[number + 1] - starts[number] != len(text.encode()):
                yield None
                continue
            tokens_at = np.minimum(at[here], last) - first
            after = tokens_at + (cut[here] & (at[here] < last))
            pairs = zip(tokens_at[::2].tolist(), after[1::2].tolist(), strict=True)
            yield ids[first:last].copy(), list(_disjoint(pairs, spans[number]))


def encode_slowly(
    backend: Tokenizer, texts: Sequence[str], spans: Sequence[Sequence[Span]]
) -> Iterator[Encoded]:
    """The ids of texts by `tokenizers`, and the tokens of each one's spans."""
    encodings = backend.encode_batch(list(texts), add_special_tokens=False)
    for text, of, encoding in zip(texts, spans, encodings, strict=True):
        pairs = [
            (_token_at(encoding, first, len(text)), _token_after(encoding, last, len(text)))
            for first, last in of
        ]
        # a third of the time of np.array
        yield np.frombuffer(array("i", encoding.ids), np.int32), list(_disjoint(pairs, of))


def _token_at(encoding: Encoding, char: int, num_chars: int) -> int:
    """First token with the character `char`, or with the next character that any token has."""
    # A character has no token when the tokenizer's normalizer drops it.
    tokens = (encoding.char_to_token(i) for i in range(char, num_chars))
    return next((token for token in tokens if token is not None), len(encoding))


def _token_after(encoding: Encoding, char: int, num_chars: int) -> int:
    """First token with no character before `char`."""
    end = _token_at(encoding, char, num_chars)
    held = encoding.token_to_chars(end)
    return end + (held is not None and held[0] < char)  # one token has characters of both sides


def _disjoint(pairs: Iterable[Span], spans: Sequence[Span]) -> Iterator[Span]:
    """Token spans without what an earlier one has, and without those of empty `spans`."""
    done = 0
    for (start, end), (first, last) in zip(pairs, spans, strict=True):
        if max(start, done) < end and first < last:
            yield max(start, done), end
            done = end


def _byte_places(text: str, places: Iterable[int]) -> list[int]:
    """Places among the characters of a text, in order, as places among its bytes."""
    if text.isascii():
        return list(places)
    results, done, num_bytes = list[int](), 0, 0
    for place in places:
        num_bytes += len(text[done:place].encode())
        done = place
        results.append(num_bytes)
    return results


def _is_byte_level(config: dict[str, Any]) -> bool:
    """Whether tokens are strings of bytes in the alphabet of GPT-2, and spans have all of them."""
    splits, post = config.get("pre_tokenizer") or {}, config.get("post_processor") or {}
    is_bytes = any(
        part.get("type") == "ByteLevel" for part in splits.get("pretokenizers", [splits])
    )
    # which leaves the spaces around a token out of its span
    trims = any(part.get("trim_offsets") for part in post.get("processors", [post]))
    normal = (config.get("normalizer") or {"type": "NFC"})["type"]
    return config["model"].get("type") == "BPE" and is_bytes and normal == "NFC" and not trims


def _token_bytes(backend: Tokenizer) -> NDArray[np.int64]:
    """By id: the bytes of a token."""
    vocab = backend.get_vocab()
    added = backend.get_added_tokens_decoder()
    num_bytes = np.zeros(1 + max(vocab.values()), np.int64)
    for token, index in vocab.items():
        num_bytes[index] = len(token.encode()) if index in added else len(token)
    return num_bytes
