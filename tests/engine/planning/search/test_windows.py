"""Chains of windows against every chain, one by one."""

import itertools

import numpy as np

from isobatch.engine.planning.search._windows import (
    Windows,
    best_chain,
    chain_bounds,
    count_joined,
    join,
    prune,
)
from isobatch.engine.planning.search.local_search import NEVER
from support.cases import for_each


def random_chain(rng):
    """Windows of one stage with random bounds: some of the stages that partitions of a few layers
    can have.
    """
    num_stages = int(rng.integers(1, 5))
    num_layers = int(rng.integers(num_stages, num_stages + 4))
    chain = []
    for stage in range(num_stages):
        starts = [0] if stage == 0 else range(1, num_layers)
        ends = [num_layers] if stage == num_stages - 1 else range(1, num_layers)
        borders = [
            (a, b) for a, b in itertools.product(starts, ends) if a < b and rng.random() < 0.8
        ]
        borders = np.array(borders * int(rng.integers(1, 3)), np.int64).reshape(
            -1, 2
        )  # several choices
        chain.append(
            Windows(
                borders=borders,
                choices=np.arange(len(borders))[:, np.newaxis],
                bound_ns=rng.integers(0, 9, len(borders)),
                head=borders[:, 0],
                tail=borders[:, 1],
            )
        )
    return chain


def chains(chain):
    """Every chain: the places of its windows, which agree on what they share."""
    for places in itertools.product(*(range(len(one)) for one in chain)):
        if all(
            a.tail[i] == b.head[j]
            for (a, i), (b, j) in itertools.pairwise(zip(chain, places, strict=True))
        ):
            yield places


def slowest(chain, places):
    return max(int(one.bound_ns[place]) for one, place in zip(chain, places, strict=True))


@for_each("seed", range(150))
def test_bounds_pruning_and_joining_are_those_of_every_chain(seed):
    chain = random_chain(np.random.default_rng(seed))
    while True:
        every = {places: slowest(chain, places) for places in chains(chain)}
        bounds = chain_bounds(chain)
        for at, own in enumerate(bounds):
            for place in range(len(chain[at])):
                through = [bound for places, bound in every.items() if places[at] == place]
                assert own[place] == min(through, default=NEVER)
        if every:
            borders, choices = best_chain(chain, bounds)
            fits = [
                bound
                for places, bound in every.items()
                if whole(chain, places) == (borders.tolist(), choices.tolist())
            ]
            assert min(fits) == min(every.values())
        limit = int(np.random.default_rng(seed).integers(3, 11))
        kept = prune(chain, bounds, limit)
        left = {tuple(map(tuple, whole(kept, places))) for places in chains(kept)}
        assert left >= {
            tuple(map(tuple, whole(chain, places)))
            for places, bound in every.items()
            if bound < limit
        }
        if len(kept) == 1:
            return
        joined = count_joined(chain, bounds, limit)
        chain = join(kept)
        assert joined == sum(len(one) for one in chain)
        assert {tuple(map(tuple, whole(chain, places))) for places in chains(chain)} == left


def whole(chain, places):
    """(borders, choices) of a chain."""
    borders = chain[0].borders[places[0]].tolist() + [
        int(one.borders[place, -1]) for one, place in zip(chain[1:], places[1:], strict=True)
    ]
    choices = chain[0].choices[places[0]].tolist() + [
        int(one.choices[place, -1]) for one, place in zip(chain[1:], places[1:], strict=True)
    ]
    return borders, choices
