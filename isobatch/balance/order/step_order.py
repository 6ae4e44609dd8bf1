"""`GlobalShuffle`: groups in random order, each step's loads as equal as asked.

For the loaders, every step. Groups that the packer made equal (`balance.grouping.even_out`) are
nearly balanced in any order. What is left is traded against randomness by one number, `balance`: a
step's groups are chosen out of 1 / (1 - balance) times as many, those nearest in load to the one
that has waited longest (large steps: to one of the first 8); the others wait. At 0 the order is
plainly random. At .9, the default, ranks wait a tenth as long or less, and of a group's step mates
about ten times as many as by chance meet it again in the next epoch: .1 % of them at 8 ranks and
19,000 groups.

What is nearest leaves the others to groups still to come. Where all that remain are chosen from
already, they are sorted and cut into steps instead, so that the last ones are balanced as well.

A step's groups are sorted, so that those of its micro-batches are neighbours, and each rank gets
one of every micro-batch: the smaller one, the more it has already. So ranks that meet in every
micro-batch (FSDP, pipelines) wait least there, and those that meet once per step even less.

Pure, and computed by every rank itself; integers only, so that all machines agree. Holds no order,
only a position in it: 250 million groups cost nothing.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from isobatch.balance.rng import SHUFFLE, random_bits
from isobatch.common.types import IntArray

LoadLookup = Callable[[IntArray], tuple[IntArray, IntArray]]
"""Groups -> (vision loads, LLM tokens)."""
DEFAULT_BALANCE = 0.9
MAX_BALANCE = 0.999
CUT_FROM = 64
"""Width of the choice, in steps' groups, from which candidates are sorted by both loads."""
MOST_GROUPS = 1 << 16
"""Groups chosen from at most, or those of two steps: those that wait are in the state."""
CENTRES, MOST_PASSED = 8, 32
"""Large steps are around one of the 8 that have waited longest; and how often in a row the first of
them may be passed over. Two sources of documents at 512 ranks: vision waits .4 % instead of .9 %.
"""
LARGE_STEP = 64
"""Groups of a step from which on this is worth its time, a quarter of a millisecond."""
ROUNDS = 6
"""Rounds of the Feistel network; four give a random-looking permutation (Luby, Rackoff 1988)."""
UNIT = 1 << 16
"""A mean load, in which loads are compared."""
EQUAL = (UNIT >> 6, UNIT >> 7)
"""Differences of vision and of tokens that do not matter at the default balance: 1/64 and 1/128 of
the mean, or one (patch). Else groups that cost nearly the same would be sorted by what little they
differ in, which often is their source. More balance lets less pass.
"""
FAR = 1 << 20
"""Loads differ by no more, 16 means, so that a squared distance and a place fit 63 bits."""
PLACE_BITS = 21
CHUNK = 1 << 14
"""Places of the random order that are computed at a time, in 3 ms; of a quarter as many, each takes
1.8 times as long.
"""


class GroupOrder(Protocol):
    """One epoch's order of groups: every group exactly once, whatever sizes are taken."""

    @property
    def remaining(self) -> int:
        """Groups of this epoch that are still to come."""

    def take(self, count: int) -> IntArray:
        """The next `count` groups, int64; fewer only when the epoch ends."""

    def take_step(self, dp: int, micro_batches: int, loads: LoadLookup) -> IntArray:
        """The next step's groups, int64, (dp, micro_batches); -1 where the epoch has ended."""

    def state(self) -> dict[str, Any]:
        """Keywords, plain JSON, with which a new order continues exactly here."""

    def copy(self) -> "GroupOrder":
        """An order in the same state that moves independently."""


def take_steps(
    order: GroupOrder, count: int, shape: tuple[int, int], loads: LoadLookup
) -> tuple[IntArray, list[GroupOrder]]:
    """The next steps' groups, int64, (count, *shape), and the order after each; `order` stays.

    `shape` is (dp, micro_batches).
    """
    if shape == (1, 1) and type(order) is GlobalShuffle:
        return order.take_groups(count)
    taken, orders = [], []
    for _ in range(count):
        order = order.copy()
        taken.append(order.take_step(*shape, loads))
        orders.append(order)
    return np.array(taken, np.int64).reshape(count, *shape), orders


class GlobalShuffle:
    """A random order; a step's groups are like the one that has waited longest.

    Its state is `consumed`, how far the random order has been read, `spare`, read but not used, and
    `passed`, for how many steps the first of these was passed over.
    """

    def __init__(  # noqa: PLR0913  (its state among them)
        self,
        *,
        num_groups: int,
        seed: int,
        epoch: int,
        balance: float = 0.0,
        consumed: int = 0,
        spare: Sequence[int] = (),
        passed: int = 0,
    ) -> None:
        """`passed`: steps in a row that did not take the first of the spare groups."""
        if not 0 <= balance <= MAX_BALANCE:
            raise ValueError(f"balance is {balance}; give 0 (random) to {MAX_BALANCE}")
        known = all(0 <= group < num_groups for group in spare)
        if not len(spare) <= consumed <= num_groups or not known:
            raise unfit_state(f"{consumed} of {num_groups} groups, {len(spare)} spare")
        self._num_groups = num_groups
        self.consumed = consumed
        self._passed = passed
        self._width = 1 / (1 - balance)
        self.tolerance = min(1.0, 2 * (1 - balance))
        """Factor of `EQUAL` below which differences do not count."""
        self._spare = np.array(spare, dtype=np.int64)
        self._keys = random_bits(ROUNDS, seed, SHUFFLE, epoch)
        self._chunk = -1, self._spare

    @property
    def remaining(self) -> int:
        """Groups of this epoch that are still to come."""
        return self._num_groups - self.consumed + len(self._spare)

    def take(self, count: int) -> IntArray:
        """The next `count` groups, int64, those that waited first; fewer at the epoch's end."""
        groups = self._read(count)
        self._spare = groups[count:]
        return groups[:count]

    def take_step(self, dp: int, micro_batches: int, loads: LoadLookup) -> IntArray:
        """The next step's groups, int64, (dp, micro_batches); -1 where the epoch has ended."""
        count = dp * micro_batches
        if count == 1 and self.remaining:  # to choose would cost more than to read the group
            return self.take(1).reshape(1, 1)
        groups = self.candidates(count)
        vision, tokens = loads(groups)
        if self._width >= CUT_FROM and self.consumed == self._num_groups:
            chosen = cut_sorted(vision, tokens, count)
        elif count < LARGE_STEP:
            chosen = nearest(vision, tokens, count, self.tolerance)
        else:
            centres = CENTRES if self._passed < MOST_PASSED else 1
            chosen = most_alike(vision, tokens, count, self.tolerance, centres)
            self._passed = 0 if 0 in chosen else self._passed + 1
        return self.assigned(groups, chosen, (vision, tokens), (dp, micro_batches))

    def candidates(self, count: int) -> IntArray:
        """The groups out of which the next step's `count` are chosen, the longest waiting first."""
        self._spare = self._read(min(int(count * self._width), max(2 * count, MOST_GROUPS)))
        return self._spare

    def assigned(
        self,
        groups: IntArray,
        chosen: IntArray,
        loads: tuple[IntArray, IntArray],
        shape: tuple[int, int],
    ) -> IntArray:
        """The step of the candidates at the places `chosen`, (dp, micro_batches); others wait."""
        self.remove(chosen)
        places = assign_ranks(loads[0][chosen], loads[1][chosen], *shape)
        return np.append(groups[chosen], -1)[places]

    def remove(self, places: IntArray) -> None:
        """Take candidates out of those that wait."""
        self._spare = np.delete(self._spare, places)

    def take_groups(self, count: int) -> tuple[IntArray, list[GroupOrder]]:
        """Take steps of a group each, at once, as `take_steps` does; at least so many remain."""
        after = self.copy()
        orders = list[GroupOrder]()
        groups = after.take(count)
        for number in range(1, count + 1):
            order = after.copy()
            order.consumed = self.consumed + max(0, number - len(self._spare))
            order._spare = self._spare[number:]
            orders.append(order)
        return groups.reshape(count, 1, 1), orders

    def state(self) -> dict[str, Any]:
        """Keywords, plain JSON, with which a new order continues exactly here."""
        return {
            "consumed": self.consumed,
            "spare": self._spare.tolist(),
            "passed": self._passed,
        }

    def copy(self) -> Self:
        """An order in the same state that moves independently."""
        return copy.copy(self)  # arrays are replaced, never changed

    def _read(self, count: int) -> IntArray:
        """The spare groups, and as many new ones as make `count` of them."""
        stop = min(self._num_groups, self.consumed + max(0, count - len(self._spare)))
        parts = [self._spare] if len(self._spare) else []
        while self.consumed < stop:
            number, place = divmod(self.consumed, CHUNK)
            if self._chunk[0] != number:
                self._chunk = number, self._places(number * CHUNK)
            parts.append(self._chunk[1][place : place + stop - self.consumed])
            self.consumed += len(parts[-1])
        return parts[0] if len(parts) == 1 else np.concatenate(parts or [self._spare])

    def _places(self, start: int) -> IntArray:
        """The groups at a chunk's places of the random order, without holding the order.

        A Feistel network permutes the numbers of an even number of bits; a number too large is
        permuted again until it is not (Black, Rogaway 2002), 2.5 times on average at most.
        """
        half = np.uint64(max(1, -(-(self._num_groups - 1).bit_length() // 2)))
        numbers = np.arange(start, min(start + CHUNK, self._num_groups), dtype=np.uint64)
        wrong = np.arange(len(numbers))
        while len(wrong):
            numbers[wrong] = _permuted(numbers[wrong], half, self._keys)
            wrong = wrong[numbers[wrong] >= np.uint64(self._num_groups)]
        return numbers.astype(np.int64)


def _permuted(
    numbers: NDArray[np.uint64], half: np.uint64, keys: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    """Numbers of 2 * half bits permuted, by a mixing function of one half after the other."""
    mask = (np.uint64(1) << half) - np.uint64(1)
    upper, lower = numbers >> half, numbers & mask
    for key in keys:
        bits = (lower ^ key) * np.uint64(0xBF58476D1CE4E5B9)
        bits = (bits ^ (bits >> np.uint64(29))) * np.uint64(0x94D049BB133111EB)
        upper, lower = lower, upper ^ ((bits ^ (bits >> np.uint64(32))) & mask)
    return upper << half | lower


def epoch_steps(
    loads: tuple[IntArray, IntArray],
    shape: tuple[int, int],
    *,
    seed: int = 0,
    epoch: int = 0,
    balance: float = DEFAULT_BALANCE,
    max_steps: int | None = None,
) -> IntArray:
    """All steps of an epoch as the loaders give them, or the first `max_steps`; -1: no group.

    `loads` are the groups' vision loads and tokens, `shape` is (dp, micro_batches); int64, shape
    (steps, dp, micro_batches).
    """
    (vision, tokens), (dp, micro_batches) = loads, shape
    order = GlobalShuffle(num_groups=len(vision), seed=seed, epoch=epoch, balance=balance)
    count = -(-len(vision) // (dp * micro_batches))
    steps = [
        order.take_step(dp, micro_batches, lambda groups: (vision[groups], tokens[groups]))
        for _ in range(count if max_steps is None else min(max_steps, count))
    ]
    return np.array(steps, np.int64).reshape(len(steps), dp, micro_batches)


def unfit_state(consumed: str) -> ValueError:
    """The error for an order's state that is not of its build."""
    problem = f"state does not fit this order: consumed {consumed}"
    return ValueError(f"{problem}; give the state of an order of the same build")


def nearest(
    vision: IntArray, tokens: IntArray, count: int, tolerance: float = 0.0, centre: int = 0
) -> IntArray:
    """Places of the first group and of the `count` - 1 nearest to it, ascending; all if not more.

    Nearest: the least sum of squares of what both loads differ by, each relative to its mean, above
    `tolerance` times `EQUAL`. Another `centre` is itself left out if `count` before it are as near.
    """
    if len(vision) <= count:
        return np.arange(len(vision))
    keys = distances(vision, tokens, tolerance, centre)
    smallest = np.partition(keys, count - 1)[:count]
    return np.sort(smallest & ((1 << PLACE_BITS) - 1))


def distances(vision: IntArray, tokens: IntArray, tolerance: float, centre: int) -> IntArray:
    """How far groups are from the centre, int64, with their places in the last PLACE_BITS.

    Of equally distant ones the longest waiting is nearest; no two are equal.
    """
    distance = np.zeros(len(vision), np.int64)
    for load, equal in zip((vision, tokens), EQUAL, strict=True):
        mean = _mean(load)
        apart = np.abs(load - load[centre]) * UNIT // mean - int(
            tolerance * max(equal, UNIT // mean)
        )
        distance += np.clip(apart, 0, FAR) ** 2
    return distance << PLACE_BITS | np.arange(len(vision))


def most_alike(
    vision: IntArray, tokens: IntArray, count: int, tolerance: float, centres: int
) -> IntArray:
    """The set whose ranks wait least, of those `nearest` to one of the first `centres` groups."""
    if len(vision) <= count:
        return np.arange(len(vision))
    numbers = range(min(centres, len(vision)))
    sets = [nearest(vision, tokens, count, tolerance, number) for number in numbers]
    return least_waiting(sets, vision, tokens)


def least_waiting(sets: Sequence[IntArray], vision: IntArray, tokens: IntArray) -> IntArray:
    """The set of groups whose ranks wait least, the first of equal ones."""
    return min(sets, key=lambda chosen: _waiting(vision, chosen) + _waiting(tokens, chosen))


def _waiting(load: IntArray, chosen: IntArray) -> int:
    """What the chosen groups are below the largest of them, together, in units of a mean load."""
    loads = load[chosen]
    return (int(loads.max()) * len(loads) - int(loads.sum())) * UNIT // _mean(load)


def cut_sorted(vision: IntArray, tokens: IntArray, count: int) -> IntArray:
    """Places of the groups of the first one's step, ascending, where all are sorted and cut.

    Sorted by vision, in bins of 1/64 to 1/32 of the mean where loads are larger than that; within
    a bin by tokens, up or down, as the bin before ends. The next call cuts the others as before.
    The last groups of the random order, which fill no step, wait.
    """
    if len(vision) <= count:
        return np.arange(len(vision))
    stop = len(vision) - len(vision) % count
    bins = vision[:stop] >> max(0, _mean(vision).bit_length() - 6)
    tokens = tokens[:stop]
    by_both = np.lexsort((tokens, bins))
    parts = []
    end = 0
    for part in np.split(by_both, np.flatnonzero(np.diff(bins[by_both])) + 1):
        low, high = tokens[part[[0, -1]]].tolist()
        is_down = abs(high - end) < abs(low - end)
        parts.append(part[::-1] if is_down else part)
        end = low if is_down else high
    by_both = np.concatenate(parts)
    start = int(np.flatnonzero(by_both == 0)[0]) // count * count
    return np.sort(by_both[start : start + count])


def assign_ranks(vision: IntArray, tokens: IntArray, dp: int, micro_batches: int) -> IntArray:
    """Places of the groups that each rank gets, int64, (dp, micro_batches); -1: none.

    Micro-batches hold neighbours, the largest groups first; within each, the rank with the largest
    sum so far gets the smallest. There are at most dp * micro_batches groups.

    >>> vision, tokens = np.array([1, 3, 2, 2]), np.array([10, 50, 40, 20])
    >>> assign_ranks(vision, tokens, dp=2, micro_batches=2).tolist()
    [[1, 0], [2, 3]]
    """
    # one scale for both loads; groups that are lacking weigh nothing, and come last
    size = vision * UNIT // _mean(vision) + tokens * UNIT // _mean(tokens)
    places = np.full(dp * micro_batches, -1)
    places[: len(size)] = np.argsort(-size, kind="stable")
    sizes = np.append(size, 0)[places].reshape(micro_batches, dp)
    rounds = places.reshape(micro_batches, dp)
    sums = np.zeros(dp, np.int64)
    for number in range(micro_batches):
        ranks = np.argsort(sums, kind="stable")
        rounds[number, ranks] = rounds[number].copy()
        sums[ranks] += sizes[number]
    return rounds.T


def _mean(load: IntArray) -> int:
    return max(1, int(load.sum()) // max(1, len(load)))
