"""Steps of several builds: by weights, mixed, each group once, and ranks that wait little."""

import json
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isobatch.balance.metrics import dist_ratio
from isobatch.balance.order.mixture import (
    UNIT,
    MixedShuffle,
    entropy,
    figures_of,
    most_alike_mixed,
    predicted_waiting,
    step_counts,
    whole_counts,
)
from isobatch.balance.order.step_order import GlobalShuffle

SIZES, TOKENS = [2_000, 2_800, 2_600], [4_096, 8_192, 16_384]


class Builds:
    """Groups of several builds, each of nearly its own load."""

    def __init__(self, sizes, tokens, seed=0):
        rng = np.random.default_rng(seed)
        self.sizes = sizes
        self.of = np.repeat(np.arange(len(sizes)), sizes)
        self.tokens = np.array(tokens)[self.of] - rng.integers(0, 200, len(self.of))
        self.vision = self.tokens // 290 + rng.integers(0, 2, len(self.of))
        self.samples = np.maximum(1, self.tokens // 1_000)

    def order(self, balance=0.9, **state):
        return MixedShuffle(
            sizes=self.sizes,
            build_lookup=lambda groups: (self.of[groups], self.samples[groups]),
            seed=3,
            epoch=0,
            balance=balance,
            **state,
        )

    def loads(self, groups):
        return self.vision[groups], self.tokens[groups]

    def figures(self, order, dp, micro_batches):
        """(entropy of a step's builds in bits, dist ratios of vision and tokens) of an epoch."""
        steps = []
        while order.remaining >= dp * micro_batches:
            steps.append(order.take_step(dp, micro_batches, self.loads))
        steps = np.array(steps)
        rounds = steps.transpose(0, 2, 1).ravel()
        counts = np.array(
            [
                np.bincount(self.of[step], self.samples[step], len(self.sizes)).astype(int)
                for step in steps.reshape(len(steps), -1)
            ]
        )
        dist = dist_ratio(self.vision[rounds], dp), dist_ratio(self.tokens[rounds], dp)
        return float(entropy(counts).mean()) / UNIT, *dist


@settings(deadline=None, max_examples=40)
@given(
    sizes=st.lists(st.integers(0, 60), min_size=2, max_size=5),
    shapes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 4)), min_size=1, max_size=8),
    balance=st.sampled_from([0.0, 0.3, 0.9, 0.99]),
)
def test_every_group_once_on_changing_ranks_and_resumed(sizes, shapes, balance):
    builds, seen = Builds(sizes, range(1_000, 1_000 * (len(sizes) + 1), 1_000)), []
    order = builds.order(balance)
    for dp, micro_batches in [*shapes, *[(9, 4)] * (sum(sizes) // 36 + 1)]:
        twin = order.copy()
        step = order.take_step(dp, micro_batches, builds.loads)
        assert (step >= 0).sum() == min(dp * micro_batches, twin.remaining)
        np.testing.assert_array_equal(twin.take_step(dp, micro_batches, builds.loads), step)
        seen += step[step >= 0].tolist()
        order = builds.order(balance, **json.loads(json.dumps(order.state())))
    assert sorted(seen) == list(range(sum(sizes)))


def test_a_state_of_the_order_before_goes_on_with_what_is_left():
    builds = Builds(SIZES, TOKENS)
    before = GlobalShuffle(num_groups=sum(SIZES), seed=3, epoch=0, balance=0.5)
    seen = [before.take_step(8, 2, builds.loads).ravel() for _ in range(30)]
    order = builds.order(**before.state())
    while order.remaining:
        step = order.take_step(8, 2, builds.loads).ravel()
        seen.append(step[step >= 0])
    assert sorted(np.concatenate(seen).tolist()) == list(range(sum(SIZES)))


@pytest.mark.parametrize("dp", [8, 64])
def test_steps_are_as_mixed_as_random_ones_and_ranks_wait_a_fifth(dp):
    builds = Builds(SIZES, TOKENS)
    mixed, *waiting = builds.figures(builds.order(), dp, 4)
    random, *random_waiting = builds.figures(builds.order(0.0), dp, 4)
    assert mixed >= 0.95 * random
    assert sum(waiting) <= sum(random_waiting) / 5


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_builds_that_are_packed_alike_are_mixed_and_wait_no_longer(micro_batches):
    builds = Builds(SIZES, [8_192] * 3)
    mixed, *waiting = builds.figures(builds.order(), 8, micro_batches)
    random, *random_waiting = builds.figures(builds.order(0.0), 8, micro_batches)
    assert mixed >= 0.95 * random
    assert all(mine <= its for mine, its in zip(waiting, random_waiting, strict=True))


@pytest.mark.thorough
def test_the_waiting_that_is_predicted_is_what_ranks_wait():
    builds = Builds(SIZES, TOKENS)
    sizes = np.array(SIZES)
    sums = [
        np.bincount(builds.of, values).astype(int)
        for values in (builds.vision, builds.tokens, builds.samples)
    ]
    for micro_batches in (1, 4):
        expected = sizes * 8 * micro_batches * UNIT // sizes.sum()
        figures = figures_of(expected, sums[:2], sizes, sums[2])
        predicted = predicted_waiting(figures, (8, micro_batches))
        _, *found = builds.figures(builds.order(), 8, micro_batches)
        assert found == pytest.approx(predicted, abs=0.03)


def test_counts_cost_no_more_than_those_in_proportion_and_little_more_than_the_best():
    rng = np.random.default_rng(0)
    for case in range(30):
        sizes = rng.integers(20, 400, 3)
        means = rng.integers(2_000, 16_384, 3)
        expected = sizes * 16 * UNIT // sizes.sum()
        figures = figures_of(expected, [means * sizes] * 2, sizes, sizes * rng.integers(1, 9, 3))
        owed = rng.integers(-UNIT, UNIT, 3)
        owed[2] -= owed.sum() + expected.sum() - 16 * UNIT
        counts = step_counts(figures, owed, np.full(3, 16), (4, 4))
        assert counts.sum() == 16
        costs = {
            tried: cost_of(np.array(tried), figures, expected + owed, 4)
            for tried in product(range(17), repeat=3)
            if sum(tried) == 16
        }
        mine = costs[tuple(counts.tolist())]
        plain = whole_counts(expected + owed, np.full(3, 16), 16)
        assert mine <= costs[tuple(plain.tolist())] + 0.001, case
        assert mine <= min(costs.values()) + 1.5, case


def cost_of(counts, figures, targets, dp):
    """What `step_counts` makes least, group by group and in floating point."""

    def waiting(counts):
        order = np.argsort(-(figures.vision + figures.tokens), kind="stable")
        total = 0.0
        for load in (figures.vision, figures.tokens):
            rounds = np.repeat(load[order], counts[order]).reshape(-1, dp)
            paid = rounds.max(axis=1).sum() * dp
            total += (paid - rounds.sum()) / paid
        return total

    def mixing(counts):
        shares = counts * figures.samples / (counts * figures.samples).sum()
        return -sum(share * np.log2(share) for share in shares if share > 0)

    usual = whole_counts(figures.expected, np.full(3, 16), 16)
    debt = ((counts - targets / UNIT) / dp) ** 2
    return (
        waiting(counts) / max(0.01, waiting(usual))
        - 8 * mixing(counts) / mixing(figures.expected)
        + 0.6 * debt.sum()
    )


def test_sets_of_known_sources_are_mixed_and_the_nearest_of_them():
    rng = np.random.default_rng(0)
    for case in range(20):
        main = rng.integers(0, 2, 80)
        # the load tells the source
        vision, tokens = 10 + 3 * main + rng.integers(0, 3, 80), rng.integers(3_900, 4_096, 80)
        sources = np.eye(2, dtype=int)[main] * rng.integers(1, 4, 80)[:, None]
        chosen = most_alike_mixed((vision, tokens), sources, 8, 0.2, 4)
        assert len(set(chosen.tolist())) == 8
        chunks = sources.reshape(10, 8, 2).sum(axis=1)
        least = entropy(chunks).mean() * 0.9
        assert entropy(sources[chosen].sum(axis=0)[None])[0] >= least, case
        assert np.array_equal(
            most_alike_mixed((vision, tokens), sources, 80, 0.2, 4), np.arange(80)
        )
        # the first group is in the set around it, however unlike it is
        vision[0], sources[0] = 90, [0, 0]
        sources = np.concatenate([sources, np.eye(80, 1, dtype=int)], axis=1)
        assert 0 in most_alike_mixed((vision, tokens), sources, 8, 0.2, 1)
