"""A chunk of raw records -> a table of what each sample costs, with its tokens.

This is the work that the processes of a build share. A chunk is one batch of the tokenizer. A
record that fails becomes a row with a `reason`, so a table has as many rows as the chunk records.
"""

import gc
import json
import multiprocessing
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from itertools import chain
from typing import BinaryIO, cast

import numpy as np
import pyarrow as pa

from balance.media.audio_tokens import AudioRejected, plan_audio
from balance.media.image_tokens import ImagePlan, ImageRejected, plan_image
from balance.presets import ModelPreset
from balance.types import COUNT_COLUMNS
from packer.media.audio_header import read_audio_header
from packer.media.image_header import read_header, warnings_about
from packer.records.extras import Kinds, kinds_in, read_extras
from packer.records.media import BLOB_SCHEME, Media, SampleProblem, open_media
from packer.records.record import RawRecord, RawSample, Rejected
from packer.records.schemas import parse_record
from packer.records.user_map import load_map
from packer.sources.base import Chunk
from packer.text.chat_tokenizer import ChatTokenizer, EncodedText, TextRejected
from shards.folders import Folder, open_folder, readers
from shards.stored_group import EXTRAS

_INTS = pa.list_(pa.int32())
_TEXT, _LONG = pa.string(), pa.int64()
_PLACE = [("name", _TEXT), ("container", _TEXT), ("offset", _LONG), ("size", _LONG)]
_IMAGE = pa.struct([*_PLACE, ("width", pa.int32()), ("height", pa.int32()), ("tokens", pa.int32())])
_AUDIO = pa.struct([*_PLACE, ("length", pa.int32()), ("tokens", pa.int32())])
STAGED_SCHEMA = pa.schema(
    [
        ("sample_id", _TEXT),
        ("source", _TEXT),
        ("reason", _TEXT),  # null for a sample that can be used
        ("detail", _TEXT),
        *[(name, pa.int32()) for name in COUNT_COLUMNS],
        ("input_ids", _INTS),  # one token per run of an image or clip: expanded when written
        ("image_runs", _INTS),  # image tokens of each run; null if each image has one
        ("loss_spans", _INTS),  # start, end, start, end, ... in `input_ids`
        ("images", pa.list_(_IMAGE)),
        ("audios", pa.list_(_AUDIO)),
    ]
)
"""One row per record read: the staged form between counting and writing."""
EXTRA_KINDS = b"extra_kinds"
"""Key of the kinds of extras in a staged table's metadata."""


def staged_schema(kinds: Kinds) -> pa.Schema:
    """STAGED_SCHEMA with a column `extras` of values of these kinds, as JSON objects."""
    metadata = {EXTRA_KINDS: json.dumps(kinds)}
    return STAGED_SCHEMA.append(pa.field(EXTRAS, _TEXT)).with_metadata(metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class CountSettings:
    """How a dataset is counted; plain values, for other processes and machines need them too."""

    model: ModelPreset
    tokenizer: str
    chat_template: str | None = None
    keep_columns: tuple[str, ...] = ()
    map: str | None = None
    """`module:function`, applied to each record first."""
    decode_images: bool = False
    follow_links: bool = False
    """Read images and audio files through links that lead out of the data root."""
    chunk_records: int = 1024
    limit: int | None = None
    executor: str = "local"
    workers: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CountJob:
    """One chunk to count."""

    settings: CountSettings
    number: int
    part: int
    source: str
    data_root: str
    chunk: Chunk | None
    """None when its rows are staged already."""


@dataclass(frozen=True, slots=True)
class Counted:
    """A chunk's rows, and the content of the files that came with its records."""

    table: pa.Table
    """STAGED_SCHEMA, and `extras` if columns are kept (`staged_schema`)."""
    blob: bytes


@dataclass(frozen=True, slots=True)
class _CountedFile:
    media: Media
    num_bytes: int
    numbers: dict[str, int]
    """Columns of its row, and what its sample adds up."""
    plan: ImagePlan | None = None
    """Of an image."""


_Usable = tuple[RawSample, list[_CountedFile], list[_CountedFile]]
"""A sample, its images and its audio files."""


@contextmanager
def _collecting_later() -> Iterator[None]:
    """No garbage collection meanwhile: a chunk makes a million objects and no cycle."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class SampleCounter:
    """Counts samples for one model and one tokenizer, which takes seconds to load."""

    def __init__(self, settings: CountSettings) -> None:
        self._settings = settings
        self._model = model = settings.model
        self._map = None if settings.map is None else load_map(settings.map)
        self._tokenizer = ChatTokenizer.for_model(model, settings.tokenizer, settings.chat_template)

    @_collecting_later()
    def count(self, records: Iterable[RawRecord], source: str, root: str, blob: str) -> Counted:
        """One row per record, or per record that `--map` makes of it, in order.

        `blob` is the name of the chunk's future blob.
        """
        folder = open_folder(root, follow_links=self._settings.follow_links)
        look = partial(self._look_at_files, folder)
        if self._map is not None:
            records = chain.from_iterable(map(self._map.records_of, records))
        parsed = [self._parse(record, source) for record in records]
        with readers(root) as pool:
            looked_at = list(pool.map(look, parsed) if pool else map(look, parsed))
        turns = [one[0].turns for one in looked_at if not isinstance(one, Rejected)]
        markups = None
        if self._tokenizer.takes_markups:
            write = self._model.image_markup.written
            markups = [
                [write(image.plan, number) for number, image in enumerate(one[1]) if image.plan]
                for one in looked_at
                if not isinstance(one, Rejected)
            ]
        texts = iter(self._tokenizer.encode_batch(turns, markups))
        content, container = bytearray(), BLOB_SCHEME + blob
        rows = []
        for one in looked_at:
            row = one if isinstance(one, Rejected) else _row(one, next(texts), content, container)
            rows.append(_rejected_row(row) if isinstance(row, Rejected) else row)
        schema = STAGED_SCHEMA
        if self._settings.keep_columns:
            schema = staged_schema(kinds_in(str(row["extras"]) for row in rows if "extras" in row))
        return Counted(pa.Table.from_pylist(rows, schema=schema), bytes(content))

    def _parse(self, record: RawRecord, source: str) -> RawSample | Rejected:
        sample, keep = parse_record(record, source), self._settings.keep_columns
        if isinstance(sample, Rejected) or not keep:
            return sample
        try:
            return replace(sample, extras=read_extras(record.value, keep))
        except SampleProblem as problem:
            return _reject(sample, problem.reason, problem.detail)

    def _look_at_files(self, root: Folder, sample: RawSample | Rejected) -> _Usable | Rejected:
        if isinstance(sample, Rejected):
            return sample
        try:
            several = len(sample.images)
            with warnings_about(sample.sample_id):
                images = [self._count_image(root, media, several) for media in sample.images]
            return sample, images, [self._count_audio(root, media) for media in sample.audios]
        except SampleProblem as problem:
            return _reject(sample, problem.reason, problem.detail)

    def _count_image(self, root: Folder, media: Media, images_in_sample: int) -> _CountedFile:
        with open_media(root, media, "image") as file:
            header = read_header(file, media.name, decode=self._settings.decode_images)
        try:
            plan = plan_image(self._model.vision, header.width, header.height, images_in_sample)
        except ImageRejected as problem:
            raise SampleProblem(problem.reason, f"{media.name}: {problem.detail}") from None
        numbers = {
            "width": header.width,
            "height": header.height,
            "tokens": plan.num_image_tokens,
            "num_patches": plan.num_patches,
            "num_vit_tokens": plan.num_vit_tokens,
        }
        return _CountedFile(media, header.num_bytes, numbers, plan)

    def _count_audio(self, root: Folder, media: Media) -> _CountedFile:
        if self._model.audio is None:
            missing = f"{media.name}: {self._model.name} has no audio encoder"
            raise SampleProblem("no_audio_encoder", missing)
        with open_media(root, media, "audio") as file:
            header = read_audio_header(cast("BinaryIO", file), media.name)
        try:
            plan = plan_audio(self._model.audio, header.num_samples, header.sampling_rate)
        except AudioRejected as problem:
            raise SampleProblem(problem.reason, f"{media.name}: {problem.detail}") from None
        numbers = {"length": plan.num_samples, "tokens": plan.num_audio_tokens}
        return _CountedFile(media, header.num_bytes, numbers)


def count_chunk(job: CountJob) -> Counted:
    """The rows of a chunk that is still to count."""
    if job.chunk is None:
        raise ValueError(f"chunk {job.number} is counted already")
    counter = _process_counter(job.settings)
    return counter.count(job.chunk.records(), job.source, job.data_root, blob_name(job.number))


def blob_name(chunk: int) -> str:
    """Name of the file with the content of the files that came with a chunk's records."""
    return f"{chunk:06d}.bin"


@lru_cache(maxsize=1)
def _process_counter(settings: CountSettings) -> SampleCounter:
    if multiprocessing.parent_process() is not None:
        # the processes use every core already, so more threads would gain nothing
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return SampleCounter(settings)


def _row(
    usable: _Usable, text: EncodedText | TextRejected, blob: bytearray, container: str
) -> dict[str, object] | Rejected:
    sample, images, audios = usable
    if isinstance(text, TextRejected):
        return _reject(sample, text.reason, text.detail)
    kinds = ("image", text.num_images, len(images)), ("audio", text.num_audios, len(audios))
    for kind, found, meant in kinds:
        if found > meant:
            return _reject(sample, f"marker_without_{kind}", f"{found} <{kind}> for {meant} files")
        if found < meant:
            return _reject(sample, "chat_template", f"it renders {found} of {meant} {kind} files")
    runs = [run for image in images if image.plan for run in image.plan.runs]
    return {
        "sample_id": sample.sample_id,
        "source": sample.source,
        "num_image_patches": sum(image.numbers["num_patches"] for image in images),
        "num_vit_tokens": sum(image.numbers["num_vit_tokens"] for image in images),
        "num_image_tokens": sum(image.numbers["tokens"] for image in images),
        "num_text_tokens": len(text.input_ids) - len(runs) - len(audios),
        "num_audio_tokens": sum(audio.numbers["tokens"] for audio in audios),
        "num_loss_tokens": text.num_loss_tokens,
        "input_ids": text.input_ids,
        "image_runs": runs if any(image.plan and image.plan.parts for image in images) else None,
        "loss_spans": np.ravel(text.loss_spans),
        "images": [_file_row(image, blob, container) for image in images],
        "audios": [_file_row(audio, blob, container) for audio in audios],
        **({"extras": sample.extras} if sample.extras else {}),
    }


def _file_row(counted: _CountedFile, blob: bytearray, container: str) -> dict[str, object]:
    """A file's row; content that came with the record goes into the blob."""
    media = counted.media
    place = {"name": media.name, "size": counted.num_bytes, **counted.numbers}
    if media.data is None:
        return {**place, "container": media.container, "offset": media.offset}
    offset = len(blob)
    blob += media.data
    return {**place, "container": container, "offset": offset}


def _reject(sample: RawSample, reason: str, detail: str) -> Rejected:
    return Rejected(sample.sample_id, sample.source, reason, detail)


def _rejected_row(rejected: Rejected) -> dict[str, object]:
    # surrogates in a path or message must not break the table that reports them
    detail = rejected.detail.encode("utf-8", "backslashreplace").decode("utf-8")
    return {**asdict(rejected), "detail": detail}
