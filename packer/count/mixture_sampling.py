"""Copies of each sample in a build, by a mixture's repeats and weights. Pure."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from isobatch.balance.rng import COPIES, random_permutation
from isobatch.common.errors import DataError
from isobatch.common.types import IntArray
from isobatch.packer.sources.dataset import Dataset
from isobatch.shards.index import LostSample


def copies_per_sample(
    dataset: Dataset, part_of: IntArray, seed: int, wanted: Sequence[int] | None = None
) -> IntArray:
    """How often each sample goes in, int64, 0 for one that is left out.

    `part_of`: the part that each sample comes from. Its samples go in `repeat` times, or so often
    that the parts' sizes are as their weights; or as `wanted` says for each part. Those of a
    fractional repeat are drawn at random.
    """
    sizes = np.bincount(part_of, minlength=len(dataset.parts))
    if wanted is None:
        wanted = wanted_samples(dataset, sizes)
    copies = np.zeros(len(part_of), np.int64)
    for number, (size, target) in enumerate(zip(sizes.tolist(), wanted, strict=True)):
        if size == 0:
            continue
        rows = np.flatnonzero(part_of == number)
        copies[rows] = target // size
        drawn = random_permutation(size, seed, COPIES, place=number)[: target % size]
        copies[rows[drawn]] += 1
    return copies


def is_as_it_is(dataset: Dataset) -> bool:
    """Whether every usable sample goes in a whole number of times, whatever the others are."""
    return all(part.weight is None and part.repeat == int(part.repeat) for part in dataset.parts)


def shared_out(wanted: Sequence[int], usable: IntArray) -> IntArray:
    """The wanted samples of each part by partition, int64, in proportion to the usable ones.

    `usable`: shape (partitions, parts). The sums over the partitions are as wanted.

    >>> shared_out([5], np.array([[4], [4], [2]])).ravel().tolist()
    [2, 2, 1]
    """
    until = np.cumsum(usable, axis=0)
    totals = np.maximum(until[-1:], 1)
    # exact in integers: a product of two sizes fits 64 bits up to three billion each
    borders = (until * np.asarray(wanted, np.int64) * 2 + totals) // (2 * totals)
    return np.asarray(np.diff(borders, axis=0, prepend=0))


def wanted_samples(dataset: Dataset, sizes: IntArray) -> list[int]:
    """Number of samples of each part, copies included."""
    parts = list(zip(dataset.parts, sizes.tolist(), strict=True))
    weights = np.array([part.weight or 0.0 for part in dataset.parts])
    if not weights.any():
        return [round(size * part.repeat) for part, size in parts]
    empty = ", ".join(part.name for part, size in parts if size == 0)
    if empty:
        raise DataError(
            f"mixture {dataset.name}: {empty} has no usable sample, so no weight can be kept"
        )
    # MixturePart and read_mixture bound weights, repeats and num_samples
    shares = weights / weights.sum()
    total = float(np.min(sizes / shares)) if dataset.num_samples is None else dataset.num_samples
    return [round(total * share) for share in shares.tolist()]


def left_out(dataset: Dataset, part_of: IntArray, copies: IntArray) -> list[LostSample]:
    """The samples that no copy of goes in, as rejections."""
    names = [part.name for part in dataset.parts]
    return [
        (row, "not_drawn", f"more samples of {names[part_of[row]]} than its share")
        for row in np.flatnonzero(copies == 0).tolist()
    ]


def copy_rows(counts: pa.Table, copies: IntArray) -> pa.Table:
    """The counts with each row as often as it goes in; the second id `x` becomes `x#2`."""
    if (copies != 1).any():
        counts = counts.take(pa.array(np.repeat(np.arange(len(copies)), copies)))
    ids = counts.column("sample_id").combine_chunks()
    if numbered := numbered_ids(ids):
        names = ids.to_pylist()
        for row, name in numbered.items():
            names[row] = name
        ids = pa.array(names, pa.string())
    return counts.set_column(counts.schema.get_field_index("sample_id"), "sample_id", ids)


def numbered_ids(ids: pa.StringArray) -> dict[int, str]:
    """Rows whose id repeats an earlier one, with that id and a number.

    >>> numbered_ids(pa.array(["a", "b", "a", "a"]))
    {2: 'a#2', 3: 'a#3'}
    """
    again = _earlier_equals(ids.dictionary_encode().indices.to_numpy())
    rows = np.flatnonzero(again)
    if len(rows) == 0:
        return {}
    names = ids.to_pylist()
    taken = set(names)
    numbered = {}
    for row, times in zip(rows.tolist(), again[rows].tolist(), strict=True):
        number = times + 1
        while (name := f"{names[row]}#{number}") in taken:  # some sample's own id
            number += 1
        taken.add(name)
        numbered[row] = name
    return numbered


def _earlier_equals(codes: IntArray) -> IntArray:
    """Number of equal values before each value.

    >>> _earlier_equals(np.array([7, 8, 7, 7])).tolist()
    [0, 0, 1, 2]
    """
    order = np.argsort(codes, kind="stable")
    ordered = codes[order]
    starts = np.flatnonzero(np.diff(ordered, prepend=ordered[:1] - 1))
    run_starts = np.repeat(starts, np.diff(np.append(starts, len(ordered))))
    earlier = np.empty(len(codes), np.int64)
    earlier[order] = np.arange(len(codes)) - run_starts
    return earlier


def part_numbers(positions: IntArray, records_per_part: Sequence[int]) -> IntArray:
    """The part of the dataset that each position belongs to."""
    return np.searchsorted(np.cumsum(records_per_part), positions, side="right").astype(np.int64)
