"""Conversations -> token ids and the tokens that have labels; one token per image until `expand`.

For `packer.count`. What comes out equals transformers' `apply_chat_template`, character for character and id for id;
`docs/design.md`, "Labels", says which tokens have one. Pure once loaded. The tokenizer takes nearly all of the time
(0.6 to 1.8 M tokens/s on two cores), so give it batches.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer

from balance.errors import ConfigError
from balance.presets import ImageMarkup
from balance.records import LABEL_IGNORE
from packer.chat_template import CharSpan, ChatTemplate, Message, TemplateRefusedError
from packer.control_tokens import ControlTokens
from packer.tokenizer_files import TokenizerFiles, build_backend, id_conflicts, read_tokenizer_files

IMAGE_MARKER = "<image>"
"""Where an image stands in a raw text (LLaVA's convention)."""

_PROBE = "isobatch probe"


@dataclass(frozen=True, slots=True)
class Turn:
    """One message of a conversation."""

    role: str
    """`user`, `assistant` or `system`."""
    text: str
    """Raw text with an `IMAGE_MARKER` for each image."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedText:
    """A tokenised conversation."""

    input_ids: NDArray[np.int32]
    """Shape (num_tokens,), with one image token per image."""
    loss_spans: NDArray[np.int32]
    """Shape (num_spans, 2): first token with a label, and the one behind the last; in order and disjoint."""
    num_images: int
    num_loss_tokens: int
    """Tokens with a label; image tokens never have one, so `expand` does not change it."""


@dataclass(frozen=True, slots=True)
class TextRejected:
    """Why a conversation cannot be tokenised."""

    reason: str
    """`invalid_utf8`, `chat_template` or `control_token`."""
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rendered:
    text: str
    answers: list[CharSpan]
    num_images: int
    protected: bool
    """Whether `text` is aliased, because the content holds control strings."""


class ChatTokenizer:
    """A tokenizer with its chat template and a model's image markup."""

    def __init__(self, files: TokenizerFiles, markup: ImageMarkup, template: str) -> None:
        """Built by `load`."""
        self.markup = markup
        self._backend = build_backend(files)
        self.id_conflicts = id_conflicts(files, self._backend)
        """Tokens that `tokenizer_config.json` declares under another id: content -> (declared id, id in use)."""
        self.added_tokens = _add_markup(self._backend, markup)
        """Markup tokens that the tokenizer did not know, and the ids behind its vocabulary that they got."""
        self.image_token_id = self._backend.get_vocab()[markup.token]
        self.vocab_size = self._backend.get_vocab_size()
        """Number of tokens, added ones included: rows that the model's embedding needs."""
        self._template = ChatTemplate(template, files.named_tokens)
        self._control = ControlTokens(self._backend)
        self._takes_parts = not self._renders(_PROBE)
        if self._takes_parts and not self._renders([_text_part(_PROBE)]):
            raise ConfigError(f"tokenizer {files.where}: its chat template renders no user message; give another one")
        self._template_writes_images = self._takes_parts and self._renders(
            [{"type": "image"}, _text_part(_PROBE)], markup.token
        )
        self.hash = _hash(files, self._backend, template, markup)
        """Changes whenever the same text could be tokenised or labelled otherwise."""

    @classmethod
    def load(cls, source: str | Path, markup: ImageMarkup, *, chat_template: str | None = None) -> Self:
        """Load a tokenizer from a folder, from a `tokenizer.json`, or by Hub id; ConfigError says what is missing.

        `chat_template` is the name of one of the tokenizer's templates, a `.jinja` file, or a template itself; without
        it the default template is used.
        """
        files = read_tokenizer_files(source)
        try:
            return cls(files, markup, _choose_template(files, chat_template))
        except (AttributeError, KeyError, TypeError) as error:  # a hand-written config of some other shape
            raise ConfigError(
                f"tokenizer {files.where}: its config is not as transformers writes it: {error!r}"
            ) from None

    def encode_batch(self, conversations: Sequence[Sequence[Turn]]) -> list[EncodedText | TextRejected]:
        """Tokenise conversations, in order; the tokenizer works on the batch with as many threads as it has cores."""
        prepared = [self._prepare(turns) for turns in conversations]
        results: dict[int, EncodedText | TextRejected] = {}
        for protected in (False, True):
            rows = {i: r for i, r in enumerate(prepared) if isinstance(r, _Rendered) and r.protected is protected}
            backend = self._control.backend if protected and rows else self._backend
            encodings = backend.encode_batch([row.text for row in rows.values()], add_special_tokens=False)
            for (i, row), encoding in zip(rows.items(), encodings, strict=True):
                results[i] = self._finish(row, encoding)
        return [row if isinstance(row, TextRejected) else results[i] for i, row in enumerate(prepared)]

    def _prepare(self, turns: Sequence[Turn]) -> _Rendered | TextRejected:
        content = "\0".join(turn.text for turn in turns)
        try:
            content.encode()
        except UnicodeEncodeError as error:
            found = f"the lone surrogate {content[error.start]!r}"
            return TextRejected("invalid_utf8", f"character {error.start} of the conversation is {found}")
        num_images = content.count(IMAGE_MARKER)
        protected = self._control.occur_in(content.replace(IMAGE_MARKER, "\0"))
        if protected and not self._control.can_protect(content):
            return TextRejected("control_token", "a control token's text stands beside private-use characters")
        guard = self._control.protect if protected else str
        messages = [{"role": turn.role, "content": self._content(turn.text, guard)} for turn in turns]
        try:
            text, answers = self._template.render_with_answers(messages)
        except TemplateRefusedError as error:
            return TextRejected("chat_template", str(error))
        if protected:
            alias = self._control.alias
            answers = [(len(alias(text[:start])), len(alias(text[:end]))) for start, end in answers]
            text = alias(text)
        return _Rendered(text=text, answers=answers, num_images=num_images, protected=protected)

    def _content(self, text: str, guard: Callable[[str], str]) -> str | list[dict[str, str]]:
        """Message content as the template wants it; `guard` protects the text around the images."""
        pieces = [guard(piece) for piece in text.split(IMAGE_MARKER)]
        if not self._template_writes_images:
            written = (self.markup.prefix + self.markup.token + self.markup.suffix).join(pieces)
            return [_text_part(written)] if self._takes_parts else written
        parts: list[dict[str, str]] = []
        for i, piece in enumerate(pieces):
            parts += [{"type": "image"}] if i else []
            parts += [_text_part(piece)] if piece or len(pieces) == 1 else []
        return parts

    def _finish(self, rendered: _Rendered, encoding: Encoding) -> EncodedText | TextRejected:
        input_ids = np.array(encoding.ids, dtype=np.int32)
        if rendered.protected:
            try:
                input_ids = self._control.restore(input_ids)
            except ValueError as error:
                return TextRejected("control_token", str(error))
        is_image = input_ids == self.image_token_id
        if (num_written := int(is_image.sum())) != rendered.num_images:
            detail = f"{num_written} image tokens in the text for {rendered.num_images} {IMAGE_MARKER} markers"
            return TextRejected("chat_template", f"the chat template makes {detail}")
        spans = list(_token_spans(encoding, rendered.answers, len(rendered.text)))
        return EncodedText(
            input_ids=input_ids,
            loss_spans=np.array(spans, dtype=np.int32).reshape(-1, 2),
            num_images=rendered.num_images,
            num_loss_tokens=sum(end - start - int(is_image[start:end].sum()) for start, end in spans),
        )

    def _renders(self, content: str | list[dict[str, str]], expected: str = _PROBE) -> bool:
        """Whether the template writes `expected`, once, for a user message with `content`."""
        message: Message = {"role": "user", "content": content}
        try:
            return self._template.render([message]).count(expected) == 1
        except TemplateRefusedError:
            return False


def expand(
    input_ids: NDArray[np.int32],
    loss_spans: NDArray[np.int32],
    image_token_id: int,
    tokens_per_image: Sequence[int] | NDArray[np.int64],
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Repeat each image token as often as its image has LLM tokens; returns `input_ids` and `labels`.

    Labels are the ids inside `loss_spans`, and LABEL_IGNORE elsewhere and on image tokens. ValueError if there are not
    as many numbers as image tokens.

    >>> ids, labels = expand(np.int32([1, 9, 2, 3]), np.int32([[2, 4]]), 9, [3])
    >>> ids.tolist(), labels.tolist()
    ([1, 9, 9, 9, 2, 3], [-100, -100, -100, -100, 2, 3])
    """
    is_image = input_ids == image_token_id
    if (num_images := int(is_image.sum())) != len(tokens_per_image):
        raise ValueError(f"{num_images} image tokens but tokens for {len(tokens_per_image)} images; give one for each")
    repeats = np.ones(len(input_ids), dtype=np.int64)
    repeats[is_image] = tokens_per_image
    labels = np.full(len(input_ids), LABEL_IGNORE, dtype=np.int32)
    for start, end in loss_spans:
        labels[start:end] = input_ids[start:end]
    labels[is_image] = LABEL_IGNORE
    return np.repeat(input_ids, repeats), np.repeat(labels, repeats)


def _token_spans(encoding: Encoding, answers: Sequence[CharSpan], num_chars: int) -> Iterator[CharSpan]:
    """Token spans of character spans: every token that holds at least one of the characters, in whole."""
    done = 0
    for first, last in answers:
        start = _token_at(encoding, first, num_chars)
        end = _token_at(encoding, last, num_chars)
        if (chars := encoding.token_to_chars(end)) is not None and chars[0] < last:
            end += 1  # this token holds characters of both sides
        if max(start, done) < end and first < last:
            yield max(start, done), end
            done = end


def _token_at(encoding: Encoding, char: int, num_chars: int) -> int:
    """First token that holds character `char`, or the next character that any token holds."""
    # A character has no token when the tokenizer's normalizer drops it.
    found = (encoding.char_to_token(i) for i in range(char, num_chars))
    return next((token for token in found if token is not None), len(encoding))


def _add_markup(backend: Tokenizer, markup: ImageMarkup) -> dict[str, int]:
    """Make the markup's strings special tokens of `backend`; returns those that are new to it."""
    tokens = [token for token in (markup.prefix, markup.suffix, markup.token) if token]
    known = backend.get_vocab()
    backend.add_special_tokens(tokens)
    vocab = backend.get_vocab()
    return {token: vocab[token] for token in tokens if token not in known}


def _choose_template(files: TokenizerFiles, wanted: str | None) -> str:
    named = files.chat_templates
    if wanted is None or wanted in named:
        if (name := wanted or "default") in named:
            return named[name]
        has = f"only templates named {', '.join(sorted(named))}" if named else "no chat template"
        raise ConfigError(f"tokenizer {files.where}: has {has}; give one, or a .jinja file")
    if "{" in wanted:
        return wanted
    try:
        return Path(wanted).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat template {wanted}: not one of {sorted(named)}, nor a readable file: {error}") from None


def _text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _hash(files: TokenizerFiles, backend: Tokenizer, template: str, markup: ImageMarkup) -> str:
    added = {index: repr(token) for index, token in sorted(backend.get_added_tokens_decoder().items())}
    parts: list[Any] = [files.tokenizer_json, added, files.named_tokens, template, asdict(markup)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
