"""Evaluation: each sample once, the same loss on any ranks, and training goes on as without it."""

import json
from itertools import pairwise

import pytest
import torch
from tiny_vlm import make_model, token_losses

from isobatch.loaders import StreamingLoader
from support.builds.sample_tables import write_tabled
from support.builds.shard_fixture import group_samples, make_samples
from support.ranks import launch
from support.trainers.engine_train import main, make, parse
from support.trainers.engine_train import run_steps as run

STEPS, EVERY = 5, 2
TOLERANCE = 1e-6
"""Of a loss, relative: replicas get some samples singly, and add up in another order."""

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def builds(tmp_path_factory):
    """(trained on, evaluated); groups of the second divide by no number of ranks."""
    root = tmp_path_factory.mktemp("packed")
    sizes = {"train": 100, "held out": 37}
    for name, count in sizes.items():
        write_tabled(root / name, group_samples(make_samples(count)))
    return [str(root / name) for name in sizes]


@pytest.fixture
def alone():
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def arguments(builds, folder, **options):
    given = {"steps": STEPS, "device": "cpu", "figures": folder / "figures", **options}
    return [builds[0], *(f"--{name.replace('_', '-')}={value}" for name, value in given.items())]


def figures(folder):
    return [json.loads(line) for line in (folder / "figures").read_text().splitlines()]


@pytest.fixture(scope="module")
def on_one(builds, tmp_path_factory):
    """Figures of one rank without an evaluation, and with."""
    found = []
    for options in ({}, {"eval": builds[1], "eval_every": EVERY}):
        folder = tmp_path_factory.mktemp("alone")
        assert main(arguments(builds, folder, micro_batches_per_step=4, **options)) == 0
        found.append(figures(folder))
    return found


def test_training_is_the_same_and_the_loss_is_that_of_each_label(builds, on_one, tmp_path, alone):
    without, evaluated = on_one
    assert [line["loss"] for line in evaluated] == [line["loss"] for line in without]
    assert [line["step"] for line in evaluated if "eval_loss" in line] == [1, 3, 4]
    losses = [line["eval_loss"] for line in evaluated if "eval_loss" in line]
    assert all(after < before for before, after in pairwise(losses))
    # in one process, sample by sample, with the weights that training ends with
    held_out = StreamingLoader(builds[1], shuffle=False)
    run_of = make(parse(arguments(builds, tmp_path, micro_batches_per_step=4)))
    run(run_of, parse(arguments(builds, tmp_path, micro_batches_per_step=4)))
    model = make_model(held_out).eval()
    trained = [weight for layer in run_of.model.stack.layers for weight in layer.parameters()]
    with torch.no_grad():
        for weight, value in zip(model.parameters(), trained, strict=True):
            weight.copy_(value)
        sums = [(token_losses(model(batch), batch).sum(), batch.labels) for (batch,) in held_out]
    labels = sum(int((of_batch >= 0).sum()) for _, of_batch in sums)
    expected = float(sum(loss for loss, _ in sums)) / labels
    assert losses[-1] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "options", [{}, {"schedule": "interleaved", "stages_per_rank": 2, "recompute": "all"}]
)
def test_the_loss_is_the_same_on_two_stages_as_training_goes_on(builds, on_one, tmp_path, options):
    options |= {"eval": builds[1], "eval_every": EVERY, "micro_batches_per_step": 4}
    result = launch(2, tmp_path, "engine", "train", *arguments(builds, tmp_path, **options))
    assert result.returncode == 0, result.stderr[-3000:]
    found = [line["eval_loss"] for line in figures(tmp_path) if "eval_loss" in line]
    expected = [line["eval_loss"] for line in on_one[1] if "eval_loss" in line]
    assert found == pytest.approx(expected, rel=10 * TOLERANCE)
    assert result.stdout.count("eval loss") == len(expected)


def test_replicas_have_the_same_loss(builds, tmp_path):
    """With weights that do not change, as replicas combine other samples in a step."""
    found = []
    for ranks, options in [(1, {}), (2, {"zero_stage": 1}), (3, {}), (4, {"dp": 2})]:
        folder = tmp_path / str(ranks)
        given = {"dp": ranks, "eval": builds[1], "steps": 1, "lr": 0, **options}
        result = launch(ranks, folder, "engine", "train", *arguments(builds, folder, **given))
        assert result.returncode == 0, result.stderr[-3000:]
        found.append(figures(folder)[0]["eval_loss"])
    assert found[1:] == pytest.approx(found[:1] * 3, rel=TOLERANCE)


def test_a_build_of_another_model_is_refused(builds, tmp_path, capsys, alone):
    write_tabled(
        tmp_path / "other",
        group_samples(make_samples(10, model="llava_1_5"), 1_800),
        model="llava_1_5",
    )
    assert main(arguments(builds, tmp_path, eval=tmp_path / "other")) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "has another model than the build that is trained on" in line
