"""Count: a chunk of raw records -> a table of what each sample costs, tokens included, or why it is rejected.

This is the work that the processes of a build share. A chunk is handled at once so that the tokenizer can run its
batch; a record that fails becomes a row with a `reason`, so a table always has as many rows as the chunk has records.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow as pa

from balance.patches import ImagePlan, ImageRejected, plan_image
from balance.presets import ModelPreset
from balance.records import COUNT_COLUMNS
from packer.images import ImageProblem, image_path, read_header
from packer.record import RawRecord, RawSample, Rejected, parse_record
from packer.text import ChatTokenizer, EncodedText, TextRejected

_INTS = pa.list_(pa.int32())
STAGED_SCHEMA = pa.schema(
    [
        ("position", pa.int64()),
        ("sample_id", pa.string()),
        ("source", pa.string()),
        ("reason", pa.string()),  # null for a sample that can be used
        ("detail", pa.string()),
        *[(name, pa.int32()) for name in COUNT_COLUMNS],
        ("input_ids", _INTS),  # one image token per image: expanded when written
        ("loss_spans", _INTS),  # start, end, start, end, ... in `input_ids`
        ("images", pa.list_(pa.string())),
        ("image_widths", _INTS),
        ("image_heights", _INTS),
        ("image_tokens", _INTS),
        ("image_bytes", pa.list_(pa.int64())),
    ]
)
"""One row per record read: the staged form between counting and writing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CountTask:
    """What a counting process needs; plain values, so that it travels to other processes and machines."""

    source: str
    data_root: str
    model: ModelPreset
    tokenizer: str
    chat_template: str | None = None
    decode_images: bool = False


@dataclass(frozen=True, slots=True)
class _CountedImage:
    path: str
    width: int
    height: int
    num_bytes: int
    plan: ImagePlan


class SampleCounter:
    """Counts samples for one model and one tokenizer; loading the tokenizer is the costly part of making one."""

    def __init__(self, task: CountTask) -> None:
        self._rule = task.model.vision
        self._source = task.source
        self._data_root = Path(task.data_root)
        self._decode_images = task.decode_images
        self._tokenizer = ChatTokenizer.load(task.tokenizer, task.model.image_markup, chat_template=task.chat_template)

    def count(self, records: Sequence[RawRecord]) -> pa.Table:
        """One row of `STAGED_SCHEMA` per record, in order."""
        parsed = [parse_record(record, self._source) for record in records]
        looked_at = [self._look_at_images(sample) for sample in parsed]
        texts = iter(self._tokenizer.encode_batch([s.turns for s, _ in looked_at if isinstance(s, RawSample)]))
        rows = [
            _row(sample, images, next(texts)) if isinstance(sample, RawSample) else _rejected_row(sample)
            for sample, images in looked_at
        ]
        return pa.Table.from_pylist(rows, schema=STAGED_SCHEMA)

    def _look_at_images(self, sample: RawSample | Rejected) -> tuple[RawSample | Rejected, list[_CountedImage]]:
        if isinstance(sample, Rejected):
            return sample, []
        try:
            return sample, [self._count_image(relative) for relative in sample.images]
        except (ImageProblem, ImageRejected) as problem:
            return _reject(sample, problem.reason, problem.detail), []

    def _count_image(self, relative: str) -> _CountedImage:
        header = read_header(image_path(self._data_root, relative), decode=self._decode_images)
        try:
            plan = plan_image(self._rule, header.width, header.height)
        except ImageRejected as problem:
            raise ImageProblem(problem.reason, f"{relative}: {problem.detail}") from None
        return _CountedImage(relative, header.width, header.height, header.num_bytes, plan)


@lru_cache(maxsize=1)
def sample_counter(task: CountTask) -> SampleCounter:
    """The counter of this process, made at its first chunk."""
    if multiprocessing.parent_process() is not None:
        # the processes already use every core; threads under each would only take them from one another
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return SampleCounter(task)


def _row(sample: RawSample, images: list[_CountedImage], text: EncodedText | TextRejected) -> dict[str, object]:
    if isinstance(text, TextRejected):
        return _rejected_row(_reject(sample, text.reason, text.detail))
    if text.num_images != len(images):
        detail = f"the template renders {text.num_images} of {len(images)} images"
        return _rejected_row(_reject(sample, "chat_template", detail))
    image_tokens = [image.plan.num_image_tokens for image in images]
    return {
        "position": sample.position,
        "sample_id": sample.sample_id,
        "source": sample.source,
        "num_image_patches": sum(image.plan.num_patches for image in images),
        "num_vit_tokens": sum(image.plan.num_vit_tokens for image in images),
        "num_image_tokens": sum(image_tokens),
        "num_text_tokens": len(text.input_ids) - len(images),
        "num_audio_tokens": 0,
        "num_loss_tokens": text.num_loss_tokens,
        "input_ids": text.input_ids,
        "loss_spans": np.ravel(text.loss_spans),
        "images": [image.path for image in images],
        "image_widths": [image.width for image in images],
        "image_heights": [image.height for image in images],
        "image_tokens": image_tokens,
        "image_bytes": [image.num_bytes for image in images],
    }


def _reject(sample: RawSample, reason: str, detail: str) -> Rejected:
    return Rejected(sample.position, sample.sample_id, sample.source, reason, detail)


def _rejected_row(rejected: Rejected) -> dict[str, object]:
    # surrogates in a path or message must not break the table that reports them
    detail = rejected.detail.encode("utf-8", "backslashreplace").decode("utf-8")
    return {
        "position": rejected.position,
        "sample_id": rejected.sample_id,
        "source": rejected.source,
        "reason": rejected.reason,
        "detail": detail,
    }
