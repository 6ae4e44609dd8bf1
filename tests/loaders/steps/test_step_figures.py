"""`loader.stats()`: what builds weigh in the gradient, and how often groups meet again."""

import dataclasses
import json

import numpy as np
import pytest

from isobatch.balance.metrics import repeated_pairs
from isobatch.common.types import COUNT_COLUMNS
from isobatch.loaders import StreamingLoader
from isobatch.loaders.stats import PairCounter
from isobatch.loaders.steps.steps import StepNormalizer
from support.builds.sample_tables import path_groups, text_samples, write_tabled


@pytest.fixture(scope="module")
def builds(tmp_path_factory):
    """One with few labels, one with many."""
    root = tmp_path_factory.mktemp("figures")
    few = [
        dataclasses.replace(sample, labels=[-100] * (size - 1) + sample.input_ids[-1:], counts=own)
        for sample in text_samples(240)
        for size in [len(sample.input_ids)]
        for own in [dict.fromkeys(COUNT_COLUMNS, 0) | {"num_text_tokens": size}]
    ]
    for sample in few:
        sample.counts["num_loss_tokens"] = 1
    return [
        write_tabled(root / "few", path_groups(few)),
        write_tabled(root / "many", path_groups(text_samples(301, "other"))),
    ]


def load(source, rank=0, **options):
    return StreamingLoader(
        source, dp_rank=rank, dp_world_size=4, micro_batches_per_step=2, workers=0, **options
    )


def test_shares_are_those_of_the_losses_that_ranks_would_sum(builds):
    source = [(builds[0], 1.0), (builds[1], 0.5)]
    for options in (
        {"loss_normalizer": "step"},
        {},
        {"loss_weights": "square", "loss_normalizer": "step"},
        {"loss_weights": "sample", "regroup": "epoch", "regroup_window": 8},
    ):
        ranks = [load(source, rank, **options) for rank in range(4)]
        sums = np.zeros((2, 2))
        for step in zip(*ranks, strict=True):
            for batch in (batch for rank in step for batch in rank):
                weights = (batch.labels != -100).double()
                if batch.loss_weights is not None:
                    weights = weights * batch.loss_weights
                for place, name in enumerate(batch.sample_ids):
                    start, end = batch.cu_seqlens[place : place + 2].tolist()
                    own = weights[start:end].sum().item()
                    sums[:, int(name.startswith("other"))] += own, own / batch.loss_normalizer
        expected = sums / sums.sum(axis=1, keepdims=True)
        for rank in ranks:
            stats = rank.stats()
            np.testing.assert_allclose(stats.label_shares, expected[0], rtol=1e-6)
            np.testing.assert_allclose(stats.gradient_shares, expected[1], rtol=1e-6)
        same = "loss_normalizer" not in options
        assert (stats.label_shares == pytest.approx(stats.gradient_shares)) == same
        json.dumps(dataclasses.asdict(stats))


def test_one_build_has_everything_and_nothing_is_divided_by_zero(builds):
    loader = load(builds[0])
    empty = loader.stats()
    assert (empty.label_shares, empty.gradient_shares) == ((0.0,), (0.0,))
    assert empty.repeated_pairs is None
    list(loader)
    stats = loader.stats()
    assert (stats.label_shares, stats.gradient_shares) == ((1.0,), (1.0,))
    assert stats.repeated_pairs is None


def test_pairs_are_counted_as_the_metric_does(builds):
    for source in (builds[1], [(builds[0], 1.0), (builds[1], 1.0)]):
        loader = load(source)
        orders, steps = [], 0
        for _ in range(2):
            copy, numbers = loader._steps.copy(), []
            while copy.remaining:
                (plan,) = copy.plan(1)
                own = plan.figures
                numbers.append(own.builds * 10_000 + own.numbers)
            orders.append(np.concatenate(numbers))
            steps += len(list(loader))
        assert loader.stats().repeated_pairs == pytest.approx(repeated_pairs(*orders, 8))
        assert loader.stats().steps == steps


def test_pairs_of_random_orders_meet_by_chance_and_memory_is_bounded(monkeypatch):
    monkeypatch.setattr("isobatch.loaders.stats.REMEMBERED", 1_024)
    rng, counter, zeros = np.random.default_rng(0), PairCounter(), np.zeros(64, np.int64)
    sizes = np.full(8, 8)
    for epoch in range(80):
        for own in rng.permutation(1_600).reshape(-1, 64):
            counter.add(epoch, zeros, own, sizes)
    assert counter.repeated_pairs == pytest.approx(1, abs=0.1)
    assert len(counter._keys) == 1_024
    # an epoch that does not follow on the last has none to be compared with
    again = PairCounter()
    for epoch in (0, 2):
        again.add(epoch, zeros, np.arange(64), sizes)
    assert again.repeated_pairs is None


class GrowingEpoch:
    """Of which another window is planned by a thread while it is asked."""

    size = 100

    def __len__(self):
        return self.size

    def label_weights(self, weights):
        total, self.size = 2.5 * self.size, 140
        return total


def test_divisor_is_that_of_other_ranks_while_an_epoch_grows():
    normalizer = StepNormalizer("epoch", "token", step_groups=8)
    assert normalizer.divisors(GrowingEpoch(), np.zeros(2)).tolist() == [20.0, 20.0]
