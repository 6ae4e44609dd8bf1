"""A saved state continues exactly on other partitions, stages and replicas, and is never lost by
being killed.
"""

import importlib
import json
import os
import shutil
import signal
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from isobatch.common.errors import ConfigError, DataError
from isobatch.engine.cost_model.training_mode import TrainingMode
from isobatch.engine.runtime.checkpoints import _state_folders as state_folders
from isobatch.engine.runtime.checkpoints import training_state
from isobatch.engine.runtime.checkpoints.training_state import (
    PROGRESS_NAME,
    Progress,
    load_state,
    newest_state,
    save_state,
)
from isobatch.engine.runtime.optimizer.main_weights import MainWeights, main_param
from isobatch.engine.runtime.pipeline import Pipeline, PipelineOptions
from support import TESTS
from support.models import toy_model
from support.models.toy_model import freeze, make_batch, run_alone
from support.ranks import on_ranks, process

BEFORE, STEPS, MICRO_BATCHES = 2, 4, 4
"""Steps until the state is saved, steps in all; micro-batches of all replicas together."""
TOLERANCE = {"fp32": 1e-6, "bf16": 1e-4}
"""Of losses, relative; float32 sums in another order round some bf16 weights differently."""
BF16, BF16_SHARDED = TrainingMode(zero_stage=0), TrainingMode()
FP32, FP32_SHARDED = (TrainingMode(precision="fp32", zero_stage=stage) for stage in (0, 1))


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How four ranks run the model."""

    name: str
    pp: int
    dp: int = 1
    borders: tuple[int, ...]
    schedule: str = "1f1b"
    stages_per_rank: int = 1
    mode: TrainingMode | None = None

    @property
    def tolerance(self):
        return TOLERANCE[self.mode.precision if self.mode else "fp32"]


SAVED_BY = Layout(name="saved by", pp=2, dp=2, borders=(0, 3, 7))
READ_BY = [
    SAVED_BY,
    Layout(name="another partition", pp=2, dp=2, borders=(0, 5, 7)),
    Layout(name="four stages", pp=4, borders=(0, 1, 3, 5, 7)),
    Layout(name="four replicas", pp=1, dp=4, borders=(0, 7)),
    Layout(
        name="two stages per rank",
        pp=2,
        dp=2,
        borders=(0, 2, 4, 6, 7),
        schedule="interleaved",
        stages_per_rank=2,
    ),
]

SHARDED = replace(SAVED_BY, mode=FP32_SHARDED)
HALF = replace(SAVED_BY, mode=BF16_SHARDED)
FAMILIES = {
    "unsharded, read sharded too": (
        SAVED_BY,
        [*READ_BY, SHARDED, replace(READ_BY[3], mode=FP32_SHARDED)],
    ),
    "sharded, read unsharded too": (
        SHARDED,
        [
            SHARDED,
            replace(READ_BY[1], mode=FP32),
            replace(READ_BY[2], mode=FP32_SHARDED),
            replace(READ_BY[3], mode=FP32_SHARDED),
            replace(READ_BY[3], mode=None),
        ],
    ),
    "bf16 weights, sharded masters": (
        HALF,
        [
            HALF,
            replace(READ_BY[1], mode=BF16),
            replace(READ_BY[2], mode=BF16_SHARDED),
            replace(READ_BY[3], mode=BF16_SHARDED),
            replace(READ_BY[4], mode=BF16_SHARDED),
        ],
    ),
}

torch.set_num_threads(1)


def make_model(num_vision=1, num_language=2, **options):
    """Of seven layers: each saves and reads its weights by itself, many as few."""
    return toy_model.make_model(num_vision, num_language, **options)


def make_optimizer(weights, rate=1.0):
    """Two groups; at another rate than the saved one's, so that it must be read to be right."""
    weights = [weight for weight in weights if weight.requires_grad]
    flat = [weight for weight in weights if weight.ndim == 1]
    wide = [weight for weight in weights if weight.ndim > 1]
    return torch.optim.AdamW(
        [{"params": wide, "lr": 0.01 * rate}, {"params": flat, "weight_decay": 0.0}], lr=3e-3
    )


def batches_of(step):
    generator = torch.Generator().manual_seed(step)
    lengths = [
        torch.randint(4, 12, (1 + place % 3,), generator=generator).tolist()
        for place in range(MICRO_BATCHES)
    ]
    return [make_batch(generator, own, place % 4) for place, own in enumerate(lengths)]


def weights_of(model):
    """Each once, tied or not."""
    return list(
        {id(weight): weight for layer in model.layers for weight in layer.parameters()}.values()
    )


def normalizer_of(batches):
    return sum(batch.num_loss_tokens for batch in batches)


def slow_down(optimizer, step):
    """As a schedule of learning rates does."""
    if step == 1:
        for group in optimizer.param_groups:
            group["lr"] /= 2


def train_alone(model, optimizer, steps, mains=None):
    losses = []
    for step in steps:
        optimizer.zero_grad()
        batches = batches_of(step)
        losses.append(run_alone(model, batches, normalizer_of(batches)))
        if mains is not None:
            mains.reduce_gradients()
        slow_down(optimizer, step)
        optimizer.step()
        if mains is not None:
            mains.gather()
    return losses


def train_piped(pipeline, layout, optimizer, steps):
    losses = []
    replica, count = dist.get_rank() // layout.pp, MICRO_BATCHES // layout.dp
    for step in steps:
        optimizer.zero_grad()
        batches = batches_of(step)
        own = batches[replica * count : (replica + 1) * count]
        loss = torch.tensor(pipeline.step(own, normalizer_of(batches)).loss, dtype=torch.float64)
        dist.all_reduce(loss)
        losses.append(float(loss) / layout.pp)
        pipeline.reduce_gradients()
        slow_down(optimizer, step)
        optimizer.step()
    return losses


def make_pipeline(layout, seed):
    model = make_model(seed=seed)
    pipelines = [list(range(first, first + layout.pp)) for first in range(0, 4, layout.pp)]
    options = PipelineOptions(
        schedule=layout.schedule, stages_per_rank=layout.stages_per_rank, mode=layout.mode
    )
    return Pipeline(model, layout.borders, [False] * len(model.layers), pipelines, options)


def run_all(folder, expected, family):
    saved_by, read_by = FAMILIES[family]
    pipeline = make_pipeline(saved_by, seed=0)
    optimizer = make_optimizer(pipeline.parameters())
    losses = train_piped(pipeline, saved_by, optimizer, range(BEFORE))
    check(losses, expected[:BEFORE], "before", saved_by.tolerance)
    save_state(
        folder / "states",
        pipeline.layers,
        optimizer,
        Progress(step=BEFORE, loader={"epoch": dist.get_rank()}),
    )
    losses = train_piped(pipeline, saved_by, optimizer, range(BEFORE, STEPS))
    check(losses, expected[BEFORE:], "uninterrupted", saved_by.tolerance)
    for layout in read_by:
        pipeline = make_pipeline(layout, seed=1)
        optimizer = make_optimizer(pipeline.parameters(), rate=7.0)
        progress = load_state(folder / "states", pipeline.layers, optimizer)
        # the first rank's
        assert progress == Progress(step=BEFORE, loader={"epoch": 0})
        check(
            train_piped(pipeline, layout, optimizer, range(progress.step, STEPS)),
            expected[BEFORE:],
            f"{layout.name}, {layout.mode}",
            layout.tolerance,
        )


def check(losses, expected, what, tolerance=TOLERANCE["fp32"]):
    for step, (loss, wanted) in enumerate(zip(losses, expected, strict=True)):
        assert abs(loss - wanted) <= tolerance * wanted, (
            f"{what}, step {step}: loss {loss}, not {wanted}"
        )


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_goes_on_with_the_same_losses_on_any_stages_and_replicas(tmp_path, family):
    saved_by, _ = FAMILIES[family]
    alone = saved_by.mode and replace(saved_by.mode, zero_stage=0)
    model = make_model()
    mains = MainWeights(weights_of(model), alone, None)
    optimizer = make_optimizer([main_param(weight) for weight in mains.weights])
    expected = train_alone(model, optimizer, range(STEPS), mains)
    assert expected[-1] < expected[0]
    on_ranks(4, tmp_path, run_all, tmp_path, expected, family)
    # and one process alone, without torch.distributed
    model = make_model(seed=1)
    mains = MainWeights(weights_of(model), alone, None)
    optimizer = make_optimizer([main_param(weight) for weight in mains.weights], rate=7.0)
    progress = load_state(tmp_path / "states", layers_of(model), optimizer)
    losses = train_alone(model, optimizer, range(progress.step, STEPS), mains)
    check(losses, expected[BEFORE:], "one process", saved_by.tolerance)


def layers_of(model):
    return dict(enumerate(model.layers))


@pytest.fixture
def trained():
    return make_trained()


def make_trained():
    model = make_model()
    optimizer = make_optimizer(weights_of(model))
    train_alone(model, optimizer, range(1))
    return model, optimizer


def save_and_die(folder, owner, name):
    """Save step 1; then step 2 with all weights 0, killed where a module's function is called."""
    model, optimizer = make_trained()
    save_state(folder, layers_of(model), optimizer, Progress(step=1, loader={}), max_states=1)
    with torch.no_grad():
        for weight in weights_of(model):
            weight.zero_()
    setattr(
        importlib.import_module(owner),
        name,
        lambda *_arguments, **_options: os.kill(os.getpid(), signal.SIGKILL),
    )
    save_state(folder, layers_of(model), optimizer, Progress(step=2, loader={}), max_states=1)


@pytest.mark.parametrize(
    ("owner", "name", "step"),
    [
        pytest.param("os", "fsync", 1, id="tensors written"),
        pytest.param(training_state.__name__, "finish_state", 1, id="no progress written"),
        pytest.param(state_folders.__name__, "give_name", 1, id="not renamed"),
        pytest.param("shutil", "rmtree", 2, id="old state not removed"),
    ],
)
def test_killed_while_it_is_saved_a_run_still_has_a_whole_state(
    tmp_path, trained, owner, name, step
):
    model, optimizer = trained
    # not a fork of this process, whose threads may hold locks
    child = process(save_and_die, tmp_path, owner, name)
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 2  # a whole one, and what was left
    read = make_model(seed=1)
    assert load_state(tmp_path, layers_of(read), make_optimizer(weights_of(read))) == Progress(
        step=step, loader={}
    )
    for weight, own in zip(weights_of(read), weights_of(model), strict=True):
        assert torch.equal(weight, own if step == 1 else torch.zeros_like(own))
    # and what is left of the killed one is in nobody's way
    save_state(tmp_path, layers_of(model), optimizer, Progress(step=2, loader={}), max_states=1)
    assert list(tmp_path.iterdir()) == [newest_state(tmp_path)]
    assert load_state(tmp_path, layers_of(read), None).step == 2
    assert all(
        torch.equal(weight, own)
        for weight, own in zip(weights_of(read), weights_of(model), strict=True)
    )


def test_the_newest_states_are_kept_and_none_is_written_over(tmp_path, trained):
    model, optimizer = trained
    places = [
        save_state(
            tmp_path, layers_of(model), optimizer, Progress(step=step, loader={}), max_states=3
        )
        for step in (9, 10, 10, 11)
    ]
    assert newest_state(tmp_path) == places[-1]
    assert sorted(tmp_path.iterdir()) == sorted(places[1:])
    assert len(set(places)) == len(places)


def test_without_a_state_nothing_changes(tmp_path, trained):
    model, optimizer = trained
    before = [weight.clone() for weight in weights_of(model)]
    assert load_state(tmp_path / "none", layers_of(model), optimizer) is None
    assert all(
        torch.equal(weight, own) for weight, own in zip(weights_of(model), before, strict=True)
    )


def test_what_was_frozen_before_begins_with_an_optimizer_state_of_its_own(tmp_path):
    model = make_model()
    freeze(model, "vision")
    optimizer = make_optimizer(weights_of(model))
    train_alone(model, optimizer, range(2))
    save_state(tmp_path, layers_of(model), optimizer, Progress(step=2, loader={}))
    read = make_model(seed=1)
    whole = make_optimizer(weights_of(read))
    load_state(tmp_path, layers_of(read), whole)
    assert len(whole.state) == len(optimizer.state) < len(weights_of(read))
    train_alone(read, whole, range(2, 3))
    assert sorted({int(state["step"]) for state in whole.state.values()}) == [1, 3]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: make_model(num_language=3), "7 layers, the model 8"),
        (lambda: make_model(num_vision=2, num_language=1), "does not have it|has it as"),
    ],
)
def test_a_state_of_another_model_is_refused(tmp_path, trained, other, message):
    model, optimizer = trained
    save_state(tmp_path, layers_of(model), optimizer, Progress(step=1, loader={}))
    read = other()
    with pytest.raises(ConfigError, match=message):
        load_state(tmp_path, layers_of(read), make_optimizer(weights_of(read)))


def test_a_state_of_another_version_or_without_its_progress_is_refused(tmp_path, trained):
    model, optimizer = trained
    path = (
        save_state(tmp_path, layers_of(model), optimizer, Progress(step=1, loader={}))
        / PROGRESS_NAME
    )
    path.write_text(path.read_text().replace('"version": 1', '"version": 99'))
    with pytest.raises(ConfigError, match="version 99"):
        load_state(tmp_path, layers_of(model), optimizer)
    path.unlink()
    with pytest.raises(DataError, match="state before it"):
        load_state(tmp_path, layers_of(model), optimizer)


def test_what_cannot_be_saved_exactly_is_refused(tmp_path, trained):
    model, optimizer = trained
    optimizer.state[weights_of(model)[0]]["history"] = [1, 2]
    with pytest.raises(ConfigError, match="history, a list"):
        save_state(tmp_path, layers_of(model), optimizer, Progress(step=1, loader={}))
    del optimizer.state[weights_of(model)[0]]["history"]
    optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
    with pytest.raises(ConfigError, match="the optimizer's lr"):
        save_state(tmp_path, layers_of(model), optimizer, Progress(step=1, loader={}))
    assert list(tmp_path.iterdir()) == []


def test_parameters_of_one_group_must_have_been_told_the_same(tmp_path, trained):
    model, optimizer = trained
    save_state(tmp_path, layers_of(model), optimizer, Progress(step=1, loader={}))
    with pytest.raises(ConfigError, match="different options"):
        load_state(tmp_path, layers_of(model), torch.optim.AdamW(weights_of(model)))


def test_a_state_of_an_earlier_version_continues_with_the_same_losses(tmp_path):
    """`old_training_state` was saved after three of six steps; `losses.json` has the others."""
    shutil.copytree(TESTS / "data" / "old_training_state", tmp_path / "state")
    expected = json.loads((tmp_path / "state" / "losses.json").read_text())
    torch.manual_seed(1)  # other weights, so that all must be read
    layers = {
        0: nn.Linear(3, 4),
        1: nn.Sequential(nn.Linear(4, 4), nn.GELU()),
        2: nn.Linear(4, 2),
    }
    weights = [weight for layer in layers.values() for weight in layer.parameters()]
    optimizer = torch.optim.AdamW(weights, lr=1.0)
    progress = load_state(tmp_path / "state", layers, optimizer)
    assert (progress.step, progress.loader) == (3, {"epoch": 0, "groups": 7})
    for number, loss in enumerate(expected, start=progress.step):
        generator = torch.Generator().manual_seed(number)
        x, y = torch.randn(8, 3, generator=generator), torch.randn(8, 2, generator=generator)
        optimizer.zero_grad()
        for layer in layers.values():
            x = layer(x)
        found = (x - y).square().mean()
        found.backward()
        optimizer.step()
        assert found.item() == pytest.approx(loss, rel=1e-6)
