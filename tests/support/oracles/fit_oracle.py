"""`balance.grouping.best_fit` in plain Python: lists, linear searches and sums against the caps,
nothing packed or indexed.
"""

from dataclasses import dataclass
from itertools import combinations, pairwise

import numpy as np

from isobatch.balance.grouping import best_fit as fit
from isobatch.balance.rng import GROUPS, random_bits
from support.oracles.isf_oracle import shuffle


@dataclass
class Plan:
    score: list[int]
    """Of every sample."""
    cap_score: int
    seed_largest: bool
    greedy: bool


def fit_oracle(loads, caps, *, seed, rounds):
    """Groups as lists of samples; `loads` is a list of samples per resource."""
    loads = [list(map(int, load)) for load in loads]
    samples = list(range(len(loads[0])))
    if not samples:
        return []
    num_windows = max(
        1,
        min(len(samples) // fit.WINDOW_SAMPLES, fewest(loads, caps, samples) // fit.WINDOW_GROUPS),
    )
    rounds //= num_windows
    windows = windows_of(len(samples), num_windows, seed)
    trial = windows_of(len(samples), -(-len(samples) // fit.TRIAL_SAMPLES), seed)[0]

    def number(plan, window):
        return len(make_well(loads, caps, plan, window, seed, 0, min(rounds, fit.TRIAL_ROUNDS)))

    plans = sorted(all_plans(loads, caps), key=lambda plan: number(plan, trial))[: fit.FINALISTS]
    plan = min(plans, key=lambda plan: number(plan, windows[0]))
    done, left, tolerance = [], [], fit.FIRST_TOLERANCE
    for place, drawn in enumerate(windows[:-1]):
        window = left + drawn
        state = int(random_bits(1, seed, GROUPS, epoch=1 + place)[0])
        made, rest, tolerance = make(
            loads, caps, plan, window, state, tolerance, len(window) // fit.PASSED_ON
        )
        weak = worst(plan, made, len(made) // fit.PASSED_ON)
        done += [group for group, is_weak in zip(made, weak, strict=True) if not is_weak]
        left = rest + [
            sample for group, is_weak in zip(made, weak, strict=True) if is_weak for sample in group
        ]
    return done + make_well(loads, caps, plan, left + windows[-1], seed, num_windows - 1, rounds)


def fewest(loads, caps, samples):
    return max(
        -(-sum(load[sample] for sample in samples) // max(cap, 1))
        for load, cap in zip(loads, caps, strict=True)
    )


def windows_of(num_samples, num_windows, seed):
    starts = range(0, num_samples, num_windows)
    shifts = [int(bits) % num_windows for bits in random_bits(len(starts), seed, GROUPS)]
    drawn = [
        [
            start + (number + shift) % num_windows
            for start, shift in zip(starts, shifts, strict=True)
        ]
        for number in range(num_windows)
    ]
    return [[sample for sample in window if sample < num_samples] for window in drawn]


def all_plans(loads, caps):
    needs = [sum(load) / max(cap, 1) for load, cap in zip(loads, caps, strict=True)]
    scarce = [r for r, cap in enumerate(caps) if cap and needs[r] >= fit.ACTIVE * max(needs)]
    choices = [[r] for r in reversed(scarce)] + ([scarce] if len(scarce) > 1 else [])
    for chosen in choices:
        full = 1 << (fit.SCORE_BITS + fit.FRACTION_BITS)
        weights = [
            int(full * (1 / len(chosen))) // cap if r in chosen else 0 for r, cap in enumerate(caps)
        ]
        score = [
            sum(w * load for w, load in zip(weights, row, strict=True)) >> fit.FRACTION_BITS
            for row in zip(*loads, strict=True)
        ]
        cap_score = sum(w * cap for w, cap in zip(weights, caps, strict=True)) >> fit.FRACTION_BITS
        for seed_largest, greedy in ((False, False), (False, True), (True, True)):
            yield Plan(score, cap_score, seed_largest, greedy)


def make_well(loads, caps, plan, window, seed, number, rounds):
    state = int(random_bits(1, seed, GROUPS, epoch=1 + number)[0])
    made, _, tolerance = make(loads, caps, plan, window, state, fit.FIRST_TOLERANCE, 0)
    for turn in range(1, rounds + 1):
        if len(made) <= fewest(loads, caps, window):
            break
        num_random = 1 + int(len(made) * fit.LEAST_SHARE)
        bits = random_bits(1 + num_random, seed, GROUPS, epoch=1 + number, place=turn).tolist()
        chosen = worst(plan, made, max(num_random, 2 * len(made) // (2 + turn)))
        for random in bits[1:]:
            chosen[random % len(made)] = True
        stays = [group for group, goes in zip(made, chosen, strict=True) if not goes]
        goes = [group for group, goes in zip(made, chosen, strict=True) if goes]
        again, _, new_tolerance = make(
            loads, caps, plan, [sample for group in goes for sample in group], bits[0], tolerance, 0
        )
        if value(plan, again) >= value(plan, goes):
            made, tolerance = stays + again, new_tolerance
    return made


def slack_of(plan, group):
    return plan.cap_score - sum(plan.score[sample] for sample in group)


def value(plan, groups):
    return -len(groups), sum(slack_of(plan, group) ** 2 for group in groups)


def worst(plan, groups, count):
    slacks = [slack_of(plan, group) for group in groups]
    border = sorted(slacks)[len(slacks) - 1 - count] if count < len(slacks) else -1
    return [slack > border for slack in slacks]


def make(loads, caps, plan, window, state, tolerance, keep):
    """-> (groups, samples left, tolerance)."""
    a_pass = Pass(loads, caps, plan, sorted(window, key=lambda sample: -plan.score[sample]))
    order = list(range(len(window)))
    shuffle(order, state)
    groups, head = [], 0
    while sum(a_pass.left) > keep:
        block = order[head : head + fit.LOOKAHEAD]
        gone = [rank for rank in block if not a_pass.left[rank]]
        order[head : head + fit.LOOKAHEAD] = gone + [rank for rank in block if a_pass.left[rank]]
        head += len(gone)
        while not a_pass.left[order[head]]:
            head += 1
        group, hit = a_pass.group(order[head : head + fit.LOOKAHEAD], tolerance)
        groups.append([a_pass.samples[rank] for rank in group])
        tolerance += -(tolerance >> fit.ADAPT) if hit else (tolerance >> fit.ADAPT) + 1
    return (
        groups,
        [sample for sample, left in zip(a_pass.samples, a_pass.left, strict=True) if left],
        tolerance,
    )


class Pass:
    def __init__(self, loads, caps, plan, samples):
        self.plan, self.caps, self.samples = plan, caps, samples
        self.load = [tuple(load[sample] for load in loads) for sample in samples]
        self.score = [plan.score[sample] for sample in samples]
        self.left = [True] * len(samples)
        runs = [
            0,
            *(rank for rank, (a, b) in enumerate(pairwise(self.load), 1) if a != b),
            len(samples),
        ]
        self.after = [stop for start, stop in pairwise(runs) for _ in range(start, stop)]

    def group(self, ahead, tolerance):
        """One group: (ranks, whether it was completed within the tolerance)."""
        least, hit, group = self.score[-1], False, []
        add = [self.next_left(0) if self.plan.seed_largest else ahead[0]]
        while add:
            for rank in add:
                self.left[rank] = False
            group += add
            slack = self.plan.cap_score - sum(self.score[rank] for rank in group)
            if slack < least:
                break
            one = self.largest_that_fits(group)
            if one is not None and slack - self.score[one] <= tolerance:
                add, hit = [one], True
                continue
            add = self.completing_pair(group, ahead, slack, tolerance)
            if add:
                hit = True
                continue
            add = self.next_member(group, ahead, slack, one)
        return group, hit

    def next_member(self, group, ahead, slack, one):
        fitting = [rank for rank in ahead if self.left[rank] and self.fits([*group, rank])]
        if fitting and not self.plan.greedy and slack >= 2 * self.score[-1]:
            return fitting[:1]
        fitting += [] if one is None else [one]
        return [min(fitting)] if fitting else []

    def completing_pair(self, group, ahead, slack, tolerance):
        most, least = self.score[0], self.score[-1]
        if not 2 * least <= slack <= 2 * most:
            return []
        fitting = [
            rank
            for rank in ahead
            if self.left[rank]
            and self.fits([*group, rank])
            and least <= slack - self.score[rank] <= most
        ]
        for rank in fitting[: fit.MAX_TRIES]:
            other = self.largest_that_fits([*group, rank], besides=rank)
            if other is not None and slack - self.score[rank] - self.score[other] <= tolerance:
                return [rank, other]
        return []

    def largest_that_fits(self, group, besides=None):
        slack = self.plan.cap_score - sum(self.score[rank] for rank in group)
        rank = next(
            (rank for rank, score in enumerate(self.score) if self.left[rank] and score <= slack),
            None,
        )
        for _ in range(fit.PROBES):
            if rank is not None and rank == besides:
                rank = self.next_left(rank + 1)
            if rank is None or self.fits([*group, rank]):
                return rank
            rank = self.next_left(self.after[rank])
        return None

    def next_left(self, start):
        return next((rank for rank in range(start, len(self.left)) if self.left[rank]), None)

    def fits(self, group):
        sums = [sum(self.load[rank][r] for rank in group) for r in range(len(self.caps))]
        return all(total <= cap for total, cap in zip(sums, self.caps, strict=True))


def best_by_brute_force(loads, caps):
    """Fewest groups of all partitions, by dynamic programming over subsets."""
    rows = np.stack(loads, axis=1)
    everything = (1 << len(rows)) - 1
    fitting = [
        sum(1 << place for place in chosen)
        for size in range(1, len(rows) + 1)
        for chosen in combinations(range(len(rows)), size)
        if (rows[list(chosen)].sum(axis=0) <= caps).all()
    ]
    fewest = {0: 0}
    for held in range(1, everything + 1):
        fewest[held] = 1 + min(fewest[held ^ part] for part in fitting if part & held == part)
    return fewest[everything]
