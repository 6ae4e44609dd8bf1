"""Count: a chunk of raw records -> a table of what each sample costs, tokens included, or why it is
rejected.

This is the work that the processes of a build share. A chunk is handled at once so that the
tokenizer can run its batch; a record that fails becomes a row with a `reason`, so a table always
has as many rows as the chunk has records.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import BinaryIO, cast

import numpy as np
import pyarrow as pa

from balance.media.audio_tokens import AudioPlan, AudioRejected, plan_audio
from balance.media.image_tokens import ImagePlan, ImageRejected, plan_image
from balance.presets import ModelPreset
from balance.types import COUNT_COLUMNS
from packer.media.audio_header import read_audio_header
from packer.media.image_header import read_header
from packer.records.media import BLOB_SCHEME, Media, MediaProblem, open_media
from packer.records.record import RawRecord, RawSample, Rejected, parse_record
from packer.text.chat_tokenizer import ChatTokenizer, EncodedText, TextRejected
from shards.folders import Folder, open_folder, readers

_INTS = pa.list_(pa.int32())
_PLACE = [
    ("name", pa.string()),
    ("container", pa.string()),
    ("offset", pa.int64()),
    ("size", pa.int64()),
]
_IMAGE = pa.struct([*_PLACE, ("width", pa.int32()), ("height", pa.int32()), ("tokens", pa.int32())])
_AUDIO = pa.struct([*_PLACE, ("length", pa.int32()), ("tokens", pa.int32())])
STAGED_SCHEMA = pa.schema(
    [
        ("sample_id", pa.string()),
        ("source", pa.string()),
        ("reason", pa.string()),  # null for a sample that can be used
        ("detail", pa.string()),
        *[(name, pa.int32()) for name in COUNT_COLUMNS],
        ("input_ids", _INTS),  # one token per image or audio file: expanded when written
        ("loss_spans", _INTS),  # start, end, start, end, ... in `input_ids`
        ("images", pa.list_(_IMAGE)),
        ("audios", pa.list_(_AUDIO)),
    ]
)
"""One row per record read: the staged form between counting and writing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CountTask:
    """What a counting process needs; plain values, so that it travels to other processes and
    machines.
    """

    model: ModelPreset
    tokenizer: str
    chat_template: str | None = None
    decode_images: bool = False
    follow_links: bool = False


@dataclass(frozen=True, slots=True)
class Counted:
    """A chunk's rows, and the content of the files that came with its records."""

    table: pa.Table
    """STAGED_SCHEMA."""
    blob: bytes


@dataclass(frozen=True, slots=True)
class _CountedImage:
    media: Media
    width: int
    height: int
    num_bytes: int
    plan: ImagePlan

    def row(self, place: dict[str, object]) -> dict[str, object]:
        return {
            **place,
            "width": self.width,
            "height": self.height,
            "tokens": self.plan.num_image_tokens,
        }


@dataclass(frozen=True, slots=True)
class _CountedAudio:
    media: Media
    num_bytes: int
    plan: AudioPlan

    def row(self, place: dict[str, object]) -> dict[str, object]:
        return {**place, "length": self.plan.num_samples, "tokens": self.plan.num_audio_tokens}


_Files = tuple[list[_CountedImage], list[_CountedAudio]]


class SampleCounter:
    """Counts samples for one model and one tokenizer; loading the tokenizer is the costly part of
    making one.
    """

    def __init__(self, task: CountTask) -> None:
        self._task = task
        self._model = task.model
        # pictures of a dataset have few sizes, and looking for the best grid takes longer than
        # reading a header
        self._plan_image = lru_cache(maxsize=1 << 16)(partial(plan_image, task.model.vision))
        self._tokenizer = ChatTokenizer.load(
            task.tokenizer,
            task.model.image_markup,
            task.model.audio_markup,
            chat_template=task.chat_template,
        )

    def count(
        self, records: Iterable[RawRecord], source: str, data_root: str, blob_name: str
    ) -> Counted:
        """One row per record, in order. `blob_name` is what the chunk's blob will be called."""
        with collecting_later():
            return self._count(records, source, data_root, blob_name)

    def _count(
        self, records: Iterable[RawRecord], source: str, data_root: str, blob_name: str
    ) -> Counted:
        root = open_folder(data_root, follow_links=self._task.follow_links)
        look = partial(self._look_at_files, root)
        parsed = [parse_record(record, source) for record in records]
        with readers(data_root) as pool:
            looked_at = list(pool.map(look, parsed) if pool else map(look, parsed))
        texts = iter(
            self._tokenizer.encode_batch(
                [s.turns for s, _ in looked_at if isinstance(s, RawSample)]
            )
        )
        blob = bytearray()
        container = BLOB_SCHEME + blob_name
        rows = [
            _row(sample, files, next(texts), blob, container)
            if isinstance(sample, RawSample)
            else _rejected_row(sample)
            for sample, files in looked_at
        ]
        return Counted(pa.Table.from_pylist(rows, schema=STAGED_SCHEMA), bytes(blob))

    def _look_at_files(
        self, root: Folder, sample: RawSample | Rejected
    ) -> tuple[RawSample | Rejected, _Files]:
        if isinstance(sample, Rejected):
            return sample, ([], [])
        try:
            images = [self._count_image(root, media) for media in sample.images]
            return sample, (images, [self._count_audio(root, media) for media in sample.audios])
        except MediaProblem as problem:
            return _reject(sample, problem.reason, problem.detail), ([], [])

    def _count_image(self, root: Folder, media: Media) -> _CountedImage:
        with open_media(root, media, "image") as file:
            header = read_header(file, media.name, decode=self._task.decode_images)
        try:
            plan = self._plan_image(header.width, header.height)
        except ImageRejected as problem:
            raise MediaProblem(problem.reason, f"{media.name}: {problem.detail}") from None
        return _CountedImage(media, header.width, header.height, header.num_bytes, plan)

    def _count_audio(self, root: Folder, media: Media) -> _CountedAudio:
        if self._model.audio is None:
            raise MediaProblem(
                "no_audio_encoder", f"{media.name}: {self._model.name} cannot hear it"
            )
        with open_media(root, media, "audio") as file:
            header = read_audio_header(cast("BinaryIO", file), media.name)
        try:
            plan = plan_audio(self._model.audio, header.num_samples, header.sampling_rate)
        except AudioRejected as problem:
            raise MediaProblem(problem.reason, f"{media.name}: {problem.detail}") from None
        return _CountedAudio(media, header.num_bytes, plan)


@contextmanager
def collecting_later() -> Iterator[None]:
    """No garbage collection meanwhile: a chunk makes a million objects and no circle, and is gone
    at its end.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@lru_cache(maxsize=1)
def sample_counter(task: CountTask) -> SampleCounter:
    """The counter of this process, made at its first chunk."""
    if multiprocessing.parent_process() is not None:
        # the processes already use every core; threads under each would only take them from one
        # another
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return SampleCounter(task)


def _row(
    sample: RawSample,
    files: _Files,
    text: EncodedText | TextRejected,
    blob: bytearray,
    container: str,
) -> dict[str, object]:
    if isinstance(text, TextRejected):
        return _rejected_row(_reject(sample, text.reason, text.detail))
    images, audios = files
    for kind, found, meant in (
        ("image", text.num_images, len(images)),
        ("audio", text.num_audios, len(audios)),
    ):
        if found > meant:
            return _rejected_row(
                _reject(sample, f"marker_without_{kind}", f"{found} <{kind}> for {meant} files")
            )
        if found < meant:
            return _rejected_row(
                _reject(sample, "chat_template", f"it renders {found} of {meant} {kind} files")
            )
    return {
        "sample_id": sample.sample_id,
        "source": sample.source,
        "num_image_patches": sum(image.plan.num_patches for image in images),
        "num_vit_tokens": sum(image.plan.num_vit_tokens for image in images),
        "num_image_tokens": sum(image.plan.num_image_tokens for image in images),
        "num_text_tokens": len(text.input_ids) - len(images) - len(audios),
        "num_audio_tokens": sum(audio.plan.num_audio_tokens for audio in audios),
        "num_loss_tokens": text.num_loss_tokens,
        "input_ids": text.input_ids,
        "loss_spans": np.ravel(text.loss_spans),
        "images": [image.row(_place(image, blob, container)) for image in images],
        "audios": [audio.row(_place(audio, blob, container)) for audio in audios],
    }


def _place(
    counted: _CountedImage | _CountedAudio, blob: bytearray, container: str
) -> dict[str, object]:
    """Where the writers will find a file; content that came with the record goes into the blob."""
    media = counted.media
    offset = media.offset
    if media.data is None:
        container = media.container
    else:
        offset = len(blob)
        blob += media.data
    return {"name": media.name, "container": container, "offset": offset, "size": counted.num_bytes}


def _reject(sample: RawSample, reason: str, detail: str) -> Rejected:
    return Rejected(sample.sample_id, sample.source, reason, detail)


def _rejected_row(rejected: Rejected) -> dict[str, object]:
    # surrogates in a path or message must not break the table that reports them
    detail = rejected.detail.encode("utf-8", "backslashreplace").decode("utf-8")
    return {
        "sample_id": rejected.sample_id,
        "source": rejected.source,
        "reason": rejected.reason,
        "detail": detail,
    }
