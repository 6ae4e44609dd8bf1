"""`EncodedCounter`: counts what a function of the user's makes of records.

The function is called in several threads, but never twice at a time: tokenizers of transformers
fail otherwise. What is counted is a stand-in with the sample's id and images, and another text.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isobatch.common.errors import DataError, first_line
from isobatch.common.types import LABEL_IGNORE, IntArray
from isobatch.counting.record_counter import (
    BrokenRecord,
    CountedRecords,
    RecordCounter,
    RejectedSample,
)
from isobatch.loaders.online.encoded import Encode, EncodedSample, checked
from isobatch.loaders.online.records import with_files
from isobatch.models.image_rules import CropsRule
from isobatch.shards.stored_group import EMPTY_GROUP, NO_NUMBERS, StoredGroup

REASON = "encode_failed"


class EncodedCounter(RecordCounter):
    """Counts records as `encode` gives them."""

    chunk_records = 32  # their arrays are in memory together while a window is measured

    def __init__(
        self,
        *args: Any,
        encode: Encode,
        cache_key: str | None,
        keep_columns: tuple[str, ...] = (),
        **options: Any,
    ) -> None:
        """`args` and `options` as of `RecordCounter`; `cache_key` is the function's name."""
        super().__init__(*args, **options)
        self._encode, self._calling = encode, threading.Lock()
        self._columns = keep_columns
        self.identity = f"encode {cache_key} {self.identity}"

    def count(self, indices: IntArray, values: Sequence[Any]) -> CountedRecords:
        """Encode and count records, given with their indices."""
        encoded = [self._sample(value) for value in values]
        pairs = zip(values, encoded, strict=True)
        counted = super().count(indices, [_stand_in(*pair) for pair in pairs])
        samples = [value if isinstance(value, EncodedSample) else None for value in encoded]
        usable, rejected = counted.usable.copy(), [*counted.rejected]
        ids = counted.table.column("sample_id").to_pylist()
        for row, sample in enumerate(samples):
            if sample and usable[row] and (problem := self._cost(sample, counted.counts[row])):
                usable[row], source = False, counted.sources[row]
                index = int(indices[row])
                rejected.append(RejectedSample(index, ids[row], source, REASON, problem))
        num_bytes = sum(sample.num_bytes for sample in samples if sample)
        return replace(
            counted,
            usable=usable,
            rejected=rejected,
            encoded=samples,
            encoded_bytes=num_bytes,
        )

    def group(
        self, parts: Sequence[tuple[CountedRecords, IntArray]], order: IntArray
    ) -> tuple[StoredGroup, list[RejectedSample]]:
        """As of `RecordCounter`, with the function's ids and arrays."""
        of_index = {
            int(counted.indices[row]): (counted.table.column("sample_id")[row].as_py(), sample)
            for counted, rows in parts
            for row in rows.tolist()
            if (sample := counted.encoded[row]) is not None
        }
        raw, changed = replace(EMPTY_GROUP, where="the dataset"), list[RejectedSample]()
        if any(sample.images for _, sample in of_index.values()):
            raw, changed = super().group(parts, order)
        lost = {sample.index for sample in changed}
        chosen = [of_index[i] for i in order.tolist() if i in of_index and i not in lost]
        samples = [sample for _, sample in chosen]
        has_arrays = any(sample.arrays for sample in samples)
        if has_arrays and raw.images:
            raise DataError(
                "media of some samples are images, and of others arrays; encode= must give one "
                "form, so that a micro-batch has one"
            )
        columns = enumerate(self._columns)
        group = replace(
            raw,
            sample_ids=tuple(name for name, _ in chosen),
            input_ids=np.concatenate([NO_NUMBERS, *(sample.input_ids for sample in samples)]),
            labels=np.concatenate([NO_NUMBERS, *(sample.labels for sample in samples)]),
            cu_seqlens=np.cumsum(
                [0, *(len(sample.input_ids) for sample in samples)], dtype=np.int32
            ),
            arrays=[sample.arrays for sample in samples] if has_arrays else self.empty_group.arrays,
            extras={name: [sample.extras[place] for sample in samples] for place, name in columns},
        )
        return group, changed

    def _sample(self, value: Any) -> EncodedSample | BrokenRecord:
        """What the function makes of a record, or why that is no sample."""
        if isinstance(value, BrokenRecord):
            return value
        try:
            with self._calling:
                result = self._encode(value)
            sample = checked(result, self.image_token_id)
            sample = replace(sample, images=with_files(sample.images))
        except Exception as error:  # of the user's code, of any kind
            return BrokenRecord(f"{type(error).__name__}: {first_line(error)}", REASON)
        record = value if isinstance(value, Mapping) else {}
        return replace(sample, extras=[record.get(name) for name in self._columns])

    def _cost(self, sample: EncodedSample, row: NDArray[np.int32]) -> str:
        """Write a sample's counts to its row, which has its images'; -> what is wrong with it."""
        patches, vit_tokens, image_tokens = row[:3].tolist()
        num_image_ids = int(np.count_nonzero(sample.input_ids == self.image_token_id))
        if sample.arrays:
            rule, patches = self.model.vision, sample.num_vision
            self.row_bytes = max(self.row_bytes, sample.num_bytes // max(1, patches))
            vit_tokens = patches
            if isinstance(rule, CropsRule):
                vit_tokens *= rule.vit_tokens_per_patch
            elif patches:  # at native resolution images, if it is said how many there are
                patches = len(sample.arrays.get("image_grid_thw", [1]))
        elif num_image_ids != image_tokens:
            return (
                f"input_ids has {num_image_ids} image tokens ({self.image_token_id}), but its "
                f"{len(sample.images)} images are {image_tokens} tokens"
            )
        num_labels = int(np.count_nonzero(sample.labels != LABEL_IGNORE))
        num_text = len(sample.input_ids) - num_image_ids
        row[:] = patches, vit_tokens, num_image_ids, num_text, 0, num_labels
        return ""


def _stand_in(value: Any, sample: EncodedSample | BrokenRecord) -> Any:
    """What is counted instead of a record."""
    known = value if isinstance(value, Mapping) else {}
    names = {key: known[key] for key in ("id", "__key__", "source") if key in known}
    if isinstance(sample, BrokenRecord):
        return replace(sample, value=names)
    if not sample.images:  # no chat template, which takes longest
        return {**names, "text": "text"}
    turns = [
        {"from": "human", "value": "<image>" * len(sample.images) + "text"},
        {"from": "gpt", "value": "text"},
    ]
    return {**names, "conversations": turns, "images": sample.images}
