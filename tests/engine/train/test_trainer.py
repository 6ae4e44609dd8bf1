"""`python -m engine train`: the losses of one process, by a plan, on any ranks, killed and
continued. By torchrun itself in `test_shutdown`.
"""

import json
import shutil

import pytest
import torch
from tiny_vlm import accumulate, endless, make_model, per_label, token_losses

from isobatch.engine.cost_model.analytical import layer_names
from isobatch.engine.cost_model.layer_list import layers_of
from isobatch.engine.cost_model.parallel import Parallelism
from isobatch.engine.runtime.checkpoints.training_state import PROGRESS_NAME, newest_state
from isobatch.engine.train.models.open_model import open_model
from isobatch.engine.train.models.tiny_vlm import num_tiles
from isobatch.loaders import StreamingLoader
from support.builds.shard_fixture import group_samples, make_samples, write_build
from support.ranks import kill_once, launch, start
from support.trainers.engine_train import main
from support.trainers.tiny_training import train

NUM_SAMPLES, STEPS, MICRO_BATCHES, SAVE_EVERY = 160, 16, 4, 2
TOLERANCE = 1e-5
"""Of losses, relative: replicas add gradients up in another order, and Adam's first steps magnify
the roundings.
"""
COMMAND = ("engine", "train")

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    groups = group_samples(make_samples(NUM_SAMPLES))
    return write_build(tmp_path_factory.mktemp("packed") / "build", groups)


@pytest.fixture(scope="module")
def plan(shared):
    """For two ranks, made by the command that people use."""
    options = {
        "model": "tiny",
        "images": 4,
        "seq-len": 160,
        "pp": 2,
        "precision": "fp32",
        "micro-batches": MICRO_BATCHES,
    }

    def make_plan(out):
        named = [f"--{name}={value}" for name, value in {**options, "out": out}.items()]
        assert launch(1, out / "printed", "engine", "plan", *named).returncode == 0

    return shared("plan-for-two-ranks", make_plan) / "plan.json"


@pytest.fixture(scope="module")
def expected(build):
    """The losses of train_tiny.py in one process, on the same steps."""
    loader = load(build, micro_batches_per_step=MICRO_BATCHES)
    torch.manual_seed(0)
    return train(make_model(loader), loader, STEPS)


def load(build, rank=0, world=1, **options):
    return StreamingLoader(build, dp_rank=rank, dp_world_size=world, **options)


def train_alone(build, *parts):
    """Losses in one process, all replicas' micro-batches in one; `parts` are (replicas, steps)."""
    torch.manual_seed(0)
    model, state, found = make_model(load(build)), None, []
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    for dp, steps in parts:
        loaders = [
            load(build, rank, dp, micro_batches_per_step=MICRO_BATCHES // dp) for rank in range(dp)
        ]
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
        for _, replicas in zip(
            range(steps), zip(*map(endless, loaders), strict=False), strict=False
        ):
            optimizer.zero_grad()
            loss = sum(accumulate(model, batches) for batches in replicas)
            found.append(per_label(loss, replicas[0]))
            optimizer.step()
        state = loaders[0].state_dict()
    return found


def given(build, **options):
    """The script's arguments."""
    every = {"steps": STEPS, "clip": "inf", "device": "cpu", **options}
    named = [f"--{name.replace('_', '-')}={value}" for name, value in every.items()]
    return [str(build), *named]


def losses(path):
    """Of each step; what was run again counts the last time."""
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {line["step"]: line["loss"] for line in lines}


def assert_same(found, expected):
    assert sorted(found) == list(range(len(expected)))
    for step, loss in enumerate(expected):
        assert found[step] == pytest.approx(loss, rel=TOLERANCE), f"step {step}"


def test_layers_are_the_whole_model_and_specs_are_what_crosses_each_cut(build):
    loader, bare = load(build), load(build, images="encoded")
    torch.manual_seed(0)
    model = make_model(loader)
    torch.manual_seed(0)
    opened = open_model(None, None, loader)
    layers, specs = opened.stack.layers, opened.stack.specs
    # the same weights in the same order as those of the whole model
    weights = [weight for layer in layers for weight in layer.parameters()]
    assert len(weights) == len(list(model.parameters()))
    assert sum(map(torch.numel, weights)) == sum(map(torch.numel, model.parameters()))
    assert opened.names == layer_names(layers_of(loader.model, Parallelism()))
    shape = opened.preset.llm
    assert (shape.vocab_size, shape.hidden_size) == tuple(model.embed.weight.shape)
    tiles = set()
    for (batch,), (undecoded,) in zip(loader, bare, strict=True):
        tensors = {}
        for cut, layer in enumerate(layers, start=1):
            tensors = layer(tensors, batch)
            if cut < len(layers):
                assert {name: tensor.shape for name, tensor in tensors.items()} == {
                    name: spec.shape for name, spec in specs(cut, undecoded).items()
                }
        torch.testing.assert_close(
            tensors["loss"], token_losses(model(batch), batch).sum(), rtol=1e-6, atol=1e-5
        )
        tiles.add(num_tiles(undecoded))
        assert not undecoded.pixel_values.numel()
    assert 0 in tiles
    assert len(tiles) > 2


@pytest.mark.slow
def test_a_plan_on_two_ranks_gives_the_losses_of_one_process(build, plan, expected, tmp_path):
    files = {"figures": tmp_path / "figures.jsonl", "trace": tmp_path / "trace.json"}
    result = launch(2, tmp_path, *COMMAND, *given(build, plan=plan, **files))
    assert result.returncode == 0, result.stderr[-3000:]
    assert_same(losses(tmp_path / "figures.jsonl"), expected)
    assert sum(expected[-4:]) < 0.9 * sum(expected[:4])
    for line in (tmp_path / "figures.jsonl").read_text().splitlines():
        found = json.loads(line)
        assert 0 < found["waiting"] < 1
        assert found["seconds"] > 0
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    passes = [event for event in events if event.get("cat") == "compute"]
    # a forward and a backward pass per micro-batch and rank
    assert {rank: sum(event["pid"] == rank for event in passes) for rank in (0, 1)} == {0: 8, 1: 8}
    assert all(event["dur"] > 0 for event in passes)


@pytest.mark.slow
def test_four_ranks_as_two_pipelines_give_the_losses_of_one_process(build, tmp_path):
    options = {
        "plan": "auto",
        "dp": 2,
        "schedule": "zero_bubble",
        "micro_batches_per_step": MICRO_BATCHES // 2,
    }
    arguments = given(build, figures=tmp_path / "figures.jsonl", **options)
    result = launch(4, tmp_path, *COMMAND, *arguments)
    assert result.returncode == 0, result.stderr[-3000:]
    assert_same(losses(tmp_path / "figures.jsonl"), train_alone(build, (2, STEPS)))
    assert "2 x 2 ranks" in result.stdout


@pytest.fixture(scope="module")
def killed(build, plan, shared):
    """The folder that two ranks left when they were killed between two saves."""

    def kill(root):
        files = {"state": root / "state", "figures": root / "figures.jsonl"}
        options = files | {"save_every": SAVE_EVERY, "steps": 100_000}
        for _ in range(5):  # a busy machine may notice late that it is time
            ranks = start(2, root, *COMMAND, *given(build, plan=plan, **options))
            kill_once(ranks, lambda: len(losses(files["figures"])) > 2 * SAVE_EVERY, most_s=120)
            if saved_steps(root) < STEPS - 2:
                return
            shutil.rmtree(root / "state")
            files["figures"].unlink()
        pytest.fail("killed too late, five times")

    return shared("killed-between-two-saves", kill)


def saved_steps(root):
    """Steps of the newest state."""
    return json.loads((newest_state(root / "state") / PROGRESS_NAME).read_text())["step"]


@pytest.mark.slow
@pytest.mark.parametrize(("pp", "dp"), [(3, 1), (1, 2)])
def test_a_killed_run_goes_on_exactly_with_other_stages_and_replicas(
    build, killed, tmp_path, pp, dp
):
    root = tmp_path / "killed"
    shutil.copytree(killed, root)
    saved = saved_steps(root)
    assert SAVE_EVERY <= saved < STEPS - 2
    options = {"state": root / "state", "figures": root / "figures.jsonl", "save_every": SAVE_EVERY}
    arguments = given(
        build, plan="auto", dp=dp, micro_batches_per_step=MICRO_BATCHES // dp, **options
    )
    result = launch(pp * dp, tmp_path, *COMMAND, *arguments)
    assert result.returncode == 0, result.stderr[-3000:]
    assert f"resumes after step {saved - 1}" in result.stdout
    assert_same(losses(root / "figures.jsonl"), train_alone(build, (1, saved), (dp, STEPS - saved)))


@pytest.fixture
def alone():
    """As without torchrun: the command begins and ends torch.distributed itself."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def test_one_process_without_torchrun_gives_the_same_losses(build, expected, tmp_path, alone):
    options = [
        "--plan=auto",
        "--steps=4",
        "--clip=inf",
        f"--figures={tmp_path / 'figures.jsonl'}",
        "--device=cpu",
    ]
    assert main([str(build), *options]) == 0
    assert_same(losses(tmp_path / "figures.jsonl"), expected[:4])


def test_gradients_are_clipped(build, expected, tmp_path, alone):
    options = [
        "--plan=auto",
        "--steps=3",
        "--clip=1e-6",
        f"--figures={tmp_path / 'figures.jsonl'}",
        "--device=cpu",
    ]
    assert main([str(build), *options]) == 0
    found = losses(tmp_path / "figures.jsonl")
    assert found[0] == pytest.approx(expected[0], rel=TOLERANCE)
    assert abs(found[2] - expected[2]) > 1e-3 * expected[2]


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        ({"plan": "plan"}, 2, "the plan is for pipelines of 2 ranks"),
        ({"plan": "plan", "precision": "bf16"}, 2, "--precision is bf16, but the plan is for fp32"),
        ({"plan": "plan", "zero-stage": 0}, 2, "--zero-stage is 0, but the plan is for 1"),
        ({"plan": "auto", "zero-stage": 2}, 2, "zero_stage 0 or 1, not fp32 and 2: plan for"),
        ({"plan": "auto", "dp": 3}, 2, "--dp is 3; 1 processes"),
        ({"plan": "none.json"}, 1, "none.json: No such file"),
    ],
)
def test_what_does_not_fit_together_is_told_in_one_line(
    build, plan, options, status, message, capsys, alone
):
    named = [f"--{name}={plan if value == 'plan' else value}" for name, value in options.items()]
    assert main([str(build), *named, "--device=cpu"]) == status
    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1
