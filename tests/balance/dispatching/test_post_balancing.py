"""Post-balancing against plain oracles, brute force and bounds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isobatch.balance.dispatching.post_balancing import (
    EXACT_MEAN,
    as_batches,
    balance_conv,
    balance_padded,
    balance_padded_attention,
    balance_squares,
    balance_sums,
)
from isobatch.balance.metrics import longest
from isobatch.common.types import IntArray
from support.oracles import post_balancing_oracle as oracle


def drawn(seed: int, num: int, longest: int) -> list[int]:
    drawn = np.random.default_rng(seed).integers(0, longest + 1, num)
    return drawn.tolist()  # type: ignore[no-any-return]


lengths_st = st.one_of(
    # lists by hypothesis itself are mostly shorter than ten: few batches would ever hold two
    # examples
    st.builds(
        drawn, st.integers(0, 10**6), st.integers(0, 120), st.sampled_from([1, 12, 60, 3_000])
    ),
    st.builds(drawn, st.integers(0, 10**6), st.integers(40, 120), st.sampled_from([12, 60])),
    st.lists(st.integers(0, 12), max_size=30),
    st.builds(
        lambda rest, giant: [*rest, giant],
        st.lists(st.integers(0, 50), max_size=40),
        st.integers(1, 10**6),
    ),
    st.builds(lambda length, number: [length] * number, st.integers(0, 100), st.integers(0, 40)),
)
batches_st = st.integers(1, 12)
few_st = st.lists(st.integers(0, 9), min_size=1, max_size=7)

FUNCTIONS = {
    "sums": balance_sums,
    "padded": balance_padded,
    "squares": lambda lengths, num_batches: balance_squares(lengths, num_batches, tolerance=7),
    "conv": balance_conv,
    "padded_attention": lambda lengths, num_batches: balance_padded_attention(
        lengths, num_batches, weight=0.1
    ),
}


def heavy_tailed(num: int, seed: int = 0) -> IntArray:
    return np.minimum(np.random.default_rng(seed).lognormal(6, 1, num), 20_000).astype(np.int64) + 1


@settings(max_examples=150, deadline=None)
@given(lengths=lengths_st, num_batches=batches_st)
def test_sums_equals_a_heap(lengths: list[int], num_batches: int) -> None:
    assert balance_sums(np.array(lengths, np.int64), num_batches).tolist() == oracle.sums_oracle(
        lengths, num_batches
    )


@settings(max_examples=150, deadline=None)
@given(lengths=lengths_st, num_batches=batches_st)
def test_padded_equals_a_walk_over_all_examples(lengths: list[int], num_batches: int) -> None:
    got = balance_padded(np.array(lengths, np.int64), num_batches)
    assert got.tolist() == oracle.padded_oracle(lengths, num_batches)


@settings(max_examples=150, deadline=None)
@given(lengths=lengths_st, num_batches=batches_st, tolerance=st.sampled_from([0, 1, 3, 40, 2_000]))
def test_squares_equals_a_look_at_all_batches(
    lengths: list[int], num_batches: int, tolerance: int
) -> None:
    got = balance_squares(np.array(lengths, np.int64), num_batches, tolerance=tolerance)
    assert got.tolist() == oracle.squares_oracle(lengths, num_batches, tolerance)


@settings(max_examples=150, deadline=None)
@given(lengths=lengths_st, num_batches=batches_st)
def test_conv_equals_plain_lists_and_uses_no_batch_too_many(
    lengths: list[int], num_batches: int
) -> None:
    got = balance_conv(np.array(lengths, np.int64), num_batches)
    assert got.tolist() == oracle.conv_oracle(lengths, num_batches)


@pytest.mark.parametrize("name", FUNCTIONS)
@settings(max_examples=60, deadline=None)
@given(lengths=lengths_st, num_batches=batches_st, seed=st.integers(0, 9))
def test_the_batches_do_not_depend_on_who_holds_which_example(
    name: str, lengths: list[int], num_batches: int, seed: int
) -> None:
    # only for distinct lengths: of equal ones, the first come first
    distinct = np.array(sorted(set(lengths)), np.int64)
    order = np.random.default_rng(seed).permutation(len(distinct))
    straight, shuffled = (
        FUNCTIONS[name](distinct, num_batches),
        FUNCTIONS[name](distinct[order], num_batches),
    )

    # examples over the mean are alike for `sums` and `conv`, so compare what the batches hold, not
    # their numbers
    def contents(values: IntArray, batches: IntArray) -> list[list[int]]:
        groups = as_batches(batches, num_batches)
        return sorted(sorted(values[groups[b]].tolist()) for b in range(num_batches))

    assert contents(distinct, straight) == contents(distinct[order], shuffled)


@settings(max_examples=100, deadline=None)
@given(lengths=few_st, num_batches=st.integers(1, 3))
def test_sums_stays_within_four_thirds_of_brute_force(lengths: list[int], num_batches: int) -> None:
    batches = balance_sums(np.array(lengths), num_batches).tolist()
    largest = max(oracle.loads(lengths, batches, num_batches, sum))
    assert 3 * largest <= 4 * oracle.best_load(lengths, num_batches, sum)


@settings(max_examples=100, deadline=None)
@given(lengths=few_st, num_batches=st.integers(1, 3))
def test_padded_equals_brute_force(lengths: list[int], num_batches: int) -> None:
    batches = balance_padded(np.array(lengths), num_batches).tolist()
    largest = max(oracle.loads(lengths, batches, num_batches, oracle.padded))
    assert largest == oracle.best_load(lengths, num_batches, oracle.padded)


@settings(max_examples=100, deadline=None)
@given(lengths=few_st, num_batches=st.integers(1, 3), weight=st.sampled_from([0.0, 0.01, 0.5, 3.0]))
def test_padded_attention_equals_the_best_cut_of_the_sorted_examples(
    lengths: list[int], num_batches: int, weight: float
) -> None:
    def cost(batch: list[int]) -> float:
        return sum(batch) + weight * len(batch) * max(batch, default=0) ** 2

    batches = balance_padded_attention(np.array(lengths), num_batches, weight=weight).tolist()
    largest = max(oracle.loads(lengths, batches, num_batches, cost))
    assert largest <= oracle.best_cut(lengths, num_batches, cost) * 1.0002
    # and the best of all assignments is not far, although it need not be a cut
    assert largest <= 2 * oracle.best_load(lengths, num_batches, cost) + 1e-9


@pytest.mark.parametrize("per_rank", [16, 60])
def test_padded_attention_costs_less_than_the_published_algorithm(per_rank: int) -> None:
    lengths, weight = heavy_tailed(256 * per_rank), 1 / 6144
    largest = []
    for batches in (
        balance_conv(lengths, 256),
        balance_padded_attention(lengths, 256, weight=weight),
    ):
        groups = as_batches(batches, 256)
        largest.append(
            (groups.sum(lengths) + weight * groups.sizes * longest(groups, lengths) ** 2).max()
        )
    assert largest[1] < 0.5 * largest[0]


def test_four_thirds_is_reached_so_the_bound_is_the_right_one() -> None:
    # Graham's worst case for three batches: 11 where 9 is possible (4/3 - 1/(3 d))
    lengths = [5, 5, 4, 4, 3, 3, 3]
    batches = balance_sums(np.array(lengths), 3).tolist()
    assert max(oracle.loads(lengths, batches, 3, sum)) == 11
    assert oracle.best_load(lengths, 3, sum) == 9


@pytest.mark.parametrize(("num_ranks", "per_rank"), [(64, 16), (256, 60), (2560, 16)])
def test_heavy_tailed_steps_end_up_even(num_ranks: int, per_rank: int) -> None:
    lengths = heavy_tailed(num_ranks * per_rank)
    groups = as_batches(balance_sums(lengths, num_ranks), num_ranks)
    sums = groups.sum(lengths)
    assert sums.max() <= max(1.005 * sums.mean(), lengths.max())
    before = lengths.reshape(num_ranks, per_rank).sum(axis=1)
    assert before.max() > 1.3 * before.mean()


def test_squares_evens_squares_and_keeps_sums_within_the_tolerance_or_one_example() -> None:
    lengths = heavy_tailed(256 * 60)
    by_sums = as_batches(balance_sums(lengths, 256), 256)
    by_squares = as_batches(balance_squares(lengths, 256, tolerance=1_000), 256)
    unevenness = [float(np.ptp(groups.sum(lengths**2))) for groups in (by_sums, by_squares)]
    assert unevenness[1] < unevenness[0]
    assert np.ptp(by_squares.sum(lengths)) <= 1_000 + lengths.max()


def test_costs_in_any_unit_give_the_same_batches() -> None:
    lengths = heavy_tailed(640)
    costs = lengths + 1e-3 * lengths.astype(float) ** 2
    batches = balance_sums(costs, 16)
    assert batches.tolist() == balance_sums(costs * 2.0**40, 16).tolist()
    sums = np.sort(np.bincount(batches, costs))
    assert sums[-1] == costs.max()  # one example alone is over the mean
    assert sums[-2] - sums[0] <= 1e-3 * sums.mean()


def test_sums_too_large_to_count_one_by_one_are_even_too() -> None:
    lengths = heavy_tailed(640) * 10**6
    assert lengths.sum() / 16 > EXACT_MEAN
    sums = as_batches(balance_sums(lengths, 16), 16).sum(lengths)
    assert sums.max() <= 1.001 * sums.mean()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_nothing_and_fewer_examples_than_batches_are_no_special_cases(name: str) -> None:
    assert FUNCTIONS[name](np.zeros(0, np.int64), 4).tolist() == []
    batches = FUNCTIONS[name](np.array([3, 9, 5]), 8)
    assert len(set(batches.tolist())) == 3 or name in ("padded", "conv", "padded_attention")
    assert as_batches(batches, 8).sizes.sum() == 3


def test_examples_of_a_batch_keep_their_order() -> None:
    batches = balance_sums(heavy_tailed(200), 7)
    groups = as_batches(batches, 7)
    assert sorted(groups.samples.tolist()) == list(range(200))
    assert all((np.diff(groups[b]) > 0).all() and (batches[groups[b]] == b).all() for b in range(7))


def test_what_cannot_be_balanced_is_an_error_that_names_it() -> None:
    with pytest.raises(ValueError, match="example 1 is -3"):
        balance_sums(np.array([1, -3]), 2)
    with pytest.raises(ValueError, match="example 0 is nan"):
        balance_sums(np.array([np.nan, 1.0]), 2)
    with pytest.raises(ValueError, match="num_batches is 0"):
        balance_padded(np.array([1]), 0)
    with pytest.raises(ValueError, match="whole numbers"):
        balance_conv(np.array([1.5]), 1)
    with pytest.raises(ValueError, match="tolerance is -1"):
        balance_squares(np.array([1]), 1, tolerance=-1)
    with pytest.raises(ValueError, match="weight is -1"):
        balance_padded_attention(np.array([1]), 1, weight=-1)
    with pytest.raises(ValueError, match="divide both"):
        balance_squares(np.array([2**25]), 1, tolerance=0)
    with pytest.raises(ValueError, match="int64"):
        balance_padded(np.array([2**62, 2**62]), 1)
