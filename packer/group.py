"""Counts -> caps -> groups, and `packer group`: given lengths -> groups.

`packer group` reads our counts.parquet, and the OmniBal authors' length files; several become one
dataset. No raw data is read.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from isobatch.balance.grouping.cap_lines import cap_lines
from isobatch.balance.grouping.caps import GroupOptions, choose_limits, over_limits
from isobatch.balance.grouping.even_out import group_balanced
from isobatch.balance.grouping.isf import group_isf
from isobatch.balance.rng import STORED, random_permutation
from isobatch.common.errors import ConfigError, DataError, first_line
from isobatch.common.plain_values import read_text
from isobatch.common.types import Counts, FloatArray, Groups, IntArray, Limits
from isobatch.models.flops import FlopsModel
from isobatch.models.presets import load_model
from isobatch.packer.config import MOST_TOKENS
from isobatch.packer.progress import StageProgress
from isobatch.shards.manifest import MANIFEST_NAME
from isobatch.shards.tables import (
    COUNTS_NAME,
    COUNTS_SCHEMA,
    GROUPS_NAME,
    REJECTED_NAME,
    counts_arrays,
    groups_table,
    read_table,
    reject_rows,
    write_table,
)

MOST_PER_SAMPLE = 1 << 24
"""Tiles or tokens of one sample; more are a mistake, and sums would not fit the tables."""

LIMITS_NAME = "limits.json"

FULL, MOST_LEFT = 0.997, 16
"""Mean fill that a partition reaches by leaving its least filled groups over, as few as will do and
at most so many.
"""
FEW_GROUPS = 32
"""A partition of fewer groups leaves all over."""

VIT_TOKENS_PER_TILE, LLM_TOKENS_PER_TILE = 1025, 256
LENGTHS_MODEL = "internvl_1_5"
"""InternVL at 448 px, for which OmniBal's length files were made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouping:
    """Groups of rows of the counts table, in stored order: random."""

    groups: Groups
    limits: Limits
    over: list[tuple[int, str, str]]
    """Rejected samples: (row of the counts table, reason, detail)."""
    limits_explained: list[str]
    """Lines on how the caps were chosen."""
    remainder: IntArray
    """Rows of the samples that are left over, ascending."""
    caps_seconds: tuple[float, float] = (0.0, 0.0)
    """(seconds, CPU seconds) that the choice of caps took: no more for many samples than few."""


def group_counts(
    counts: Counts,
    options: GroupOptions,
    *,
    vision_unit: str,
    context_len: int,
    predictor: FlopsModel | None = None,
) -> Grouping:
    """Choose caps, reject what exceeds them, group the rest."""
    begun, cpu_begun = perf_counter(), process_time()
    choice = choose_limits(
        counts, options, vision_unit=vision_unit, context_len=context_len, predictor=predictor
    )
    took = perf_counter() - begun, process_time() - cpu_begun
    return replace(
        group_within(counts, choice.limits, options, cap_lines(choice)), caps_seconds=took
    )


def group_within(
    counts: Counts,
    limits: Limits,
    options: GroupOptions,
    limits_explained: list[str],
    *,
    leave: bool = False,
) -> Grouping:
    """Reject what exceeds chosen caps, group the rest.

    `leave`: samples of the least filled groups are left over.
    """
    too_long, too_much_vision = over_limits(counts, limits)
    seq_len, vision = limits.llm_load(counts), limits.vision_load(counts)
    padded = f" with padding to a multiple of {limits.pad_each_to}" * (limits.pad_each_to > 1)
    long = f"tokens{padded}, cap {limits.max_seq_len}"
    large = f"{limits.unit}, cap {limits.max_vision}"
    over = [(int(i), "longer_than_max_seq_len", f"{seq_len[i]} {long}") for i in too_long]
    over += [(int(i), "more_than_max_vision", f"{vision[i]} {large}") for i in too_much_vision]
    fits = np.ones(len(counts), dtype=bool)
    fits[too_long] = fits[too_much_vision] = False
    rows = np.flatnonzero(fits)
    loads = (vision[rows], seq_len[rows])
    seed = options.seed

    def fuller(groups: Groups) -> Groups:
        caps = (max(limits.max_vision, 1), limits.max_seq_len)
        fills = [groups.sum(load) / cap for load, cap in zip(loads, caps, strict=True)]
        return groups.take(_full(np.maximum(*fills))) if leave else groups

    if options.grouping == "isf":
        grouped = group_isf(*loads, limits, seed=seed, iterations=options.isf_iterations)
        grouped = fuller(grouped)
    else:
        grouped = group_balanced(*loads, limits, seed=seed, keep=fuller)
    groups = Groups(rows[grouped.samples], grouped.offsets)
    return Grouping(
        # any stretch of the build is like the whole
        groups=groups.take(random_permutation(len(groups), seed, STORED)),
        limits=limits,
        over=over,
        limits_explained=limits_explained,
        remainder=np.setdiff1d(rows, groups.samples),
    )


def _full(fills: FloatArray) -> IntArray:
    """Groups that stay when the least filled ones are left over, ascending."""
    if len(fills) < FEW_GROUPS:
        return np.empty(0, np.int64)
    order = np.argsort(-fills, kind="stable")
    means = np.cumsum(fills[order]) / np.arange(1, len(fills) + 1)
    number = max(np.count_nonzero(means >= FULL), len(fills) - MOST_LEFT)
    return np.sort(order[:number])


# --- `packer group` ---


def group_files(
    files: list[Path],
    out: Path,
    options: GroupOptions,
    progress: StageProgress,
    *,
    vision_unit: str,
) -> tuple[Grouping, pa.Table]:
    """Group the samples of length files; tables and caps are written to `out`."""
    if (out / MANIFEST_NAME).exists():
        raise ConfigError(f"{out} holds a finished build: choose another --out")
    tables = [read_lengths(path) for path in files]
    counts = pa.concat_tables(tables).combine_chunks()
    # positions run through all the files, so that each row of the output has its own
    positions = pa.array(np.arange(len(counts)))
    counts = counts.set_column(0, COUNTS_SCHEMA.field("position"), positions)
    if len(counts) == 0:
        raise DataError(f"no samples in {', '.join(map(str, files))}")
    # counts do not say which model they are for
    with_counts = any(path.suffix == ".parquet" for path in files)
    with progress.stage("group", None) as stage:
        arrays = counts_arrays(counts)
        grouping = group_counts(
            arrays,
            options,
            vision_unit=vision_unit,
            context_len=MOST_TOKENS,
            predictor=None if with_counts else FlopsModel.of(load_model(LENGTHS_MODEL)),
        )
        stage.count(len(counts))
    rejected = reject_rows(counts, grouping.over)
    out.mkdir(parents=True, exist_ok=True)
    write_table(counts, out / COUNTS_NAME)
    write_table(groups_table(grouping.groups, arrays), out / GROUPS_NAME)
    write_table(rejected, out / REJECTED_NAME)
    limits = {**grouping.limits.to_json(), "limits_explained": grouping.limits_explained}
    (out / LIMITS_NAME).write_text(json.dumps(limits, indent=1), "utf-8")
    return grouping, rejected


def read_lengths(path: Path) -> pa.Table:
    """A counts table from counts.parquet, or from an OmniBal length file or meta file.

    A length file lists `{"vit_num", "token_num", "image_flags"}` per sample. A meta file maps a
    dataset's name to `{"token_lengths": path}`, relative to the working directory or to itself.
    """
    if path.suffix == ".parquet":
        return _read_counts(path)
    value = _read_json(path)
    if isinstance(value, dict):
        named = ((name, *_named_file(path, name, entry)) for name, entry in value.items())
        return pa.concat_tables([_from_omnibal(*dataset) for dataset in named])
    return _from_omnibal(path.stem, path, value)


def _read_counts(path: Path) -> pa.Table:
    hint = "is it a counts.parquet of `packer count`?"
    table = read_table(path)
    if missing := [name for name in COUNTS_SCHEMA.names if name not in table.column_names]:
        raise DataError(f"{path}: no column {', '.join(missing)}; {hint}")
    try:
        table = table.select(COUNTS_SCHEMA.names).cast(COUNTS_SCHEMA)
    except pa.ArrowInvalid as error:
        raise DataError(f"{path}: not a counts table: {first_line(error)}") from None
    for name in COUNTS_SCHEMA.names:
        column = table.column(name)
        is_text = name in ("sample_id", "source")
        smallest = 0 if is_text or not len(column) else pc.min(column).as_py()
        if column.null_count or smallest < 0:
            raise DataError(f"{path}: column {name} has empty or negative entries; {hint}")
    return table


def _read_json(path: Path) -> object:
    try:
        return json.loads(read_text(path))
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not valid JSON: {first_line(error)}") from None


def _named_file(meta: Path, name: str, entry: object) -> tuple[Path, object]:
    """The length file of one dataset of a meta file, and its content."""
    path = entry.get("token_lengths") if isinstance(entry, dict) else None
    if not isinstance(path, str):
        raise DataError(f"{meta}: dataset {name!r} has no `token_lengths`: its length file")
    # the authors' files are relative to where their script runs, copies often to the meta file
    places = [Path(path), meta.parent / path, meta.parent / Path(path).name]
    file = next((place for place in places if place.is_file()), None)
    if file is None:
        raise DataError(f"{meta}: dataset {name!r}: no file {path} here or next to the meta file")
    return file, _read_json(file)


def _from_omnibal(source: str, path: Path, rows: object) -> pa.Table:
    if not isinstance(rows, list):
        raise DataError(f"{path}: expected a list of samples: vit_num, token_num and image_flags")
    lengths = [_sample_lengths(path, number, row) for number, row in enumerate(rows)]
    tiles, tokens = np.array(lengths, dtype=np.int64).reshape(-1, 2).T
    image_tokens = tiles * LLM_TOKENS_PER_TILE
    if (image_tokens > tokens).any():
        number = int(np.argmax(image_tokens > tokens))
        tile_tokens = f"the {image_tokens[number]} of its {tiles[number]} tiles"
        problem = f"sample {number}: {tokens[number]} tokens are fewer than {tile_tokens}"
        raise DataError(f"{path}: {problem}; OmniBal counts image tokens in token_num")
    zeros = np.zeros(len(rows), dtype=np.int64)
    columns = {
        "position": np.arange(len(rows)),
        "sample_id": [f"{source}:{number}" for number in range(len(rows))],
        "source": [source] * len(rows),
        "num_image_patches": tiles,
        "num_vit_tokens": tiles * VIT_TOKENS_PER_TILE,
        "num_image_tokens": image_tokens,
        "num_text_tokens": tokens - image_tokens,
        "num_audio_tokens": zeros,
        "num_loss_tokens": zeros,  # the files do not say
        "seq_len": tokens,
        "media_bytes": zeros,
    }
    return pa.table({f.name: pa.array(columns[f.name], f.type) for f in COUNTS_SCHEMA})


def _sample_lengths(path: Path, number: int, row: Any) -> tuple[int, int]:
    """(tiles, LLM tokens) of a sample; OmniBal's dummy tile of text-only samples left out."""
    if not isinstance(row, dict):
        expected = "expected an object with vit_num and token_num"
        raise DataError(f"{path}: sample {number} is {str(row)[:40]}; {expected}")
    lengths: list[Any] = [row.get("image_flags", row.get("vit_num", 0)), row.get("token_num")]
    for name, value in zip(("image_flags or vit_num", "token_num"), lengths, strict=True):
        # not isinstance: True is an integer too
        if type(value) is not int or not 0 <= value <= MOST_PER_SAMPLE:
            problem = f"{name} is {value!r}; expected a whole number, 0 or more"
            raise DataError(f"{path}: sample {number}: {problem}")
    return lengths[0], lengths[1]
