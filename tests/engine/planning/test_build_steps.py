"""Loads of a packed build: what its loaders would give, sample by sample."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from isobatch.balance.order.step_order import DEFAULT_BALANCE
from isobatch.common.errors import ConfigError, DataError
from isobatch.common.types import Groups
from isobatch.engine.cost_model.loads import Loads, PhaseLoads, packed_loads, sample_loads
from isobatch.engine.planning.build_steps import padded, read_build
from isobatch.loaders.read.build import open_builds
from isobatch.loaders.steps.build_groups import BuildSource
from isobatch.loaders.steps.steps import StepConfig, Steps


def tokens_of(loads):
    return loads.vision.tokens, loads.llm.tokens


@pytest.mark.parametrize(("dp", "micro_batches"), [(1, 4), (2, 3), (3, 1)])
def test_steps_are_those_of_the_loaders(demo_build, dp, micro_batches):
    build = read_build(demo_build)
    loads = build.stream_steps(dp=dp, micro_batches=micro_batches, steps=3, seed=5)
    num_steps = len(loads) // (dp * micro_batches)
    assert num_steps > 1
    config = StepConfig(
        dp_rank=0,
        dp_world_size=dp,
        micro_batches=micro_batches,
        seed=5,
        remainder="drop",
    )
    (opened,) = open_builds([demo_build])
    plans = Steps(BuildSource(opened, seed=5, balance=DEFAULT_BALANCE), config).plan(num_steps)
    shape = num_steps, dp, micro_batches
    vit, llm = tokens_of(loads)
    np.testing.assert_array_equal(
        vit.reshape(shape), np.stack([plan.figures.vit_tokens[plan.place] for plan in plans])
    )
    np.testing.assert_array_equal(
        llm.reshape(shape), np.stack([plan.figures.llm_tokens[plan.place] for plan in plans])
    )


def test_squares_are_those_of_each_sample(demo_build):
    build = read_build(demo_build)
    loads = packed_loads(sample_loads(build.counts, build.model), build.groups)
    per_patch = build.model.vision.vit_tokens_per_patch
    for group in range(len(build.groups)):
        samples = build.groups[group]
        lengths = build.counts.seq_len[samples]
        patches = build.counts.num_image_patches[samples].sum()
        assert loads.llm.squares[group] == (lengths**2).sum()
        assert loads.llm.items[group] == len(samples)
        assert loads.vision.squares[group] == patches * per_patch**2
        assert loads.vision.items[group] == patches


def test_random_batches_are_padded_to_their_longest_sample(demo_build):
    build = read_build(demo_build)
    loads = build.random_steps(dp=2, micro_batches=3, steps=2, batch_size=4)
    assert len(loads) == 12
    assert (loads.llm.items == 4).all()
    assert (loads.llm.tokens % 4 == 0).all()
    np.testing.assert_array_equal(loads.llm.squares, 4 * (loads.llm.tokens // 4) ** 2)
    assert set(loads.llm.tokens // 4) <= set(build.counts.seq_len[build.groups.samples])
    assert len(set(loads.llm.tokens)) > 4


def test_random_batches_of_the_mean_size_are_at_least_as_many_as_the_groups(demo_build):
    build = read_build(demo_build)
    # one or two samples per group: rounded up, there would be fewer batches than groups
    few = build.groups.take(np.argsort(build.groups.sizes)[:1])
    one, two = Groups(few.samples[:1], np.array([0, 1])), Groups(few.samples[:2], np.array([0, 2]))
    groups = Groups(
        np.concatenate([one.samples, two.samples, two.samples]),
        np.cumsum([0, *one.sizes, *two.sizes, *two.sizes]),
    )
    build = replace(build, groups=groups)
    asked = {"dp": 1, "micro_batches": len(groups), "steps": 1}
    assert len(build.random_steps(batch_size=build.mean_group_size, **asked)) == len(groups)


def test_random_batches_hold_each_sample_at_most_once(demo_build):
    build = read_build(demo_build)
    packed = build.groups.samples
    steps = len(packed) // 4
    loads = build.random_steps(dp=1, micro_batches=1, steps=steps, batch_size=4)
    assert len(loads) == steps
    left_out = len(packed) - 4 * steps
    total, most = build.counts.num_vit_tokens[packed].sum(), build.counts.num_vit_tokens.max()
    assert total - left_out * most <= loads.vision.tokens.sum() <= total


def test_padding_counts_the_longest_for_everyone():
    groups = Groups(np.array([0, 1, 2, 3]), np.array([0, 3, 4]))
    plain = Loads(
        vision=PhaseLoads.nothing(2), audio=PhaseLoads.nothing(2), llm=PhaseLoads.nothing(2)
    )
    loads = padded(plain, groups, np.array([5, 7, 1, 2]))
    assert loads.llm.tokens.tolist() == [21, 2]
    assert loads.llm.squares.tolist() == [147, 4]


def test_no_group_is_larger_than_a_full_micro_batch(demo_build):
    build = read_build(demo_build)
    full, every = (
        build.full_micro_batch(),
        packed_loads(sample_loads(build.counts, build.model), build.groups),
    )
    assert (every.llm.tokens <= full.llm.tokens).all()
    assert (every.vision.tokens <= full.vision.tokens).all()
    assert full.llm.tokens.tolist() == [build.limits.max_seq_len]


def test_a_step_larger_than_the_build_is_refused(demo_build):
    build = read_build(demo_build)
    with pytest.raises(
        ConfigError,
        match=rf"has {len(build.groups)} groups, a step needs 4,000 \(dp x micro-batches\)",
    ):
        build.stream_steps(dp=4, micro_batches=1000, steps=1)


@pytest.fixture
def copied(demo_build, tmp_path):
    return shutil.copytree(demo_build, tmp_path / "copy")


def test_wrong_folders_are_named(copied, tmp_path):
    with pytest.raises(DataError, match="no such folder; give the output folder of `packer build`"):
        read_build(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"no manifest.json, so no finished build"):
        read_build(tmp_path / "empty")
    for name in ("index.arrow", "counts.parquet", "groups.parquet"):
        kept = (copied / name).read_bytes()
        (copied / name).unlink()
        with pytest.raises(
            DataError,
            match=rf"planning needs index.arrow, .* of the build, and {name} is not there",
        ):
            read_build(copied)
        (copied / name).write_bytes(kept[:100])
        with pytest.raises(DataError, match=r"cannot be (read|opened)|has 100 bytes"):
            read_build(copied)
        (copied / name).write_bytes(kept)
    assert len(read_build(copied).groups)


def test_other_manifests_are_refused(copied):
    path = copied / "manifest.json"
    values = json.loads(path.read_text())
    for content, message in (
        ("[]", "not a manifest of Isobatch"),
        ("{", "not a manifest of Isobatch"),
        (
            json.dumps({**values, "format_version": 1}),
            "format_version 1, format .arrow., but this version of Isobatch reads format_version 2",
        ),
        (
            json.dumps({**values, "seed": 1}),
            "damaged or edited: its content is not what its content_hash says",
        ),
    ):
        path.write_text(content)
        with pytest.raises(DataError, match=message):
            read_build(copied)


@pytest.mark.parametrize("name", ["model", "limits"])
@pytest.mark.parametrize("value", [None, 5, "x", [1], {"speed": 1}])
def test_a_manifest_whose_parts_are_not_what_they_should_be_is_refused_in_one_line(
    copied, name, value
):
    path = copied / "manifest.json"
    values = {
        key: kept for key, kept in json.loads(path.read_text()).items() if key != "content_hash"
    }
    path.write_text(json.dumps({**values, name: value}))
    with pytest.raises(
        (DataError, ConfigError), match=r"not a manifest of Isobatch|model preset"
    ) as error:
        read_build(copied)
    assert "\n" not in str(error.value)


def test_tables_of_another_build_are_noticed(copied, demo_build):
    table = pq.read_table(copied / "counts.parquet")
    longer = pa.array(table.column("num_text_tokens").to_numpy() + 1, pa.int32())
    place = table.schema.get_field_index("num_text_tokens")
    pq.write_table(table.set_column(place, "num_text_tokens", longer), copied / "counts.parquet")
    with pytest.raises(
        DataError, match=r"counts.parquet and groups.parquet do not fit index.arrow"
    ):
        read_build(copied)
