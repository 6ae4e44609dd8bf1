"""Packers that trainers use today: token counts and a cap -> groups.

For benchmarks/grouping.py. They pack by tokens alone, because they know nothing else. Each calls
the public package that the framework itself calls, or the framework's own function. First fit and
online best fit are written out below.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import numba
import numpy as np

from isobatch.common.types import Groups, IntArray

SWIFT_BATCH = 1000
"""Samples that ms-swift packs at a time; the last pack of a batch continues in the next."""
VERL_BATCH = 512
"""Samples of a step that verl balances; Karmarkar-Karp takes seconds for thousands."""
OPEN_GROUPS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Packer:
    """A way to pack by token counts."""

    name: str
    pack: Callable[[IntArray, int], list[list[int]]]
    package: str = ""
    """What must be installed; empty: nothing."""
    pip: str = ""
    """What to install it by."""

    @property
    def installed(self) -> bool:
        return not self.package or importlib.util.find_spec(self.package) is not None


def as_groups(groups: list[list[int]]) -> Groups:
    """Lists of samples as `Groups`."""
    sizes = np.array([len(group) for group in groups], dtype=np.int64)
    samples = np.fromiter(
        (sample for group in groups for sample in group), dtype=np.int64, count=int(sizes.sum())
    )
    return Groups(samples, np.concatenate([[0], np.cumsum(sizes)]))


def pack_trl(tokens: IntArray, cap: int) -> list[list[int]]:
    """TRL's `pack_dataset`, strategy "bfd": best fit decreasing; a token is its sample's number."""
    import pyarrow as pa  # noqa: PLC0415
    from datasets import Dataset  # noqa: PLC0415
    from trl.data_utils import pack_dataset  # noqa: PLC0415

    offsets = np.concatenate([[0], np.cumsum(tokens)]).astype(np.int32)
    numbers = np.repeat(np.arange(len(tokens), dtype=np.int32), tokens)
    column = pa.ListArray.from_arrays(pa.array(offsets), pa.array(numbers))
    packed = pack_dataset(Dataset(pa.table({"input_ids": column})), seq_length=cap, strategy="bfd")
    groups = []
    for row in packed.with_format("arrow").iter(batch_size=1):
        numbers = row["input_ids"].combine_chunks().values.to_numpy()
        first = np.flatnonzero(np.diff(numbers, prepend=-1))
        groups.append(numbers[first].tolist())
    return groups


def pack_swift(tokens: IntArray, cap: int) -> list[list[int]]:
    """`binpacking.to_constant_volume` on batches, as ms-swift's packing calls it."""
    import binpacking  # noqa: PLC0415

    groups: list[list[tuple[int, int]]] = []
    rest: list[tuple[int, int]] = []
    for start in range(0, len(tokens), SWIFT_BATCH):
        stop = min(start + SWIFT_BATCH, len(tokens))
        batch = rest + [(sample, int(tokens[sample])) for sample in range(start, stop)]
        packs = binpacking.to_constant_volume(batch, cap, weight_pos=1)
        rest = [] if stop == len(tokens) else packs.pop()
        groups += packs
    return [[sample for sample, _ in group] for group in groups]


def pack_karmarkar_karp(tokens: IntArray, cap: int) -> list[list[int]]:
    """Karmarkar-Karp into as few micro-batches as a step's tokens need: verl's dynamic batches."""
    from numberpartitioning import karmarkar_karp  # noqa: PLC0415

    groups: list[list[int]] = []
    for start in range(0, len(tokens), VERL_BATCH):
        lengths = tokens[start : start + VERL_BATCH].tolist()
        parts = karmarkar_karp(
            lengths, num_parts=-(-sum(lengths) // cap), return_indices=True
        ).partition
        groups += [[start + int(place) for place in part] for part in parts if part]
    return groups


def pack_first_fit(tokens: IntArray, cap: int) -> list[list[int]]:
    """First fit, decreasing: the first open group with enough free tokens."""
    order = np.argsort(-tokens, kind="stable")
    number, group_of = _first_fit(order, tokens, cap)
    groups: list[list[int]] = [[] for _ in range(number)]
    for sample in order.tolist():
        groups[group_of[sample]].append(sample)
    return groups


@numba.njit(cache=True)
def _first_fit(order, tokens, cap):  # type: ignore[no-untyped-def]
    free, group_of, number = np.empty(len(tokens), np.int64), np.empty(len(tokens), np.int64), 0
    for sample in order:
        group = 0
        while group < number and free[group] < tokens[sample]:
            group += 1
        if group == number:
            free[group] = cap
            number += 1
        free[group] -= tokens[sample]
        group_of[sample] = group
    return number, group_of


def best_fit_online(vision: IntArray, tokens: IntArray, max_vision: int, cap: int) -> Groups:
    """One pass in random order under both caps: the fullest of 16 open groups that fits."""
    shuffled = np.random.default_rng(0).permutation(len(tokens))
    group_of = np.empty_like(shuffled)
    group_of[shuffled] = _best_fit(vision[shuffled], tokens[shuffled], max_vision, cap)
    order = np.argsort(group_of, kind="stable")
    return Groups(order, np.concatenate([[0], np.cumsum(np.bincount(group_of))]))


@numba.njit(cache=True)
def _best_fit(vision, tokens, max_vision, cap):  # type: ignore[no-untyped-def]
    group_of, number = np.empty(len(tokens), np.int64), 0
    free = np.zeros((OPEN_GROUPS, 3), np.int64)  # vision, tokens, group
    for sample in range(len(tokens)):
        best, fullest = -1, 0
        for place in range(OPEN_GROUPS):
            fits = free[place, 0] >= vision[sample] and free[place, 1] >= tokens[sample]
            if fits and (
                best < 0
                or _free_share(free[place], max_vision, cap)
                < _free_share(free[best], max_vision, cap)
            ):
                best = place
            if _free_share(free[place], max_vision, cap) < _free_share(
                free[fullest], max_vision, cap
            ):
                fullest = place
        if best < 0:
            best = fullest
            free[best] = np.array([max_vision, cap, number])
            number += 1
        free[best, 0] -= vision[sample]
        free[best, 1] -= tokens[sample]
        group_of[sample] = free[best, 2]
    return group_of


@numba.njit(cache=True)
def _free_share(free, max_vision, cap):  # type: ignore[no-untyped-def]
    """Free capacity of both resources, each relative to its cap, as one whole number."""
    return cap * free[0] + max_vision * free[1]


PEERS = (
    Packer(name="TRL, bfd", pack=pack_trl, package="trl", pip="trl"),
    Packer(
        name="binpacking (as ms-swift)", pack=pack_swift, package="binpacking", pip="binpacking"
    ),
    Packer(
        name="Karmarkar-Karp (as verl)",
        pack=pack_karmarkar_karp,
        package="numberpartitioning",
        pip="numberpartitioning",
    ),
    Packer(name="first fit decr. (as Axolotl)", pack=pack_first_fit),
)
