"""Token ids of a stored sample -> pieces of text, labels, images, videos, audio.

A build holds its tokenizer's hash only. The tokenizer is given again, and is refused without it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from isobatch.common.errors import ConfigError
from isobatch.common.types import LABEL_IGNORE
from isobatch.counting.text.chat_tokenizer import ChatTokenizer
from isobatch.counting.text.tokenizer_files import build_backend, read_tokenizer_files
from isobatch.shards.manifest import Manifest
from isobatch.shards.stored_group import Int32Array


class PieceKind(StrEnum):
    """What the tokens of a piece are."""

    text = "text"
    label = "label"
    """Text that is learned."""
    image = "image"
    audio = "audio"
    video = "video"


_KINDS = tuple(PieceKind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Adjacent tokens of one kind; those of one run of a file for an image, video or clip."""

    kind: PieceKind
    input_ids: tuple[int, ...]
    text: str | None = None
    """Text of the tokens; None for files, and without a tokenizer."""
    file: int | None = None
    """Number of the file within the sample, from 0; images and videos have one numbering."""

    def to_json(self) -> dict[str, Any]:
        """Plain values; ids only where there is neither text nor a file."""
        about: dict[str, Any] = {"kind": str(self.kind), "num_tokens": len(self.input_ids)}
        if self.file is not None:
            return about | {"file": self.file}
        shown = {"input_ids": list(self.input_ids)} if self.text is None else {"text": self.text}
        return about | shown


def load_decoder(source: str, manifest: Manifest, chat_template: str | None = None) -> Tokenizer:
    """The build's tokenizer; ConfigError if `source` is not the one that the manifest tells of."""
    tokenizer = manifest.values["tokenizer"]
    day = tokenizer.get("template_date")
    loaded = ChatTokenizer.for_model(manifest.model, source, chat_template, day)
    if loaded.hash != tokenizer["hash"]:
        hashes = f"hash {loaded.hash[:12]}, the manifest says {tokenizer['hash'][:12]}"
        hint = "give the build's --tokenizer, and its --chat-template if it had one"
        raise ConfigError(f"tokenizer {source}: not the one of this build ({hashes}); {hint}")
    decoder = build_backend(read_tokenizer_files(source))
    # in the order of their ids, so that they get the same ones
    decoder.add_special_tokens(list(tokenizer["added_tokens"]))
    return decoder


def read_pieces(
    input_ids: Int32Array,
    labels: Int32Array,
    files: Mapping[PieceKind, tuple[Sequence[int], Sequence[tuple[int, int]]]],
    decoder: Tokenizer | None,
) -> tuple[Piece, ...]:
    """A sample's pieces in order.

    `files` has the token ids of images (videos among them) and audio, and (number of the file,
    tokens) of each run.
    """
    text, label = _KINDS.index(PieceKind.text), _KINDS.index(PieceKind.label)
    kinds = np.where(labels == LABEL_IGNORE, text, label)
    for kind, (token_ids, _) in files.items():
        kinds[np.isin(input_ids, token_ids)] = _KINDS.index(kind)
    # a piece begins where the kind changes
    borders = [0, *(np.flatnonzero(np.diff(kinds)) + 1).tolist(), len(input_ids)]
    remaining = {kind: list(runs) for kind, (_, runs) in files.items()}
    pieces: list[Piece] = []
    for start, end in pairwise(borders):
        if start == end:
            continue
        kind = _KINDS[kinds[start]]
        if kind in files:
            pieces += _file_pieces(kind, input_ids[start:end], remaining[kind])
        else:
            decoded = None if decoder is None else _decode(decoder, input_ids, start, end)
            ids = tuple(input_ids[start:end].tolist())
            pieces.append(Piece(kind=kind, input_ids=ids, text=decoded))
    return tuple(pieces)


def _file_pieces(kind: PieceKind, ids: Int32Array, runs: list[tuple[int, int]]) -> Iterator[Piece]:
    """One piece per run of adjacent file tokens; takes (number, tokens) from `runs`."""
    start, number = 0, -1
    while start < len(ids):
        number, tokens = runs.pop(0) if runs else (number + 1, len(ids))
        yield Piece(kind=kind, input_ids=tuple(ids[start : start + tokens].tolist()), file=number)
        start += max(tokens, 1)


def _decode(decoder: Tokenizer, input_ids: Int32Array, start: int, end: int) -> str:
    """Text of tokens, decoded after the one before: SentencePiece drops leading spaces."""
    before = input_ids[max(0, start - 1) : start].tolist()
    whole = decoder.decode([*before, *input_ids[start:end].tolist()], skip_special_tokens=False)
    return whole[len(decoder.decode(before, skip_special_tokens=False)) :]
