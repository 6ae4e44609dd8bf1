"""PipeTune's packing and clustering against plain oracles and brute force."""

from __future__ import annotations

from itertools import pairwise
from math import factorial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isobatch.common.types import Groups, IntArray
from isobatch.engine.tuning.pack import (
    MAX_CLUSTERS,
    TOLERANCE,
    cluster_costs,
    cluster_orders,
    pack_balanced,
)
from support.oracles import repack_oracle as oracle

MAX_LEN = 50


def drawn(seed: int, num: int, longest: int) -> list[tuple[int, int]]:
    rng = np.random.default_rng(seed)
    return list(
        zip(
            rng.integers(0, longest + 1, num).tolist(),
            rng.integers(0, 200, num).tolist(),
            strict=True,
        )
    )


samples_st = st.one_of(
    st.builds(drawn, st.integers(0, 10**6), st.integers(0, 60), st.sampled_from([10, 30, MAX_LEN])),
    st.lists(st.tuples(st.integers(0, MAX_LEN), st.integers(0, 200)), max_size=40),
    st.builds(
        lambda length, number: [(length, length)] * number,
        st.integers(0, MAX_LEN),
        st.integers(0, 30),
    ),
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 20)), max_size=30).map(
        lambda rest: [*rest, (MAX_LEN, 10**6)]
    ),
)


def flops(lengths: IntArray, width: int = 4096) -> IntArray:
    """Forward FLOPs of one layer, attention by each sample's own length."""
    return 24 * lengths * width**2 + 4 * width * lengths**2


def members(groups: Groups) -> list[list[int]]:
    return [groups[g].tolist() for g in range(len(groups))]


@settings(max_examples=200, deadline=None)
@given(samples_st)
def test_packing_equals_the_plain_form_of_both_starts(samples: list[tuple[int, int]]) -> None:
    lengths, costs = [s[0] for s in samples], [s[1] for s in samples]
    groups = pack_balanced(np.array(lengths, np.int64), np.array(costs, np.int64), max_len=MAX_LEN)
    fewest = max(-(-sum(lengths) // MAX_LEN), min(1, len(lengths)))
    plain = oracle.pack_oracle(lengths, costs, MAX_LEN, fewest)
    if len(plain) > fewest:
        again = oracle.pack_oracle(lengths, costs, MAX_LEN, fewest + 1)
        plain = min(plain, again, key=lambda batches: oracle.unevenness(batches, costs))
    assert members(groups) == [sorted(batch) for batch in plain]
    assert sorted(groups.samples.tolist()) == list(range(len(samples)))
    assert (groups.sum(np.array(lengths, np.int64)) <= MAX_LEN).all()


@pytest.mark.parametrize("mean_log", [4.5, 6.0])
@pytest.mark.parametrize("micro_batch_size", [1, 2, 4])
def test_cost_is_evener_than_in_the_printed_form(mean_log: float, micro_batch_size: int) -> None:
    rng = np.random.default_rng(micro_batch_size)
    max_len = micro_batch_size * 4096
    printed, ours, least = [], [], []
    for _ in range(10):
        lengths = np.clip(rng.lognormal(mean_log, 1, 128), 1, 4096).astype(np.int64)
        costs = flops(lengths)
        groups = pack_balanced(lengths, costs, max_len=max_len)
        ours.append(oracle.unevenness(members(groups), costs.tolist()))
        plain = oracle.pack_oracle(lengths.tolist(), costs.tolist(), max_len, 0)
        printed.append(oracle.unevenness(plain, costs.tolist()))
        # a sample of 4,096 tokens fills a micro-batch of 4,096, and costs more than 4,096 tokens of
        # short samples
        least.append(max(1.0, costs.max() * len(groups) / costs.sum()))
    assert np.median(np.array(ours) / least) <= 1.033
    assert np.median(printed) >= max(1.05, np.median(ours))


def test_a_sample_over_the_cap_is_an_error_that_names_the_way_out() -> None:
    with pytest.raises(ValueError, match=r"sample 1 with 9.*reject or split"):
        pack_balanced(np.array([8, 9]), np.array([1, 1]), max_len=8)
    with pytest.raises(ValueError, match="2 lengths but 1 costs"):
        pack_balanced(np.array([8, 9]), np.array([1]), max_len=8)
    with pytest.raises(ValueError, match="finite"):
        pack_balanced(np.array([8]), np.array([np.inf]), max_len=8)


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(1, 13),
    st.sampled_from([(1, 12), (1, 100), (10**14, 10**14 + 10**13)]),
)
def test_clusters_are_the_best_runs_and_as_few_as_the_tolerance_allows(
    seed: int, num: int, between: tuple[int, int]
) -> None:
    costs = np.random.default_rng(seed).integers(*between, num).tolist()
    labels = cluster_costs(np.array(costs))
    mean = sum(costs) / len(costs)
    scaled = [cost / mean for cost in costs]
    clusters = [
        [s for s, label in zip(scaled, labels, strict=True) if label == k]
        for k in range(labels.max() + 1)
    ]
    assert all(clusters)
    assert all(max(below) < min(above) for below, above in pairwise(clusters))
    best = oracle.best_spread(scaled, len(clusters))
    assert sum(map(oracle.spread, clusters)) == pytest.approx(best, abs=1e-9)
    assert len(clusters) <= MAX_CLUSTERS
    within = max(abs(s - sum(c) / len(c)) for c in clusters for s in c)
    assert within <= TOLERANCE + 1e-9 or len(clusters) == min(MAX_CLUSTERS, len(set(costs)))


def test_packed_micro_batches_need_few_clusters() -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(4.5, 1, 128), 1, 4096).astype(np.int64)
    groups = pack_balanced(lengths, flops(lengths), max_len=4096)
    assert cluster_costs(groups.sum(flops(lengths))).max() == 0


def test_zero_costs_and_no_micro_batches_are_one_cluster_and_none() -> None:
    assert cluster_costs(np.zeros(3)).tolist() == [0, 0, 0]
    assert cluster_costs(np.zeros(0)).tolist() == []
    with pytest.raises(ValueError, match="max_clusters is 0"):
        cluster_costs(np.ones(2), max_clusters=0)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=10))
def test_orders_are_all_permutations_of_whole_clusters(raw: list[int]) -> None:
    clusters = np.unique(raw, return_inverse=True)[1]
    orders = [tuple(order.tolist()) for order in cluster_orders(clusters)]
    assert len(set(orders)) == len(orders) == factorial(clusters.max() + 1)
    for order in orders:
        assert sorted(order) == list(range(len(raw)))
        runs = clusters[list(order)]
        assert (np.diff(runs) != 0).sum() == clusters.max()
