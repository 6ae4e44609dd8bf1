"""Node-wise rearrangement against brute force, HiGHS and a proven bound at scale."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isobatch.balance.dispatching.node_placement import place_batches
from isobatch.balance.dispatching.post_balancing import balance_sums
from isobatch.common.types import IntArray
from support.cases import for_each
from support.oracles import post_balancing_oracle as oracle
from support.oracles.node_placement_bound import node_bound, whole_bound, worst_node_bound

Step = tuple[IntArray, IntArray, IntArray]
"""(lengths, batches, source offsets)"""


def step(num_ranks: int, per_rank: int, seed: int = 0) -> Step:
    lengths = np.random.default_rng(seed).lognormal(6, 1, num_ranks * per_rank)
    lengths = np.minimum(lengths, 20_000).astype(np.int64) + 1
    return lengths, balance_sums(lengths, num_ranks), np.arange(num_ranks + 1) * per_rank


def sends(case: Step, rank_of: IntArray, ranks_per_node: int) -> IntArray:
    lengths, batches, offsets = case
    sources = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    abroad = sources // ranks_per_node != rank_of[batches] // ranks_per_node
    return np.bincount(sources, lengths * abroad, minlength=len(offsets) - 1).astype(np.int64)


def place(case: Step, ranks_per_node: int) -> IntArray:
    return sends(case, place_batches(*case, ranks_per_node=ranks_per_node), ranks_per_node)


@st.composite
def steps(draw: st.DrawFn) -> tuple[Step, int]:
    num_ranks = draw(st.integers(1, 20))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    sizes = rng.integers(0, draw(st.integers(1, 12)), num_ranks)
    values = draw(st.sampled_from([[0, 1, 1, 7, 50, 10**6], [5], [0], list(range(1, 300))]))
    lengths = rng.choice(values, sizes.sum())
    batches = rng.integers(0, num_ranks, sizes.sum())
    return (lengths, batches, np.cumsum([0, *sizes])), draw(st.integers(1, num_ranks + 2))


@pytest.mark.thorough
@settings(max_examples=100, deadline=None)
@given(steps())
def test_every_rank_gets_one_batch_and_nobody_sends_more_than_it_holds(
    problem: tuple[Step, int],
) -> None:
    case, ranks_per_node = problem
    rank_of = place_batches(*case, ranks_per_node=ranks_per_node)
    num_ranks = len(case[2]) - 1
    assert sorted(rank_of.tolist()) == list(range(num_ranks))
    sources = np.repeat(np.arange(num_ranks), np.diff(case[2])).tolist()
    plain = oracle.sends(
        case[0].tolist(), sources, rank_of[case[1]].tolist(), ranks_per_node, num_ranks
    )
    assert sends(case, rank_of, ranks_per_node).tolist() == plain
    if ranks_per_node >= num_ranks:
        assert max(plain) == 0


@for_each("seed", range(8))
def test_six_ranks_on_three_nodes_come_within_a_tenth_of_brute_force(seed: int) -> None:
    case = step(6, 4, seed)
    sources = np.repeat(np.arange(6), 4).tolist()
    best = oracle.best_send(case[0].tolist(), sources, case[1].tolist(), 2, 6)
    assert best <= place(case, 2).max() <= 1.1 * best
    assert whole_bound(*case, 2) == pytest.approx(best)


@pytest.mark.parametrize("ranks_per_node", [2, 4])
def test_four_nodes_come_within_a_tenth_of_the_integer_program(ranks_per_node: int) -> None:
    case = step(4 * ranks_per_node, 8)
    best = whole_bound(*case, ranks_per_node)
    assert best - 0.5 <= place(case, ranks_per_node).max() <= 1.1 * best


def test_one_node_alone_bounds_all() -> None:
    case = step(8, 6)
    assert max(node_bound(*case, node, 2) for node in range(4)) <= whole_bound(*case, 2) + 0.5


@pytest.mark.thorough
@pytest.mark.parametrize("num_ranks", [1024, 2048, 2560])
@pytest.mark.parametrize("per_rank", [16, 60])
def test_from_1024_ranks_on_the_largest_send_is_within_two_percent_of_a_proven_bound(
    num_ranks: int, per_rank: int
) -> None:
    case = step(num_ranks, per_rank)
    placed = place(case, 8)
    assert placed.max() <= 1.02 * worst_node_bound(*case, placed, 8, seconds=3)
    assert placed.max() < 0.7 * sends(case, np.arange(num_ranks), 8).max()


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["even", "tiles"])
def test_the_gap_stays_when_lengths_are_not_log_normal(kind: str) -> None:
    rng = np.random.default_rng(1)
    lengths = rng.integers(1, 4_000, 1024 * 30)
    if kind == "tiles":
        lengths = 256 * rng.integers(1, 13, 1024 * 30) + rng.integers(10, 600, 1024 * 30)
    case = (lengths, balance_sums(lengths, 1024), np.arange(1025) * 30)
    placed = place(case, 8)
    assert placed.max() <= 1.02 * worst_node_bound(*case, placed, 8, seconds=3)


def test_the_last_node_may_be_smaller() -> None:
    case = step(21, 10)
    placed = place(case, 8)
    assert placed.max() < sends(case, np.arange(21), 8).max()


def test_a_node_may_have_more_places_than_there_are_ranks() -> None:
    case = step(6, 4)
    assert place(case, 1 << 40).max() == 0


def test_batches_that_nobody_needs_go_where_their_largest_example_is() -> None:
    # only rank 0 holds much, and batch 0 is most of it; batches 1 and 2 cost nobody more than what
    # rank 0 keeps sending
    lengths, offsets = np.array([90, 20, 3, 1, 2, 1]), np.array([0, 2, 3, 5, 6])
    batches = np.array([0, 3, 1, 1, 2, 2])
    rank_of = place_batches(lengths, batches, offsets, ranks_per_node=1)
    assert rank_of.tolist() == [0, 1, 2, 3]


def test_every_rank_computes_the_same() -> None:
    case = step(64, 16)
    assert (place_batches(*case, ranks_per_node=8) == place_batches(*case, ranks_per_node=8)).all()


def test_inside_its_node_a_batch_goes_where_most_of_it_is() -> None:
    lengths, batches, offsets = np.array([5, 9, 8, 1]), np.array([0, 1, 0, 1]), np.array([0, 2, 4])
    # rank 0 holds 5 of batch 0 and 9 of batch 1
    assert place_batches(lengths, batches, offsets, ranks_per_node=2).tolist() == [1, 0]


def test_arrays_that_do_not_fit_are_errors_that_say_what() -> None:
    with pytest.raises(ValueError, match="ascending offsets"):
        place_batches(np.array([1]), np.array([0]), np.array([0, 2]), ranks_per_node=1)
    with pytest.raises(ValueError, match="batches must be 0 to 0"):
        place_batches(np.array([1]), np.array([1]), np.array([0, 1]), ranks_per_node=1)
    with pytest.raises(ValueError, match="0 per node"):
        place_batches(np.array([1]), np.array([0]), np.array([0, 1]), ranks_per_node=0)


@pytest.mark.thorough
@pytest.mark.parametrize("per_rank", [16, 60])
def test_two_swaps_at_once_and_smallest_covers_keep_small_clusters_near_the_bound(
    per_rank: int,
) -> None:
    gaps = []
    for seed in range(4):
        case = step(64, per_rank, seed)
        placed = place(case, 8)
        gaps.append(placed.max() / worst_node_bound(*case, placed, 8, seconds=1))
    assert max(gaps) <= 1.06
    assert np.mean(gaps) <= 1.02
