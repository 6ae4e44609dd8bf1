"""The default grouping: complete each group with the samples, among all that are left, that fit
exactly.

OmniBal's ISF fills groups in random order and filters. Here a group is completed by the sample, or
the pair of samples, that fills it best (`balance.grouping._best_fit_kernel`); then the worst
groups, and a few others, are dissolved and made again, round after round, wherever that takes no
more groups (ruin and recreate: Schrimpf et al. 2000). How to weigh the caps against each other, and
whether large samples come first, is tried on a part of the samples (`balance.grouping._fit_plan`).

AI2D + ChartQA (30,730 samples, 4,096 tokens): at 15 patches 7,967 groups in a tenth of a second,
where the bound is 7,939 and 50 ISF iterations give 8,064; from 10 to 16 patches within .4 % of the
bound. Large sets are grouped in windows drawn evenly from all samples; what a window cannot
complete goes on to the next. 1.2 million samples take a quarter of a second, 100 million 22 s and,
held as uint8 and uint16, 1.4 GB with all that is given back. Pure: the same loads and seed give the
same groups on every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from balance.grouping._best_fit_kernel import run_pass
from balance.grouping._fit_plan import FIRST_TOLERANCE, Plan, all_plans
from balance.grouping.resources import Load, PackedLoads, Resource, resources_of
from balance.radix_sort import index_dtype
from balance.rng import GROUPS, random_bits
from balance.types import Groups, IntArray, Limits

DEFAULT_ROUNDS = 60
"""AI2D + ChartQA at 15 patches: 7,982 groups after 6 rounds, 7,975 after 20, 7,967 after 60, 7,964
after 600.
"""
WINDOW_SAMPLES = 1 << 15
"""Enough for exact fits, and few enough for the second-level cache."""
WINDOW_GROUPS = 512
"""Groups that a window makes at least, so that the few that it cannot complete do not count."""
CARRIED = 8
"""One in so many of a window's samples, and of its groups, the worst, goes on to the next
window.
"""
TRIAL_SAMPLES, TRIAL_ROUNDS, FINALISTS = 1 << 12, 6, 2
"""All plans are tried on so many samples, the best two of them on a window."""
LEAST_SHARE = 0.02
"""Of the groups, a round dissolves the worst so many at least, and as many at random."""


@dataclass(frozen=True, slots=True)
class _Made:
    """Groups of one window: group g holds the next `sizes[g]` of `samples`."""

    samples: IntArray
    sizes: NDArray[np.int32]
    slacks: NDArray[np.int32]
    """Score that each lacks to be full in every resource that its plan weighs."""
    left: IntArray
    """Samples that are in no group."""
    tolerance: int

    def split(self, dissolved: NDArray[np.bool_]) -> tuple[_Made, IntArray]:
        """The groups that stay, and the samples of those that are dissolved."""
        moves = np.repeat(dissolved, self.sizes)
        stays = ~dissolved
        made = _Made(
            self.samples[~moves], self.sizes[stays], self.slacks[stays], self.left, self.tolerance
        )
        return made, self.samples[moves]

    def worst(self, count: int) -> NDArray[np.bool_]:
        """Which are the `count` groups with the most slack; fewer, if several are at the border
        alike.
        """
        border = len(self.slacks) - 1 - count
        return self.slacks > (np.partition(self.slacks, border)[border] if border >= 0 else -1)


def group_best_fit(
    vision: Load,
    tokens: Load,
    limits: Limits,
    *,
    seed: int,
    rounds: int = DEFAULT_ROUNDS,
    also: Sequence[Resource] = (),
    plan: Plan | None = None,
) -> Groups:
    """Group samples under both caps, and those of `also`, into as few groups as can be found.

    `vision` and `tokens` are the loads of the samples, shape (num_samples,), in the unit of
    `limits.max_vision` and in LLM tokens; the filter targets of `limits` do not matter. Every
    sample ends in exactly one group. `rounds` is the effort; they are shared out among the windows
    of a large set, so that time stays linear. In one window more of them, from 6 on, never need
    more groups. A given `plan` saves choosing one (`choose_strategy`), most of the time that few
    samples take. Raises ValueError for a sample that is over a cap by itself.

    >>> limits = Limits(max_seq_len=10, max_vision=4, min_seq_len=9, min_vision=4)
    >>> groups = group_best_fit(np.array([1, 3, 0, 1]), np.array([6, 4, 10, 4]), limits, seed=0)
    >>> sorted(sorted(groups[g].tolist()) for g in range(len(groups)))
    [[0, 3], [1], [2]]
    """
    if rounds < 0:
        raise ValueError(f"rounds is {rounds}; give 0 or more")
    packing, num_samples = PackedLoads.of(resources_of(vision, tokens, limits, also)), len(tokens)
    if num_samples == 0:
        return Groups(np.empty(0, np.int64), np.zeros(1, np.int64))
    num_windows = _num_windows(packing)
    rounds = rounds // num_windows
    draw = _draw(num_samples, num_windows, seed)
    if plan is None:
        plan = _best_plan(packing, draw(0), seed, rounds)
    samples = np.empty(num_samples, index_dtype(num_samples))
    sizes, done = [np.zeros(1, np.int32)], 0
    left, tolerance = np.empty(0, np.int64), FIRST_TOLERANCE
    for number in range(num_windows):
        window = np.concatenate([left, draw(number)])
        if number < num_windows - 1:
            made = _make(
                packing, plan, window, _bits(seed, number), tolerance, keep=len(window) // CARRIED
            )
            made, weak = made.split(made.worst(len(made.sizes) // CARRIED))
            left, tolerance = np.concatenate([made.left, weak]), made.tolerance
        else:
            made = _make_well(packing, plan, window, seed, number, rounds)
        samples[done : done + len(made.samples)] = made.samples
        done += len(made.samples)
        sizes.append(made.sizes)
    return Groups(samples, np.cumsum(np.concatenate(sizes), dtype=np.int64))


def choose_strategy(
    vision: Load,
    tokens: Load,
    limits: Limits,
    *,
    seed: int,
    rounds: int = DEFAULT_ROUNDS,
    also: Sequence[Resource] = (),
    varied: bool = False,
) -> Plan:
    """The plan by which `group_best_fit` groups these samples; it serves for others like them under the
    same caps.

    `varied` leaves out the plans that begin groups with the largest samples: they make much the
    same groups with every seed.
    """
    packing = PackedLoads.of(resources_of(vision, tokens, limits, also))
    num_windows = _num_windows(packing)
    return _best_plan(
        packing, _draw(len(tokens), num_windows, seed)(0), seed, rounds // num_windows, varied
    )


def _best_plan(
    packing: PackedLoads, window: IntArray, seed: int, rounds: int, varied: bool = False
) -> Plan:
    """Of all plans the two that make the fewest groups of a part of all samples, of these the
    better on a window.
    """
    num_samples, rounds = len(packing.resources[0].load), min(rounds, TRIAL_ROUNDS)
    trial = _draw(num_samples, -(-num_samples // TRIAL_SAMPLES), seed)(0)
    plans = [plan for plan in all_plans(packing) if not (varied and plan.rules.seed_largest)]
    plans.sort(key=_num_groups(packing, trial, seed, rounds))
    return min(plans[:FINALISTS], key=_num_groups(packing, window, seed, rounds))


def _num_groups(
    packing: PackedLoads, samples: IntArray, seed: int, rounds: int
) -> Callable[[Plan], int]:
    """Plan -> the number of groups that it makes of `samples`."""
    return lambda plan: len(_make_well(packing, plan, samples, seed, 0, rounds).sizes)


def _num_windows(packing: PackedLoads) -> int:
    return max(
        1, min(len(packing.resources[0].load) // WINDOW_SAMPLES, _fewest(packing) // WINDOW_GROUPS)
    )


def _draw(num_samples: int, num_windows: int, seed: int) -> Callable[[int], IntArray]:
    """Window number -> its samples, int64: one of each `num_windows` consecutive ones; each sample
    is in one window.

    So each window is like the whole, also where samples are sorted by source or length.
    """
    starts = np.arange(0, num_samples, num_windows)
    shifts = (random_bits(len(starts), seed, GROUPS) % np.uint64(num_windows)).astype(np.int64)

    def window(number: int) -> IntArray:
        drawn = starts + (number + shifts) % num_windows
        return drawn[drawn < num_samples]

    return window


def _bits(seed: int, window: int, turn: int = 0, count: int = 1) -> NDArray[np.uint64]:
    return random_bits(count, seed, GROUPS, epoch=1 + window, place=turn)


def _make(
    packing: PackedLoads,
    plan: Plan,
    window: IntArray,
    bits: NDArray[np.uint64],
    tolerance: int,
    keep: int = 0,
) -> _Made:
    """Groups of the samples of a window, one pass, until at most `keep` samples are left."""
    packed, score = packing.pack(window), plan.scores(packing, window)
    places, ends, slacks, tolerance = run_pass(packed, score, plan.rules, bits[0], tolerance, keep)
    grouped = int(ends[-1]) if len(ends) else 0
    members = window[places]
    return _Made(
        members[:grouped],
        np.diff(ends, prepend=np.int32(0)),
        slacks,
        members[grouped:],
        int(tolerance),
    )


def _make_well(
    packing: PackedLoads, plan: Plan, window: IntArray, seed: int, number: int, rounds: int
) -> _Made:
    """Groups of all samples of a window: in each round the worst are made again, and stay as they
    were if that fails.

    Rounds dissolve 2/3, 2/4, 2/5, ... of the groups. Of as many groups, those are better whose
    slack is less even: some full, and some with room for others.
    """
    made = _make(packing, plan, window, _bits(seed, number), FIRST_TOLERANCE)
    fewest = _fewest(packing, window)
    for turn in range(1, rounds + 1):
        if len(made.sizes) <= fewest:
            break
        num_random = 1 + int(len(made.sizes) * LEAST_SHARE)
        bits = _bits(seed, number, turn, 1 + num_random)
        dissolved = made.worst(max(num_random, 2 * len(made.sizes) // (2 + turn)))
        dissolved[(bits[1:] % np.uint64(len(made.sizes))).astype(np.int64)] = True
        stays, loose = made.split(dissolved)
        again = _make(packing, plan, loose, bits, made.tolerance)
        if _value(again.slacks) >= _value(made.slacks[dissolved]):
            made = _Made(
                np.concatenate([stays.samples, again.samples]),
                np.concatenate([stays.sizes, again.sizes]),
                np.concatenate([stays.slacks, again.slacks]),
                made.left,
                again.tolerance,
            )
    return made


def _value(slacks: NDArray[np.int32]) -> tuple[int, int]:
    """More is better: fewer groups, then more uneven slack."""
    return -len(slacks), int(np.square(slacks, dtype=np.int64).sum())


def _fewest(packing: PackedLoads, samples: IntArray | slice = slice(None)) -> int:
    """Groups that no grouping of `samples` gets below, by each resource alone."""
    return max(
        -(-int(r.load[samples].sum(dtype=np.int64)) // max(r.cap, 1)) for r in packing.resources
    )
