"""Caps: those from the data reject nothing that fits and cost no groups; what is said about them is true."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from balance.cost import CostModel
from balance.limits import FREE, choose_limits, choose_limits_omnibal, over_limits
from balance.presets import load_model
from balance.records import Counts

LENGTHS = Path(__file__).parents[3] / "shared" / "data" / "omnibal_lengths"
COST = CostModel.of(load_model("internvl_1_5"))


def counts_of(patches, tokens):
    zeros = np.zeros(len(tokens), dtype=np.int64)
    return Counts(
        num_image_patches=np.array(patches, np.int64),
        num_vit_tokens=np.array(patches, np.int64) * 1025,
        num_image_tokens=zeros,
        num_text_tokens=np.array(tokens, np.int64),
        num_audio_tokens=zeros,
        num_loss_tokens=zeros,
    )


def published():
    rows = [row for path in sorted(LENGTHS.glob("*.json")) for row in json.loads(path.read_text())]
    return counts_of([row["image_flags"] for row in rows], [row["token_num"] for row in rows])


def choose(counts, **changes):
    return choose_limits(counts, **{"vision_unit": "image_patches", "context_len": 4096, **changes})


def by_paper(counts, **changes):
    return choose_limits_omnibal(counts, **{"vision_unit": "image_patches", "context_len": 4096, **changes})


def test_the_papers_rule_takes_the_ratio_of_the_data_and_the_least_of_longest_context_and_given_cap():
    counts = counts_of([1, 2, 3, 2], [500, 1000, 1500, 1000])
    assert by_paper(counts).max_seq_len == 1500
    assert by_paper(counts, context_len=1200).max_seq_len == 1200
    limits = by_paper(counts, max_seq_len=4000)
    assert (limits.max_seq_len, limits.max_vision) == (4000, 8)
    assert (limits.min_seq_len, limits.min_vision) == (4000 - 128, 8)
    assert by_paper(counts, max_seq_len=4000, vision_unit="vit_tokens").max_vision == 8 * 1025


@st.composite
def datasets(draw):
    """Any samples: without tokens or without images, one giant, all equal, longer than the context."""
    rows = draw(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 300)), min_size=1, max_size=60))
    return counts_of(*zip(*rows, strict=True))


@settings(max_examples=120, deadline=None)
@given(datasets(), st.integers(1, 400), st.sampled_from(["image_patches", "vit_tokens"]), st.sampled_from([COST, None]))
def test_caps_from_the_data_reject_no_sample_that_fits_the_context(counts, context_len, vision_unit, cost):
    for limits in (
        by_paper(counts, context_len=context_len, vision_unit=vision_unit),
        choose(counts, context_len=context_len, vision_unit=vision_unit, cost=cost).limits,
    ):
        too_long, too_much_vision = over_limits(counts, limits)
        assert len(too_much_vision) == 0
        assert too_long.tolist() == np.flatnonzero(counts.seq_len > context_len).tolist()
        assert limits.min_seq_len <= limits.max_seq_len
        assert limits.min_vision > 0, "a target of 0 would keep every group as it is"


@settings(max_examples=60, deadline=None)
@given(datasets(), st.integers(300, 1200))
def test_the_chosen_vision_cap_costs_no_groups(counts, max_seq_len):
    choice = choose(counts, max_seq_len=max_seq_len)
    tried = {c.limits.max_vision: c.num_groups for c in choice.candidates}
    if tried:  # none without images
        assert tried[choice.limits.max_vision] <= tried[max(tried)] * (1 + FREE)
        assert {c.num_samples for c in choice.candidates} == {int((counts.seq_len <= max_seq_len).sum())}


def test_a_cap_is_found_that_a_ratio_of_means_cannot_see():
    # halves of 3 and 5 patches only fill 8 together; 6.4 patches per 1,000 tokens is the ratio
    counts = counts_of([3, 5] * 500, [500, 500] * 500)
    assert by_paper(counts, max_seq_len=1000).max_vision == 8
    counts = counts_of([5] * 500 + [1] * 500, [500] * 1000)
    assert by_paper(counts, max_seq_len=1000).max_vision == 6
    counts = counts_of([5] * 700 + [1] * 300, [500] * 1000)
    assert by_paper(counts, max_seq_len=1000).max_vision == 8
    assert choose(counts, max_seq_len=1000).limits.max_vision == 10, "two samples of 5 fit no smaller cap"


def test_a_smaller_cap_is_taken_where_it_costs_nothing():
    # a sample of 4 patches fills a group alone, samples without images fill the others: no group holds more than 4
    counts = counts_of([4] * 300 + [0] * 3000, [1000] * 300 + [100] * 3000)
    choice = choose(counts, max_seq_len=1000)
    assert choice.limits.max_vision == 4
    assert "the largest sample's" in choice.reason


def test_given_caps_are_taken_and_their_price_is_said():
    counts = counts_of([5] * 200, [500] * 200)
    choice = choose(counts, max_seq_len=1000, max_vision=9)
    assert (choice.limits.max_seq_len, choice.limits.max_vision) == (1000, 9)
    assert "9 image patches (your max_vision): +100.0 % groups against no cap" in choice.reason
    assert "never binds" in choose(counts, max_seq_len=1000, max_vision=10).reason
    assert choose(counts, max_seq_len=1000, max_vision=0).limits.max_vision == 0


def test_the_reason_names_where_the_token_cap_comes_from():
    counts = counts_of([1], [500])
    assert "500 tokens (the longest sample)" in choose(counts).reason
    assert "400 tokens (the model's context)" in choose(counts, context_len=400).reason
    assert "450 tokens (your max_seq_len)" in choose(counts, max_seq_len=450).reason
    assert "4,096 tokens (the model's context)" in choose(counts, max_seq_len=5000).reason


def test_text_only_data_filters_by_tokens_and_says_so():
    choice = choose(counts_of([0, 0], [100, 200]), cost=COST)
    assert (choice.limits.max_vision, choice.lines) == (0, ["caps: 200 tokens (the longest sample), no images"])
    assert choice.limits.min_vision > 0


def test_a_time_is_predicted_only_with_a_cost_model_and_holds_the_overhead():
    counts = counts_of([2] * 64, [1000] * 64)
    assert len(choose(counts).lines) == 1
    choice = choose(counts, max_seq_len=2000, cost=COST)
    assert "internvl_1_5" in choice.prediction
    one = next(c for c in choice.candidates if c.limits == choice.limits)
    # 32 equal groups of two samples on 8 ranks: nobody waits
    pair = COST.micro_batch_ms(COST.work(counts)).sum() - 32 * COST.hardware.micro_batch_overhead_ms
    assert one.ms_per_sample == pytest.approx(pair / 64)


def test_no_samples_and_an_unknown_unit_are_errors():
    with pytest.raises(ValueError, match="no sample"):
        choose(counts_of([], []))
    with pytest.raises(ValueError, match="use one of image_patches, vit_tokens"):
        choose(counts_of([1], [5]), vision_unit="tiles")


def test_the_choice_is_the_same_every_time_and_quick_for_a_million_samples():
    rng = np.random.default_rng(0)
    patches = rng.choice([0, 1, 3, 5, 9], 1_200_000)
    counts = counts_of(patches, patches * 256 + rng.integers(30, 900, len(patches)))
    first = choose(counts, cost=COST)
    begin = time.perf_counter()
    assert choose(counts, cost=COST) == first
    assert time.perf_counter() - begin < 5


@pytest.mark.skipif(not LENGTHS.is_dir(), reason="OmniBal's length files are not here")
def test_on_the_published_lengths_the_search_finds_15_patches_at_4096_tokens():
    choice = choose(published(), max_seq_len=4096, cost=COST)
    assert choice.limits.max_vision == 15
    prices = {int(cap): float(price) for cap, price in re.findall(r"(\d+): \+([\d.]+) %", choice.reason)}
    assert prices[14] == pytest.approx(16.3, abs=3), "9,468 groups by the LP bound against about 8,050"
