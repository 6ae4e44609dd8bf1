"""Conversations and documents -> token ids, and which of them have labels.

For `counting.sample_counter`. Images, videos and clips are one token per run until the shards
are written. The result equals transformers' `apply_chat_template`, character for character and id
for id; `docs/design.md`, "Labels", says which tokens have one. A document (one turn with the role
`document`) skips the template: its ids are those of transformers' `tokenizer(text)` and the
end-of-sequence token, and all of it is learned. Pure once loaded. The tokenizer takes nearly all
of the time (0.6 to 1.8 M tokens/s on two cores), so give it batches.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np

from isobatch.common.errors import ConfigError
from isobatch.counting.text._control_tokens import ControlTokens
from isobatch.counting.text._media_placeholders import (
    MediaWriter,
    Medium,
    MediumKind,
    add_markup,
    text_part,
    write_markups,
)
from isobatch.counting.text._turn_fields import (
    DROPPED_THOUGHT,
    MessageFields,
    dropped_thoughts,
    messages_of,
    require_shown,
)
from isobatch.counting.text._turn_places import edge, holds_marks
from isobatch.counting.text.chat_template import (
    DEFAULT_DATE,
    ChatTemplate,
    Message,
    TemplateRefusedError,
)
from isobatch.counting.text.text_encoder import Encoded, TextEncoder, encode_slowly
from isobatch.counting.text.tokenizer_files import (
    TokenizerFiles,
    build_backend,
    choose_template,
    document_ends,
    id_conflicts,
    read_tokenizer_files,
)
from isobatch.counting.text.turn import Span, Turn, widened
from isobatch.models.presets import MediaMarkup, ModelPreset, given_options
from isobatch.shards.stored_group import Int32Array

IMAGE_MARKER = "<image>"
"""Place of an image in a raw text (LLaVA's convention)."""
VIDEO_MARKER = "<video>"
"""Place of a video in a raw text; plain text for a model without videos."""
AUDIO_MARKER = "<audio>"
"""Place of an audio clip in a raw text; plain text for a model without audio."""
DOCUMENT = "document"
"""Role of the only turn of a document."""

MOST_CHARACTERS = 4_000_000
"""Of a sample, about a million tokens: tokenizing without spaces takes 300 bytes for each."""

__all__ = ["DOCUMENT", "DROPPED_THOUGHT", "ChatTokenizer", "EncodedText", "TextRejected", "Turn"]

_PROBE = "isobatch probe"


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedText:
    """A tokenised conversation or document."""

    input_ids: Int32Array
    """Shape (num_tokens,), with one token per run of an image or video, and one per clip."""
    loss_spans: Int32Array
    """Shape (num_spans, 2): first token with a label, and the one after the last; disjoint."""
    num_images: int
    num_audios: int
    num_loss_tokens: int
    """Tokens with a label. Image and audio tokens have none, so expanding does not change it."""
    num_videos: int = 0
    videos_at: tuple[int, ...] = ()
    """Places of the videos among images and videos, in the order of the text."""
    unused: tuple[tuple[int, str], ...] = ()
    """Fields that did not change the text: (number of the turn, key of its `more`), or
    `DROPPED_THOUGHT` for a thought in the text of a turn that the template leaves out."""


@dataclass(frozen=True, slots=True)
class TextRejected:
    """Why a conversation cannot be tokenised."""

    reason: str
    """Key of REASONS, such as `invalid_utf8` or `chat_template`."""
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rendered:
    text: str
    spans: list[Span]
    """Answers; in a document, markup."""
    is_document: bool
    num_files: dict[str, int]
    """Kind -> files: images, and videos and clips if the model takes them."""
    num_tokens: dict[str, int]
    """Tokens of each kind: more than files where their markup has several runs."""
    videos_at: tuple[int, ...]
    protected: bool
    """Whether `text` is aliased, because the content holds control strings."""
    unused: tuple[tuple[int, str], ...]
    says_learned: bool
    """Whether a turn says itself which of it is learned."""


class ChatTokenizer:
    """A tokenizer with its chat template and a model's image and audio markup."""

    def __init__(
        self,
        files: TokenizerFiles,
        template: str,
        image: MediaMarkup,
        audio: MediaMarkup | None,
        video: MediaMarkup | None,
        template_date: date,
    ) -> None:
        """Make a tokenizer of files that are read: `load` does."""
        self._backend = build_backend(files)
        self.id_conflicts = id_conflicts(files, self._backend)
        """Tokens declared under another id: content -> (declared id, id in use)."""
        markups = [one for one in (image, audio, video) if one is not None]
        self.added_tokens: dict[str, int] = {}
        """Markup tokens that the tokenizer did not know -> their ids after its vocabulary."""
        for one in markups:
            self.added_tokens |= add_markup(self._backend, one, is_video=one is video)
        vocab = self._backend.get_vocab()
        self.image_token_id = vocab[image.token]
        self.audio_token_id = None if audio is None else vocab[audio.token]
        """Id of the audio token; None for a model without audio."""
        self.video_token_id = None if video is None else vocab[video.token]
        """Id of the video token, perhaps the image token's; None for a model without videos."""
        self.vocab_size = self._backend.get_vocab_size()
        """Number of tokens, added ones included: rows that the model's embedding needs."""
        self._template = ChatTemplate(template, files.named_tokens, template_date)
        self.template_date = template_date.isoformat() if self._template.reads_date else None
        """The day that the template writes; None if it writes none."""
        self._fields = MessageFields(self._template)
        self._control = ControlTokens(self._backend)
        self._encoder = TextEncoder(self._backend)
        takes_parts = self._takes_parts(files.where)
        self._media = self._media_of(image, video, audio, takes_parts=takes_parts)
        self._visual = [medium for medium in self._media if medium.kind != "audio"]
        self._writer = MediaWriter(self._media, takes_parts=takes_parts)
        self._bos, self._eos = document_ends(files, self._backend)
        listed = sorted(self._backend.get_added_tokens_decoder().items())
        parts = [
            files.tokenizer_json,
            {index: repr(token) for index, token in listed},
            files.named_tokens,
            template,
            *map(given_options, markups),
            *([] if self.template_date is None else [self.template_date]),
        ]
        self.hash = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
        """Changes whenever the same text could be tokenised or labelled otherwise."""

    @classmethod
    def for_model(
        cls,
        model: ModelPreset,
        source: str,
        chat_template: str | None = None,
        template_date: str | None = None,
    ) -> Self:
        """Load the tokenizer of a model; see `load`."""
        return cls.load(
            source,
            model.image_markup,
            model.audio_markup,
            video_markup=model.video_markup,
            chat_template=chat_template,
            template_date=template_date,
        )

    @classmethod
    def load(
        cls,
        source: str | Path,
        markup: MediaMarkup,
        audio_markup: MediaMarkup | None = None,
        *,
        video_markup: MediaMarkup | None = None,
        chat_template: str | None = None,
        template_date: str | None = None,
    ) -> Self:
        """Load a tokenizer from a folder, from a `tokenizer.json`, or by Hub id.

        `chat_template` is the name of one of the tokenizer's templates, a `.jinja` file, or a
        template itself. Without `audio_markup`, `<audio>` is plain text, as is `<video>`.
        `template_date` (YYYY-MM-DD) is what a template that asks for the day writes: by default
        the day of SOURCE_DATE_EPOCH (reproducible-builds.org) if that is set, else `DEFAULT_DATE`.
        """
        day = _day(template_date)
        files = read_tokenizer_files(source)
        template = choose_template(files, chat_template)
        try:
            return cls(files, template, markup, audio_markup, video_markup, day)
        except ConfigError:
            raise
        # a config written by hand, of some other shape
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"tokenizer {files.where}: its config is not as transformers writes it: {error!r}"
            ) from None

    @property
    def takes_markups(self) -> bool:
        """Whether the markup of an image or a video depends on it: `encode_batch` is given it."""
        return any(medium.markup.placeholder for medium in self._visual)

    def encode_batch(
        self,
        batch: Sequence[Sequence[Turn]],
        markups: Sequence[Sequence[str]] | None = None,
        video_markups: Sequence[Sequence[str]] | None = None,
    ) -> list[EncodedText | TextRejected]:
        """Tokenise conversations and documents, in order, on as many threads as cores.

        `markups`, if `takes_markups`: each sample's images' (`MediaMarkup.written`); and those of
        its videos.
        """
        none: list[Sequence[str]] = [()] * len(batch)
        samples = zip(batch, markups or none, video_markups or none, strict=True)
        prepared = [self._prepare(turns, written) for turns, *written in samples]
        results: dict[int, EncodedText | TextRejected] = {}
        for protected in (False, True):
            rows: dict[int, _Rendered] = {}
            for i, row in enumerate(prepared):
                if isinstance(row, TextRejected):
                    results[i] = row
                elif row.protected is protected:
                    rows[i] = row
            texts = [row.text for row in rows.values()]
            spans = [row.spans for row in rows.values()]
            encoded: Iterable[Encoded] = (
                encode_slowly(self._control.backend, texts, spans)
                if protected and rows
                else self._encoder.encode(texts, spans)
            )
            for (i, row), one in zip(rows.items(), encoded, strict=True):
                results[i] = self._finish(row, *one)
        return [results[i] for i in range(len(prepared))]

    def _prepare(
        self, turns: Sequence[Turn], markups: Sequence[Sequence[str]]
    ) -> _Rendered | TextRejected:
        content = "\0".join(turn.text for turn in turns)
        if (number := len(content)) > MOST_CHARACTERS:
            detail = f"{number:,} characters; at most {MOST_CHARACTERS:,} are tokenized"
            return TextRejected("too_many_characters", detail)
        more = "\0".join(turn.more for turn in turns if turn.more)
        try:
            content.encode()
        except UnicodeEncodeError as error:
            surrogate = f"the lone surrogate {content[error.start]!r}"
            return TextRejected(
                "invalid_utf8", f"character {error.start} of the conversation is {surrogate}"
            )
        tokens = frozenset(token for turn in turns for token in turn.tokens)
        plain = self._writer.blank(content)
        for token in tokens:
            plain = plain.replace(token, "\0")
        protected = self._control.occur_in(plain) or (more != "" and self._control.occur_in(more))
        if protected and not self._control.can_protect(content + more):
            both = "the text has a control token's string and private-use characters"
            return TextRejected("control_token", both)
        guard = partial(self._control.protect, tokens=tokens) if protected else str
        says_learned = any(turn.learned is not None for turn in turns)
        is_document = any(turn.role == DOCUMENT for turn in turns)
        try:
            if is_document:
                unused: tuple[tuple[int, str], ...] = ()
                text, spans = self._writer.document(_only_turn(turns).text, guard)
            else:
                text, spans, unused = self._conversation(turns, guard)
            kinds = (medium.kind for medium in self._media)
            num_files: dict[str, int] = dict(zip(kinds, self._writer.count(content), strict=True))
            num_tokens = num_files
            videos_at = tuple[int, ...]()
            if num_files.get("video") or self._media[0].markup.placeholder:
                text, spans, num_tokens, videos_at = self._write_visuals(
                    text, spans, num_files, markups
                )
        except TemplateRefusedError as error:
            return TextRejected("chat_template", str(error))
        if protected:
            if self._control.is_escaped_in(text):
                escapes = "the chat template escapes a control token's string"
                return TextRejected("control_token", escapes)
            text, spans = self._control.alias(text, spans)
        return _Rendered(
            text=text,
            spans=spans,
            is_document=is_document,
            num_files=num_files,
            num_tokens=num_tokens,
            videos_at=videos_at,
            protected=protected,
            unused=unused,
            says_learned=says_learned,
        )

    def _conversation(
        self, turns: Sequence[Turn], guard: Callable[[str], str]
    ) -> tuple[str, list[Span], tuple[tuple[int, str], ...]]:
        """The text of a conversation, its spans with labels, and the fields that it leaves out."""
        write = partial(self._writer.content, guard=guard)
        messages, tools = messages_of(turns, write, guard)
        all_messages = messages
        if not any(turn.more for turn in turns):
            unused: tuple[tuple[int, str], ...] = ()
        else:
            messages, tools, unused = self._fields.read(messages, tools)
        if all(turn.learned is None for turn in turns):
            text, spans = self._template.render_with_answers(messages, tools)
        else:
            text, spans = self._as_learned(turns, messages, tools, write)
        require_shown(text, all_messages)
        dropped = dropped_thoughts(turns, text, guard, self._writer.markers_in)
        return text, spans, (*unused, *dropped)

    def _as_learned(
        self,
        turns: Sequence[Turn],
        messages: Sequence[Message],
        tools: Any,
        write: Callable[[str], Any],
    ) -> tuple[str, list[Span]]:
        """The text of a conversation whose turns say what is learned, and its spans with labels."""
        if holds_marks("".join(turn.text for turn in turns)):
            raise TemplateRefusedError("the texts contain characters that mark what is learned")
        learned = [turn.learned for turn in turns]
        # many templates strip the texts, which they cannot where an edge is
        for strips in (False, True):
            edged: list[Message] = []
            for number, (turn, message) in enumerate(zip(turns, messages, strict=True)):
                has_ranges = turn.ranges and message.get("content") is not None
                text = self._with_edges(turn, number, strips=strips)
                edged.append({**message, "content": write(text)} if has_ranges else message)
            try:
                return self._template.render_as_learned(messages, learned, edged, tools)
            except TemplateRefusedError:
                if strips:
                    raise
        raise AssertionError("the second try returns or raises")

    def _with_edges(self, turn: Turn, number: int, *, strips: bool) -> str:
        """A turn's text with marks around each range that is learned.

        A range that has a part of a marker or of a control string has all of it.
        """
        text = turn.text
        first = len(text) - len(text.lstrip()) if strips else 0
        last = len(text.rstrip()) if strips else len(text)
        whole = [*self._writer.markers_in(text), *self._control.strings_in(text)]
        wide = [(max(start, first), min(end, last)) for start, end in widened(turn.ranges, whole)]
        for start, end in reversed(wide):
            if start < end:
                before, inside, after = text[:start], text[start:end], text[end:]
                text = f"{before}{edge(2 * number)}{inside}{edge(2 * number + 1)}{after}"
        return text

    def _write_visuals(
        self,
        text: str,
        spans: list[Span],
        num_files: dict[str, int],
        markups: Sequence[Sequence[str]],
    ) -> tuple[str, list[Span], dict[str, int], tuple[int, ...]]:
        """The text with the markup of images and videos in place of placeholders, and its spans.

        Also the tokens of each kind, and the places of videos among images and videos.
        """
        written: dict[str, Sequence[str] | None] = {}
        num_tokens = dict(num_files)
        for medium, of_files in zip(self._visual, markups, strict=False):
            number = num_files[medium.kind]
            markup = medium.markup
            written[medium.in_text] = None
            if markup.placeholder:
                # not given, or a sample that is refused for it later
                strings = of_files if len(of_files) == number else [markup.text] * number
                written[medium.in_text] = strings
                num_tokens[medium.kind] = sum(string.count(markup.token) for string in strings)
        try:
            text, spans, order = write_markups(text, spans, written)
        except ValueError as error:
            raise TemplateRefusedError(f"the chat template makes {error}") from None
        video = self._visual[-1].in_text if "video" in num_files else ""
        videos_at = tuple(place for place, placeholder in enumerate(order) if placeholder == video)
        return text, spans, num_tokens, videos_at

    def _finish(
        self, rendered: _Rendered, input_ids: Int32Array, spans: list[Span]
    ) -> EncodedText | TextRejected:
        if rendered.protected:
            try:
                input_ids = self._control.restore(input_ids)
            except ValueError as error:
                return TextRejected("control_token", str(error))
        if rendered.is_document:
            bos = len(self._bos)
            input_ids = np.concatenate([self._bos, input_ids, self._eos])
            shifted = [(bos + start, bos + end) for start, end in spans]
            spans = _spans_between(shifted, bos, len(input_ids))
        # nothing precedes the first token, so no model predicts it
        spans = [(max(1, start), end) for start, end in spans if end > 1]
        places: list[int] = []
        for token_id in dict.fromkeys(medium.token_id for medium in self._media):
            media = [medium for medium in self._media if medium.token_id == token_id]
            num_tokens = sum(rendered.num_tokens[medium.kind] for medium in media)
            written = np.flatnonzero(input_ids == token_id).tolist()
            if len(written) != num_tokens:
                actual = f"{len(written)} {media[0].kind} tokens in the text"
                meant = f"{num_tokens} {media[0].marker} markers"
                return TextRejected(
                    "chat_template", f"the chat template makes {actual} for {meant}"
                )
            places += written
        num_media = sum(start <= place < end for place in places for start, end in spans)
        num_loss_tokens = sum(end - start for start, end in spans) - num_media
        if rendered.says_learned and num_loss_tokens == 0:
            return TextRejected("not_learned", "the record says that none of its text is learned")
        return EncodedText(
            input_ids=input_ids,
            loss_spans=np.array(spans, dtype=np.int32).reshape(-1, 2),
            num_images=rendered.num_files["image"],
            num_videos=rendered.num_files.get("video", 0),
            num_audios=rendered.num_files.get("audio", 0),
            num_loss_tokens=num_loss_tokens,
            videos_at=rendered.videos_at,
            unused=rendered.unused,
        )

    def _media_of(
        self,
        image: MediaMarkup,
        video: MediaMarkup | None,
        audio: MediaMarkup | None,
        *,
        takes_parts: bool,
    ) -> tuple[Medium, ...]:
        """Images, and videos and audio if the model has them.

        Clips are given to the template as parts whenever it writes those: Qwen2-Audio's, which
        also takes strings, numbers them. Images and videos only if it takes no strings: otherwise
        the model's own markup says what it would write, if it does (`template_first`).
        """
        candidates: list[tuple[MediumKind, str, MediaMarkup | None, int | None]] = [
            ("image", IMAGE_MARKER, image, self.image_token_id),
            ("video", VIDEO_MARKER, video, self.video_token_id),
            ("audio", AUDIO_MARKER, audio, self.audio_token_id),
        ]
        media = []
        for kind, marker, markup, token_id in candidates:
            if markup is not None and token_id is not None:
                asked = takes_parts or kind == "audio" or markup.template_first
                parts = asked and self._writes(kind, markup)
                media.append(Medium(kind, marker, markup, token_id, parts))
        return tuple(media)

    def _takes_parts(self, where: str) -> bool:
        """Whether the template takes no plain strings as content; ConfigError if it takes none."""
        refusals = []
        for content in (_PROBE, [text_part(_PROBE)]):
            try:
                if self._template.render([{"role": "user", "content": content}]).count(_PROBE) == 1:
                    return not isinstance(content, str)
            except TemplateRefusedError as refusal:
                refusals.append(f" ({refusal})")
        why = refusals[0] if refusals else ""
        bad = f"tokenizer {where}: its chat template renders no user message{why}"
        raise ConfigError(f"{bad}; give another")

    def _writes(self, kind: str, markup: MediaMarkup) -> bool:
        """Whether the template writes a medium's markup, given a part."""
        expected = markup.placeholder or markup.token
        message: Message = {"role": "user", "content": [{"type": kind}, text_part(_PROBE)]}
        try:
            return self._template.render([message]).count(expected) == 1
        except TemplateRefusedError:
            return False


def _only_turn(turns: Sequence[Turn]) -> Turn:
    if len(turns) > 1:
        raise TemplateRefusedError(f"{len(turns)} turns, but a document must be the only one")
    if turns[0].learned not in (None, True):
        raise TemplateRefusedError("a document is learned as a whole")
    return turns[0]


def _day(day: str | None) -> date:
    """The day of a date, or else of SOURCE_DATE_EPOCH, or else the default; ConfigError."""
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    try:
        if day is not None:
            return date.fromisoformat(day)
        return DEFAULT_DATE if epoch is None else datetime.fromtimestamp(int(epoch), UTC).date()
    except (ValueError, OverflowError, OSError):
        what = "SOURCE_DATE_EPOCH" if day is None else "--template-date (template_date)"
        form = "seconds since 1970" if day is None else "YYYY-MM-DD"
        raise ConfigError(f"{what} = {(day or epoch)!r}: expected a day as {form}") from None


def _spans_between(spans: Sequence[Span], start: int, end: int) -> list[Span]:
    """What `spans`, in order and disjoint, leave of `start` up to `end`; no span is empty.

    >>> _spans_between([(2, 3), (5, 7)], 0, 7)
    [(0, 2), (3, 5)]
    """
    edges = [start, *(edge for span in spans for edge in span), end]
    return [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]
