"""Steps without any reading: exact on any ranks, balanced as predicted, several builds and
regrouped ones too.
"""

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isobatch.balance.metrics import dist_ratio
from isobatch.balance.order.step_order import epoch_steps
from isobatch.balance.steps.step_planner import StepAssignment
from isobatch.common.errors import ConfigError, DataError
from isobatch.common.types import Groups
from isobatch.loaders import StreamingLoader
from isobatch.loaders.read.build import open_builds
from isobatch.loaders.stats import Meter
from isobatch.loaders.steps.build_groups import BuildSource
from isobatch.loaders.steps.mixture import MixedGroups, MixedSource
from isobatch.loaders.steps.source import sample_counts
from isobatch.loaders.steps.steps import StepConfig, Steps
from support.builds.sample_tables import (
    LIMITS,
    llm_tokens,
    path_groups,
    text_samples,
    write_tabled,
)
from support.builds.shard_fixture import Sample
from support.loading.step_planners import dispatch, repack

NUM_SAMPLES = 900


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    """Samples with images by their counts alone: the shards are not read here."""
    rng = np.random.default_rng(3)
    samples = [with_images(sample, int(rng.integers(0, 4))) for sample in text_samples(NUM_SAMPLES)]
    root = write_tabled(tmp_path_factory.mktemp("steps") / "build", path_groups(samples))
    return open_builds([root])[0]


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """Two smaller builds."""
    roots = [tmp_path_factory.mktemp("other") / "build" for _ in range(2)]
    sizes = zip(roots, [300, 101], strict=True)
    return open_builds(
        [write_tabled(root, path_groups(text_samples(size, f"of-{size}"))) for root, size in sizes]
    )


def with_images(sample, num_patches):
    counts = sample.counts | {"num_image_patches": num_patches, "num_vit_tokens": 17 * num_patches}
    return Sample(sample.sample_id, sample.input_ids, sample.labels, counts=counts)


def make_steps(source, rank=0, world=1, micro_batches=1, remainder="pad", planner=None, seed=0):
    config = StepConfig(
        dp_rank=rank,
        dp_world_size=world,
        micro_batches=micro_batches,
        seed=seed,
        remainder=remainder,
    )
    return Steps(source, config, planner)


def samples_of(items, builds):
    """(build, sample in stored order) of everything that items read."""
    for item in items:
        for pick in item:
            first = int(builds[pick.build].samples.offsets[pick.group])
            size = int(builds[pick.build].samples.groups.sizes[pick.group])
            yield from ((pick.build, first + place) for place in pick.places or range(size))


sources = st.sampled_from(["stored", "regrouped", "mixed"])
shapes = st.tuples(
    st.one_of(st.integers(1, 8), st.integers(1, 64)), st.integers(1, 4), st.integers(0, 9)
)


@settings(deadline=None, max_examples=20)
@given(
    kind=sources,
    balance=st.sampled_from([0.0, 0.5, 0.9]),
    planner=st.sampled_from([None, repack, dispatch]),
    remainder=st.sampled_from(["pad", "drop"]),
    runs=st.lists(shapes, max_size=3),
    last=st.tuples(st.integers(1, 6), st.integers(1, 3)),
)
def test_every_sample_once_per_epoch_whatever_the_ranks(
    build, others, kind, balance, planner, remainder, runs, last
):
    builds = others if kind == "mixed" else [build]
    source = make_source(kind, builds, balance)
    seen: Counter[tuple[int, int]] = Counter()
    state, left_out = None, 0
    for world, micro_batches, num_steps in [*runs, (*last, 10**6)]:
        ranks = [
            make_steps(source, rank, world, micro_batches, remainder, planner)
            for rank in range(world)
        ]
        for steps in ranks if state is not None else []:
            steps.load(json.loads(state))
        assert len({steps.remaining for steps in ranks}) == 1
        for _ in range(min(num_steps, ranks[0].remaining)):
            plans = [steps.plan(1)[0] for steps in ranks]
            given = [sample for plan in plans for sample in samples_of(plan.micro_batches, builds)]
            seen.update(given)
            check_step(plans, given, builds)
        assert len({json.dumps(steps.state()) for steps in ranks}) == 1
        state = json.dumps(ranks[0].state())
    if ranks[0].epoch == 0:
        left_out = ranks[0].finish_epoch()
    assert set(seen.values()) <= {1}
    assert len(seen) + left_out == sum(len(one.samples.groups.samples) for one in builds)
    assert left_out == 0 or remainder == "drop"


def make_source(kind, builds, balance):
    if kind == "mixed":
        return mixed(builds, [1.0] * len(builds), balance=balance)
    window_groups = 16 if kind == "regrouped" else None
    return part_of(builds[0], window_groups=window_groups, balance=balance)


def part_of(build, number=0, window_groups=None, balance=0.5):
    return BuildSource(build, number, seed=0, balance=balance, window_groups=window_groups)


def mixed(builds, weights, window_groups=None, balance=0.5):
    parts = [part_of(build, number, window_groups, balance) for number, build in enumerate(builds)]
    return MixedSource(parts, weights, 0, balance)


def check_step(plans, given, builds):
    """What every rank knows of a step is so, and what planners gave to encoders is all there is to
    encode.
    """
    count = {
        name: sum(int(builds[b].samples.columns[name][s]) for b, s in given)
        for name in builds[0].samples.columns
    }
    assert {plan.totals.num_samples for plan in plans} == {len(given)}
    assert {plan.totals.num_loss_tokens for plan in plans} == {count["num_loss_tokens"]}
    for plan in plans:
        assert int(plan.figures.vit_tokens[plan.place].sum()) == count["num_vit_tokens"]
        assert int(plan.figures.llm_tokens[plan.place].sum()) == count["num_text_tokens"]
    assert sum(plan.num_tokens for plan in plans) == count["num_text_tokens"]
    assert sum(plan.num_pixel_rows for plan in plans) == count["num_image_patches"]
    if plans[0].encoders:
        encoded = Counter(
            sample for plan in plans for sample in samples_of(plan.encoders["vision"], builds)
        )
        assert encoded == Counter(
            (b, s) for b, s in given if builds[b].samples.columns["num_vit_tokens"][s]
        )


def test_hundreds_of_ranks_share_every_sample(build):
    source, world = part_of(build), 512
    seen: Counter[tuple[int, int]] = Counter()
    for rank in range(world):
        steps = make_steps(source, rank, world)
        while steps.remaining:
            seen.update(samples_of(steps.plan(1)[0].micro_batches, [build]))
    assert len(seen) == NUM_SAMPLES
    assert set(seen.values()) == {1}


@pytest.mark.parametrize("world", [2, 8, 1000])
def test_the_dist_ratios_of_the_steps_are_those_that_the_metrics_predict(build, world):
    steps, meter = make_steps(part_of(build), 0, world, micro_batches=2), Meter()
    while steps.remaining:
        meter.add_step(steps.plan(1)[0], 0, 0.0)
    everyone = np.arange(len(build.index))
    loads = build.index.column("num_image_patches", everyone), llm_tokens(build.index, everyone)
    taken = epoch_steps(loads, (world, 2), balance=0.5).transpose(0, 2, 1).ravel()
    groups = taken[taken >= 0]
    stats = meter.stats(0)
    assert stats.dist_ratio_vit == pytest.approx(
        dist_ratio(build.index.column("num_vit_tokens", groups), world)
    )
    tokens = llm_tokens(build.index, groups)
    assert stats.dist_ratio_llm == pytest.approx(dist_ratio(tokens, world))
    assert stats.dist_ratio_llm > 0


def test_regrouped_epochs_differ_keep_the_caps_and_are_the_same_when_made_in_the_background(build):
    source, ahead = part_of(build, 0, 16), part_of(build, 0, 16)
    table, groups_of = build.samples, []
    for number in range(2):
        ahead.prepare(number)
        epoch, again = source.table(number), ahead.table(number)
        everyone = np.arange(len(epoch))
        made, made_again = epoch.samples(everyone), again.samples(everyone)
        np.testing.assert_array_equal(made.groups, made_again.groups)
        np.testing.assert_array_equal(made.places, made_again.places)
        sizes = epoch.column("num_samples", everyone)
        groups = Groups(
            table.offsets[made.groups] + made.places, np.concatenate([[0], np.cumsum(sizes)])
        )
        assert groups.sum(llm_tokens(table, np.arange(NUM_SAMPLES))).max() <= LIMITS.max_seq_len
        groups_of.append({tuple(sorted(groups[g].tolist())) for g in range(len(groups))})
    assert len(groups_of[0] & groups_of[1]) < len(groups_of[0]) / 4


@pytest.mark.parametrize("window_groups", [None, 16])
def test_mixed_epochs_are_the_same_when_made_in_the_background(others, window_groups):
    source, ahead = (mixed(others, [5.0, 2.0], window_groups) for _ in range(2))
    for number in (0, 1, 2, 1):
        ahead.prepare(number)
        epoch, again = source.table(number), ahead.table(number)
        selections = [each.selections(np.arange(len(each))) for each in (epoch, again)]
        assert selections[0] == selections[1]


def test_weights_are_shares_of_passes_and_every_pass_is_whole(others):
    source = mixed(others, [5.0, 2.0])
    times: Counter[tuple[int, int]] = Counter()
    num_groups = [one.manifest.num_groups for one in others]
    for number in range(5):
        epoch = source.table(number)
        items = epoch.selections(np.arange(len(epoch)))
        times.update((pick.build, pick.group) for item in items for pick in item)
        assert all(times[0, group] == number + 1 for group in range(num_groups[0]))
        assert len(epoch) == len(set(items))  # none twice
    assert {times[1, group] for group in range(num_groups[1])} == {2}


def test_groups_of_a_large_build_in_part_are_those_that_were_chosen():
    class Numbers:
        """An epoch whose groups' origins are their own numbers."""

        def __init__(self, size):
            self.size = size

        def __len__(self):
            return self.size

        def origins(self, groups):
            return np.zeros_like(groups), groups

    rng = np.random.default_rng(0)
    masks = [rng.random(size) < share for size, share in ((150_000, 0.4), (300_000, 1e-4))]
    masks[0][65_536:131_072] = False  # a block of which none is chosen
    pieces = [(Numbers(len(masks[0])), masks[0]), (Numbers(7), None), (Numbers(300_000), masks[1])]
    epoch = MixedGroups([], pieces, np.zeros(len(pieces), np.int64))
    expected = np.concatenate([np.flatnonzero(masks[0]), np.arange(7), np.flatnonzero(masks[1])])
    assert len(epoch) == len(expected)
    groups = rng.permutation(len(expected))
    assert np.array_equal(epoch.origins(groups)[1], expected[groups])


def test_regrouped_builds_keep_their_weights_and_every_pass_is_whole(others):
    source, again = mixed(others, [5.0, 2.0], 16), mixed(others, [5.0, 2.0], 16)
    times: Counter[tuple[int, int]] = Counter()
    groups_of = []
    for number in range(5):
        again.prepare(number)
        epoch, same = source.table(number), again.table(number)
        items = epoch.selections(np.arange(len(epoch)))
        assert items == same.selections(np.arange(len(same)))
        everyone = np.arange(len(epoch))[::-1]
        refs = epoch.samples(everyone)
        assert list(samples_of([refs.select(np.arange(len(refs.places)))], others)) == list(
            samples_of(reversed(items), others)
        )
        num_loss = sum(sample_counts(epoch, refs).num_loss_tokens)
        assert epoch.column("num_loss_tokens", everyone).sum() == num_loss
        groups_of.append({item for item in items if item[0].build == 0})
        times.update(samples_of(items, others))
    assert {times[0, sample] for sample in range(300)} == {5}
    assert {times[1, sample] for sample in range(101)} == {2}
    assert len(groups_of[0] & groups_of[1]) < len(groups_of[0]) / 4


def test_a_state_of_other_weights_is_refused(others):
    state = make_steps(mixed(others, [5.0, 2.0])).state()
    make_steps(mixed(others, [10.0, 4.0])).load(state)
    with pytest.raises(ConfigError, match="belongs to another build"):
        make_steps(mixed(others, [5.0, 3.0])).load(state)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda groups: Groups(
                groups.samples[1:], groups.offsets.clip(max=len(groups.samples) - 1)
            ),
            "to 0 micro-b",
        ),
        (
            lambda groups: Groups(np.zeros_like(groups.samples), groups.offsets),
            "sample 0 to [0-9]+ micro-batches",
        ),
        (
            lambda groups: Groups(groups.samples + 10**6, groups.offsets),
            "sample 10000.. of|assigned sample 1000",
        ),
    ],
)
def test_a_planner_that_loses_or_repeats_a_sample_is_refused(build, spoil, message):
    def planner(samples):
        work = repack(samples)
        return StepAssignment(micro_batches=(spoil(work.micro_batches[0]), *work.micro_batches[1:]))

    with pytest.raises(ConfigError, match=message):
        make_steps(part_of(build), 0, 2, planner=planner).plan(1)


def test_tables_that_are_missing_or_of_another_build_are_refused(tmp_path):
    root = write_tabled(tmp_path / "build", path_groups(text_samples(90)))
    other = write_tabled(tmp_path / "other", path_groups(text_samples(91)))
    (other / "counts.parquet").replace(root / "counts.parquet")
    (other / "groups.parquet").replace(root / "groups.parquet")
    with pytest.raises(DataError, match="do not fit index"):
        StreamingLoader(root, dp_rank=0, dp_world_size=1, regroup="epoch")
    (root / "counts.parquet").unlink()
    with pytest.raises(DataError, match=r"copy them next to index.arrow, or build again"):
        StreamingLoader(root, dp_rank=0, dp_world_size=1, regroup="epoch")
