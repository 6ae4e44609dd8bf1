"""Control tokens in a user's text, which must stay plain letters.

For `counting.text.chat_tokenizer`. A text about prompts may well contain "<|im_end|>" or
"<IMG_CONTEXT>". Tokenised with the rest of the conversation it would end the turn, or count as an
image. Such conversations (one in thousands) take four steps:

1. before rendering, a private character replaces each control string in the content;
2. after rendering, each control string in the text (now surely the template's own) becomes another
   private character, its alias, and the letters of step 1 come back;
3. a copy of the tokenizer, which knows the aliases as added tokens and no other special token,
   encodes the whole text, so that control strings are tokenised like ordinary words;
4. the ids of the aliases are mapped back.
"""

import re
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer

from isobatch.counting.text.turn import Span

_LETTERS = 0x10_0000
"""First of the private characters (plane 16) that stand for a control string in content."""
_ALIAS = 0xF_0000
"""First of the private characters (plane 15) that stand for a control token of the template."""
_PRIVATE = re.compile("[\U000f0000-\U0010ffff]")


class ControlTokens:
    """The special tokens of a tokenizer, and how to tell the template's from those in content."""

    def __init__(self, backend: Tokenizer) -> None:
        """Take every special added token of `backend` for a control token."""
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        special = [index for index, token in added.items() if token.special]
        self._ids = np.array(special, dtype=np.int32)
        self._tokens = [token for token in added.values() if token.special]
        self._number = {token.content: k for k, token in enumerate(self._tokens)}
        longest_first = sorted(self._number, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        # Most texts have none of these few beginnings, which a plain search finds far more cheaply.
        self._beginnings = {content[:2] for content in self._number}

    def occur_in(self, text: str) -> bool:
        """Whether `text` contains a control string."""
        may = any(start in text for start in self._beginnings)
        return may and self._pattern.search(text) is not None

    def can_protect(self, text: str) -> bool:
        """Whether `text` is free of the private characters that `protect` needs."""
        return _PRIVATE.search(text) is None

    def is_escaped_in(self, rendered: str) -> bool:
        """Whether a private character of `protect` was rendered as an escape of JSON."""
        return "\\udbc" in rendered

    def strings_in(self, text: str) -> list[Span]:
        """The places of the control strings in a text."""
        return [match.span() for match in self._pattern.finditer(text)]

    def protect(self, content: str, tokens: frozenset[str] = frozenset()) -> str:
        """Content with a private character for each control string (step 1).

        `tokens` are control strings that are meant as such.
        """
        return self._pattern.sub(
            lambda match: (
                match[0] if match[0] in tokens else chr(_LETTERS + self._number[match[0]])
            ),
            content,
        )

    def alias(self, rendered: str, spans: Sequence[Span]) -> tuple[str, list[Span]]:
        """Rendered text with aliases for the template's control strings (step 2), and spans in it.

        Spans are in order and disjoint, and none begins or ends inside a control string.
        """
        letters = {_LETTERS + k: content for content, k in self._number.items()}
        edges = [0, *(edge for span in spans for edge in span), len(rendered)]
        pieces = [
            self._pattern.sub(
                lambda match: chr(_ALIAS + self._number[match[0]]), rendered[start:end]
            ).translate(letters)
            for start, end in pairwise(edges)
        ]
        ends = list(accumulate(map(len, pieces)))
        return "".join(pieces), list(zip(ends[:-1:2], ends[1:-1:2], strict=True))

    @cached_property
    def backend(self) -> Tokenizer:
        """The tokenizer for aliased text (step 3); built at first use, for few datasets need it."""
        copy = Tokenizer.from_str(self._backend.to_str())
        copy.encode_special_tokens = True
        flags = ("single_word", "lstrip", "rstrip", "normalized")
        copy.add_tokens(
            [
                AddedToken(
                    chr(_ALIAS + k), special=False, **{flag: getattr(token, flag) for flag in flags}
                )
                for k, token in enumerate(self._tokens)
            ]
        )
        return copy

    def restore(self, ids: NDArray[np.int32]) -> NDArray[np.int32]:
        """Ids of aliased text with each alias as its control token (step 4).

        ValueError if a control token came from plain letters: it cannot be written as text.
        """
        unknown = getattr(self._backend.model, "unk_token", None)
        forbidden = self._ids[[token.content != unknown for token in self._tokens]]
        forged = np.intersect1d(ids, forbidden)
        if len(forged):
            token = self._backend.id_to_token(int(forged[0]))
            raise ValueError(f"the tokenizer has no way to write {token!r} as text")
        return self._real_ids[ids]

    @cached_property
    def _real_ids(self) -> NDArray[np.int32]:
        """Id in `backend` -> id in the tokenizer itself; they differ for the aliases only."""
        vocab = self.backend.get_vocab()
        real_ids = np.arange(1 + max(vocab.values()), dtype=np.int32)
        real_ids[[vocab[chr(_ALIAS + k)] for k in range(len(self._tokens))]] = self._ids
        return real_ids
