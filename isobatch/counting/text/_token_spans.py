"""Character spans of a text -> token spans of its encoding.

For `counting.text.chat_tokenizer`. Pure.
"""

from collections.abc import Iterator, Sequence

from tokenizers import Encoding

from isobatch.counting.text.turn import Span


def token_spans(encoding: Encoding, chars: Sequence[Span], num_chars: int) -> Iterator[Span]:
    """Token spans of character spans: every token that has at least one of the characters.

    `chars` are in order and disjoint, and so are the results. `num_chars` is the text's length.
    """
    done = 0
    for first, last in chars:
        start = _token_at(encoding, first, num_chars)
        end = _token_at(encoding, last, num_chars)
        if (held := encoding.token_to_chars(end)) is not None and held[0] < last:
            end += 1  # this token has characters of both sides
        if max(start, done) < end and first < last:
            yield max(start, done), end
            done = end


def spans_between(spans: Sequence[Span], start: int, end: int) -> list[Span]:
    """What `spans`, in order and disjoint, leave of `start` up to `end`; no span is empty.

    >>> spans_between([(2, 3), (5, 7)], 0, 7)
    [(0, 2), (3, 5)]
    """
    edges = [start, *(edge for span in spans for edge in span), end]
    return [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]


def _token_at(encoding: Encoding, char: int, num_chars: int) -> int:
    """First token with the character `char`, or with the next character that any token has."""
    # A character has no token when the tokenizer's normalizer drops it.
    tokens = (encoding.char_to_token(i) for i in range(char, num_chars))
    return next((token for token in tokens if token is not None), len(encoding))
