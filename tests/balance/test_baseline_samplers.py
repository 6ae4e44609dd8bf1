"""Properties of the baseline samplers, and the figures they are known to give on OmniBal's
published lengths.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isobatch.balance.baseline_samplers import BASELINES, LENGTH_WINDOW, as_groups
from isobatch.balance.metrics import dist_ratio, pad_ratio, padded_loads
from isobatch.common.types import IntArray
from support import corpora

lengths_st = st.lists(st.integers(0, 5_000), max_size=300).map(
    lambda values: np.array(values, np.int64)
)


@pytest.mark.parametrize("name", BASELINES)
@settings(max_examples=60, deadline=None)
@given(
    lengths=lengths_st, dp=st.integers(1, 9), batch_size=st.integers(1, 5), seed=st.integers(0, 3)
)
def test_every_sample_comes_once_except_what_does_not_fill_a_step(
    name: str, lengths: IntArray, dp: int, batch_size: int, seed: int
) -> None:
    batches = BASELINES[name](lengths, dp, batch_size, seed)
    present = batches[batches >= 0]
    steps = len(lengths) // (dp * batch_size)
    expected = steps * dp * batch_size if steps else len(lengths)
    assert batches.shape[1:] == (dp, batch_size)
    assert len(batches) == max(steps, int(len(lengths) > 0))
    assert len(np.unique(present)) == len(present) == expected
    assert np.array_equal(batches, BASELINES[name](lengths, dp, batch_size, seed)), (
        "same seed, other batches"
    )


@settings(max_examples=60, deadline=None)
@given(lengths=lengths_st, dp=st.integers(1, 6), batch_size=st.integers(1, 4))
def test_device_group_deals_each_step_to_the_lightest_rank_with_room(
    lengths: IntArray, dp: int, batch_size: int
) -> None:
    drawn = BASELINES["random"](lengths, dp, batch_size, 5)
    dealt = BASELINES["device_group"](lengths, dp, batch_size, 5)
    for random_step, dealt_step in zip(drawn.tolist(), dealt.tolist(), strict=True):
        samples = [sample for rank in random_step for sample in rank if sample >= 0]
        ranks: list[list[int]] = [[] for _ in range(dp)]
        for sample in sorted(samples, key=lambda sample: -int(lengths[sample])):
            room = [rank for rank in ranks if len(rank) < batch_size]
            min(room, key=lambda rank: sum(int(lengths[s]) for s in rank)).append(sample)
        assert [[s for s in rank if s >= 0] for rank in dealt_step] == ranks


def test_length_group_sorts_inside_windows_and_nowhere_else() -> None:
    lengths = np.random.default_rng(0).integers(1, 10_000, 8 * LENGTH_WINDOW * 4)
    flat = (
        lengths[BASELINES["length_group"](lengths, 8, 4, 0)].ravel().reshape(-1, LENGTH_WINDOW * 4)
    )
    assert (np.diff(flat, axis=1) <= 0).all()
    assert (np.diff(flat, axis=0)[:, 0] > 0).any(), "the whole epoch is sorted, not windows of it"


def test_sorted_batches_hold_neighbours_of_the_whole_epoch_in_random_order() -> None:
    lengths = np.random.default_rng(0).permutation(3_200)
    batches = BASELINES["sorted"](lengths, 8, 4, 0).reshape(-1, 4)
    assert (np.ptp(lengths[batches], axis=1) == 3).all()
    first = lengths[batches].max(axis=1)
    assert abs(np.corrcoef(first[:-1], first[1:])[0, 1]) < 0.1


@pytest.mark.parametrize("name", BASELINES)
def test_another_seed_gives_other_batches(name: str) -> None:
    lengths = np.random.default_rng(0).integers(1, 4_096, 1_000)
    assert not np.array_equal(BASELINES[name](lengths, 8, 4, 0), BASELINES[name](lengths, 8, 4, 1))


def test_impossible_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="dp is 0"):
        BASELINES["random"](np.array([1, 2]), 0, 4, 0)


@pytest.mark.parametrize(
    ("name", "expected"),
    # pad / dist ViT / dist LLM on AI2D + ChartQA at dp 8, measured independently of this code
    [
        ("random", (0.237, 0.204, 0.091)),
        ("device_group", (0.250, 0.065, 0.075)),
        ("sorted", (0.000, 0.233, 0.263)),
    ],
)
def test_ratios_on_published_lengths_are_those_known(
    name: str, expected: tuple[float, float, float]
) -> None:
    lengths = corpora.lengths()
    vision, tokens = lengths["vit_num"], lengths["token_num"]
    groups = as_groups(BASELINES[name](tokens, 8, 4, 0))
    measured = (
        pad_ratio(groups, tokens),
        dist_ratio(groups.sum(vision), 8),
        dist_ratio(padded_loads(groups, tokens), 8),
    )
    assert measured == pytest.approx(expected, abs=0.004 if corpora.WHOLE else 0.02)
