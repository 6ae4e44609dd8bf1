"""Caps: those from the data reject nothing that fits and cost no groups; what is said about them is
true.
"""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isobatch.balance.grouping._cap_search import FREE, CapTrial, best_trial, caps_of
from isobatch.balance.grouping.activation_budget import ActivationBudget
from isobatch.balance.grouping.best_fit import group_best_fit
from isobatch.balance.grouping.cap_lines import CapNames, cap_lines
from isobatch.balance.grouping.caps import (
    TRIAL_ROUNDS,
    GroupOptions,
    choose_limits,
    choose_limits_omnibal,
    over_limits,
)
from isobatch.balance.grouping.isf import group_isf
from isobatch.common.errors import ConfigError
from isobatch.common.types import Counts
from isobatch.models.flops import FlopsModel
from isobatch.models.layer_bytes import activation_budget
from isobatch.models.presets import load_model
from support.corpora import lengths

COST = FlopsModel.of(load_model("internvl_1_5"))


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
    return counts_of(lengths()["image_flags"], lengths()["token_num"])


def choose(counts, *, context_len=4096, vision_unit="image_patches", flops=None, **options):
    return choose_limits(
        counts,
        GroupOptions(**options),
        vision_unit=vision_unit,
        context_len=context_len,
        predictor=flops,
    )


def by_paper(counts, **changes):
    return choose_limits_omnibal(
        counts, **{"vision_unit": "image_patches", "context_len": 4096, **changes}
    )


def test_the_papers_rule_takes_the_ratio_of_the_data_and_the_least_of_the_three_caps():
    counts = counts_of([1, 2, 3, 2], [500, 1000, 1500, 1000])
    assert by_paper(counts).max_seq_len == 1500
    assert by_paper(counts, context_len=1200).max_seq_len == 1200
    limits = by_paper(counts, max_seq_len=4000)
    assert (limits.max_seq_len, limits.max_vision) == (4000, 8)
    assert (limits.min_seq_len, limits.min_vision) == (4000 - 128, 8)
    assert by_paper(counts, max_seq_len=4000, vision_unit="vit_tokens").max_vision == 8 * 1025


@st.composite
def datasets(draw):
    """Any samples: without tokens or without images, one giant, all equal, longer than the
    context.
    """
    rows = draw(
        st.lists(st.tuples(st.integers(0, 9), st.integers(0, 300)), min_size=1, max_size=60)
    )
    return counts_of(*zip(*rows, strict=True))


@pytest.mark.thorough
@settings(max_examples=120, deadline=None)
@given(
    datasets(),
    st.integers(1, 400),
    st.sampled_from(["image_patches", "vit_tokens"]),
    st.sampled_from([COST, None]),
)
def test_caps_from_the_data_reject_no_sample_that_fits_the_context(
    counts, context_len, vision_unit, cost
):
    for limits in (
        by_paper(counts, context_len=context_len, vision_unit=vision_unit),
        choose(counts, context_len=context_len, vision_unit=vision_unit, flops=cost).limits,
    ):
        too_long, too_much_vision = over_limits(counts, limits)
        assert len(too_much_vision) == 0
        assert too_long.tolist() == np.flatnonzero(counts.seq_len > context_len).tolist()
        assert limits.min_seq_len <= limits.max_seq_len
        assert limits.min_vision > 0, "a target of 0 would keep every group as it is"


@pytest.mark.thorough
@settings(max_examples=60, deadline=None)
@given(datasets(), st.integers(300, 1200))
def test_the_chosen_vision_cap_costs_no_groups(counts, max_seq_len):
    choice = choose(counts, max_seq_len=max_seq_len)
    tried = {c.limits.max_vision: c.num_groups for c in choice.trials}
    if tried:  # none without images
        assert tried[choice.limits.max_vision] <= tried[max(tried)] * (1 + FREE)
        assert {c.num_samples for c in choice.trials} == {
            int((counts.seq_len <= max_seq_len).sum())
        }


def test_a_cap_is_found_that_a_ratio_of_means_cannot_see():
    # halves of 3 and 5 patches only fill 8 together; 6.4 patches per 1,000 tokens is the ratio
    counts = counts_of([3, 5] * 500, [500, 500] * 500)
    assert by_paper(counts, max_seq_len=1000).max_vision == 8
    counts = counts_of([5] * 500 + [1] * 500, [500] * 1000)
    assert by_paper(counts, max_seq_len=1000).max_vision == 6
    counts = counts_of([5] * 700 + [1] * 300, [500] * 1000)
    assert by_paper(counts, max_seq_len=1000).max_vision == 8
    assert choose(counts, max_seq_len=1000).limits.max_vision == 10, (
        "two samples of 5 fit no smaller cap"
    )


def test_a_smaller_cap_is_taken_where_it_costs_nothing():
    # a sample of 4 patches fills a group alone, samples without images fill the others: no group
    # holds more than 4
    counts = counts_of([4] * 300 + [0] * 3000, [1000] * 300 + [100] * 3000)
    choice = choose(counts, max_seq_len=1000)
    assert choice.limits.max_vision == 4
    assert "the largest sample's" in cap_lines(choice)[0]


@pytest.mark.thorough
def test_what_is_said_of_a_caps_price_is_true_of_its_trials():
    said = set()
    for seed in range(8):
        rng = np.random.default_rng(seed)
        patches = rng.integers(9, 14, 2_000)
        text = np.exp(rng.normal(7.2, 0.5, 2_000)).astype(np.int64)
        tokens = np.minimum(256 * patches + text, 8_192)
        choice = choose(counts_of(patches, tokens), context_len=8_192, flops=COST)
        line, trials = cap_lines(choice)[0], {c.limits.max_vision: c for c in choice.trials}
        free, chosen = trials[max(trials)], trials[choice.limits.max_vision]
        assert "()" not in line, seed
        if "cost no groups" in line or "costs no groups" in line:
            assert chosen.extra_groups(free) <= FREE, (seed, line)
        if "the smallest cap" in line:
            smaller = [c for cap, c in trials.items() if cap < choice.limits.max_vision]
            assert all(c.extra_groups(free) > FREE for c in smaller), (seed, line)
        said.add(line.partition(" image patches")[2][:12])
    assert len(said) > 1, said


def test_given_caps_are_taken_and_their_price_is_said():
    counts = counts_of([5] * 200, [500] * 200)
    choice = choose(counts, max_seq_len=1000, max_vision=9)
    assert (choice.limits.max_seq_len, choice.limits.max_vision) == (1000, 9)
    assert (
        "9 image patches (your max_vision): +100.0 % groups against no cap" in cap_lines(choice)[0]
    )
    assert "never binds" in cap_lines(choose(counts, max_seq_len=1000, max_vision=10))[0]
    assert choose(counts, max_seq_len=1000, max_vision=0).limits.max_vision == 0


def test_the_reason_names_where_the_token_cap_comes_from():
    counts = counts_of([1], [500])
    assert "500 tokens (the longest sample)" in cap_lines(choose(counts))[0]
    assert "400 tokens (the model's context)" in cap_lines(choose(counts, context_len=400))[0]
    assert "450 tokens (your max_seq_len)" in cap_lines(choose(counts, max_seq_len=450))[0]
    assert "4,096 tokens (the model's context)" in cap_lines(choose(counts, max_seq_len=5000))[0]


def test_whoever_prints_says_what_its_users_call_the_caps():
    names = CapNames(given_tokens="as before", larger_tokens="max_tokens={}")
    lines = cap_lines(choose(counts_of([1], [500]), max_seq_len=450), names)
    assert "450 tokens (as before)" in lines[0]
    assert "; with max_tokens=900: " in next(line for line in lines if line.startswith("groups: "))


def test_text_only_data_filters_by_tokens_and_says_so():
    choice = choose(counts_of([0, 0], [100, 200]), flops=COST)
    assert choice.limits.max_vision == 0
    assert cap_lines(choice) == [
        "caps: 200 tokens (the longest sample), no images",
        "groups: 1.0 samples each on average, tokens 75.0% full; with --max-seq-len 400:"
        " 2.0 samples each on average, tokens 75.0% full",
    ]
    assert choice.limits.min_vision > 0


UNIFORM = {
    "receipts": (lambda rng: rng.integers(640, 760, 626), 4096),
    "one length": (lambda rng: np.full(800, 701), 4096),
    "long documents": (lambda rng: rng.integers(1500, 4000, 2000), 32_768),
    "two lengths": (lambda rng: rng.choice([900, 1000], 3000), 8192),
    "uneven": (lambda rng: np.minimum(np.exp(rng.normal(6, 1, 4000)), 4000).astype(int), 32_768),
}


@pytest.mark.thorough
def test_without_a_given_cap_groups_are_full_and_hold_several_samples():
    for case, (draw, context) in UNIFORM.items():
        rng = np.random.default_rng(0)
        tokens = draw(rng)
        for images in (0, 1):
            counts = counts_of(rng.integers(1, 3, len(tokens)) * images, tokens)
            choice = choose(counts, context_len=context, flops=COST)
            limits = choice.limits
            groups = group_best_fit(limits.vision_load(counts), tokens, limits, seed=0)
            fill = tokens.sum() / (len(groups) * limits.max_seq_len)
            # a vision cap that is predicted to be faster may cost some groups
            assert fill >= (0.97 if images else 0.98), (case, images, fill, limits)
            assert len(tokens) / len(groups) >= 1.95, (case, images)
            assert limits.max_seq_len <= context
            each = f"{len(tokens) / len(groups):.1f}"
            (line,) = (line for line in cap_lines(choice) if line.startswith("groups: "))
            assert float(each) == pytest.approx(float(line.split()[1]), rel=0.03), (line, each)
            longest = " (the longest sample)" in cap_lines(choice)[0]
            assert longest == (limits.max_seq_len == tokens.max()) == (case == "uneven"), case


def test_a_cap_is_not_raised_where_that_does_not_fill_groups_or_leaves_few():
    near_context = counts_of([0] * 500, [2880 + i % 100 for i in range(500)])
    assert choose(near_context).limits.max_seq_len == 2979
    few = counts_of([0] * 150, [701] * 150)
    assert choose(few).limits.max_seq_len == 701
    assert "with --max-seq-len 1402: 2.0 samples each" in cap_lines(choose(few))[1]
    # groups that a given vision cap fills hold no more samples under a longer cap
    tight = counts_of([5] * 500, [500 + i % 50 for i in range(500)])
    assert choose(tight, max_vision=5).limits.max_seq_len == 549
    assert "no cap is above" in cap_lines(choose(near_context, max_seq_len=4096))[1]


def test_a_time_is_predicted_only_with_a_cost_model_and_holds_the_overhead():
    counts = counts_of([2] * 64, [1000] * 64)
    choice = choose(counts)
    assert not any("predicted" in line for line in cap_lines(choice))
    choice = choose(counts, max_seq_len=2000, flops=COST)
    assert "internvl_1_5" in cap_lines(choice)[1]
    one = next(c for c in choice.trials if c.limits == choice.limits)
    # 32 equal groups of two samples on 8 ranks: nobody waits
    pair = COST.micro_batch_ms(COST.loads(counts)).sum() - 32 * COST.speed.micro_batch_overhead_ms
    assert one.ms_per_sample == pytest.approx(pair / 64)


def test_no_samples_and_an_unknown_unit_are_errors():
    with pytest.raises(ValueError, match="no sample"):
        choose(counts_of([], []))
    with pytest.raises(ValueError, match="use one of image_patches, vit_tokens"):
        choose(counts_of([1], [5]), vision_unit="tiles")


@pytest.mark.thorough
def test_the_choice_is_the_same_every_time_for_a_million_samples():
    rng = np.random.default_rng(0)
    patches = rng.choice([0, 1, 3, 5, 9], 1_200_000)
    counts = counts_of(patches, patches * 256 + rng.integers(30, 900, len(patches)))
    first = choose(counts, flops=COST)
    assert choose(counts, flops=COST) == first


def test_on_the_published_lengths_the_search_finds_15_patches_at_4096_tokens():
    choice = choose(published(), max_seq_len=4096, flops=COST)
    assert choice.limits.max_vision == 15
    prices = {
        int(cap): float(price)
        for cap, price in re.findall(r"(\d+): \+([\d.]+) %", cap_lines(choice)[0])
    }
    assert prices[14] == pytest.approx(16.3, abs=3), (
        "9,468 groups by the LP bound against about 8,050"
    )


def packed(num_samples, seed=0):
    """Samples of which neither cap alone decides: images of 1 to 6 patches, some texts without."""
    rng = np.random.default_rng(seed)
    patches = rng.choice([0, 1, 2, 3, 4, 6], num_samples)
    return counts_of(patches, patches * 50 + rng.integers(20, 400, num_samples))


@pytest.mark.thorough
def test_caps_and_split_are_as_good_as_a_full_grid():
    counts, memory = (
        packed(150),
        ActivationBudget(num_bytes=4_000, bytes_per_token=1, bytes_per_vision=100),
    )
    patches, tokens = counts.num_image_patches, counts.seq_len
    fewest = len(counts)
    for q_v, q_t in itertools.product(
        range(patches.max(), 35), range(int(tokens.max()), 2_001, 40)
    ):
        if memory.bytes_per_token * q_t + memory.bytes_per_vision * q_v <= memory.num_bytes:
            limits = caps_of(q_t, q_v, "image_patches")
            fewest = min(
                fewest, len(group_best_fit(patches, tokens, limits, seed=0, rounds=TRIAL_ROUNDS))
            )
    limits = choose(counts, context_len=2_000, memory=memory).limits
    assert (
        len(group_best_fit(patches, tokens, limits, seed=0, rounds=TRIAL_ROUNDS))
        <= fewest * (1 + FREE) + 1
    )
    assert limits.max_seq_len + 100 * limits.max_vision <= 4_000


def test_without_a_budget_the_vision_cap_is_the_smallest_free_one_of_a_full_grid():
    counts = packed(2_000)
    patches, tokens = counts.num_image_patches, counts.seq_len
    chosen = choose(counts, max_seq_len=900).limits.max_vision
    groups = {
        q_v: len(
            group_best_fit(
                patches, tokens, caps_of(900, q_v, "image_patches"), seed=0, rounds=TRIAL_ROUNDS
            )
        )
        for q_v in range(patches.max(), 45)
    }
    free = groups[44]
    smallest = min(q_v for q_v, found in groups.items() if found <= free * (1 + FREE))
    assert abs(chosen - smallest) <= 1, groups


@pytest.mark.thorough
@settings(max_examples=40, deadline=None)
@given(datasets(), st.integers(400, 3_000), st.integers(0, 150), st.sampled_from([COST, None]))
def test_a_budget_is_kept_and_rejects_no_sample(counts, num_bytes, price, cost):
    memory = ActivationBudget(num_bytes=num_bytes, bytes_per_token=1, bytes_per_vision=price)
    if max(counts.seq_len.max(), 1) + price * counts.num_image_patches.max() > num_bytes:
        with pytest.raises(ConfigError, match=r"memory budget holds .* longest sample has"):
            choose(counts, memory=memory, flops=cost)
        return
    limits = choose(counts, memory=memory, flops=cost).limits
    assert limits.max_seq_len + price * limits.max_vision <= num_bytes
    assert [len(over) for over in over_limits(counts, limits)] == [0, 0]


def test_a_budget_leaves_a_given_vision_cap_and_bounds_a_given_token_cap():
    counts, memory = (
        packed(200),
        ActivationBudget(num_bytes=3_000, bytes_per_token=1, bytes_per_vision=100),
    )
    choice = choose(counts, max_seq_len=2_900, max_vision=12, memory=memory)
    assert (choice.limits.max_seq_len, choice.limits.max_vision) == (1_800, 12)
    assert "1,800 tokens (your memory budget)" in cap_lines(choice)[0]
    assert (
        choose(counts, max_seq_len=1_500, max_vision=12, memory=memory).limits.max_seq_len == 1_500
    )


def test_prices_come_from_the_models_dimensions_and_are_shared_by_gpus():
    preset = load_model("llava_1_5")
    one, four = (activation_budget(preset, 1e12, gpus=gpus) for gpus in (1, 4))
    fused = activation_budget(preset, 1e12, kernels="fused")
    # a plain layer of equal heads and four times as wide a feed-forward part: 32 bytes per hidden
    # value, and 8 for the sigmoid of QuickGELU
    layers = preset.vit.hidden_size * preset.vit.num_layers * 577
    for budget, each in ((one, 40), (fused, 32)):
        embedding_and_projector = 576 * (2 * 588 + 4 * 1024 + 4 * 4096)
        assert budget.bytes_per_vision == pytest.approx(each * layers + embedding_and_projector)
    assert four.bytes_per_token == one.bytes_per_token / 4
    with pytest.raises(ConfigError, match="above 0"):
        ActivationBudget(num_bytes=0, bytes_per_token=1, bytes_per_vision=1)


def test_isf_gets_targets_that_need_no_more_groups_than_omnibals_and_fit_gets_none():
    counts = packed(3_000)
    patches, tokens = counts.num_image_patches, counts.seq_len
    choice = choose(counts, max_seq_len=900, grouping="isf")
    paper = caps_of(900, choice.limits.max_vision, "image_patches")
    ours, theirs = (
        len(group_isf(patches, tokens, limits, seed=0)) for limits in (choice.limits, paper)
    )
    assert ours <= theirs
    assert cap_lines(choice)[-1].startswith(
        f"filter: a group stays from {choice.limits.min_seq_len:,} tokens"
    )
    tried = [c for c in choice.trials if c.limits.max_vision == choice.limits.max_vision]
    assert ours <= min(c.num_groups for c in tried) * 1.002, "the best target that was tried"
    by_fit = choose(counts, max_seq_len=900)
    assert (by_fit.limits.min_seq_len, by_fit.limits.min_vision) == (
        900 - 112,
        by_fit.limits.max_vision,
    )
    assert not any(line.startswith("filter") for line in cap_lines(by_fit)), "ISF alone has one"


def test_the_explanation_compares_the_caps_with_their_neighbours_by_fill_and_time():
    counts = packed(2_000)
    choice = choose(counts, max_seq_len=900, flops=COST)
    cap = choice.limits.max_vision
    figures = {
        int(q_v): text for q_v, text in re.findall(r"Q_v (\d+): ([^;]+)", cap_lines(choice)[-1])
    }
    assert next(iter(figures)) == cap
    assert set(figures) <= {cap - 1, cap, cap + 1}
    for q_v, text in figures.items():
        groups = group_best_fit(
            counts.num_image_patches,
            counts.seq_len,
            caps_of(900, q_v, "image_patches"),
            seed=0,
            rounds=TRIAL_ROUNDS,
        )
        fill = counts.seq_len.sum() / (len(groups) * 900)
        assert text.startswith(f"{len(groups):,} groups of 2,000 samples, vision ")
        assert f"tokens {fill:.1%} full" in text
        assert "GPU-ms per sample predicted" in text


def test_a_time_beyond_chance_decides_before_groups_and_these_before_size():
    def tried(q_v, num_groups, ms_per_sample):
        return CapTrial(
            limits=caps_of(900, q_v, "image_patches"),
            num_samples=10_000,
            num_groups=num_groups,
            token_fill=0.9,
            vision_fill=0.9,
            ms_per_sample=ms_per_sample,
            waiting=0.0,
        )

    few, many = tried(9, 1_000, 70.1), tried(8, 1_020, 70.0)
    assert best_trial([many, few]) == few, "times differ by chance"
    fast = tried(8, 1_020, 69.0)
    assert best_trial([fast, few]) == fast
    assert best_trial([few, tried(10, 999, 70.0)]) == few, "no more groups to speak of, and smaller"
    assert best_trial([tried(8, 1_020, None), tried(9, 1_000, None)]).num_groups == 1_000
