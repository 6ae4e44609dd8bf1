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
from support.builds.packed import build
from support.builds.raw_data import good_records, write_dataset
from support.builds.sample_tables import text_samples
from support.builds.shard_fixture import make_samples, write_build
from support.pages.blocks import Block
from support.pages.page_data import block
from support.pages.tutorial import Tutorial

RUN = "torchrun --nproc-per-node 2 -m engine"
TUNED = f"{RUN} train packed --plan measured/plan.json \\\n    --tune"


def texts_and_images(folder, num_texts):
    samples = [[sample] for sample in text_samples(num_texts)]
    seen = [[sample] for sample in make_samples(20) if sample.images]
    return write_build(folder, samples + seen)


def load(folder, seed=0, *, decode=True):
    images = "patches" if decode else "encoded"
    return StreamingLoader(folder, dp_rank=0, dp_world_size=1, seed=seed, images=images)


def test_the_first_step_with_images_is_measured_and_outlives_its_loader(tmp_path):
    folder, found = texts_and_images(tmp_path / "build", 20), []
    for seed in range(8):
        loader, bare = load(folder, seed), load(folder, seed, decode=False)
        kept = [first_of_all_phases(own, own.model) for own in (loader, bare)]
        loader.close()
        bare.close()
        del loader, bare
        gc.collect()
        steps = list(load(folder, seed))
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
def test_a_measured_plan_is_one_that_training_takes(tmp_path):
    """The pages' commands, with few steps: measure, train, adapt and tune."""
    folder = tmp_path / "folder"
    folder.mkdir()
    data = write_dataset(tmp_path / "data", good_records(tmp_path / "data", 40))
    build(data, folder / "packed", max_seq_len=256)
    (folder / "plan").symlink_to(folder / "measured")
    more = " --device cpu --micro-batches-per-step 3"
    measure, train = block("docs/plan.md", f"{RUN} measure").code.splitlines()
    trained = [train]
    for start in (f"{RUN} train packed --plan plan/plan.json \\\n    --recompute", TUNED):
        trained.append(block("docs/train.md", start).code.rstrip())
    commands = [f"{measure}{more} --most-run 3"]
    for number, command in enumerate(trained):
        commands.append(f"{command}{more} --steps 1 --figures figures{number}.jsonl")
    page = Tutorial([Block("docs/plan.md", 0, "", "bash", "\n".join(commands))], folder)
    printed = page.follow()
    evidence = json.loads((folder / "measured/evidence.json").read_text())
    plan = read_plan(folder / "measured/plan.json")
    assert list(plan.borders) == evidence["chosen"]
    assert 3 <= len(evidence["candidates"]) <= 4  # the anchor is run in any case
    assert all(len(row["steps_ms"]) == 3 for row in evidence["candidates"])
    profile = read_profile(folder / "measured/profile.json")
    chosen = next(row for row in evidence["candidates"] if row["borders"] == evidence["chosen"])
    assert plan.predicted.step_ns == round(1e6 * chosen["predicted_ms"])
    assert (profiled_costs(profile, plan.loads).forward_ns.sum(axis=0) > 0).all()
    assert f"{evidence['chosen']}  <- chosen" in printed
    rows = [json.loads((folder / f"figures{number}.jsonl").read_text()) for number in range(3)]
    assert rows[1]["loss"] == rows[0]["loss"] > 0
    assert rows[2]["loss"] == pytest.approx(rows[0]["loss"], rel=1e-6)
