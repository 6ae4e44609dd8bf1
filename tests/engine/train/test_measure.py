"""`python -m engine measure` on two ranks: what it writes is a profile, evidence, and a plan that
the training takes.
"""

import gc
import json

import pytest
import torch

from isobatch.common.errors import ConfigError
from isobatch.engine.cost_model.profile_table import profiled_costs, read_profile
from isobatch.engine.planning.plan import read_plan
from isobatch.engine.train.measure import MOST_STEPS, first_of_all_phases
from isobatch.loaders import StreamingLoader
from support.builds.sample_tables import text_samples
from support.builds.shard_fixture import group_samples, make_samples, write_build
from support.ranks import launch


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    groups = group_samples(make_samples(80))
    return write_build(tmp_path_factory.mktemp("packed") / "build", groups)


def on_two(folder, command, build, **options):
    """What two ranks printed."""
    named = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    result = launch(2, folder, "engine", command, build, "--device=cpu", *named)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def texts_and_images(folder, num_texts):
    samples = [[sample] for sample in text_samples(num_texts)]
    seen = [[sample] for sample in make_samples(20) if sample.images]
    return write_build(folder, samples + seen)


def load(build, seed=0, *, decode=True):
    images = "patches" if decode else "encoded"
    return StreamingLoader(build, dp_rank=0, dp_world_size=1, seed=seed, images=images)


def test_the_first_step_with_images_is_measured_and_outlives_its_loader(tmp_path):
    build, found = texts_and_images(tmp_path / "build", 20), []
    for seed in range(8):
        loader, bare = load(build, seed), load(build, seed, decode=False)
        kept = [first_of_all_phases(own, own.model) for own in (loader, bare)]
        loader.close()
        bare.close()
        del loader, bare
        gc.collect()
        steps = list(load(build, seed))
        place = next(place for place, (batch,) in enumerate(steps) if len(batch.patches_per_image))
        for (batch,), has_pixels in zip(kept, (True, False), strict=True):
            assert batch.sample_ids == steps[place][0].sample_ids
            assert torch.equal(batch.input_ids, steps[place][0].input_ids)
            assert bool(len(batch.pixel_values)) == has_pixels
            assert all(bytes(image) for image in batch.images)
        assert torch.equal(kept[0][0].pixel_values, steps[place][0].pixel_values)
        found.append(place)
    # otherwise steps before it were never passed over
    assert max(found) > 0


def test_a_build_whose_first_steps_have_no_images_is_refused(tmp_path):
    loader = load(
        write_build(tmp_path / "build", [[sample] for sample in text_samples(MOST_STEPS + 3)])
    )
    with pytest.raises(
        ConfigError,
        match=f"none of the first {MOST_STEPS} steps has something for each of vision and",
    ):
        first_of_all_phases(loader, loader.model)
    loader.close()


@pytest.mark.slow
def test_a_measured_plan_is_one_that_training_takes(build, tmp_path):
    out = tmp_path / "plan"
    printed = on_two(
        tmp_path / "planned",
        "measure",
        build,
        out=out,
        micro_batches_per_step=3,
        most_run=3,
    )
    evidence = json.loads((out / "evidence.json").read_text())
    plan = read_plan(out / "plan.json")
    assert list(plan.borders) == evidence["chosen"]
    assert 3 <= len(evidence["candidates"]) <= 4  # the anchor is run in any case
    assert all(len(row["steps_ms"]) == 3 for row in evidence["candidates"])
    profile = read_profile(out / "profile.json")
    chosen = next(row for row in evidence["candidates"] if row["borders"] == evidence["chosen"])
    assert plan.predicted.step_ns == round(1e6 * chosen["predicted_ms"])
    assert (profiled_costs(profile, plan.loads).forward_ns.sum(axis=0) > 0).all()
    assert f"{evidence['chosen']}  <- chosen" in printed
    given = {"plan": out / "plan.json", "steps": 1, "figures": tmp_path / "figures.jsonl"}
    on_two(tmp_path / "trained", "train", build, **given)
    assert json.loads((tmp_path / "figures.jsonl").read_text())["loss"] > 0
