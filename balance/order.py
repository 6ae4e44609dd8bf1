"""The order of groups: a path along which neighbours cost the same, and each epoch's stream, "blocks in lanes".

For the packer (`sort_along_path`, `choose_order`: once per build) and the loaders (`GroupStream`: every step). Pure
NumPy; a stream holds one number per block and one block's order per lane, 2 MB for 250 million groups.

Balance costs randomness: the groups of a micro-batch are neighbours on the path. In exchange the blocks come in random
order, and lanes keep consecutive micro-batches apart. OmniBal's AI2D + ChartQA lengths (9,468 groups, caps 14 patches
and 4,096 tokens, dp 8): dist ratio ViT / LLM .109 / .124 in random order, .0002 / .0007 in this one; the loads of
consecutive micro-batches correlate by -.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from balance.records import IntArray

MIN_BLOCK, MAX_BLOCK = 24, 1536
"""3 x 2^k, so that micro-batches of 6, 8, 24, 64, 96, ... groups end where a block ends; a larger one mixes blocks."""
MIN_BLOCKS = 32
"""Fewer blocks in an epoch make whole stretches of it alike (mean load drifts over windows of 64 micro-batches)."""
MAX_LANES = 31
"""A prime, so that no number of micro-batches per step meets the same lanes in each step."""
MIN_SPREAD, PATH_PARTS = 8, 1024
"""Groups move inside their block by up to 1/1024 of the path: wider gains little randomness and costs balance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderConfig:
    """How the path is cut. Fixed at build, so that the stream never depends on the ranks of a run."""

    block_size: int
    """Groups of a block; only the path's last block may be shorter."""
    num_lanes: int

    def __post_init__(self) -> None:
        if self.block_size < 1 or self.num_lanes < 1:
            raise ValueError(f"block_size {self.block_size} and num_lanes {self.num_lanes} must be at least 1")


def choose_order(num_groups: int) -> OrderConfig:
    """The largest block that leaves an epoch 32 blocks, and at least two blocks per lane.

    Large blocks keep micro-batches of many ranks inside one block: at 336,000 groups and dp 512, blocks of 384 give a
    dist ratio of .066, of 1,536 .0005, and with 31 lanes the larger block drifts no more than the smaller one.

    >>> choose_order(9_468)
    OrderConfig(block_size=192, num_lanes=25)
    >>> choose_order(1_000_000)
    OrderConfig(block_size=1536, num_lanes=31)
    """
    block_size = MIN_BLOCK
    while block_size < MAX_BLOCK and num_groups >= MIN_BLOCKS * 2 * block_size:
        block_size *= 2
    num_blocks = -(-num_groups // block_size)
    return OrderConfig(block_size=block_size, num_lanes=min(MAX_LANES, max(1, num_blocks // 2)))


def sort_along_path(vision_load: IntArray, tokens: IntArray, seed: int) -> IntArray:
    """The permutation (int64) that puts groups in path order: by vision load, tokens up and down in turn.

    Where vision loads are nearly all distinct (ViT tokens of native-resolution models), they are first put into bins,
    else tokens would jump at every step. Ties are in a random order that depends on `seed` alone.

    >>> sort_along_path(np.array([2, 1, 2, 1]), np.array([50, 60, 90, 70]), seed=0).tolist()
    [1, 3, 2, 0]
    """
    bins = _vision_bins(vision_load, tokens)
    span = int(tokens.max(initial=0)) + 1
    key = bins * span + np.where(bins % 2 == 0, tokens, span - 1 - tokens)
    shuffled = np.argsort(_random_bits(len(key), seed, TIES), kind="stable")
    return shuffled[np.argsort(key[shuffled], kind="stable")]


def _vision_bins(vision_load: IntArray, tokens: IntArray) -> IntArray:
    """Bin of each group: the quantile bins that make neighbours on the path most alike in both loads.

    More bins mean a narrower range of vision loads in each, but a longer path, on which neighbours differ more in
    tokens. Both spreads are estimated relative to the mean load, for 1, 2, 4, ... bins up to one per value.
    """
    values, inverse, counts = np.unique(vision_load, return_inverse=True, return_counts=True)
    below = np.cumsum(counts) - counts  # groups of smaller load, per distinct value
    window = (_spread(len(vision_load)) + MIN_BLOCK) / max(1, len(vision_load))
    token_spread = float(np.std(tokens)) / max(1.0, float(np.mean(tokens))) if len(tokens) else 0.0
    best, best_cost, num_bins = np.zeros_like(values), np.inf, 1
    while num_bins < 2 * len(values):
        # bin of each distinct value; equal values share a bin, so some of the num_bins may stay empty
        bins = np.arange(len(values)) if num_bins >= len(values) else below * num_bins // len(vision_load)
        bins = np.unique(bins, return_inverse=True)[1]
        cost = _spread_inside(values, counts, bins) + token_spread * min(1.0, window * (bins.max() + 1))
        if cost < best_cost:
            best, best_cost = bins, cost
        num_bins *= 2
    return np.asarray(best[inverse], dtype=np.int64)


def _spread_inside(values: IntArray, counts: IntArray, bins: IntArray) -> float:
    """Mean over groups of the standard deviation of the values in their bin, relative to the mean value."""
    starts = np.flatnonzero(np.diff(bins, prepend=-1))
    weights = np.add.reduceat(counts, starts)
    means = np.add.reduceat(counts * values, starts) / weights
    variances = np.add.reduceat(counts * (values - means[bins]) ** 2, starts) / weights
    return float(np.sum(weights * np.sqrt(variances)) / max(1, np.sum(counts * values)))


class GroupStream:
    """One epoch's stream of groups (path positions); every group exactly once, whatever sizes are taken.

    Depends on (num_groups, order, seed, epoch) alone. Its state is `consumed` (groups taken per lane) and `next_lane`,
    plain ints: a stream made with them goes on exactly there, also with other sizes.
    """

    def __init__(
        self,
        *,
        num_groups: int,
        order: OrderConfig,
        seed: int,
        epoch: int,
        consumed: Sequence[int] | None = None,
        next_lane: int = 0,
    ) -> None:
        self._num_groups, self._order, self._seed, self._epoch = num_groups, order, seed, epoch
        self._blocks, self.lane_sizes = _deal_blocks(num_groups, order, seed, epoch)
        self.consumed = [0] * order.num_lanes if consumed is None else list(consumed)
        self.next_lane = next_lane
        self._check_state()
        self._opened: dict[int, tuple[int, IntArray]] = {}  # lane -> its open block's turn and groups

    @property
    def remaining(self) -> int:
        """Groups that this epoch has not given out yet."""
        return self._num_groups - sum(self.consumed)

    def take(self, count: int) -> IntArray:
        """The next `count` groups from the next lane, int64; fewer only when the epoch ends.

        A lane that runs out is continued by the lanes after it, so near the end a micro-batch may mix blocks.
        """
        missing = min(count, self.remaining)
        parts = [np.zeros(0, dtype=np.int64)]
        while missing:
            parts.append(self._take_from(self.next_lane, missing))
            missing -= len(parts[-1])
            self.next_lane = (self.next_lane + 1) % self._order.num_lanes
        return np.concatenate(parts)

    def copy(self) -> GroupStream:
        """A stream in the same state that moves on its own."""
        twin = object.__new__(GroupStream)
        twin.__dict__.update(self.__dict__, consumed=list(self.consumed), _opened=dict(self._opened))
        return twin

    def _take_from(self, lane: int, count: int) -> IntArray:
        """Up to `count` groups of one lane, across its blocks."""
        size = self._order.block_size
        start = self.consumed[lane]
        stop = min(start + count, self.lane_sizes[lane])
        self.consumed[lane] = stop
        parts = [np.zeros(0, dtype=np.int64)]
        # e.g. size 4, taking [3, 9): the last of block 0, all of block 1, the first of block 2
        for turn in range(start // size, -(-stop // size)):
            parts.append(self._block(lane, turn)[max(0, start - turn * size) : stop - turn * size])
        return np.concatenate(parts)

    def _block(self, lane: int, turn: int) -> IntArray:
        """The groups of a lane's `turn`-th block in this epoch's order."""
        opened = self._opened.get(lane)
        if opened is None or opened[0] != turn:
            block = int(self._blocks[turn * self._order.num_lanes + lane])
            first = block * self._order.block_size
            size = min(self._order.block_size, self._num_groups - first)
            random = _random_bits(size, self._seed, INSIDE, self._epoch, block) * 2.0**-64
            moved = np.arange(size) + _spread(self._num_groups) * random
            opened = self._opened[lane] = (turn, first + np.argsort(moved, kind="stable"))
        return opened[1]

    def _check_state(self) -> None:
        fits = len(self.consumed) == len(self.lane_sizes) and all(
            0 <= used <= size for used, size in zip(self.consumed, self.lane_sizes, strict=True)
        )
        if not fits or not 0 <= self.next_lane < self._order.num_lanes:
            raise ValueError(
                f"state does not fit this stream: consumed {self.consumed} of {self.lane_sizes} groups per lane, "
                f"next lane {self.next_lane}; give the state of a stream of the same build"
            )


def _deal_blocks(num_groups: int, order: OrderConfig, seed: int, epoch: int) -> tuple[IntArray, list[int]]:
    """The epoch's blocks, block `turn * num_lanes + lane` being a lane's `turn`-th, and the groups of each lane."""
    size, num_lanes = order.block_size, order.num_lanes
    num_blocks = -(-num_groups // size)
    blocks = np.argsort(_random_bits(num_blocks, seed, BLOCKS, epoch), kind="stable")
    lane_sizes = [len(range(lane, num_blocks, num_lanes)) * size for lane in range(num_lanes)]
    if num_groups % size:
        # the short block goes to the end of its lane, so that all other positions stay multiples of the block size
        at = int(np.flatnonzero(blocks == num_blocks - 1)[0])
        last = range(at, num_blocks, num_lanes)[-1]
        blocks[[at, last]] = blocks[[last, at]]
        lane_sizes[at % num_lanes] -= size - num_groups % size
    return blocks, lane_sizes


def _spread(num_groups: int) -> int:
    """How far a group moves from its place on the path inside its block, in groups."""
    return max(MIN_SPREAD, num_groups // PATH_PARTS)


TIES, BLOCKS, INSIDE = 0, 1, 2
"""What random bits are for: each purpose draws from a sequence of its own."""


def _random_bits(count: int, seed: int, purpose: int, epoch: int = 0, block: int = 0) -> NDArray[np.uint64]:
    """`count` random uint64: raw bits, because NumPy keeps these the same in all versions, unlike shuffles (NEP 19)."""
    return np.random.Philox(np.random.SeedSequence(seed, spawn_key=(purpose, epoch, block))).random_raw(count)
