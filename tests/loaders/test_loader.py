"""The loader: every sample once on any ranks, exact resume, global sums, clear refusals."""

import dataclasses
import json
from collections import Counter
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isobatch.common.errors import ConfigError, DataError
from isobatch.loaders import MicroBatch, StreamingLoader
from support.builds.sample_tables import write_tabled
from support.builds.shard_fixture import (
    FORMATS,
    IMAGE_TOKEN,
    group_samples,
    make_samples,
    write_build,
)
from support.cases import for_each

NUM_SAMPLES = 90


@pytest.fixture(scope="module")
def builds(tmp_path_factory):
    groups = group_samples(make_samples(NUM_SAMPLES), max_tokens=120)
    root = tmp_path_factory.mktemp("builds")
    return {format: write_build(root / format, groups, format) for format in FORMATS}


@pytest.fixture(scope="module")
def text_build(tmp_path_factory):
    """No images: fast enough for many resumes."""
    groups = group_samples([s for s in make_samples(300, seed=1) if not s.images], max_tokens=30)
    return write_build(tmp_path_factory.mktemp("text") / "build", groups)


def load(build, rank=0, world=1, **options):
    return StreamingLoader(build, dp_rank=rank, dp_world_size=world, **options)


def all_ids(build):
    return [
        sample_id
        for step in load(build, pixel_dtype=torch.uint8)
        for b in step
        for sample_id in b.sample_ids
    ]


def ids_of(steps):
    return [sample_id for step in steps for batch in step for sample_id in batch.sample_ids]


@pytest.mark.parametrize("format", FORMATS)
def test_every_sample_of_an_epoch_once_on_four_ranks(builds, format):
    loaders = [
        load(builds[format], rank, 4, micro_batches_per_step=2, pixel_dtype=torch.uint8)
        for rank in range(4)
    ]
    steps = [list(loader) for loader in loaders]
    assert Counter(ids_of(chain(*steps))) == Counter(f"sample-{n:05d}" for n in range(NUM_SAMPLES))
    assert {len(s) for s in steps} == {len(loaders[0])}
    assert all(len(step) == 2 for s in steps for step in s)
    assert [loader.epoch for loader in loaders] == [1] * 4


def test_the_formats_hold_the_same(builds):
    arrow, *others = (list(load(builds[format])) for format in FORMATS)
    for other in others:
        for a, b in zip(arrow, other, strict=True):
            assert_same(a, b)


def test_two_loaders_give_identical_tensors(builds):
    for a, b in zip(load(builds["arrow"], 1, 2), load(builds["arrow"], 1, 2), strict=True):
        assert_same(a, b)


def test_epochs_and_seeds_have_orders_of_their_own(text_build):
    loader = load(text_build)
    first, second = ids_of(loader), ids_of(loader)
    assert first != second
    assert Counter(first) == Counter(second)
    assert ids_of(load(text_build, seed=1)) != first


def test_sums_of_the_step_are_global_and_known_to_every_rank(builds):
    ranks = [
        load(builds["arrow"], rank, 3, micro_batches_per_step=2, pixel_dtype=torch.uint8)
        for rank in range(3)
    ]
    for step in zip(*ranks, strict=True):
        batches = [batch for rank in step for batch in rank]
        labels = sum(int((batch.labels != -100).sum()) for batch in batches)
        samples = sum(batch.num_samples for batch in batches)
        assert {(batch.num_loss_tokens, batch.num_step_samples) for batch in batches} == {
            (labels, samples)
        }


def test_a_micro_batch_is_packed_as_documented(builds):
    pixels_seen = 0
    for (batch,) in load(builds["arrow"]):
        lengths = batch.cu_seqlens.diff().tolist()
        assert batch.position_ids.tolist() == [
            place for length in lengths for place in range(length)
        ]
        assert batch.max_seqlen == max(lengths)
        assert batch.pixel_values.shape == (int(batch.patches_per_image.sum()), 3, 56, 56)
        assert batch.pixel_values.dtype == torch.float32
        assert int((batch.input_ids == IMAGE_TOKEN).sum()) == 4 * len(batch.pixel_values)
        assert batch.image_sizes.shape == (len(batch.patches_per_image), 2)
        assert batch.image_grid_thw is None
        assert (batch.input_ids.dtype, batch.labels.dtype, batch.cu_seqlens.dtype) == (
            torch.int64,
            torch.int64,
            torch.int32,
        )
        pixels_seen += len(batch.pixel_values)
    assert pixels_seen > 0


def test_native_resolution_gives_squares_and_their_grid(tmp_path):
    samples = make_samples(6, model="qwen2_vl")
    (step,) = load(write_build(tmp_path / "build", [samples], model="qwen2_vl"))
    (raw,) = next(iter(load(tmp_path / "build", pixel_dtype=torch.uint8)))
    batch = step[0]
    assert batch.image_grid_thw is not None
    num_vit_tokens = sum(sample.counts["num_vit_tokens"] for sample in samples)
    assert int(batch.image_grid_thw.prod(dim=1).sum()) == num_vit_tokens
    assert batch.pixel_values.shape == (num_vit_tokens, 3 * 2 * 14 * 14)
    assert raw.pixel_values.shape == (num_vit_tokens, 3, 14, 14)
    assert batch.patches_per_image.tolist() == [1] * sum(len(sample.images) for sample in samples)


def test_padding_adds_empty_micro_batches_of_zero_weight(text_build):
    num_groups = len(load(text_build))
    world = num_groups - 1  # the second step has one group
    ranks = [list(load(text_build, rank, world)) for rank in (0, world - 1)]
    (last,) = ranks[1][1]
    assert last.num_samples == 0
    assert last.max_seqlen == 0
    assert last.cu_seqlens.tolist() == [0]
    assert last.input_ids.shape == last.labels.shape == last.position_ids.shape == (0,)
    assert last.pixel_values.shape == (0, 3, 56, 56)
    (first,) = ranks[0][1]
    assert last.num_loss_tokens == first.num_loss_tokens == int((first.labels != -100).sum())


def test_drop_leaves_out_less_than_a_step_and_counts_it(text_build):
    ranks = [
        load(text_build, rank, 4, micro_batches_per_step=2, remainder="drop") for rank in range(4)
    ]
    num_groups = len(load(text_build))
    assert num_groups % 8
    steps = [list(loader) for loader in ranks]
    assert {len(s) for s in steps} == {num_groups // 8} == {len(loader) for loader in ranks}
    seen = ids_of(chain(*steps))
    assert len(set(seen)) == len(seen)
    assert {loader.num_dropped_samples for loader in ranks} == {
        len(all_ids(text_build)) - len(seen)
    }
    assert ranks[0].num_dropped_samples > 0


runs = st.lists(
    st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(0, 6)), min_size=1, max_size=4
)


@settings(deadline=None, max_examples=40)
@given(
    runs=runs,
    last=st.tuples(st.integers(1, 5), st.integers(1, 3)),
    balance=st.sampled_from([0, 0.5, 0.9]),
)
def test_resumed_on_other_ranks_at_any_step_the_union_is_exact_and_none_comes_twice(
    text_build, runs, last, balance
):
    state, seen = None, []
    for world, micro_batches, num_steps in [*runs, (*last, None)]:
        states = []
        for rank in range(world):
            loader = load(
                text_build, rank, world, micro_batches_per_step=micro_batches, balance=balance
            )
            if state is not None:
                loader.load_state_dict(json.loads(json.dumps(state)))
            count = (
                loader.remaining_steps
                if num_steps is None
                else min(num_steps, loader.remaining_steps)
            )
            seen += ids_of(step for _, step in zip(range(count), loader, strict=False))
            states.append(loader.state_dict())
        assert all(other == states[0] for other in states)
        state = states[0]
    assert Counter(seen) == Counter(all_ids(text_build))


@pytest.mark.parametrize("format", FORMATS)
def test_steps_give_ranks_the_same_sums_and_every_sample_once(builds, format):
    loaders = [
        load(
            builds[format],
            rank,
            2,
            micro_batches_per_step=4,
            pixel_dtype=torch.uint8,
        )
        for rank in range(2)
    ]
    steps = list(zip(*loaders, strict=True))
    assert Counter(ids_of(chain(*steps))) == Counter(f"sample-{n:05d}" for n in range(NUM_SAMPLES))
    tokens = np.array(
        [[sum(len(batch.input_ids) for batch in rank) for rank in step] for step in steps[:-2]]
    )
    patches = np.array(
        [[sum(len(batch.pixel_values) for batch in rank) for rank in step] for step in steps[:-2]]
    )
    plain = zip(
        *(load(builds[format], rank, 2, micro_batches_per_step=4, balance=0) for rank in range(2)),
        strict=True,
    )
    assert ids_of(chain(*plain)) != ids_of(chain(*steps))
    assert np.ptp(tokens, axis=1).mean() < 0.1 * tokens.mean()
    assert np.ptp(patches, axis=1).mean() <= 3


def test_an_epoch_without_a_step_is_refused_and_not_dropped_unheard(text_build):
    loader = load(text_build, 0, 4, micro_batches_per_step=1_000, remainder="drop")
    with pytest.raises(
        ConfigError,
        match=r"the \d+ groups of an epoch are less than one step of 4 ranks x 1000 micro-b",
    ):
        next(iter(loader))
    assert (loader.epoch, loader.num_dropped_samples) == (0, 0)


def test_a_resumed_loader_gives_the_steps_that_the_first_would_have_given(text_build):
    whole = [ids_of([step]) for step in load(text_build, 1, 2)]
    first = load(text_build, 1, 2)
    for _, _ in zip(range(5), first, strict=False):
        pass
    second = load(text_build, 0, 2)
    second.load_state_dict(first.state_dict())
    third = load(text_build, 1, 2)
    third.load_state_dict(second.state_dict())
    assert [ids_of([step]) for step in third] == whole[5:]
    assert third.epoch == 1


def test_state_after_the_last_step_leads_into_the_next_epoch(text_build):
    loader = load(text_build)
    for _, _ in zip(range(len(loader)), loader, strict=False):
        pass
    resumed = load(text_build)
    resumed.load_state_dict(loader.state_dict())
    whole = load(text_build)
    list(whole)
    second_epoch = ids_of(whole)
    assert ids_of(resumed) == second_epoch
    assert resumed.epoch == 2
    assert ids_of(loader) == second_epoch


def test_a_new_iterator_continues_in_the_middle_of_an_epoch(text_build):
    loader = load(text_build)
    seen = ids_of(step for _, step in zip(range(3), loader, strict=False)) + ids_of(loader)
    assert Counter(seen) == Counter(all_ids(text_build))


@for_each(
    ("change", "message"),
    [
        ({"manifest_hash": "0"}, "belongs to another build"),
        ({"seed": 5}, "seed of the run"),
        ({"version": 9}, "another version"),
        ({"stream": {"consumed": 10**6, "spare": []}}, "does not fit"),
        ({"stream": {"consumed": [0], "spare": [1]}}, "another stream"),
        ({"stream": 7}, "give what .state_dict"),
        ({"order": "stored"}, "shuffle of the run"),
        ({"regroup": {"window_groups": 8}}, "regroup and regroup_window of the run"),
        ({"epoch": -1}, "epoch -1; epochs are numbered from 0"),
        ({"extra": 1}, "has the keys"),
    ],
)
def test_a_wrong_state_is_refused_and_changes_nothing(text_build, change, message):
    loader = load(text_build)
    next(iter(loader))
    before = loader.state_dict()
    with pytest.raises(ConfigError, match=message):
        loader.load_state_dict({**before, **change})
    assert loader.state_dict() == before


@for_each(
    ("options", "message"),
    [
        ({"rank": 2, "world": 2}, "dp_rank is 2"),
        ({"rank": -1}, "dp_rank is -1"),
        ({"micro_batches_per_step": 0}, "micro_batches_per_step is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"remainder": "keep"}, "remainder is 'keep'; it must be one of pad, drop, split or None"),
        ({"balance": 1.0}, "balance is 1.0; use 0 .random. to 0.99"),
        ({"pixel_dtype": torch.int64}, "pixel_dtype is torch.int64"),
        ({"regroup": "step"}, "regroup is 'step'; it must be 'epoch' or None"),
        ({"regroup": "epoch", "regroup_window": 0}, "regroup_window is 0"),
        ({"workers": -1}, "workers is -1"),
        ({"prefetch_bytes": -1}, "prefetch_bytes is -1"),
    ],
)
def test_wrong_options_are_refused(text_build, options, message):
    with pytest.raises(ConfigError, match=message):
        load(text_build, **options)


def test_unknown_schemes_are_refused_and_file_urls_are_taken(text_build):
    with pytest.raises(ConfigError, match="ftp://host/build: unknown scheme"):
        load("ftp://host/build")
    assert len(load(f"file://{text_build}")) == len(load(str(text_build)))


@pytest.mark.parametrize("format", FORMATS)
def test_a_damaged_image_names_its_sample_and_shard_and_the_step_is_not_lost(tmp_path, format):
    samples = make_samples(12)
    victim = next(sample for sample in samples if sample.images)
    victim.images[0] = victim.images[0][:30]
    loader = load(write_build(tmp_path / "build", group_samples(samples), format))
    with pytest.raises(
        DataError, match=rf"(?s)sample '{victim.sample_id}' \(shard-00000.* group \d+\): image"
    ) as error:
        list(loader)
    assert "\n" not in str(error.value)
    state = loader.state_dict()
    with pytest.raises(DataError, match=victim.sample_id):
        next(iter(loader))
    assert loader.state_dict() == state


def test_an_image_of_another_size_than_counted_is_refused(tmp_path):
    samples = make_samples(12)
    victim = next(sample for sample in samples if sample.images)
    victim.sizes[0] = (victim.sizes[0][0] + 1, victim.sizes[0][1])
    with pytest.raises(DataError, match=f"{victim.sample_id}.*when it was counted"):
        list(load(write_build(tmp_path / "build", group_samples(samples))))


def test_refs_take_images_from_another_folder_and_name_a_missing_one(tmp_path):
    samples = make_samples(12)
    build = write_build(tmp_path / "build", group_samples(samples), "refs")
    (build / "images").rename(tmp_path / "moved")
    with pytest.raises(ConfigError, match="give image_root"):
        load(build)
    assert len(ids_of(load(build, image_root=tmp_path / "moved"))) == 12
    victim = next(sample for sample in samples if sample.images)
    (tmp_path / "moved" / victim.sample_id / "0.img").unlink()
    with pytest.raises(DataError, match=f"{victim.sample_id}.*cannot be read"):
        list(load(build, image_root=tmp_path / "moved"))


def test_samples_of_several_builds_say_which_is_theirs(tmp_path):
    samples = [each for each in make_samples(300, seed=1) if not each.images]
    halves = {}
    for name, own in (("a", samples[:20]), ("b", samples[20:40])):
        same_ids = [dataclasses.replace(s, sample_id=f"s{n}") for n, s in enumerate(own)]
        write_tabled(tmp_path / name, group_samples(same_ids, max_tokens=60))
        halves[name] = tmp_path / name
    for options in ({}, {"shuffle": False}, {"regroup": "epoch"}, {"filter": all_of}):
        found = Counter()
        for step in load(list(halves.values()), **options):
            for batch in step:
                assert len(batch.sample_builds) == batch.num_samples
                found.update(zip(batch.sample_builds, batch.sample_ids, strict=True))
        assert found == Counter((build, f"s{n}") for build in (0, 1) for n in range(20))


def all_of(columns):
    return columns["num_text_tokens"] > 0


def assert_same(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        for field in dataclasses.fields(MicroBatch):
            left, right = getattr(a, field.name), getattr(b, field.name)
            if isinstance(left, torch.Tensor):
                np.testing.assert_array_equal(left.numpy(), right.numpy(), err_msg=field.name)
            else:
                assert left == right
