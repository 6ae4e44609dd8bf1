"""Items that are samples already, of a dataset that calls a processor by itself."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from isobatch.common.errors import ConfigError
from isobatch.counting.records.schemas import CONTENT_KEYS
from isobatch.loaders.config import LoaderConfig
from isobatch.loaders.online.config import PackingConfig
from isobatch.loaders.online.encoded import OF_TEXT, Encoded
from isobatch.loaders.online.per_rank.streams import StreamRecords
from isobatch.loaders.online.records import Records


def require_own_options(packing: PackingConfig, config: LoaderConfig) -> None:
    """ConfigError for options that are not there with `measure="own"`."""
    refused = {
        "lengths_cache": packing.lengths_cache is not None,
        "planner": config.planner is not None,
        "shuffle=False": not config.shuffle,
    }
    if wrong := [name for name, is_given in refused.items() if is_given]:
        raise ConfigError(
            f"{wrong[0]} is not there with measure='own', where each rank trains on what it has "
            "loaded to measure it; leave it out"
        )


def of_items(records: Records, packing: PackingConfig) -> PackingConfig:
    """With `encode`, if items are samples already; the first one tells, where a model is given."""
    is_sample = packing.model is None and packing.processor is None
    if packing.encode is None and not is_sample:
        try:
            if isinstance(records, StreamRecords):
                first = records.first_items()[0]
                first = packing.transform(first) if packing.transform else first
            else:
                first = records.take(np.zeros(1, np.int64))[0]
            is_sample = isinstance(first, Mapping) and "input_ids" in first
        except Exception:  # what is wrong with it will be said when it is loaded
            is_sample = False
    is_sample = is_sample and packing.encode is None
    return replace(packing, encode=encoded_item) if is_sample else packing


def require_records(records: Records, packing: PackingConfig) -> None:
    """ConfigError for items that are samples already, where they are not loaded as such.

    The first one tells. Nothing else says what such an item costs, and no model has to.
    """
    if packing.measure == "own" or packing.encode is not None or packing.columns:
        return
    first = records.take(np.zeros(1, np.int64))[0]
    value = getattr(first, "value", first)
    if isinstance(value, Mapping) and "input_ids" in value and not CONTENT_KEYS & {*value}:
        raise ConfigError(
            "record 0 has input_ids and no text: it is a sample already; give measure='own' and "
            "max_tokens=, which need no model"
        )


def encoded_item(item: Any) -> Encoded:
    """The sample in what a dataset gives that calls a processor by itself.

    ValueError without `input_ids`. Tokens that `attention_mask` leaves out are padding.
    """
    if not (isinstance(item, Mapping) and "input_ids" in item):
        raise ValueError(f"the item is a {type(item).__name__} without input_ids")
    arrays = dict[str, torch.Tensor]()
    for name, value in item.items():
        with suppress(TypeError, ValueError, RuntimeError):  # text and the like
            arrays[name] = torch.as_tensor(_writable(value))
    arrays = {name: array for name, array in arrays.items() if array.ndim and array.numel()}
    texts = {name: arrays.pop(name, None) for name in ("input_ids", "labels", "attention_mask")}
    for name in OF_TEXT:  # what is left of them is made for packed samples
        arrays.pop(name, None)
    ids = texts["input_ids"]
    if ids is not None and ids.ndim > 1 and len(ids) > 1:
        raise ValueError(f"input_ids has the shape {tuple(ids.shape)}: an item is one sample")
    ids, labels, mask = (None if array is None else array.reshape(-1) for array in texts.values())
    for name, array in (("labels", labels), ("attention_mask", mask)):
        if array is not None and (ids is None or len(array) != len(ids)):
            raise ValueError(f"{name} and input_ids have different lengths; align them")
    if mask is not None:
        ids, labels = (None if array is None else array[mask != 0] for array in (ids, labels))
    rows = sum(len(array) for name, array in arrays.items() if name.startswith("pixel_values"))
    return Encoded(ids, labels, arrays, rows)


def _writable(value: Any) -> Any:
    """A copy of an array that is not, of which torch would warn."""
    is_fixed = isinstance(value, np.ndarray) and not value.flags.writeable
    return value.copy() if is_fixed else value
