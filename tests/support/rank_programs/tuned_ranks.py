"""What each rank runs for `test_tuned_training`: `python -m engine train --tune`, beside one
process without it.
"""

import json
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from isobatch.engine.cost_model.analytical import layer_names
from isobatch.engine.cost_model.costs import MEMORY, Costs
from isobatch.engine.cost_model.layer_list import layers_of, phases_of
from isobatch.engine.cost_model.loads import Loads
from isobatch.engine.cost_model.parallel import Parallelism
from isobatch.engine.cost_model.profile_table import make_profile, write_profile
from isobatch.engine.simulator.schedule import PassKind
from isobatch.engine.train.models.open_model import open_model
from isobatch.loaders import StreamingLoader
from isobatch.models.presets import load_model
from support.trainers.engine_train import make, parse, run_steps

TOLERANCE = 1e-6
"""Of gradients and losses, relative to their size; float32."""
COMPARED = 4
"""Steps whose gradients are compared with one process."""


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """An epoch to run, and what to check of it."""

    name: str
    dp: int = 1
    options: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    vision_us: int = 900
    """Of its profile, for each thousand tokens of a vision layer."""


FIXED_US = 50
"""Of a layer, for each micro-batch."""
LLM_US = 2_500
"""For each thousand tokens of an LLM layer."""
PHASES = phases_of(load_model("tiny"))


def stated_profile(path, vision_us=900):
    """A profile that says so: nobody's measurement, but the same for all ranks on any machine."""
    sizes = np.arange(0, 200, 20)
    loads = Loads.constant(1, images=1, vit_tokens_per_image=17, seq_len=1)
    loads = loads.take(np.zeros(len(sizes), np.int64))
    for phase, scale in (("vision", 4), ("llm", 1), ("labels", 1)):
        getattr(loads, phase).tokens[:] = scale * sizes
        getattr(loads, phase).squares[:] = scale * sizes * 17
        getattr(loads, phase).items[:] = sizes
    layers = layers_of(load_model("tiny"), Parallelism())
    kinds = tuple(layer.kind for layer in layers)
    each_us = {"vision": vision_us, "llm": LLM_US, "labels": LLM_US}
    forward = np.array(
        [
            1_000 * FIXED_US + each_us[PHASES[kind]] * getattr(loads, PHASES[kind]).tokens
            for kind in kinds
        ]
    )
    nothing = np.zeros_like(forward)
    costs = Costs(
        names=layer_names(layers),
        kinds=kinds,
        forward_ns=forward,
        input_grad_ns=forward,
        weight_grad_ns=forward // 2,
        recompute_ns=forward,
        send_ns=nothing,
        **dict.fromkeys(MEMORY, nothing),
        state_bytes=nothing[:, 0],
        param_counts=nothing[:, 0],
        sends_grad=np.ones(len(kinds), np.bool_),
    )
    write_profile(make_profile(costs, loads, PHASES), path)


def options_of(build, profile, *more):
    tuning = ["--tune", f"--profile={profile}", "--effort=5000"]
    return parse([str(build), "--plan=auto", "--device=cpu", "--clip=inf", *tuning, *more])


def run_all(folder, build, epochs, steps, behind):
    """All that two ranks are to run."""
    run_epochs(folder, build, epochs)
    train_in_parts(folder, build, steps, behind)
    tune_differently(folder, build)


def run_epochs(folder, build, epochs):
    """An epoch of each; what is known of its steps goes to `NAME-RANK.json`; profiles are
    `NAME.json`.
    """
    for epoch in epochs:
        try:
            found = run_epoch(folder, build, epoch)
        except Exception as error:
            raise AssertionError(f"{epoch.name}, rank {dist.get_rank()}: {error}") from error
        (folder / f"{epoch.name}-{dist.get_rank()}.json").write_text(json.dumps(found))


def run_epoch(folder, build, epoch):
    named = [f"--dp={epoch.dp}", *epoch.options, *(f"--freeze={part}" for part in epoch.frozen)]
    args = options_of(build, folder / f"{epoch.name}.json", *named)
    run = make(args)
    places = {"dp_world_size": epoch.dp, "micro_batches_per_step": 4, "check_ranks": False}
    untuned = [StreamingLoader(build, dp_rank=rank, **places) for rank in range(epoch.dp)]
    torch.manual_seed(args.seed)
    model = open_model(None, None, untuned[0])
    model.freeze(epoch.frozen)
    layers = nn.ModuleList(model.stack.layers)
    steps = []
    for number, (batches, *replicas) in enumerate(zip(run.source, *untuned, strict=True)):
        result = run.pipeline.step(list(batches), batches[0].num_loss_tokens, batches.note.schedule)
        run.pipeline.reduce_gradients()
        if number < COMPARED:
            layers.zero_grad()
            expected = sum(accumulate(layers, own) for own in replicas)
            check_loss(result.loss, expected, run.num_ranks)
            check_gradients(run.pipeline, model.stack)
        for weight in run.pipeline.parameters():
            weight.grad = None
        steps.append(
            {
                "ids": [list(batch.sample_ids) for batch in batches],
                "untuned": [len(own) for own in replicas],
                "schedule": _actions(result.schedule),
                "planned": _actions(batches.note.schedule)
                if batches.note.schedule is not None
                else None,
                "encoded": int((result.schedule.kinds == PassKind.ENCODE).sum()),
                "step_ns": batches.note.step_ns,
                "untuned_ns": batches.note.untuned_ns,
                "fingerprint": batches.note.fingerprint,
            }
        )
    stats = run.source.stats()
    assert stats.planned_steps == len(steps)
    assert stats.planning_s > 0
    run.source.close()
    return steps


def accumulate(layers, batches):
    """Gradients of micro-batches in one process; -> their part of the step's mean loss."""
    total = 0.0
    for batch in batches:
        tensors = {}
        for layer in layers:
            tensors = layer(tensors, batch)
        loss = tensors["loss"] / max(1, batch.num_loss_tokens)
        if loss.requires_grad:
            loss.backward()
        total += loss.item()
    return total


def check_loss(own, expected, num_ranks):
    loss = torch.tensor(own, dtype=torch.float64)
    dist.all_reduce(loss)
    found = float(loss) / num_ranks
    assert abs(found - expected) <= TOLERANCE * abs(expected), f"loss {found}, not {expected}"


def check_gradients(pipeline, alone):
    """A layer's gradients as one vector: single ones may be sums that cancel out."""
    for place, layer in pipeline.layers.items():
        pairs = list(zip(layer.parameters(), alone.layers[place].parameters(), strict=True))
        assert all(own.requires_grad == other.requires_grad for own, other in pairs)
        trained = [
            (own.grad.flatten(), other.grad.flatten()) for own, other in pairs if own.requires_grad
        ]
        if trained:
            own, wanted = (torch.cat(side) for side in zip(*trained, strict=True))
            off = float((own - wanted).norm() / wanted.norm().clamp(min=1e-6))
            assert off <= TOLERANCE, f"layer {place}: gradients off by {off:.1e}"


def _actions(schedule):
    return [
        [list(map(int, action)) for action in schedule.of_rank(rank)]
        for rank in range(schedule.num_ranks)
    ]


def train_in_parts(folder, build, steps, behind):
    """Train `steps`, once in one go, and once in two runs of which the first ends in the middle of
    an epoch.

    What each step held and ran goes to `whole-RANK.json` and `parts-RANK.json`.
    """
    for name, ends in (("whole", (steps,)), ("parts", (behind, steps))):
        seen = []
        for end in ends:
            more = (
                f"--state={folder / name}",
                f"--figures={folder / name}.jsonl",
                f"--steps={end}",
            )
            args = options_of(build, folder / "profile.json", *more)
            run = make(args)
            noting(run, seen)
            run_steps(run, args)
            run.source.close()
        (folder / f"{name}-{dist.get_rank()}.json").write_text(json.dumps(seen))


def noting(run, seen):
    """Have the pipeline write down each step that it runs."""
    plain = run.pipeline.step

    def step(batches, normalizer, schedule):
        result = plain(batches, normalizer, schedule)
        seen.append(
            [[list(batch.sample_ids) for batch in batches], _actions(result.schedule), result.loss]
        )
        return result

    run.pipeline.step = step


def tune_differently(folder, build):
    """The second rank has another profile; what becomes of it goes to `error-RANK.txt`."""
    name = "profile.json" if dist.get_rank() == 0 else "other.json"
    args = options_of(build, folder / name, "--steps=2")
    run = make(args)
    try:
        run_steps(run, args)
    except Exception as error:
        (folder / f"error-{dist.get_rank()}.txt").write_text(f"{type(error).__name__}: {error}")
    run.source.close()
