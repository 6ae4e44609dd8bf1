"""Conversations and documents -> token ids, and which of them have labels.

For `packer.count.sample_counter`. Images and clips are one token each until the shards are
written. The result equals transformers' `apply_chat_template`, character for character and id for
id; `docs/design.md`, "Labels", says which tokens have one. A document (one turn with the role
`document`) skips the template: its ids are those of transformers' `tokenizer(text)` and the
end-of-sequence token, and all of it is learned. Pure once loaded. The tokenizer takes nearly all
of the time (0.6 to 1.8 M tokens/s on two cores), so give it batches.
"""

import hashlib
import json
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

import numpy as np
from tokenizers import Encoding, Tokenizer

from balance.errors import ConfigError
from balance.presets import MediaMarkup, ModelPreset, given_options
from packer.text._control_tokens import ControlTokens
from packer.text._media_placeholders import (
    MediaWriter,
    Medium,
    add_markup,
    text_part,
    write_markups,
)
from packer.text._tool_turns import messages_of, require_shown
from packer.text.chat_template import ChatTemplate, Message, Span, TemplateRefusedError
from packer.text.tokenizer_files import (
    TokenizerFiles,
    build_backend,
    id_conflicts,
    read_tokenizer_files,
)
from shards.stored_group import Int32Array

IMAGE_MARKER = "<image>"
"""Place of an image in a raw text (LLaVA's convention)."""
AUDIO_MARKER = "<audio>"
"""Place of an audio clip in a raw text; plain text for a model without audio."""
DOCUMENT = "document"
"""Role of the only turn of a document."""

_PROBE = "isobatch probe"


@dataclass(frozen=True, slots=True)
class Turn:
    """One message of a conversation."""

    role: str
    """`user`, `assistant`, `system` or `tool`; or `DOCUMENT`, then it is the only turn."""
    text: str
    """Raw text with an `IMAGE_MARKER` for each image and an `AUDIO_MARKER` for each clip."""
    more: str = ""
    """JSON object of more keys of the message: `tool_calls`; in the first turn also `tools`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedText:
    """A tokenised conversation or document."""

    input_ids: Int32Array
    """Shape (num_tokens,), with one image token per run of an image, one audio token per clip."""
    loss_spans: Int32Array
    """Shape (num_spans, 2): first token with a label, and the one after the last; disjoint."""
    num_images: int
    num_audios: int
    num_loss_tokens: int
    """Tokens with a label. Image and audio tokens have none, so expanding does not change it."""


@dataclass(frozen=True, slots=True)
class TextRejected:
    """Why a conversation cannot be tokenised."""

    reason: str
    """`invalid_utf8`, `chat_template` or `control_token`."""
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rendered:
    text: str
    spans: list[Span]
    """Answers; in a document, markup."""
    is_document: bool
    num_files: tuple[int, ...]
    """Images and, for a model with audio, clips."""
    num_tokens: tuple[int, ...]
    """Image tokens and audio tokens: more than images where their markup has several runs."""
    protected: bool
    """Whether `text` is aliased, because the content holds control strings."""


class ChatTokenizer:
    """A tokenizer with its chat template and a model's image and audio markup."""

    def __init__(
        self, files: TokenizerFiles, template: str, image: MediaMarkup, audio: MediaMarkup | None
    ) -> None:
        """Built by `load`."""
        self._backend = build_backend(files)
        self.id_conflicts = id_conflicts(files, self._backend)
        """Tokens declared under another id: content -> (declared id, id in use)."""
        markups = [image] if audio is None else [image, audio]
        self.added_tokens: dict[str, int] = {}
        """Markup tokens that the tokenizer did not know -> their ids after its vocabulary."""
        for one in markups:
            self.added_tokens |= add_markup(self._backend, one)
        vocab = self._backend.get_vocab()
        self.image_token_id = vocab[image.token]
        self.audio_token_id = None if audio is None else vocab[audio.token]
        """None for a model without audio."""
        self.vocab_size = self._backend.get_vocab_size()
        """Number of tokens, added ones included: rows that the model's embedding needs."""
        self._template = ChatTemplate(template, files.named_tokens)
        self._control = ControlTokens(self._backend)
        takes_parts = not self._renders(_PROBE)
        if takes_parts and not self._renders([text_part(_PROBE)]):
            raise ConfigError(
                f"tokenizer {files.where}: its chat template renders no user message; give another"
            )
        self._media = self._media_of(image, audio, takes_parts=takes_parts)
        self._writer = MediaWriter(self._media, takes_parts=takes_parts)
        self._bos, self._eos = _document_ends(files, self._backend)
        self.hash = _hash(files, self._backend, template, markups)
        """Changes whenever the same text could be tokenised or labelled otherwise."""

    @classmethod
    def for_model(cls, model: ModelPreset, source: str, chat_template: str | None = None) -> Self:
        """Load the tokenizer of a model; see `load`."""
        markups = model.image_markup, model.audio_markup
        return cls.load(source, *markups, chat_template=chat_template)

    @classmethod
    def load(
        cls,
        source: str | Path,
        markup: MediaMarkup,
        audio_markup: MediaMarkup | None = None,
        *,
        chat_template: str | None = None,
    ) -> Self:
        """Load a tokenizer from a folder, from a `tokenizer.json`, or by Hub id.

        `chat_template` is the name of one of the tokenizer's templates, a `.jinja` file, or a
        template itself. Without `audio_markup`, `<audio>` is plain text.
        """
        files = read_tokenizer_files(source)
        try:
            return cls(files, _choose_template(files, chat_template), markup, audio_markup)
        # a config written by hand, of some other shape
        except (AttributeError, KeyError, TypeError) as error:
            raise ConfigError(
                f"tokenizer {files.where}: its config is not as transformers writes it: {error!r}"
            ) from None

    @property
    def takes_markups(self) -> bool:
        """Whether an image's markup depends on the image, so that `encode_batch` is given it."""
        return bool(self._media[0].markup.placeholder)

    def encode_batch(
        self, batch: Sequence[Sequence[Turn]], markups: Sequence[Sequence[str]] | None = None
    ) -> list[EncodedText | TextRejected]:
        """Tokenise conversations and documents, in order, on as many threads as cores.

        `markups`, if `takes_markups`: each sample's images' (`MediaMarkup.written`).
        """
        if markups is None:
            prepared = [self._prepare(turns, ()) for turns in batch]
        else:
            prepared = [self._prepare(*sample) for sample in zip(batch, markups, strict=True)]
        results: dict[int, EncodedText | TextRejected] = {}
        for protected in (False, True):
            rows: dict[int, _Rendered] = {}
            for i, row in enumerate(prepared):
                if isinstance(row, TextRejected):
                    results[i] = row
                elif row.protected is protected:
                    rows[i] = row
            backend = self._control.backend if protected and rows else self._backend
            texts = [row.text for row in rows.values()]
            encodings = backend.encode_batch(texts, add_special_tokens=False)
            for (i, row), encoding in zip(rows.items(), encodings, strict=True):
                results[i] = self._finish(row, encoding)
        return [results[i] for i in range(len(prepared))]

    def _prepare(self, turns: Sequence[Turn], markups: Sequence[str]) -> _Rendered | TextRejected:
        content = "\0".join(turn.text for turn in turns)
        if self._control.occur_in("\0".join(turn.more for turn in turns)):
            return TextRejected("control_token", "a tool call holds a control token's string")
        try:
            content.encode()
        except UnicodeEncodeError as error:
            found = f"the lone surrogate {content[error.start]!r}"
            return TextRejected(
                "invalid_utf8", f"character {error.start} of the conversation is {found}"
            )
        protected = self._control.occur_in(self._writer.blank(content))
        if protected and not self._control.can_protect(content):
            both = "the text has a control token's string and private-use characters"
            return TextRejected("control_token", both)
        guard = self._control.protect if protected else str
        is_document = any(turn.role == DOCUMENT for turn in turns)
        try:
            if is_document:
                text, spans = self._writer.document(_only_turn(turns).text, guard)
            else:
                write = partial(self._writer.content, guard=guard)
                messages, tools = messages_of(turns, write)
                text, spans = self._template.render_with_answers(messages, tools)
                require_shown(text, messages)
            num_files = num_tokens = self._writer.count(content)
            if self.takes_markups:
                text, spans, num_images = self._write_images(text, spans, num_files[0], markups)
                num_tokens = num_images, *num_files[1:]
        except TemplateRefusedError as error:
            return TextRejected("chat_template", str(error))
        if protected:
            text, spans = self._control.alias(text, spans)
        return _Rendered(
            text=text,
            spans=spans,
            is_document=is_document,
            num_files=num_files,
            num_tokens=num_tokens,
            protected=protected,
        )

    def _write_images(
        self, text: str, spans: list[Span], num_images: int, markups: Sequence[str]
    ) -> tuple[str, list[Span], int]:
        """The text with the images' markup in place of placeholders, and its image tokens."""
        markup = self._media[0].markup
        if len(markups) != num_images:  # not given, or a sample that is refused for it later
            markups = [markup.text] * num_images
        try:
            text, spans = write_markups(text, spans, markup.placeholder, markups)
        except ValueError as error:
            raise TemplateRefusedError(f"the chat template makes {error}") from None
        return text, spans, sum(each.count(markup.token) for each in markups)

    def _finish(self, rendered: _Rendered, encoding: Encoding) -> EncodedText | TextRejected:
        # a third of the time of np.array
        input_ids = np.frombuffer(array("i", encoding.ids), np.int32)
        if rendered.protected:
            try:
                input_ids = self._control.restore(input_ids)
            except ValueError as error:
                return TextRejected("control_token", str(error))
        spans = list(_token_spans(encoding, rendered.spans, len(rendered.text)))
        if rendered.is_document:
            bos = len(self._bos)
            input_ids = np.concatenate([self._bos, input_ids, self._eos])
            shifted = [(bos + start, bos + end) for start, end in spans]
            spans = _spans_between(shifted, bos, len(input_ids))
        places: list[int] = []
        for medium, num_tokens in zip(self._media, rendered.num_tokens, strict=True):
            written = np.flatnonzero(input_ids == medium.token_id).tolist()
            if len(written) != num_tokens:
                made = f"{len(written)} {medium.kind} tokens in the text"
                meant = f"{num_tokens} {medium.marker} markers"
                return TextRejected("chat_template", f"the chat template makes {made} for {meant}")
            places += written
        num_media = sum(start <= place < end for place in places for start, end in spans)
        return EncodedText(
            input_ids=input_ids,
            loss_spans=np.array(spans, dtype=np.int32).reshape(-1, 2),
            num_images=rendered.num_files[0],
            num_audios=sum(rendered.num_files[1:]),
            num_loss_tokens=sum(end - start for start, end in spans) - num_media,
        )

    def _media_of(
        self, markup: MediaMarkup, audio_markup: MediaMarkup | None, *, takes_parts: bool
    ) -> tuple[Medium, ...]:
        """Images, and audio if the model has it.

        Clips are given to the template as parts whenever it writes those: Qwen2-Audio's, which
        also takes strings, numbers them. Images only if it takes no strings: otherwise the model's
        own markup says what it would write.
        """
        parts = takes_parts and self._writes("image", markup)
        media = [Medium("image", IMAGE_MARKER, markup, self.image_token_id, parts)]
        if audio_markup is not None and self.audio_token_id is not None:
            parts = self._writes("audio", audio_markup)
            media.append(Medium("audio", AUDIO_MARKER, audio_markup, self.audio_token_id, parts))
        return tuple(media)

    def _writes(self, kind: str, markup: MediaMarkup) -> bool:
        """Whether the template writes a medium's markup, given a part."""
        expected = markup.placeholder or markup.token
        return self._renders([{"type": kind}, text_part(_PROBE)], expected)

    def _renders(self, content: str | list[dict[str, str]], expected: str = _PROBE) -> bool:
        """Whether the template writes `expected`, once, for a user message with `content`."""
        message: Message = {"role": "user", "content": content}
        try:
            return self._template.render([message]).count(expected) == 1
        except TemplateRefusedError:
            return False


def _only_turn(turns: Sequence[Turn]) -> Turn:
    if len(turns) > 1:
        raise TemplateRefusedError(f"{len(turns)} turns, but a document must be the only one")
    return turns[0]


# --- character spans -> token spans ---


def _token_spans(encoding: Encoding, chars: Sequence[Span], num_chars: int) -> Iterator[Span]:
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


def _spans_between(spans: Sequence[Span], start: int, end: int) -> list[Span]:
    """What `spans`, in order and disjoint, leave of `start` up to `end`; no span is empty.

    >>> _spans_between([(2, 3), (5, 7)], 0, 7)
    [(0, 2), (3, 5)]
    """
    edges = [start, *(edge for span in spans for edge in span), end]
    return [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]


def _token_at(encoding: Encoding, char: int, num_chars: int) -> int:
    """First token with the character `char`, or with the next character that any token has."""
    # A character has no token when the tokenizer's normalizer drops it.
    found = (encoding.char_to_token(i) for i in range(char, num_chars))
    return next((token for token in found if token is not None), len(encoding))


# --- parts of a tokenizer ---


def _document_ends(files: TokenizerFiles, backend: Tokenizer) -> tuple[Int32Array, Int32Array]:
    """The ids before and after a document: `bos_token` and `eos_token`, or none.

    The first only if the post-processor of `tokenizer.json` adds it, which is what decides in
    transformers (5.x drops `add_bos_token` of the config). The second ends a text in training.
    """
    bos, eos = (
        [backend.token_to_id(files.named_tokens[name])] if name in files.named_tokens else []
        for name in ("bos_token", "eos_token")
    )
    adds_bos = backend.encode(_PROBE).ids[:1] == bos
    return np.array(bos if adds_bos else [], dtype=np.int32), np.array(eos, dtype=np.int32)


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
        raise ConfigError(
            f"chat template {wanted}: not one of {sorted(named)}, nor a readable file: {error}"
        ) from None


def _hash(
    files: TokenizerFiles, backend: Tokenizer, template: str, markups: Sequence[MediaMarkup]
) -> str:
    listed = sorted(backend.get_added_tokens_decoder().items())
    added = {index: repr(token) for index, token in listed}
    parts = [
        files.tokenizer_json,
        added,
        files.named_tokens,
        template,
        *map(given_options, markups),
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
