"""What ranks run in the tests of gradients that are NaN, infinite or too large to square."""

from dataclasses import dataclass
from math import inf, nan

import numpy as np
import torch
import torch.distributed as dist

from isobatch.engine.runtime.errors import GradientNotFinite
from isobatch.engine.runtime.pipeline import Pipeline, PipelineOptions
from isobatch.engine.train.trainer import run_steps
from support.models.toy_model import freeze, make_model
from support.rank_programs.rank_faults import batches_of
from support.trainers.engine_train import make, parse

LARGE = 1e25
"""Its square is infinite in float32."""
NUM_LAYERS, MICRO_BATCHES = 11, 4


@dataclass(frozen=True, kw_only=True)
class Poisoned:
    """The gradient that leaves a layer in one micro-batch of one replica, times a factor."""

    name: str
    pp: int
    layer: int
    factor: float
    frozen: str = ""
    schedule: str = "1f1b"
    micro_batch: int = 1
    raises: bool = True


CASES = [
    Poisoned(name="one stage of a pipeline", pp=4, layer=7, factor=nan),
    Poisoned(name="one replica", pp=1, layer=3, factor=inf),
    Poisoned(name="both", pp=2, layer=10, factor=-inf, micro_batch=3),
    Poisoned(name="split passes", pp=4, layer=8, factor=nan, schedule="zero_bubble"),
    Poisoned(name="through frozen layers", pp=2, layer=9, factor=nan, frozen="language"),
    Poisoned(name="above frozen layers", pp=4, layer=6, factor=inf, frozen="vision"),
    Poisoned(name="nothing trained", pp=2, layer=2, factor=nan, frozen="vision", raises=False),
    Poisoned(name="large", pp=2, layer=10, factor=LARGE, raises=False),
    Poisoned(name="large in a replica", pp=1, layer=10, factor=LARGE, raises=False),
]


class _Times(torch.autograd.Function):
    """A tensor as it is, whose gradient is multiplied."""

    @staticmethod
    def forward(ctx, value, factor):
        ctx.factor = factor
        return value.view_as(value)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor, None


def poison(layer, factor, forward_passes):
    """Multiply the gradients of what a layer returns in these of its forward passes, from 0."""
    passes = []

    def returned(_module, _inputs, outputs):
        passes.append(None)
        if len(passes) - 1 not in forward_passes:
            return outputs
        return {name: _Times.apply(value, factor) for name, value in outputs.items()}

    return layer.register_forward_hook(returned)


def poisoned_steps(said):
    """Each case on four ranks: a plain step, the poisoned one, and plain ones again."""
    for case in CASES:
        said[case.name] = _poisoned_step(case)


def _poisoned_step(case):
    model = make_model()
    if case.frozen:
        freeze(model, case.frozen)
    borders = np.linspace(0, NUM_LAYERS, case.pp + 1).astype(int)
    pipelines = [list(range(first, first + case.pp)) for first in range(0, 4, case.pp)]
    options = PipelineOptions(schedule=case.schedule)
    pipeline = Pipeline(model, borders, np.zeros(NUM_LAYERS, bool), pipelines, options)
    trained = [weight for weight in pipeline.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3) if trained else None
    batches = batches_of(MICRO_BATCHES, seed=dist.get_rank() // case.pp)

    def step():
        for weight in trained:
            weight.grad = None
        loss = pipeline.step(batches, 10).loss
        pipeline.reduce_gradients()
        norm = pipeline.clip_gradients(1.0)
        clipped = [weight.grad.double().norm().item() for weight in trained]
        if optimizer is not None:
            optimizer.step()
        return {"loss": loss, "norm": norm, "own": float(np.linalg.norm(clipped))}

    found = {"before": step(), "error": None}
    kept = _copies(pipeline, optimizer)
    hook = None
    if dist.get_rank() >= 4 - case.pp and case.layer in pipeline.layers:  # of the last replica
        hook = poison(pipeline.layers[case.layer], case.factor, {case.micro_batch})
    try:
        found["poisoned"] = step()
    except GradientNotFinite as error:
        found["error"] = str(error)
    found["unchanged"] = all(map(torch.equal, kept, _copies(pipeline, optimizer)))
    if hook is not None:
        hook.remove()
    found["after"] = step()
    return found


def _copies(pipeline, optimizer):
    """All that an optimizer's step may change."""
    states = optimizer.state.values() if optimizer is not None else ()
    moments = [value for state in states for value in state.values()]
    return [value.detach().clone() for value in [*pipeline.parameters(), *moments]]


def skipping_runs(said, build, folder, *options):
    """Skip a poisoned step: in one run, and in one that ends after it and is resumed."""
    state = f"--state={folder}/state"
    parts = {
        "whole": ["--steps=6", "--not-finite=skip"],
        "begun": ["--steps=4", "--not-finite=skip", "--save-every=3", state],
        "resumed": ["--steps=6", state],
    }
    for name, own in parts.items():
        figures = f"--figures={folder}/{name}.jsonl"
        config = parse([build, "--plan=auto", "--device=cpu", figures, *own, *options])
        run = make(config)
        if name != "resumed" and dist.get_rank() == dist.get_world_size() - 1:
            last = run.pipeline.layers[max(run.pipeline.layers)]
            poison(last, nan, {2 * MICRO_BATCHES + 1})  # in the third step
        run_steps(run, config)
        said[name] = run.skipped
        finite = [bool(weight.isfinite().all()) for weight in run.pipeline.parameters()]
        said[f"{name}, finite"] = all(finite)
        run.source.close()
