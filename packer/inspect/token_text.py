"""Token ids of a stored sample -> pieces that a person reads: text, text with a label, runs of
image and audio tokens.

For `packer inspect`. A build holds only its tokenizer's hash, so the tokenizer is given anew and
must have that hash: the text of a wrong one would look right and be wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from balance.errors import ConfigError
from balance.presets import ModelPreset
from balance.types import LABEL_IGNORE
from packer.text.chat_tokenizer import ChatTokenizer
from packer.text.tokenizer_files import build_backend, read_tokenizer_files


class Kind(StrEnum):
    """What the tokens of a piece are."""

    text = "text"
    label = "label"
    """Text that is learned."""
    image = "image"
    audio = "audio"


KINDS = (Kind.text, Kind.label, Kind.image, Kind.audio)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Neighbouring tokens of one kind; those of one file, if they stand for an image or a clip."""

    kind: Kind
    input_ids: tuple[int, ...]
    text: str | None = None
    """None for files, and without a tokenizer."""
    file: int | None = None
    """Which of the sample's images or clips, from 0."""

    def to_json(self) -> dict[str, Any]:
        """Plain values; ids only where there is no text and no file to stand for them."""
        about: dict[str, Any] = {"kind": str(self.kind), "num_tokens": len(self.input_ids)}
        if self.file is not None:
            return about | {"file": self.file}
        return about | (
            {"input_ids": list(self.input_ids)} if self.text is None else {"text": self.text}
        )


def load_decoder(
    source: str | Path,
    model: ModelPreset,
    tokenizer: dict[str, Any],
    *,
    chat_template: str | None = None,
) -> Tokenizer:
    """The tokenizer of a build, `tokenizer` being what its manifest says; ConfigError for another
    one.
    """
    loaded = ChatTokenizer.load(
        source, model.image_markup, model.audio_markup, chat_template=chat_template
    )
    if loaded.hash != tokenizer["hash"]:
        raise ConfigError(
            f"tokenizer {source}: not the one of this build (hash {loaded.hash[:12]}, the manifest says"
            f" {tokenizer['hash'][:12]}); give the build's --tokenizer, and its --chat-template if it had one"
        )
    decoder = build_backend(read_tokenizer_files(source))
    decoder.add_special_tokens(
        list(tokenizer["added_tokens"])
    )  # in the order of their ids, so they get the same ones
    return decoder


def read_pieces(
    input_ids: NDArray[np.int32],
    labels: NDArray[np.int32],
    files: Mapping[Kind, tuple[int | None, Sequence[int]]],
    decoder: Tokenizer | None,
) -> tuple[Piece, ...]:
    """The pieces of a sample, in order: together they hold all of its tokens.

    `files` gives for images and audio the id of their token, and the LLM tokens of each file in
    order.
    """
    kinds = np.where(labels == LABEL_IGNORE, KINDS.index(Kind.text), KINDS.index(Kind.label))
    for kind, (token_id, _) in files.items():
        if token_id is not None:
            kinds[input_ids == token_id] = KINDS.index(kind)
    borders = [0, *(np.flatnonzero(np.diff(kinds)) + 1).tolist(), len(input_ids)]
    left = {kind: list(tokens) for kind, (_, tokens) in files.items()}
    pieces: list[Piece] = []
    for start, end in pairwise(borders):
        if start == end:
            continue
        kind = KINDS[kinds[start]]
        if kind in files:
            first = len(files[kind][1]) - len(left[kind])
            pieces += _files(kind, input_ids[start:end], left[kind], first)
        else:
            text = None if decoder is None else _decode(decoder, input_ids, start, end)
            pieces.append(
                Piece(kind=kind, input_ids=tuple(input_ids[start:end].tolist()), text=text)
            )
    return tuple(pieces)


def _files(kind: Kind, run: NDArray[np.int32], left: list[int], first: int) -> Iterator[Piece]:
    """The files in a run of their tokens: without markup between them, two of them stand side by
    side.
    """
    start = 0
    while start < len(run):
        tokens = left.pop(0) if left else len(run)
        yield Piece(kind=kind, input_ids=tuple(run[start : start + tokens].tolist()), file=first)
        start += max(tokens, 1)
        first += 1


def _decode(decoder: Tokenizer, input_ids: NDArray[np.int32], start: int, end: int) -> str:
    """Text of some tokens behind the one before them: SentencePiece's decoders drop the space a
    text begins with.
    """
    before = input_ids[max(0, start - 1) : start].tolist()
    whole = decoder.decode([*before, *input_ids[start:end].tolist()], skip_special_tokens=False)
    return whole[len(decoder.decode(before, skip_special_tokens=False)) :]
