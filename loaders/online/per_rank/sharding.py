"""Whether ranks read one stream or each its own: told by their first items.

Libraries shard a dataset by rank inside it (LitData, MosaicML, Energon), at a call (`datasets`,
WebDataset, Grain) or not at all. What a rank would read says which it is, whatever the library. Two
ranks' items are the same if half of what tells them from others is: a dataset may augment its items
at random on each rank.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from hashlib import blake2b
from itertools import combinations
from typing import Any

import numpy as np
import torch

from isobatch.common.errors import ConfigError

FIRST_ITEMS = 4
"""Items of each rank that are compared."""
ALIKE = 0.75
"""Share of them that must be the same; more than its complement, and the ranks are refused."""
END_BYTES = 4096
"""Of a file, its first and last bytes count."""
Parts = frozenset[int]
"""Digests of an item's texts, whole numbers and files, below 2**64."""


def parts_of(item: Any) -> Parts:
    """The digests of an item's texts, whole numbers and files, each with its key.

    Pixels and other numbers are left out: they may be random.
    """
    return frozenset(
        int.from_bytes(blake2b(part, digest_size=8).digest(), "little") for part in _walk(item, "")
    )


def is_sharded(firsts: Sequence[Sequence[Parts]], asked: bool | None) -> bool:
    """Whether each rank has items of its own; `firsts` are the parts of each rank's first items.

    ConfigError if that contradicts `asked`, or cannot be told.
    """
    ranks = [rank for rank, items in enumerate(firsts) if items]
    if len(ranks) < 2:  # the others have shares without an item
        return bool(ranks) and len(firsts) > 1 and asked is not False
    if not all(part for rank in ranks for part in firsts[rank]):  # nothing but pixels
        return bool(asked)
    telling = _telling_parts(firsts)
    pairs = list(combinations(ranks, 2))
    shares = [_same_places(firsts[one], firsts[other], telling) for one, other in pairs]
    if min(shares) >= ALIKE:
        if asked:
            raise ConfigError(
                "is_sharded=True, and the data of all ranks begins with the same items; shard it "
                "by rank, or leave is_sharded out: each item then goes to one rank"
            )
        return False
    if max(shares) <= 1 - ALIKE:
        if asked is False:
            raise ConfigError(
                "is_sharded=False, and the data of each rank begins with other items; leave "
                "is_sharded out if the dataset shards itself, or give all ranks the same order"
            )
        return True
    if asked is None:
        one, other = pairs[int(np.argmax(shares))]
        raise ConfigError(
            f"the data of the ranks {one} and {other} begins with the same items, and that of "
            "others does not; give is_sharded=True if each rank has items of its own, else False"
        )
    return asked


def _telling_parts(firsts: Sequence[Sequence[Parts]]) -> Parts:
    """Parts by which items of a rank differ: no question that all of them ask."""
    counts = [Counter(part for item in items for part in item) for items in firsts]
    repeated = {part for counter in counts for part, count in counter.items() if count > 1}
    return frozenset(part for counter in counts for part in counter) - repeated


def _same_places(one: Sequence[Parts], other: Sequence[Parts], telling: Parts) -> float:
    """Share of places at which two ranks have the same item: one of which half is the same."""
    same = 0
    for mine, theirs in zip(one, other, strict=False):
        num_told = min(len(mine & telling), len(theirs & telling))
        same += 2 * len(mine & theirs & telling) >= num_told if num_told else mine == theirs
    return same / min(len(one), len(other))


def _walk(value: Any, key: str) -> Iterator[bytes]:
    if (content := _content(value)) is not None:
        yield f"{key} ".encode("utf-8", "surrogatepass") + content
    elif isinstance(value, Mapping):
        for name, part in value.items():
            yield from _walk(part, f"{key}/{name}")
    elif isinstance(value, list | tuple):
        for place, part in enumerate(value):
            yield from _walk(part, f"{key}/{place}")
    elif is_dataclass(value):
        for field in fields(value):
            yield from _walk(getattr(value, field.name, None), f"{key}/{field.name}")


def _content(value: Any) -> bytes | None:
    """Of a text, a file or whole numbers; None of anything else."""
    if isinstance(value, bytes | bytearray | memoryview):
        return f"{len(value)} ".encode() + bytes(value[:END_BYTES]) + bytes(value[-END_BYTES:])
    if isinstance(value, str | bool | int | None):
        return repr(value).encode("utf-8", "surrogatepass")
    if isinstance(value, list | tuple) and value and all(type(part) is int for part in value):
        return repr(value).encode()
    if isinstance(value, np.ndarray | np.generic | torch.Tensor):
        array = np.asarray(value.cpu() if isinstance(value, torch.Tensor) else value)
        return array.tobytes() if array.dtype.kind in "iubSU" else None
    return None
