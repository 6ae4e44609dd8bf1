"""Models of transformers through `python -m engine`: planned by measuring, trained, tuned,
fitted into memory.
"""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")


from isobatch.common.errors import ConfigError
from isobatch.engine.cost_model.profile_table import read_profile
from isobatch.engine.planning.adaptive_recompute import OutOfMemory
from isobatch.engine.planning.plan import read_plan
from isobatch.engine.runtime.cpu_memory import LiveBytes
from isobatch.engine.runtime.profiling.recompute_trials import StepObserver
from isobatch.engine.train.layout import apply_plan
from isobatch.engine.train.models._transformers_files import make_config
from isobatch.engine.train.models.open_model import open_model
from isobatch.loaders import StreamingLoader
from support.builds.sample_tables import write_tabled
from support.builds.shard_fixture import group_samples, make_samples, write_build
from support.ranks import launch, run_ranks
from support.trainers.engine_train import main, make, parse, run_steps
from support.trainers.family_ranks import STEPS, everything
from support.trainers.stated_ranks import TUNED, state_times, tune_by_stated

pytestmark = pytest.mark.slow

GIB, PLENTY = 2**30, 1 << 40
TOLERANCE = 1e-5
"""Of losses, relative: steps packed anew add gradients up in another order, which Adam
magnifies.
"""
LAYERS = {"internvl": 9, "llava": 8, "qwen2_vl": 9}

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def builds(shared):
    """By model; tiles of the tiny preset do for InternVL."""

    def make_builds(root):
        write_tabled(root / "internvl", group_samples(make_samples(60)))
        for name, preset, most in (("llava", "llava_1_5", 1_800), ("qwen2_vl", "qwen2_vl", 160)):
            groups = group_samples(make_samples(24, model=preset), most)
            write_build(root / name, groups, model=preset)

    root = shared("model-families", make_builds)
    return {name: str(root / name) for name in LAYERS}


@pytest.fixture(scope="module")
def two(shared, builds):
    """The folder with what two ranks wrote."""

    def train(folder):
        for said in run_ranks(folder, 2, everything, str(folder), builds, most_s=200):
            assert set(said.values()) == {STEPS}

    return shared("model-families-on-two-ranks", train)


def losses(path):
    return [json.loads(line)["loss"] for line in path.read_text().splitlines()]


def train_here(build, name, figures, *options):
    """As without torchrun; -> the exit status."""
    given = [
        f"--model={name}",
        f"--figures={figures}",
        f"--steps={STEPS}",
        "--micro-batches-per-step=3",
    ]
    try:
        return main([build, "--device=cpu", *given, *options])
    finally:
        part()


def part():
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("name", LAYERS)
def test_a_measured_plan_trains_with_the_losses_of_one_stage(builds, two, tmp_path, name):
    plan, profile = read_plan(two / name / "plan.json"), read_profile(two / name / "profile.json")
    assert len(plan.layer_names) == LAYERS[name]
    assert plan.layer_names == profile.names
    assert plan.model.name == name
    assert len(plan.borders) == 3
    evidence = json.loads((two / name / "evidence.json").read_text())
    assert list(plan.borders) == evidence["chosen"]
    # parts of micro-batches are smaller, with their images
    assert profile.loads.vision.tokens.min() < profile.loads.vision.tokens.max()
    assert (profile.costs.forward_ns > 0).all()
    assert train_here(builds[name], name, tmp_path / "alone") == 0
    assert losses(two / f"{name}.jsonl") == pytest.approx(losses(tmp_path / "alone"), rel=TOLERANCE)


def test_steps_that_are_tuned_have_the_losses_of_steps_that_are_not(builds, two, tmp_path):
    for name, more in {"tuned": [], "frozen": ["--freeze=vision"]}.items():
        assert train_here(builds["internvl"], "internvl", tmp_path / name, *more) == 0
        assert losses(two / f"{name}.jsonl") == pytest.approx(
            losses(tmp_path / name), rel=TOLERANCE
        )
        figures = [json.loads(line) for line in (two / f"{name}.jsonl").read_text().splitlines()]
        assert all(0 < step["tuned_s"] <= step["untuned_s"] for step in figures)
    assert losses(tmp_path / "tuned") != losses(tmp_path / "frozen")


def test_tuning_changes_steps_and_a_frozen_encoder_runs_ahead(builds, two, tmp_path):
    state_times(two / "internvl" / "profile.json", tmp_path / "profile.json")
    profile = str(tmp_path / "profile.json")
    for said in run_ranks(
        tmp_path, 2, tune_by_stated, str(tmp_path), builds["internvl"], profile, most_s=100
    ):
        assert set(said.values()) == {STEPS}
    for name in TUNED:
        figures = [
            json.loads(line)
            for line in (tmp_path / f"stated-{name}.jsonl").read_text().splitlines()
        ]
        assert all(step["tuned_s"] <= step["untuned_s"] for step in figures)
        # a step of trained encoders comes in an order that nothing here improves
        is_faster = any(step["tuned_s"] < step["untuned_s"] for step in figures)
        assert is_faster or name != "frozen"
        assert any(step["encoded_ahead"] > 0 for step in figures) == (name == "frozen")
        assert losses(tmp_path / f"stated-{name}.jsonl") == pytest.approx(
            losses(two / f"{name}.jsonl"), rel=TOLERANCE
        )


def needs_bytes(build, masks):
    """What a rank needs for its first step behind one of training, for each choice of recomputed
    layers.
    """
    args = parse(
        [build, "--model=internvl", "--device=cpu", "--steps=1", "--micro-batches-per-step=3"]
    )
    run = make(args)
    batches = next(
        iter(StreamingLoader(build, dp_rank=0, dp_world_size=1, micro_batches_per_step=3))
    )
    run_steps(run, args)
    observe = StepObserver(run.pipeline, [batches], limit_bytes=PLENTY, optimizer=run.optimizer)
    found = [PLENTY - int(observe(np.array(mask))[0]) for mask in masks]
    part()
    return found


def test_recomputation_fitted_into_memory_changes_neither_losses_nor_weights(
    builds, two, tmp_path, capsys
):
    build, count = builds["internvl"], LAYERS["internvl"]
    least, most = needs_bytes(build, [[True] * count, [False] * count])
    limit = (least + most) // 2
    fitting = ["--recompute=adapt", f"--profile={two / 'internvl' / 'profile.json'}"]
    for name, more in {
        "all": ["--recompute=all"],
        "fitted": [*fitting, f"--memory-gib={limit / GIB}"],
    }.items():
        saving = [f"--export={tmp_path / name}", f"--state={tmp_path / name}-state"]
        assert train_here(build, "internvl", tmp_path / f"{name}.jsonl", *more, *saving) == 0
    assert losses(tmp_path / "fitted.jsonl") == losses(tmp_path / "all.jsonl")
    evidence = json.loads((tmp_path / "fitted-state" / "recompute.json").read_text())
    chosen = evidence["chosen"]["recompute"]
    assert evidence["limit_bytes"] == limit
    assert 0 < sum(chosen) < count
    (needed,) = needs_bytes(build, [chosen])
    assert least < needed <= limit < most
    assert "recomputed from here on: " in capsys.readouterr().out
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("all", "fitted")]
    assert weights[0] == weights[1]
    # not even everything recomputed goes into this
    status = train_here(
        build, "internvl", tmp_path / "none.jsonl", *fitting, f"--memory-gib={(least - 1) / GIB}"
    )
    assert status == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "run out of memory with every layer recomputed" in line


@pytest.fixture(scope="module")
def growing(builds, tmp_path_factory):
    """Options for a model with dropout, whose later steps are heavier than its first; and what each
    needs, (steps, 2): bytes besides weights and optimizer state, with every layer recomputed and
    with none; and bytes of these two.
    """
    folder = tmp_path_factory.mktemp("growing")
    config = make_config(
        "internvl", StreamingLoader(builds["internvl"], dp_rank=0, dp_world_size=1)
    )
    config.vision_config.hidden_dropout_prob = 0.2
    config.save_pretrained(folder)
    for seed in range(20):
        options = [
            f"--config={folder / 'config.json'}",
            "--micro-batches-per-step=1",
            f"--seed={seed}",
        ]
        args = parse(
            [builds["internvl"], "--model=internvl", "--device=cpu", "--steps=1", *options]
        )
        run = make(args)
        loader = StreamingLoader(builds["internvl"], dp_rank=0, dp_world_size=1, seed=seed)
        steps = [batches for batches, _ in zip(loader, range(STEPS), strict=False)]
        run_steps(run, args)
        kept = fixed_bytes(run)
        needs = np.array(
            [[PLENTY - kept - left for left in observed(run, batches)] for batches in steps]
        )
        part()
        # a limit between them lets the first step recompute nothing, and a later one not
        if needs[0, 1] < needs[1:, 1].max() and needs[:, 0].max() < needs[0, 1]:
            return options, needs, kept
    pytest.fail("every first step is the heaviest")


def fixed_bytes(run):
    """Of weights, buffers and optimizer state."""
    layers = run.pipeline.layers.values()
    state = [value for fields in run.optimizer.state.values() for value in fields.values()]
    kept = [
        *(weight for layer in layers for weight in (*layer.parameters(), *layer.buffers())),
        *state,
    ]
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in kept
    }
    return sum(storages.values())


def observed(run, batches):
    """What a step leaves of `PLENTY`, everything recomputed and nothing."""
    observe = StepObserver(run.pipeline, [batches], limit_bytes=PLENTY, optimizer=run.optimizer)
    count = len(run.model.names)
    return [int(observe(np.full(count, recomputed))[0]) for recomputed in (True, False)]


def train_within(limit, build, *options):
    """Train in so much memory besides that of weights and optimizer state."""
    args = parse([build, "--model=internvl", "--device=cpu", f"--steps={STEPS}", *options])
    run = make(args)
    plain = run.pipeline.step

    def step(*given):
        with LiveBytes(limit):
            return plain(*given)

    run.pipeline.step = step
    try:
        run_steps(run, args)
    finally:
        part()


def test_a_step_too_heavy_for_the_choice_is_repeated_and_the_next_choice_is_for_it_too(
    builds, two, growing, tmp_path, capsys
):
    options, needs, kept = growing
    limit = int(needs[0, 1])  # just what the first step takes without recomputation
    fitting = [
        "--recompute=adapt",
        f"--profile={two / 'internvl' / 'profile.json'}",
        f"--state={tmp_path / 'state'}",
    ]
    given = {
        "fitted": [*fitting, f"--memory-gib={(limit + kept) / GIB}"],
        "all": ["--recompute=all"],
    }
    for name, more in given.items():
        figures = [f"--figures={tmp_path / name}.jsonl", f"--export={tmp_path / name}"]
        within = limit if name == "fitted" else PLENTY
        train_within(within, builds["internvl"], *options, *more, *figures)
    said = capsys.readouterr().out
    assert said.count("the step is repeated with every layer recomputed") >= 1
    first, *others = [
        line for line in said.splitlines() if line.startswith("recomputed from here on: ")
    ]
    assert first.startswith("recomputed from here on: nothing; ")
    assert others
    assert "recomputed from here on: nothing" not in "".join(others)
    assert losses(tmp_path / "fitted.jsonl") == losses(tmp_path / "all.jsonl")
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("fitted", "all")]
    assert weights[0] == weights[1]
    assert (
        sum(json.loads((tmp_path / "state" / "recompute.json").read_text())["chosen"]["recompute"])
        > 0
    )


def test_a_step_too_heavy_with_every_layer_recomputed_ends_the_run(builds, two, growing):
    options, needs, kept = growing
    limit = int(needs[0, 1])
    profile = f"--profile={two / 'internvl' / 'profile.json'}"
    adapting = ["--recompute=adapt", profile, f"--memory-gib={(limit + kept) / GIB}"]
    assert needs[0, 0] < needs[1:, 0].max()
    # what training has besides is less than what the choice was made for
    with pytest.raises(OutOfMemory, match="out of memory in stages"):
        train_within(int(needs[1:, 0].max()) - 1, builds["internvl"], *options, *adapting)


def test_a_reserve_is_left_free(builds, two, tmp_path, capsys):
    build, count = builds["internvl"], LAYERS["internvl"]
    least, most = needs_bytes(build, [[True] * count, [False] * count])
    fitting = [
        "--recompute=adapt",
        f"--profile={two / 'internvl' / 'profile.json'}",
        f"--memory-gib={most / GIB}",
    ]
    for name, reserve in {"none": 0, "some": (most - least) // 2}.items():
        more = [f"--reserve-gib={reserve / GIB}", f"--state={tmp_path / name}"]
        assert train_here(build, "internvl", tmp_path / f"{name}.jsonl", *fitting, *more) == 0
        evidence = json.loads((tmp_path / name / "recompute.json").read_text())
        assert evidence["reserve_bytes"] == reserve
        assert min(evidence["chosen"]["left_bytes"]) >= reserve
        assert any(evidence["chosen"]["recompute"]) == bool(reserve)
    assert losses(tmp_path / "none.jsonl") == losses(tmp_path / "some.jsonl")


def test_a_plan_or_profile_that_is_not_for_this_run_is_refused_in_one_line(
    builds, two, tmp_path, capsys
):
    making = {
        "model": "tiny",
        "images": 4,
        "seq-len": 160,
        "pp": 1,
        "precision": "fp32",
        "micro-batches": 3,
        "out": tmp_path,
    }
    named = [f"--{name}={value}" for name, value in making.items()]
    assert launch(1, tmp_path / "printed", "engine", "plan", *named).returncode == 0
    profile, own = (f"--profile={two / name / 'profile.json'}" for name in ("llava", "internvl"))
    loader = StreamingLoader(builds["internvl"], dp_rank=0, dp_world_size=1)
    wide = make_config("internvl", loader)
    wide.text_config.intermediate_size = 96
    wide.save_pretrained(tmp_path / "wide")
    refused = {
        f"--plan={tmp_path / 'plan.json'}": "the plan is for tiny (1 patch_embedding, 2 vision_la",
        f"--plan={two / 'internvl' / 'plan.json'}": "the plan is for pipelines of 2 ranks",
        profile: "is a profile of 1 patch_embedding, 2 vision_layer, ",
        own: "is a profile of a model whose llm_layer 0 has 9,",
    }
    for option, message in refused.items():
        more = ["--tune"] if option in (profile, own) else []
        if option == own:
            more.append(f"--config={tmp_path / 'wide' / 'config.json'}")
        assert train_here(builds["internvl"], "internvl", tmp_path / "figures", option, *more) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line


def test_a_plan_of_a_model_of_other_widths_is_refused(builds, two):
    plan, loader = (
        read_plan(two / "llava" / "plan.json"),
        StreamingLoader(builds["llava"], dp_rank=0, dp_world_size=1),
    )
    model = open_model(None, None, loader)
    apply_plan(plan, model, 2)
    wide = replace(model.preset.llm, hidden_size=64)
    with pytest.raises(
        ConfigError, match=r"the plan is for llava .*widths \(16, 32\).*widths \(16, 64\)"
    ):
        apply_plan(plan, replace(model, preset=replace(model.preset, llm=wide)), 2)
