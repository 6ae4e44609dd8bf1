"""`BlockShuffle`: each epoch's order of groups, random blocks of sorted ones.

For the loaders, every step, and the packer, which fixes how the sorted groups are cut
(`choose_order`). An order depends on the build, the seed and the epoch alone; what was taken is its
whole state, so it continues exactly with any other number of ranks. Pure; a micro-batch costs about
15 microseconds, 250 million groups need half a megabyte.

Blocks in lanes: the sorted groups (`former_order.sort_groups`) are cut into lanes, so that a
lane's groups cost about the same, and lanes into blocks. Each micro-batch comes from one lane,
drawn by how much is left in it, so all lanes are being read at any time, and one micro-batch says
nothing about the next. A lane's blocks come in random order; inside, the groups of each window in
an order of which any stretch holds the window's sources (Owen 1995). A micro-batch that no lane can
fill takes neighbouring lanes together, so its groups are neighbours for any number of ranks.

What balance costs: 1.2 million samples of 4 sources (benchmarks/order.py), dp 8, one micro-batch
per step: dist ratio ViT / LLM .013 / .005 in random order, .0001 / .0001 here, with .98 of its
source entropy. And epochs repeat each other, unlike with `balance.order.global_shuffle` and
`regroup`: a micro-batch of a whole window (256 groups; 16 in a build of 9,000) holds the same
groups in every epoch, one of dp 8 one in 30.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from operator import sub
from typing import Any

import numpy as np
from numpy.typing import NDArray

from former_order.rng import BLOCKS, INSIDE, TURNS, mix64
from isobatch.balance.order.global_shuffle import LoadLookup, unfit_state
from isobatch.balance.rng import random_bits, random_permutation
from isobatch.common.types import IntArray

MIN_BLOCK, DP_BLOCK, MAX_BLOCK = 8, 512, 4096
"""Powers of two, as usual numbers of ranks; at least 16 blocks up to 512 groups, 128 beyond."""
MAX_LANES = 32
"""More would only make the state longer."""
MIN_WINDOW, MAX_WINDOW, NUM_WINDOWS = 8, 256, 512
"""A window is up to 1/512 of all groups: wider mixes sources no better and costs balance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderConfig:
    """How the sorted groups are cut. Fixed at build, so that no order depends on a run's ranks."""

    block_size: int
    """Groups of a block; only the very last block may be shorter."""
    num_lanes: int
    window_size: int = 1
    """Groups of a window, sorted by source inside: a power of two that divides `block_size`."""

    def __post_init__(self) -> None:
        block, window = self.block_size, self.window_size
        if block < 1 or self.num_lanes < 1:
            raise ValueError(f"block_size {block}, num_lanes {self.num_lanes}: must be at least 1")
        if window < 1 or window & (window - 1) or block % window:
            advice = f"use a power of two that divides block_size {block}"
            raise ValueError(f"window_size is {window}; {advice}")


def choose_order(num_groups: int) -> OrderConfig:
    """Blocks of a micro-batch of 512 ranks where 16 or more remain, larger in large builds.

    >>> choose_order(9_468)
    OrderConfig(block_size=512, num_lanes=18, window_size=16)
    >>> choose_order(1_000_000)
    OrderConfig(block_size=4096, num_lanes=32, window_size=256)
    """
    block_size = max(
        _power_of_two(num_groups // 16, MIN_BLOCK, DP_BLOCK),
        _power_of_two(num_groups // 128, 1, MAX_BLOCK),
    )
    return OrderConfig(
        block_size=block_size,
        num_lanes=min(MAX_LANES, max(1, num_groups // block_size)),
        window_size=_power_of_two(num_groups // NUM_WINDOWS, MIN_WINDOW, MAX_WINDOW),
    )


class BlockShuffle:
    """Blocks in lanes. Its state is `consumed`, the groups taken of each lane."""

    def __init__(
        self,
        *,
        num_groups: int,
        order: OrderConfig,
        seed: int,
        epoch: int,
        consumed: Sequence[int] | None = None,
    ) -> None:
        self._num_groups, self._order, self._seed, self._epoch = num_groups, order, seed, epoch
        num_blocks = -(-num_groups // order.block_size)
        # lane l holds the blocks first_blocks[l]:first_blocks[l + 1] of the sorted groups
        lanes = range(order.num_lanes + 1)
        self._first_blocks = [num_blocks * lane // order.num_lanes for lane in lanes]
        borders = [min(num_groups, block * order.block_size) for block in self._first_blocks]
        self.lane_sizes = [stop - start for start, stop in pairwise(borders)]
        self.consumed = [0] * order.num_lanes if consumed is None else list(consumed)
        self._check_state()
        self._draws = int(random_bits(1, seed, TURNS, epoch)[0])
        # lane -> its blocks in this epoch's order; its open block's place there, and its groups
        self._blocks: dict[int, IntArray] = {}
        self._opened: dict[int, tuple[int, IntArray]] = {}

    @property
    def remaining(self) -> int:
        """Groups of this epoch that are still to come."""
        return self._num_groups - sum(self.consumed)

    def take(self, count: int) -> IntArray:
        """The next `count` groups, neighbours in the sorted order, int64; fewer at the end."""
        missing = min(count, self.remaining)
        parts = []
        for lane in self._draw_lanes(missing):
            parts.append(self._take_from(lane, missing))
            missing -= len(parts[-1])
        return _join(parts)

    def take_step(self, dp: int, micro_batches: int, loads: LoadLookup | None = None) -> IntArray:
        """The next step's groups, int64, (dp, micro_batches): each micro-batch is balanced."""
        step = np.full((dp, micro_batches), -1, np.int64)
        for number in range(micro_batches):
            taken = self.take(dp)
            step[: len(taken), number] = taken
        return step

    def state(self) -> dict[str, Any]:
        """Keywords, plain JSON, with which a new order continues exactly here."""
        return {"consumed": list(self.consumed)}

    def copy(self) -> BlockShuffle:
        """An order in the same state that moves independently."""
        twin = object.__new__(BlockShuffle)
        own = {"consumed": list(self.consumed), "_opened": dict(self._opened)}
        twin.__dict__.update(self.__dict__ | own)
        return twin

    def _draw_lanes(self, count: int) -> range:
        """A lane that can fill `count`, else 2, 4, ... neighbouring lanes that together can.

        Drawn by what is left in each, as from an urn: all lanes end together, and steps are as
        independent of each other as in a random order.
        """
        left = list(map(sub, self.lane_sizes, self.consumed))
        width, sums = 1, left
        while True:
            # neighbours n have the places urn[n - 1]:urn[n] of the urn
            urn = list(accumulate([total if total >= count else 0 for total in sums]))
            if urn[-1] or width >= len(left):
                break
            width *= 2
            sums = [sum(left[lane : lane + width]) for lane in range(0, len(left), width)]
        draw = mix64(self._draws + sum(self.consumed)) * urn[-1] >> 64
        # nothing is left: `number` is past the last lane, and the range empty
        number = bisect_right(urn, draw)
        return range(number * width, min((number + 1) * width, len(left)))

    def _take_from(self, lane: int, count: int) -> IntArray:
        """Up to `count` groups of one lane, across its blocks."""
        size = self._order.block_size
        start = self.consumed[lane]
        stop = min(start + count, self.lane_sizes[lane])
        self.consumed[lane] = stop
        parts = []
        # e.g. size 4, taking [3, 9): the last of block 0, all of block 1, the first of block 2
        for turn in range(start // size, -(-stop // size)):
            parts.append(self._block(lane, turn)[max(0, start - turn * size) : stop - turn * size])
        return _join(parts)

    def _block(self, lane: int, turn: int) -> IntArray:
        """The groups of a lane's `turn`-th block in this epoch's order."""
        found = self._opened.get(lane)
        if found is not None and found[0] == turn:
            return found[1]
        block = int(self._lane_blocks(lane)[turn])
        first = block * self._order.block_size
        size = min(self._order.block_size, self._num_groups - first)
        bits = random_bits(self._order.block_size, self._seed, INSIDE, self._epoch, block)
        groups = first + _inside_block(size, self._order.window_size, bits)
        self._opened[lane] = turn, groups
        return groups

    def _lane_blocks(self, lane: int) -> IntArray:
        blocks = self._blocks.get(lane)
        if blocks is None:
            first, stop = self._first_blocks[lane], self._first_blocks[lane + 1]
            blocks = first + random_permutation(stop - first, self._seed, BLOCKS, self._epoch, lane)
            if stop * self._order.block_size > self._num_groups:
                # the short block comes last: all others start at multiples of the block size
                blocks = np.concatenate([blocks[blocks != stop - 1], blocks[blocks == stop - 1]])
            self._blocks[lane] = blocks
        return blocks

    def _check_state(self) -> None:
        pairs = zip(self.consumed, self.lane_sizes, strict=False)
        in_range = all(0 <= used <= size for used, size in pairs)
        if len(self.consumed) != len(self.lane_sizes) or not in_range:
            raise unfit_state(f"{self.consumed} of {self.lane_sizes} groups per lane")


def _join(parts: list[IntArray]) -> IntArray:
    """All parts in one array; mostly there is one."""
    return parts[0] if len(parts) == 1 else np.concatenate([np.zeros(0, np.int64), *parts])


def _inside_block(size: int, window_size: int, bits: NDArray[np.uint64]) -> IntArray:
    """A block's places in an epoch's order: each window as a scrambled van der Corput sequence.

    Window after window, from either end. Scrambled (Owen 1995): of any 2^j places in a row, from a
    multiple of 2^j, one is in each of the window's 2^j parts; which one is random. E.g. window_size
    4 gives 0 2 1 3, 2 0 1 3, 3 0 2 1, ... but never 0 1 2 3. A block of 512 takes 18 microseconds,
    three times a compiled loop, whose runtime would take .3 s and 60 MB in every loader's process.
    """
    nodes, digits, mirrored = _window_tree(window_size)
    firsts = np.arange(-(-size // window_size)) * window_size
    if bits[0] & np.uint64(1):
        firsts = firsts[::-1]
    # (windows, levels, window_size): one random bit per node of each window's tree
    flips = (bits >> np.uint64(63)).astype(np.int64)[firsts[:, np.newaxis, np.newaxis] + nodes]
    found: IntArray = (firsts[:, np.newaxis] + ((flips * digits).sum(axis=1) ^ mirrored)).ravel()
    return found[found < size]


@lru_cache(maxsize=8)
def _window_tree(window_size: int) -> tuple[IntArray, IntArray, IntArray]:
    """The binary tree over a window: (nodes, digits, mirrored).

    Nodes above each number, shape (levels, window_size); the digit that each level flips, (levels,
    1); each number with its digits in reverse, (window_size,). E.g. 1 of 8 is 4 in reverse.
    """
    widths = 1 << np.arange(window_size.bit_length() - 1)[:, np.newaxis]
    numbers, digits = np.arange(window_size), window_size // (2 * widths)
    nodes = widths + (numbers & (widths - 1))
    return nodes, digits, np.where(numbers & widths, digits, 0).sum(axis=0)


def _power_of_two(value: int, least: int, most: int) -> int:
    """The largest power of two up to `value`, within `least` and `most`.

    >>> [_power_of_two(value, 8, 512) for value in (0, 8, 100, 5_000)]
    [8, 8, 64, 512]
    """
    return max(least, min(most, 1 << (max(1, value).bit_length() - 1)))
