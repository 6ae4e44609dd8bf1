"""`balance.order.regroup` in plain Python: sets of samples that trade places, offer after offer."""

from itertools import pairwise

from isobatch.balance.order import regroup as tested
from isobatch.balance.rng import WINDOWS, random_bits
from support.oracles.isf_oracle import MASK, mix


def regroup_oracle(vision, tokens, groups, limits, *, window_groups, seed, epoch):
    """Groups as sets of samples; `groups` are lists of samples, loads are lists per sample."""
    vision, tokens = list(map(int, vision)), list(map(int, tokens))
    largest = max(vision, default=0)
    level = 1 << max(0, largest.bit_length() - tested.LEVEL_BITS)
    shift = int(random_bits(1, seed, WINDOWS, epoch)[0]) % window_groups
    borders = sorted({0, *range(shift, len(groups), window_groups), len(groups)})
    states = random_bits(len(borders), seed, WINDOWS, epoch, place=1).tolist()
    made = []
    for (first, end), state in zip(pairwise(borders), states, strict=False):
        window = [set(group) for group in groups[first:end]]
        places = [sample for group in groups[first:end] for sample in group]
        ranked = sorted(places, key=lambda sample: (vision[sample] // level, tokens[sample]))
        trade(window, ranked, (vision, tokens), limits, state)
        made += window
    return made


def trade(window, ranked, loads, limits, state):
    caps = limits.max_vision, limits.max_seq_len
    unit = [max(1, (1 << tested.UNIT_BITS) // max(1, cap)) for cap in caps]
    home = {sample: number for number, group in enumerate(window) for sample in group}
    for sweep in range(tested.SWEEPS):
        bits = tested.MOST_REACH - sweep % tested.MOST_REACH
        reach = min(len(ranked), 2**bits)
        is_last = sweep >= tested.SWEEPS - tested.SWEEPS // 3
        for rank, one in enumerate(ranked[:-1]):
            state = (state + 0x9E3779B97F4A7C15) & MASK
            other = rank + 1 + ((mix(state) >> 32) * reach >> 32)
            if other >= len(ranked):
                continue
            other = ranked[other]
            first, second = home[one], home[other]
            if first == second:
                continue
            after = window[first] - {one} | {other}, window[second] - {other} | {one}
            growth = 0
            for load, weight in zip(loads, unit, strict=True):
                for old, new in zip((window[first], window[second]), after, strict=True):
                    growth += (weight * total(load, new)) ** 2 - (weight * total(load, old)) ** 2
            fits = all(
                total(load, group) <= cap
                for group in after
                for load, cap in zip(loads, caps, strict=True)
            )
            if fits and growth <= (0 if is_last else 2 * tested.UNEVEN**2):
                window[first], window[second] = after
                home[one], home[other] = second, first


def total(load, group):
    return sum(load[sample] for sample in group)
