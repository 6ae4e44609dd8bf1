"""A chunk of raw records -> a table of what each sample costs, with its tokens.

This is the work that the processes of a build share. A chunk is one batch of the tokenizer. A
record that fails becomes a row with a `reason`, so a table has as many rows as the chunk records.
"""

import gc
import json
import multiprocessing
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import chain

import numpy as np
import pyarrow as pa

from isobatch.common.errors import ConfigError
from isobatch.common.types import COUNT_COLUMNS
from isobatch.counting._file_counter import CountedFile, FileCounter
from isobatch.counting.headers.image_header import warnings_about
from isobatch.counting.records.extras import Kinds, kinds_in, read_extras
from isobatch.counting.records.fields import Unread, example_of, unread_texts
from isobatch.counting.records.media import BLOB_SCHEME, Media, SampleProblem, below, from_base
from isobatch.counting.records.places.grounding import ImageSize, with_objects
from isobatch.counting.records.reading import DEFAULT_READING, Reading
from isobatch.counting.records.record import Chunk, RawRecord, RawSample
from isobatch.counting.records.reject_reasons import Rejected
from isobatch.counting.records.schemas import parse_records
from isobatch.counting.records.user_map import load_map
from isobatch.counting.text.chat_tokenizer import ChatTokenizer, EncodedText, TextRejected
from isobatch.counting.text.stored_tokens import StoredTokens, one_per_run
from isobatch.models.image_rules.native import NativeRule
from isobatch.models.presets import MediaMarkup, ModelPreset, model_to_dict
from isobatch.shards.folders import Folder, open_folder, readers
from isobatch.shards.manifest import hash_json
from isobatch.shards.stored_group import EXTRAS, FRAMES

_INTS = pa.list_(pa.int32())
_TEXT, _LONG = pa.string(), pa.int64()
_PLACE = [("name", _TEXT), ("container", _TEXT), ("offset", _LONG), ("size", _LONG)]
_NUMBERS = [(name, pa.int32()) for name in ("width", "height", "tokens", "num_frames")]
_IMAGE = pa.struct([*_PLACE, *_NUMBERS, ("rate", pa.float64())])
_AUDIO = pa.struct([*_PLACE, ("length", pa.int32()), ("tokens", pa.int32())])
STAGED_SCHEMA = pa.schema(
    [
        ("sample_id", _TEXT),
        ("source", _TEXT),
        ("reason", _TEXT),  # null for a sample that can be used
        ("detail", _TEXT),
        *[(name, pa.int32()) for name in COUNT_COLUMNS],
        ("input_ids", _INTS),  # one token per run of an image or clip: expanded when written
        ("image_runs", _INTS),  # image tokens of each run; null if all images and videos have one
        ("loss_spans", _INTS),  # start, end, start, end, ... in `input_ids`
        ("images", pa.list_(_IMAGE)),  # and videos, in the order of the text
        ("audios", pa.list_(_AUDIO)),
        ("unread", _TEXT),  # paths of keys that nothing reads, as `unread_texts` gives them
        ("unread_values", _TEXT),
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
    template_date: str | None = None
    """Day that the chat template writes, YYYY-MM-DD; see `ChatTokenizer.load`."""
    keep_columns: tuple[str, ...] = ()
    map: str | None = None
    """Function (`module:function`) that is applied to each record first."""
    reading: Reading = DEFAULT_READING
    """The model's own marks are added to it."""
    decode_images: bool = False
    follow_links: bool = False
    """Read files through links that lead out of the data root."""
    base: str | None = None
    """Folder that relative paths of files begin at, where absolute ones may lead anywhere: for
    records in memory, whose data root is then `/`. None: all paths are under the data root.
    """
    chunk_records: int = 1024
    limit: int | None = None
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
    """Records to count; None when their rows are staged already."""


@dataclass(frozen=True, slots=True)
class Counted:
    """A chunk's rows, and the content of the files that came with its records."""

    table: pa.Table
    """STAGED_SCHEMA, and `extras` if columns are kept (`staged_schema`)."""
    blob: bytes


_Usable = tuple[RawSample, list[CountedFile], list[CountedFile], list[CountedFile]]
"""A sample, its images, its videos and its audio files."""


class _Blob:
    """What came with the records of a chunk, as a file of the staging folder will have it."""

    def __init__(self, container: str) -> None:
        self._container = container
        self.content = bytearray()

    def row_of(self, file: CountedFile) -> dict[str, object]:
        """A file's row; content that came with the record goes into the blob."""
        place = self._place(file.media, file.num_bytes)
        if file.frames:
            frames = [list(self._place(*frame).values()) for frame in file.frames]
            name = json.dumps(frames, ensure_ascii=False)
            place = {"name": name, "container": FRAMES, "offset": 0, "size": file.num_bytes}
        return {**place, **file.numbers}

    def _place(self, media: Media, num_bytes: int) -> dict[str, object]:
        container, offset = media.container, media.offset
        if media.data is not None:
            container, offset = self._container, len(self.content)
            self.content += media.data
        return {"name": media.name, "container": container, "offset": offset, "size": num_bytes}


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
        self.tokenizer = ChatTokenizer.for_model(
            model, settings.tokenizer, settings.chat_template, settings.template_date
        )
        self._reading = replace(
            settings.reading,
            image_tokens=_written_marks(model.image_markup),
            video_tokens=_written_marks(model.video_markup),
            audio_tokens=_written_marks(model.audio_markup),
            keep_columns=settings.keep_columns,
        )
        self._files = FileCounter(model, decode_images=settings.decode_images)
        self._may_ask = isinstance(model.vision, NativeRule)
        rules = model.vision, model.video
        self._has_runs = any(rule.part_names for rule in rules if rule is not None)

    @_collecting_later()
    def count(self, records: Iterable[RawRecord], source: str, root: str, name: str) -> Counted:
        """One row per record, or per sample that options make of it, in order.

        `name` is that of the chunk's future blob.
        """
        folder = open_folder(root, follow_links=self._settings.follow_links)
        look = partial(self._look_at_files, folder)
        if self._map is not None:
            records = chain.from_iterable(map(self._map.records_of, records))
        parsed = [
            self._place(record, sample, root)
            for record in records
            for sample in parse_records(record, source, self._reading)
        ]
        with readers(root) as pool:
            looked_at = list(pool.map(look, parsed) if pool else map(look, parsed))
        texts = iter(self._encode([one for one in looked_at if not isinstance(one, Rejected)]))
        blob = _Blob(BLOB_SCHEME + name)
        rows = []
        for one in looked_at:
            row = one if isinstance(one, Rejected) else self._row(one, next(texts), blob)
            if isinstance(row, Rejected):
                # surrogates in a path or message must not break the table that reports them
                detail = row.detail.encode("utf-8", "backslashreplace").decode("utf-8")
                row = {**asdict(row), "detail": detail}
            rows.append(row)
        schema = STAGED_SCHEMA
        if self._settings.keep_columns:
            schema = staged_schema(kinds_in(str(row["extras"]) for row in rows if "extras" in row))
        return Counted(pa.Table.from_pylist(rows, schema=schema), bytes(blob.content))

    def _place(
        self, record: RawRecord, sample: RawSample | Rejected, root: str
    ) -> RawSample | Rejected:
        """A sample with its files' places and the columns that are kept of its record."""
        if isinstance(sample, Rejected):
            return sample
        keep = self._settings.keep_columns
        base = self._settings.base
        place = partial(below, root=root) if base is None else partial(from_base, base=base)
        files = sample.images, sample.videos, sample.audios
        images, videos, audios = (tuple(map(place, several)) for several in files)
        if (images, videos, audios) != files:
            sample = replace(sample, images=images, videos=videos, audios=audios)
        if not keep:
            return sample
        try:
            return replace(sample, extras=read_extras(record.value, keep, record.renamed))
        except SampleProblem as problem:
            return _reject(sample, problem.reason, problem.detail)

    def _look_at_files(self, root: Folder, sample: RawSample | Rejected) -> _Usable | Rejected:
        if isinstance(sample, Rejected):
            return sample
        try:
            several = len(sample.images)
            with warnings_about(sample.sample_id):
                images = [self._files.count_image(root, file, several) for file in sample.images]
                videos = [self._files.count_video(root, file) for file in sample.videos]
            audios = self._files.count_audios(root, sample.audios)
            if sample.objects is not None:
                sizes = [_size(image) for image in images]
                turns = with_objects(sample.turns, sample.objects, self._model.name, sizes)
                sample = replace(sample, turns=turns)
        except SampleProblem as problem:
            files = chain(sample.images, sample.videos, sample.audios)
            files = chain.from_iterable((file, *file.frames) for file in files)
            names = tuple(file.name for file in files if file.name and file.data is None)
            # with a base, names that are no URLs are under `/`, and a user's have it
            is_cut = self._settings.base is not None and problem.detail.startswith(names)
            is_cut &= not problem.reason.endswith("_url")
            return _reject(sample, problem.reason, "/" * is_cut + problem.detail)
        return sample, images, videos, audios

    def _encode(self, samples: list[_Usable]) -> list[EncodedText | TextRejected]:
        """The tokens of each: those of a build, or of its turns."""
        texts = iter(self._tokenised([one for one in samples if one[0].stored is None]))
        return [
            next(texts) if one[0].stored is None else self._of_build(one, one[0].stored)
            for one in samples
        ]

    @cached_property
    def _model_hash(self) -> str:
        """Of samples of builds alone: what stands for a model of a user's function has none."""
        return hash_json(model_to_dict(self._model))

    def _of_build(self, usable: _Usable, stored: StoredTokens) -> EncodedText | TextRejected:
        """Tokens of a build, by the runs that its files have. ConfigError for those of another
        model or tokenizer.
        """
        tokenizer = self.tokenizer
        for is_same, option in (
            (stored.model == self._model_hash, "--model"),
            (stored.tokenizer == tokenizer.hash, "--tokenizer and --chat-template"),
        ):
            if not is_same:
                asks = f"its tokens are packed again as they are: give its own {option}"
                raise ConfigError(f"{stored.place} was packed with another one; {asks}")
        _, images, videos, audios = usable
        both = _in_order(images, videos, stored.videos_at)
        visual = np.array([tokenizer.image_token_id, tokenizer.video_token_id or -1])
        sound = np.array([-1 if tokenizer.audio_token_id is None else tokenizer.audio_token_id])
        clips = [int(audio.numbers["tokens"]) for audio in audios]
        try:
            ids, spans = one_per_run(
                stored.input_ids, stored.labels, [(visual, _runs(both)), (sound, clips)]
            )
        except ValueError as error:
            return TextRejected("media_changed", f"{stored.place}: {error}")
        return EncodedText(
            input_ids=ids,
            loss_spans=spans,
            num_images=len(images),
            num_audios=len(audios),
            num_loss_tokens=int(np.diff(spans).sum()),
            num_videos=len(videos),
            videos_at=stored.videos_at,
        )

    def _tokenised(self, samples: list[_Usable]) -> list[EncodedText | TextRejected]:
        turns = [sample.turns for sample, *_ in samples]
        if not self.tokenizer.takes_markups:
            return self.tokenizer.encode_batch(turns)
        image, video = self._model.image_markup, self._model.video_markup
        return self.tokenizer.encode_batch(
            turns,
            [_written(image, images) for _, images, _, _ in samples],
            [_written(video, videos) if video else [] for _, _, videos, _ in samples],
        )

    def _row(
        self, usable: _Usable, text: EncodedText | TextRejected, blob: _Blob
    ) -> dict[str, object] | Rejected:
        sample, images, videos, audios = usable
        if isinstance(text, TextRejected):
            return _reject(sample, text.reason, text.detail)
        num_rendered = {
            "image": text.num_images,
            "video": text.num_videos,
            "audio": text.num_audios,
        }
        for kind, files in zip(num_rendered, (images, videos, audios), strict=True):
            meant = len(files)
            if num_rendered[kind] > meant:
                detail = f"{num_rendered[kind]} <{kind}> for {meant} files"
                return _reject(sample, f"marker_without_{kind}", detail)
            if num_rendered[kind] < meant:
                detail = f"it renders {num_rendered[kind]} of {meant} {kind} files"
                return _reject(sample, "chat_template", detail)
        both = _in_order(images, videos, text.videos_at)
        runs = _runs(both)
        return {
            "sample_id": sample.sample_id,
            "source": sample.source,
            "num_image_patches": sum([file.numbers["num_patches"] for file in both]),
            "num_vit_tokens": sum([file.numbers["num_vit_tokens"] for file in both]),
            "num_image_tokens": sum([file.numbers["tokens"] for file in both]),
            "num_text_tokens": len(text.input_ids) - len(runs) - len(audios),
            "num_audio_tokens": sum(audio.numbers["tokens"] for audio in audios),
            "num_loss_tokens": text.num_loss_tokens,
            "input_ids": text.input_ids,
            "image_runs": runs if self._has_runs else None,
            "loss_spans": np.ravel(text.loss_spans),
            "images": [blob.row_of(file) for file in both],
            "audios": [blob.row_of(audio) for audio in audios],
            **dict(
                zip(
                    ("unread", "unread_values"),
                    unread_texts(_unread(sample, text, may_ask=self._may_ask)) or (),
                    strict=False,
                )
            ),
            **({"extras": sample.extras} if sample.extras else {}),
        }


def _unread(sample: RawSample, text: EncodedText, *, may_ask: bool) -> Sequence[Unread]:
    """Keys of the record that nothing reads, and fields of turns that the chat template leaves.

    `may_ask`: whether the model's rule knows sizes that a part asks for.
    """
    unread = list(sample.unread)
    if not may_ask:
        asked = chain.from_iterable(image.asked for image in sample.images)
        unread += [(f"{sample.turns_path}.content[].{key}", example_of(x)) for key, x in asked]
    for turn, key in text.unused:
        path = key if key == "tools" else f"{sample.turns_path}.{key}"
        unread.append((path, example_of(json.loads(sample.turns[turn].more).get(key))))
    return unread


def _in_order(
    images: list[CountedFile], videos: list[CountedFile], videos_at: Sequence[int]
) -> list[CountedFile]:
    """Images and videos in the order of the text."""
    following = iter(images)
    at = dict(zip(videos_at, videos, strict=True))
    return [at[i] if i in at else next(following) for i in range(len(images) + len(videos))]


def _runs(files: list[CountedFile]) -> list[int]:
    """Tokens of each run of images and videos."""
    return [run for file in files if file.plan for run in file.plan.runs]


def _size(image: CountedFile) -> ImageSize:
    """An image's sizes for its boxes; without a plan it is not resized."""
    width, height = int(image.numbers["width"]), int(image.numbers["height"])
    plan = image.plan
    resized = (width, height) if plan is None else (plan.resized_width, plan.resized_height)
    return ImageSize(width, height, *resized)


def _written_marks(markup: MediaMarkup | None) -> tuple[str, ...]:
    """The model's own strings for a file, as people write them into texts."""
    if markup is None:
        return ()
    strings = (markup.text.strip(), markup.placeholder, markup.token)
    # a field such as {number} is written otherwise for each
    return tuple(dict.fromkeys(string for string in strings if string and "{" not in string))


def _written(markup: MediaMarkup, files: list[CountedFile]) -> list[str]:
    """The markup of each image or video of a sample."""
    return [markup.written(file.plan, number) for number, file in enumerate(files) if file.plan]


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


def _reject(sample: RawSample, reason: str, detail: str) -> Rejected:
    return Rejected(sample.sample_id, sample.source, reason, detail)
