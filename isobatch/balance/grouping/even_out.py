"""Groups of equal cost: pairs of them exchange samples until all cost the same.

For the packer, after `balance.grouping.best_fit`, which makes few groups, but some of them with
many images and some with none. Groups of equal cost are balanced in any order, so a random one
serves (`balance.order.global_shuffle`).

Each round takes the groups that are furthest from the mean load (a vector: vision, LLM tokens, and
attention's squared lengths), each with a random partner, and divides the samples of both again:
single samples and pairs of them change sides while that brings both nearer to the mean; a few
random changes and the same again find better divisions. A division that breaks a cap may be on the
way to a better one, but is never kept. Groups that are near enough are left alone, so that most of
the work is in the first rounds. The number of groups stays.

Two sources of images and one of text, 32,768 tokens: loads' spread from .145 / .022 / .37 of the
mean (vision / tokens / attention) to .031 / .0002 / .05. Pure: integers only, and a pair's random
numbers are its own, so the same groups on every machine, with any number of threads.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from isobatch.balance.grouping._even_out_kernel import (
    COSTLY,
    FAR,
    NEAR,
    NEAR_ENOUGH,
    SCALE_BITS,
    UNIT,
    EvenState,
    divide_pairs,
)
from isobatch.balance.grouping.best_fit import group_best_fit
from isobatch.balance.metrics import epoch_ms
from isobatch.balance.rng import EVEN, random_bits, random_permutation
from isobatch.common.types import Groups, IntArray, Limits

MAX_ROUNDS = 24
"""Rounds at most; groups that are near enough, or did not get better, make the last ones short."""
ATTENTION_TOKENS = 1 << 18
"""Tokens of a group at which attention counts as much as the others: 1/8 of it at 32,768."""
SLACK = 500
"""1 / share of the tokens that groups do without, so that they can exchange samples: .2 %."""
VISION_SHARE, TRIAL_DP = 0.25, 8
"""The encoder's share of the time (.1 to .5 in the papers' models), and the ranks it is for."""
PATIENCE, GAIN = 4, 0.02
"""Rounds in a row without a better division, after which a group is left as it is; and share of all
distances that two rounds must bring, or they are the last.
"""


def group_balanced(
    vision: IntArray,
    tokens: IntArray,
    limits: Limits,
    *,
    seed: int,
    keep: Callable[[Groups], Groups] = lambda groups: groups,
) -> Groups:
    """Group samples under both caps into few groups of about equal loads.

    `vision` and `tokens` are the samples' loads, integers, shape (num_samples,).
    As `group_best_fit`, then `even_out`. Groups that are full to the last token cannot exchange
    samples: where they stay uneven, the same with a little less of it, if that is faster in a
    random order. `keep` chooses among the groups before they are made even.

    >>> limits = Limits(max_seq_len=10, max_vision=4, min_seq_len=9, min_vision=4)
    >>> groups = group_balanced(np.array([1, 3, 0, 1]), np.array([6, 4, 10, 4]), limits, seed=0)
    >>> sorted(sorted(groups[g].tolist()) for g in range(len(groups)))
    [[0, 3], [1], [2]]
    """
    fitted = keep(group_best_fit(vision, tokens, limits, seed=seed))
    best = even_out(fitted, vision, tokens, limits, seed=seed)
    spare = limits.max_seq_len - limits.max_seq_len // SLACK
    sums = best.sum(vision), best.sum(tokens)
    time = _random_order_time(*sums, seed)
    min_time = _random_order_time(_most_even(sums[0]), _most_even(sums[1]), seed)
    if time <= min_time * (1 + 1 / SLACK) or spare < int(tokens.max(initial=0)):
        return best
    slack = replace(limits, max_seq_len=spare, min_seq_len=min(limits.min_seq_len, spare))
    looser = keep(group_best_fit(vision, tokens, slack, seed=seed))
    looser = even_out(looser, vision, tokens, limits, seed=seed)
    looser_time = _random_order_time(looser.sum(vision), looser.sum(tokens), seed)
    return looser if looser_time < time else best


def _most_even(loads: IntArray) -> IntArray:
    """As many loads of the same sum that are as even as whole numbers can be, int64."""
    return (int(loads.sum()) + np.arange(len(loads))) // max(1, len(loads))


def _random_order_time(vision: IntArray, tokens: IntArray, seed: int) -> float:
    """Time of an epoch of groups in random order, relative: steps wait for their slowest rank."""
    order = random_permutation(len(vision), seed, EVEN)
    shares = [load[order] / max(1, int(load.sum())) for load in (vision, tokens)]
    times = VISION_SHARE * shares[0] + (1 - VISION_SHARE) * shares[1]
    return epoch_ms(times, min(TRIAL_DP, max(1, len(vision))))


def even_out(
    groups: Groups,
    vision: IntArray,
    tokens: IntArray,
    limits: Limits,
    *,
    seed: int,
    rounds: int = MAX_ROUNDS,
) -> Groups:
    """As many groups of the same samples within the same caps, with more equal loads.

    `vision` and `tokens` are the samples' loads, shape (num_samples,), as for `group_best_fit`.

    >>> limits = Limits(max_seq_len=10, max_vision=8, min_seq_len=9, min_vision=8)
    >>> groups = Groups(np.array([0, 1, 2, 3]), np.array([0, 2, 4]))
    >>> made = even_out(groups, np.array([4, 4, 0, 0]), np.array([5, 5, 5, 5]), limits, seed=0)
    >>> made.sum(np.array([4, 4, 0, 0])).tolist()
    [4, 4]
    """
    if len(groups) < 2:
        return groups
    state = _state(groups, vision, tokens, limits)
    threads = os.cpu_count() or 1
    # rounds in a row in which a group did not get better
    failures = np.zeros(len(groups), np.int64)
    totals: list[int] = []
    with ThreadPoolExecutor(threads) as pool:
        for number in range(rounds):
            distances = _distances(state.above, state.scale, state.near)
            totals.append((int((distances >> 32).sum()) << 32) + int((distances % (1 << 32)).sum()))
            if number > 1 and totals[-1] > (1 - GAIN) * totals[-3]:
                break
            pairs = _pairs(distances, failures, seed, number)
            bits = random_bits(len(pairs), seed, EVEN, epoch=number)
            parts = np.array_split(np.arange(len(pairs)), threads)
            futures = [pool.submit(divide_pairs, pairs[part], bits[part], state) for part in parts]
            better = np.concatenate([future.result() for future in futures])
            failures[pairs[:, 0]] = np.where(better, 0, failures[pairs[:, 0]] + 1)
    places = np.arange(len(state.members)) - np.repeat(state.starts[:-1], np.diff(state.starts))
    taken = places < np.repeat(state.sizes, np.diff(state.starts))
    offsets = np.concatenate([[0], np.cumsum(state.sizes)])
    return Groups(state.members[taken].astype(groups.samples.dtype), offsets)


def _state(groups: Groups, vision: IntArray, tokens: IntArray, limits: Limits) -> EvenState:
    num_groups = len(groups)
    sizes = groups.sizes.astype(np.int64)
    squares = tokens.astype(np.int64) ** 2
    # so that the mean group has 24 bits of squares: precise enough, and sums fit 64 bits
    mean = int(squares.mean() * len(groups.samples) / num_groups)
    squares = np.minimum(squares >> max(0, mean.bit_length() - 24), np.iinfo(np.int32).max)
    loads = np.stack([load.astype(np.int32) for load in (vision, tokens, squares)], axis=1)
    sums = np.stack([groups.sum(load) for load in loads.T], axis=1)
    means = sums.sum(axis=0) // num_groups
    scale = (UNIT << SCALE_BITS) // np.maximum(means, 1)
    scale[2] = scale[2] * min(limits.max_seq_len, ATTENTION_TOKENS) // ATTENTION_TOKENS
    # the vision of a group is whole patches: the next number above the mean is as near as can be
    near = np.array([max(NEAR, int(scale[0]) >> SCALE_BITS), FAR, FAR])
    max_above = np.array([limits.max_vision - means[0], limits.max_seq_len - means[1], FAR])
    # a group's places: its samples, and room for more
    places = np.maximum(2 * sizes, 2 * (len(groups.samples) // num_groups) + 4)
    starts = np.concatenate([[0], np.cumsum(places)])
    # one type whatever the caller's, unless there are too many: each has its own kernels compiled
    kind = np.int32 if len(loads) <= np.iinfo(np.int32).max else np.int64
    members = np.full(starts[-1], -1, kind)
    firsts = np.repeat(starts[:-1] - groups.offsets[:-1], sizes)
    members[firsts + np.arange(len(groups.samples))] = groups.samples
    return EvenState(members, starts, sizes, loads, sums - means, scale, near, max_above)


def _distances(above: IntArray, scale: IntArray, near: IntArray) -> IntArray:
    """What `_cost` says of each group, without caps and the fraction of the mean vision load."""
    whole = above - (above > 0) * np.array([1, 0, 0])
    units = np.clip(whole * scale >> SCALE_BITS, -FAR, FAR)
    squares: IntArray = (units**2).sum(axis=1)
    return np.asarray(squares + COSTLY * np.maximum(units[:, 0] - near[0], 0) ** 2)


def _pairs(distances: IntArray, failures: IntArray, seed: int, number: int) -> IntArray:
    """(num_pairs, 2): the groups that are far from the mean, each with a random other one."""
    far = np.flatnonzero((distances > NEAR_ENOUGH**2) & (failures < PATIENCE))
    far = far[np.argsort(-distances[far], kind="stable")][: len(distances) // 2]
    is_far = np.zeros(len(distances), bool)
    is_far[far] = True
    others = np.flatnonzero(~is_far)
    bits = random_bits(len(others), seed, EVEN, epoch=number, place=1)
    partners = others[np.argsort(bits, kind="stable")[: len(far)]]
    return np.stack([far[: len(partners)], partners], axis=1)
