"""What is decided once for all partitions: caps, shares, types of kept columns."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import pyarrow as pa

from isobatch.balance.grouping.cap_lines import cap_lines
from isobatch.balance.grouping.caps import LimitChoice, choose_limits
from isobatch.balance.rng import PARTS, random_permutation
from isobatch.common.errors import DataError
from isobatch.counting.records.extras import joined_kinds, types_of
from isobatch.counting.records.record import Chunk
from isobatch.counting.sample_counter import Counted, CountJob, count_chunk
from isobatch.models.flops import FlopsModel
from isobatch.models.presets import ModelPreset
from isobatch.packer.config import BuildConfig
from isobatch.packer.count.mixture_sampling import (
    is_as_it_is,
    shared_out,
    wanted_samples,
)
from isobatch.packer.count.staging import usable_counts
from isobatch.packer.partitions.cut import Cut, single_pieces
from isobatch.packer.partitions.partition import (
    CountedPartition,
    Decisions,
    count_settings,
    no_values,
)
from isobatch.packer.partitions.reports import Tell
from isobatch.packer.partitions.run import load_tools, run_jobs
from isobatch.packer.sources.dataset import Dataset
from isobatch.packer.sources.detect import Part
from isobatch.shards.tables import counts_arrays

DRAWN_CHUNKS = 64
"""Chunks that are counted for the caps, the first of as many pieces: some 65,000 samples."""


def needs_counts(config: BuildConfig, dataset: Dataset) -> bool:
    """Whether all partitions must be counted before one is grouped."""
    return bool(config.kept_columns) or not is_as_it_is(dataset)


def decide_limits(cut: Cut, config: BuildConfig, on_samples: Callable[[int], None]) -> Decisions:
    """Caps by the first records of drawn pieces of all partitions.

    `on_samples` is told of counted ones. DataError if none of them is usable.
    """
    model, _ = load_tools(config)
    drawn_pieces = list(_drawn(cut, config.seed))
    each = -(-DRAWN_CHUNKS // len(drawn_pieces))
    jobs = [_DrawnJob(config, dataset, each) for dataset in drawn_pieces]
    results = run_jobs(_count_first, jobs, executor=config.executor, workers=config.workers)
    tables = {}
    for place, table in results:
        tables[place] = table
        on_samples(len(table))
    counts = pa.concat_tables(tables[place] for place in range(len(jobs)))
    if len(counts) == 0:
        raise DataError(
            f"none of the first records of {len(jobs)} drawn pieces is usable: --limit 1000 shows"
            " why"
        )
    choice = _choose(counts, config, model)
    drawn = f"caps by {len(counts):,} drawn samples; longer ones of the others are rejected"
    return Decisions(
        limits=choice.limits,
        limits_explained=(*cap_lines(choice), drawn),
        videos=model.video is not None,
        extras={},
    )


def decide_by_counts(
    decisions: Decisions,
    config: BuildConfig,
    dataset: Dataset,
    counted: Sequence[CountedPartition],
) -> list[Decisions]:
    """The decisions for each partition, with what depends on the counts of all."""
    if not any(sum(of.usable) for of in counted):
        raise DataError("none of the records can be used: `packer count --limit 1000` says why")
    types = types_of(config.kept_columns, joined_kinds(of.kinds for of in counted))
    if missing := [name for name in config.kept_columns if name not in types]:
        raise no_values(missing, dataset)
    usable = np.array([of.usable for of in counted])
    wanted = wanted_samples(dataset, usable.sum(axis=0))
    copies = shared_out(wanted, usable).tolist()
    return [replace(decisions, extras=types, copies=tuple(of)) for of in copies]


def _choose(counts: pa.Table, config: BuildConfig, model: ModelPreset) -> LimitChoice:
    return choose_limits(
        counts_arrays(counts),
        config.group_options,
        vision_unit=model.vision_unit,
        context_len=model.context_len,
        predictor=FlopsModel.of(model) if model.has_dimensions else None,
    )


@dataclass(frozen=True, slots=True)
class _DrawnJob:
    config: BuildConfig
    dataset: Dataset
    """One piece."""
    chunks: int


def _drawn(cut: Cut, seed: int) -> Iterator[Dataset]:
    """DRAWN_CHUNKS pieces, at most, as likely as they have records."""
    pieces = list(single_pieces(cut))
    order = random_permutation(len(pieces), seed, PARTS, epoch=2)
    ends = np.cumsum(np.array([records for _, records in pieces])[order])
    wanted = (np.arange(DRAWN_CHUNKS) + 0.5) / DRAWN_CHUNKS * ends[-1]
    for place in np.unique(np.searchsorted(ends, wanted)).tolist():
        yield pieces[order[place]][0]


def _count_first(job: _DrawnJob, _tell: Tell) -> pa.Table:
    """Counts of the usable samples of the first chunks of a piece."""
    (part,) = job.dataset.parts
    chunks = islice(part.open().chunks(job.config.chunk_records, lambda _: None), job.chunks)
    tables = [
        usable_counts(count_of_part(job.config, part, chunk, number).table)
        for number, chunk in enumerate(chunks)
    ]
    return pa.concat_tables([usable_counts(None), *tables])


def count_of_part(config: BuildConfig, part: Part, chunk: Chunk, number: int) -> Counted:
    """Count a chunk of a part of the dataset."""
    job = CountJob(
        settings=count_settings(config, *load_tools(config)),
        number=number,
        part=0,
        source=part.name,
        data_root=part.data_root,
        chunk=chunk,
    )
    return count_chunk(job)
