"""Batches of similar length: the fewest that fit, with the least padding."""

from itertools import pairwise

import numpy as np

from isobatch.balance.grouping.cap_lines import CapNames, padded_lines
from isobatch.balance.grouping.padded import choose_padded_limits, group_padded
from isobatch.balance.metrics import padded_loads
from isobatch.common.types import Limits

NAMES = CapNames(given_tokens="your max_tokens")


def limits_of(tokens, vision):
    return Limits(max_seq_len=tokens, max_vision=vision, min_seq_len=tokens, min_vision=vision)


def partitions(items):
    """All ways to divide a list into parts."""
    if not items:
        yield []
        return
    first, *rest = items
    for parts in partitions(rest):
        yield [[first], *parts]
        for place, part in enumerate(parts):
            yield [*parts[:place], [first, *part], *parts[place + 1 :]]


def cuts(items):
    """All ways to cut a list into runs."""
    for bits in range(1 << max(0, len(items) - 1)):
        borders = [0, *(i for i in range(1, len(items)) if bits >> (i - 1) & 1), len(items)]
        yield [items[start:end] for start, end in pairwise(borders)]


def best(ways, vision, tokens, limits):
    """(batches, padded tokens) of the best way that fits."""
    found = []
    for parts in ways:
        areas = [len(part) * max(tokens[part]) for part in parts]
        loads = [sum(vision[part]) for part in parts]
        if max(areas) <= limits.max_seq_len and max(loads) <= limits.max_vision:
            found.append((len(parts), int(sum(areas))))
    return min(found)


def test_no_grouping_needs_fewer_batches_or_as_many_with_less_padding():
    for draw in range(30):
        rng = np.random.default_rng(draw)
        count = int(rng.integers(1, 8))
        tokens, vision = rng.integers(1, 12, count), np.zeros(count, np.int64)
        limits = limits_of(int(rng.integers(12, 40)), 1)
        groups, waiting = group_padded(vision, tokens, limits, seed=draw)
        found = len(groups), int(padded_loads(groups, tokens).sum())
        wanted = best(partitions([*range(count)]), vision, tokens, limits)
        assert (found, len(waiting)) == (wanted, 0), draw


def test_no_cut_of_the_sorted_samples_is_better_under_both_caps():
    for draw in range(30):
        rng = np.random.default_rng(draw)
        count = int(rng.integers(1, 11))
        tokens, vision = rng.permutation(40)[:count] + 1, rng.integers(0, 5, count)
        limits = limits_of(int(rng.integers(40, 120)), int(rng.integers(4, 12)))
        groups, _ = group_padded(vision, tokens, limits, seed=draw)
        assert groups.sum(vision).max() <= limits.max_vision
        found = len(groups), int(padded_loads(groups, tokens).sum())
        by_length = np.argsort(-tokens).tolist()
        assert found == best(cuts(by_length), vision, tokens, limits), draw


def test_windows_lose_no_sample_and_their_worst_batches_wait():
    rng = np.random.default_rng(0)
    tokens, vision = np.exp(rng.normal(6, 1, 2000)).astype(np.int64) + 1, rng.integers(0, 9, 2000)
    limits = limits_of(2000, 60)
    groups, waiting = group_padded(vision, tokens, limits, seed=0, is_last=False)
    assert sorted([*groups.samples.tolist(), *waiting.tolist()]) == [*range(2000)]
    assert 0 < len(waiting) < 400
    padded = padded_loads(groups, tokens)
    is_over = tokens[groups.samples[groups.offsets[:-1]]] > 2000
    assert is_over.sum() == (tokens > 2000).sum()
    assert groups.sizes[is_over].max() == 1
    assert padded[~is_over].max() <= 2000
    assert groups.sum(vision).max() <= 60
    for start, end in pairwise(groups.offsets.tolist()):
        lengths = tokens[groups.samples[start:end]]
        assert (np.diff(lengths) <= 0).all()  # the longest first
    every, none = group_padded(vision, tokens, limits, seed=0)
    assert len(none) == 0
    # the batches that wait are those that pad most, or lack rows
    with_all = padded_loads(every, tokens).sum() - tokens.sum()
    assert padded.sum() - tokens[groups.samples].sum() < 0.8 * with_all
    again, _ = group_padded(vision, tokens, limits, seed=0, is_last=False)
    assert np.array_equal(groups.samples, again.samples)
    others, _ = group_padded(vision, tokens, limits, seed=0, place=(1, 0), is_last=False)
    assert sorted(others.samples.tolist()) == sorted(groups.samples.tolist())
    assert not np.array_equal(groups.samples, others.samples)


def test_windows_of_no_and_of_one_sample():
    limits = limits_of(10, 3)
    for tokens in ([], [4], [40]):
        groups, waiting = group_padded(
            np.zeros(len(tokens), np.int64),
            np.array(tokens, np.int64),
            limits,
            seed=0,
            is_last=False,
        )
        assert (groups.samples.tolist(), waiting.tolist()) == ([*range(len(tokens))], [])


def test_chosen_caps_fill_batches_and_vision_costs_none():
    rng = np.random.default_rng(1)
    vision, tokens = rng.integers(0, 6, 2000), rng.integers(100, 1000, 2000)
    unit = {"vision_unit": "image_patches"}
    choice = choose_padded_limits(vision, tokens, max_tokens=None, max_vision=None, **unit)
    limits, lines = choice.limits, padded_lines(choice, NAMES)
    longest = int(tokens.max())
    assert f"({limits.max_seq_len / longest:.3g} x the longest sample)" in lines[0]
    assert "the least that costs no batches" in lines[0]

    def batches(q_t, q_v):
        return len(group_padded(vision, tokens, limits_of(q_t, q_v), seed=0)[0])

    def fill(q_t):
        return tokens.sum() / (batches(q_t, limits.max_vision) * q_t)

    assert fill(limits.max_seq_len) >= 0.895
    assert f"{fill(limits.max_seq_len):.1%} full of samples" in lines[1]
    assert fill(longest) < 0.9
    free = batches(limits.max_seq_len, 10**6)
    assert batches(limits.max_seq_len, limits.max_vision) <= 1.005 * free
    assert batches(limits.max_seq_len, limits.max_vision - 1) > 1.005 * free
    choice = choose_padded_limits(vision, tokens, max_tokens=5000, max_vision=40, **unit)
    given, lines = choice.limits, padded_lines(choice, NAMES)
    assert (given.max_seq_len, given.max_vision) == (5000, 40)
    assert "(your max_tokens), 40 image patches (your max_vision)" in lines[0]
