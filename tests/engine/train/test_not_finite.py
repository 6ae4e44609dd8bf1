"""A gradient that is NaN or infinite though the loss is finite, on real ranks: all raise or all
skip the step, no weight changes, and nothing of it is saved.
"""

import json

import pytest
import torch

from isobatch.engine.runtime.checkpoints.training_state import Progress, newest_state, save_state
from isobatch.engine.runtime.errors import IsobatchError
from support.builds.sample_tables import write_tabled
from support.builds.shard_fixture import group_samples, make_samples
from support.models.toy_model import make_model
from support.rank_programs.rank_not_finite import CASES, poison, poisoned_steps, skipping_runs
from support.ranks import run_ranks, what_they_said
from support.trainers.engine_train import main, make, parse, run_steps

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    groups = group_samples(make_samples(100))
    return write_tabled(tmp_path_factory.mktemp("packed") / "build", groups)


@pytest.fixture
def alone():
    yield
    part()


def part():
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(shared):
    """What four ranks saw in each case."""
    folder = shared("poisoned-steps", lambda folder: run_ranks(folder, 4, poisoned_steps))
    return what_they_said(folder, 4)


def test_one_gradient_of_one_rank_is_refused_by_all_and_changes_nothing(ranks):
    for case in CASES:
        found = [own[case.name] for own in ranks]
        assert len({own["error"] for own in found}) == 1, case.name
        if case.raises:
            assert "the loss is finite, but the norm of the gradients is" in found[0]["error"]
            assert all(own["unchanged"] for own in found), case.name
        else:
            assert found[0]["error"] is None, case.name
            # a rank with nothing that is trained has nothing to change
            assert any(not own["unchanged"] for own in found), case.name
            assert len({own["poisoned"]["norm"] for own in found}) == 1
        norms = {own["after"]["norm"] for own in found}
        assert len(norms) == 1
        assert 0 < norms.pop() < 1e3


def test_gradients_whose_squares_are_above_float32_are_clipped_to_the_norm(ranks):
    for name, pp in (("large", 2), ("large in a replica", 1)):
        steps = [own[name]["poisoned"] for own in ranks]
        assert steps[0]["norm"] > 1e20
        replica = sum(step["own"] ** 2 for step in steps[:pp]) ** 0.5
        assert replica == pytest.approx(1, abs=0.02)  # tied weights are on two ranks


@pytest.mark.parametrize(
    "options",
    [
        ("--dp=1",),
        ("--dp=2", "--schedule=zero_bubble"),
        ("--dp=2", "--precision=bf16", "--zero-stage=1"),
    ],
)
def test_a_step_is_skipped_by_all_ranks_and_a_resume_repeats_the_losses(build, tmp_path, options):
    for own in run_ranks(tmp_path, 2, skipping_runs, str(build), str(tmp_path), *options):
        assert (own["whole"], own["begun"], own["resumed"]) == (1, 1, 0)
        assert own["whole, finite"]
        assert own["resumed, finite"]
    whole, begun, resumed = (losses(tmp_path, name) for name in ("whole", "begun", "resumed"))
    assert sorted(whole) == [0, 1, 3, 4, 5]
    assert begun | resumed == whole
    assert sorted(resumed) == [4, 5]
    assert newest_state(tmp_path / "state").name == "step-6"


def losses(folder, name):
    lines = map(json.loads, (folder / f"{name}.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines}


def train(build, *options, poisoned=()):
    """A run of this process, whose gradients are NaN in these micro-batches."""
    config = parse([str(build), "--plan=auto", "--device=cpu", *options])
    run = make(config)
    poison(run.pipeline.layers[0], float("nan"), set(poisoned))
    try:
        run_steps(run, config)
    finally:
        run.source.close()
    return run


def test_by_default_the_run_ends_and_the_state_before_stays(build, tmp_path, alone):
    states = tmp_path / "states"
    with pytest.raises(IsobatchError, match="norm of the gradients is nan; no weight has changed"):
        train(build, "--steps=4", "--save-every=1", f"--state={states}", poisoned=[9])
    assert newest_state(states).name == "step-2"


def test_skips_are_counted_and_printed(build, capsys, alone):
    assert train(build, "--steps=4", "--not-finite=skip", poisoned=[4, 13]).skipped == 2
    lines = [line for line in capsys.readouterr().out.splitlines() if "skipped" in line]
    assert [line.partition(":")[0] for line in lines] == [
        "step    1  skipped, 1 so far",
        "step    3  skipped, 2 so far",
    ]


def test_what_is_due_after_a_skipped_step_is_evaluated(build, tmp_path, capsys, alone):
    file = tmp_path / "figures.jsonl"
    options = "--steps=4", "--not-finite=skip", f"--eval={build}", f"--figures={file}"
    assert train(build, *options, poisoned=[13]).skipped == 1
    skipped = json.loads(file.read_text().splitlines()[-1])
    assert (skipped["step"], sorted(skipped)) == (3, ["eval_loss", "step"])
    assert f"step    3  eval loss {skipped['eval_loss']:.4f}" in capsys.readouterr().out


def test_a_loss_that_is_not_finite_is_skipped_too(build, capsys, alone):
    config = parse([str(build), "--plan=auto", "--device=cpu", "--steps=3", "--not-finite=skip"])
    run, passes = make(config), []

    def broken(_module, _inputs, outputs):
        passes.append(None)
        return {"loss": outputs["loss"] * float("nan")} if len(passes) == 6 else outputs

    run.pipeline.layers[max(run.pipeline.layers)].register_forward_hook(broken)
    run_steps(run, config)
    run.source.close()
    assert "step    1  skipped, 1 so far: the loss is not finite" in capsys.readouterr().out


def test_weights_that_are_not_finite_are_never_saved(build, tmp_path, capsys, alone):
    states = tmp_path / "states"
    command = [str(build), "--plan=auto", "--steps=2", "--device=cpu", f"--state={states}"]
    assert main([*command, "--save-every=1", "--lr=1e37"]) == 1
    error = capsys.readouterr().err
    assert "the loss is not finite" in error
    assert len(error.splitlines()) == 1
    assert newest_state(states).name == "step-1"


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_a_state_with_a_weight_or_moment_that_is_not_finite_is_refused(tmp_path, number):
    layers = dict(enumerate(make_model().layers))
    weights = [weight for layer in layers.values() for weight in layer.parameters()]
    optimizer = torch.optim.AdamW(dict.fromkeys(weights))
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    progress = Progress(step=1, loader={})
    save_state(tmp_path, layers, optimizer, progress)
    for value in (weights[3].data, optimizer.state[weights[5]]["exp_avg_sq"]):
        before = value.flatten()[0].item()
        value.view(-1)[0] = number
        with pytest.raises(IsobatchError, match="has numbers that are NaN or infinite"):
            save_state(tmp_path, layers, optimizer, Progress(step=2, loader={}))
        value.view(-1)[0] = before
    assert newest_state(tmp_path).name == "step-1"
    layers[0].register_buffer("mask", torch.tensor([0.0, float("-inf")]))
    save_state(tmp_path, layers, optimizer, Progress(step=3, loader={}))
    assert newest_state(tmp_path).name == "step-3"
