"""A dataset in partitions: which pieces of its files each of them has.

Every part of the dataset is cut into pieces of equal size, some for each partition, which are dealt
at random. So a partition is like the whole dataset, also where the files of a source are next to
each other, and none is needed to know what is in another.
"""

import json
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace

import numpy as np

from isobatch.balance.rng import PARTS, random_bits, random_permutation
from isobatch.packer.sources.base import FilePiece
from isobatch.packer.sources.dataset import Dataset

PIECES = 16
"""Pieces that a partition gets of each part of the dataset, about."""
MIN_BYTES = 4 << 10
"""Size of a piece at least: a smaller one costs more to open than to read."""
SMALLEST_RECORD = 32
"""Bytes of a record at least, about: what is smaller than one partition of those is not cut."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A dataset in partitions."""

    partitions: tuple[Dataset, ...]
    """Each with all the parts of the dataset, of which it reads its pieces."""
    part_records: tuple[float, ...]
    """Records of each part of the dataset, about."""


def cut_dataset(dataset: Dataset, samples: int, seed: int, *, limit: int | None = None) -> Cut:
    """The dataset in partitions of about `samples` records; one of the dataset as it is, if small.

    Depends on the arguments and the files alone. What no reader can begin in the middle of stays
    whole: a compressed file, a part of which the first records are drawn or limited. With `limit`
    all is one partition.
    """
    sizes = _sizes(dataset)
    if limit is not None or sum(sizes) < 1.5 * samples * SMALLEST_RECORD:
        return Cut((dataset,), tuple(size / SMALLEST_RECORD for size in sizes))
    records = records_of_parts(dataset)
    number = max(1, round(sum(records) / samples))
    if number == 1:
        return Cut((dataset,), records)
    dealt = [
        deal(_pieces(dataset, part, size, number), number, seed, part)
        for part, size in enumerate(sizes)
    ]
    pieces = [[of[place] for of in dealt] for place in range(number)]
    # of few files that stay whole there are fewer
    pieces = [of for of in pieces if any(part != () for part in of)]
    if len(pieces) == 1:
        return Cut((dataset,), records)
    return Cut(tuple(_restricted(dataset, of) for of in pieces), records)


def records_of_parts(dataset: Dataset) -> tuple[float, ...]:
    """Records of each part of the dataset, about: by the size of the first ones."""
    return tuple(
        min(size / part.open().bytes_per_record(), part.limit or np.inf) if size else 0.0
        for part, size in zip(dataset.parts, _sizes(dataset), strict=True)
    )


def _sizes(dataset: Dataset) -> list[int]:
    return [sum(info.size for info in part.open().files()) for part in dataset.parts]


def _pieces(dataset: Dataset, part: int, size: int, number: int) -> list[FilePiece] | None:
    """Pieces of a part of the dataset in order; None for one that stays whole."""
    if dataset.parts[part].limit is not None:
        return None
    return dataset.parts[part].open().cut(max(MIN_BYTES, size // (number * PIECES)))


def deal(
    pieces: list[FilePiece] | None, number: int, seed: int, part: int
) -> list[tuple[FilePiece, ...] | None]:
    """The pieces of each partition, in order; None for one that gets an uncut part.

    >>> halves = [FilePiece("a", 0, 5, size=5), FilePiece("a", 5, None, size=5)]
    >>> sorted(len(pieces) for pieces in deal(halves, 2, 0, 0))
    [1, 1]
    """
    phase = int(random_bits(1, seed, PARTS, epoch=1, place=part)[0]) / 2**64
    if pieces is None:
        whole = int(phase * number)
        return [None if place == whole else () for place in range(number)]
    order = random_permutation(len(pieces), seed, PARTS, place=part)
    sizes = np.array([max(piece.size, 1) for piece in pieces], float)[order]
    # by the middle of each, on a circle: so that small parts do not all begin at the first one
    middles = (np.cumsum(sizes) - sizes / 2) / sizes.sum()
    place_of = ((middles + phase) % 1 * number).astype(np.int64)
    return [
        tuple(pieces[piece] for piece in np.sort(order[place_of == place]).tolist())
        for place in range(number)
    ]


def _restricted(dataset: Dataset, pieces: list[tuple[FilePiece, ...] | None]) -> Dataset:
    parts = (
        replace(part, located=replace(part.located, pieces=of))
        for part, of in zip(dataset.parts, pieces, strict=True)
    )
    return replace(dataset, parts=tuple(parts))


def without_pieces(dataset: Dataset) -> Dataset:
    """The dataset, of which nothing is read."""
    return _restricted(dataset, [()] * len(dataset.parts))


def cut_to_json(cut: Cut) -> str:
    """Which pieces each partition has, as JSON: an array that was read for it is not read again."""
    rows = [
        [
            None
            if part.located.pieces is None
            else [astuple(piece) for piece in part.located.pieces]
            for part in dataset.parts
        ]
        for dataset in cut.partitions
    ]
    return json.dumps([cut.part_records, rows])


def cut_from_json(dataset: Dataset, text: str) -> Cut:
    """The partitions of a dataset, of a text of `cut_to_json`."""
    records, rows = json.loads(text)
    partitions = (
        _restricted(
            dataset,
            [None if of is None else tuple(FilePiece(*piece) for piece in of) for of in row],
        )
        for row in rows
    )
    return Cut(tuple(partitions), tuple(records))


def single_pieces(cut: Cut) -> Iterator[tuple[Dataset, float]]:
    """Each piece of all partitions alone, and the records in it, about."""
    datasets = cut.partitions
    for number in range(len(cut.part_records)):
        parts = [dataset.parts[number] for dataset in datasets]
        alone = [
            replace(part, located=replace(part.located, pieces=pieces))
            for part in parts
            for pieces in _one_by_one(part.located.pieces)
        ]
        sizes = [max(sum(piece.size for piece in one.located.pieces or ()), 1) for one in alone]
        for one, size in zip(alone, sizes, strict=True):
            share = size / sum(sizes)
            yield replace(datasets[0], parts=(one,)), share * cut.part_records[number]


def _one_by_one(pieces: tuple[FilePiece, ...] | None) -> list[tuple[FilePiece, ...] | None]:
    return [None] if pieces is None else [(piece,) for piece in pieces]
