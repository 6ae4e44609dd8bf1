"""What ranks run in the tests of steps that run out of memory: what each was told, and the step
after it.
"""

import gc
import time
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from isobatch.engine.planning.adaptive_recompute import OutOfMemory
from isobatch.engine.runtime.cpu_memory import LiveBytes
from isobatch.engine.runtime.pipeline import Pipeline, PipelineOptions
from isobatch.engine.simulator.schedule import Action, PassKind, Schedule, make_schedule
from support.models.toy_model import freeze, make_model, run_alone
from support.rank_programs.rank_faults import batches_of

PLENTY = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Shortage:
    """A step, and who has how little memory for it."""

    name: str
    pp: int
    victims: tuple[int, ...]
    share: float
    """Of what a step takes at most; of what it takes less than that by a byte, 1."""
    dp: int = 1
    schedule: str = "1f1b"
    stages_per_rank: int = 1
    recompute: bool = False
    encode_on: int | None = None
    count: int = 4


def run_short(said, cases):
    """All cases; of each, what this rank was told, how long that took, and what was wrong with the
    step after it.
    """
    for case in cases:
        said[case.name] = _run_short(case)


def _run_short(case):
    pipeline, alone = (_model(case) for _ in range(2))
    pipeline = _pipeline(case, pipeline)
    replica = dist.get_rank() // case.pp
    batches = batches_of(case.count * case.dp)
    own = batches[replica * case.count : (replica + 1) * case.count]
    labels, schedule = sum(batch.num_loss_tokens for batch in batches), _schedule(case)
    with LiveBytes() as memory:
        pipeline.step(own, labels, schedule)
    _drop_gradients(pipeline)
    limit = int(case.share * (memory.peak_bytes - 1)) if dist.get_rank() in case.victims else PLENTY
    found = {}
    with LiveBytes(limit) as memory:
        begun = time.monotonic()
        try:
            pipeline.step(own, labels, schedule)
        except OutOfMemory as error:
            found |= {
                "error": str(error),
                "stages": error.stages,
                "seconds": time.monotonic() - begun,
            }
        _drop_gradients(pipeline)
        gc.collect()
        found["left over"] = memory.live_bytes
    with LiveBytes(PLENTY):
        loss = torch.tensor(pipeline.step(own, labels, schedule).loss)
        pipeline.reduce_gradients()
    if case.dp > 1:
        dist.all_reduce(loss)
        loss /= case.pp
    expected = run_alone(alone, batches, labels)
    return found | {
        "loss off": abs(float(loss) / expected - 1),
        "gradients off": gradients_off(pipeline, alone),
    }


def gradients_off(pipeline, alone):
    """The most that any layer's gradients are off, relative to their size."""
    most = 0.0
    for place, layer in pipeline.layers.items():
        own = [weight for weight in layer.parameters() if weight.requires_grad]
        wanted = [
            weight.grad.flatten()
            for weight in alone.layers[place].parameters()
            if weight.requires_grad
        ]
        if own:
            difference = torch.cat([weight.grad.flatten() for weight in own]) - torch.cat(wanted)
            most = max(most, float(difference.norm() / torch.cat(wanted).norm()))
    return most


def _model(case):
    model = make_model()
    if case.encode_on is not None:
        freeze(model, "vision")
    return model


def _pipeline(case, model):
    borders = np.linspace(0, len(model.layers), case.pp * case.stages_per_rank + 1).astype(int)
    if case.encode_on is not None:
        borders = np.array([0, *np.linspace(6, len(model.layers), case.pp).astype(int)])
    pipelines = [
        list(range(first, first + case.pp)) for first in range(0, case.pp * case.dp, case.pp)
    ]
    options = PipelineOptions(
        schedule=case.schedule,
        stages_per_rank=case.stages_per_rank,
        encoder_ranks=() if case.encode_on is None else (case.encode_on,),
    )
    return Pipeline(model, borders, np.full(len(model.layers), case.recompute), pipelines, options)


def _schedule(case):
    """The case's own, with the first micro-batches encoded ahead on another rank; None for the
    pipeline's.
    """
    if case.encode_on is None:
        return None
    plain = make_schedule(case.schedule, case.pp, case.count, case.stages_per_rank)
    actions = [plain.of_rank(rank) for rank in range(case.pp)]
    actions[case.encode_on][:0] = [Action(PassKind.ENCODE, 0, number) for number in (0, 1)]
    return Schedule.of("encoding", plain.num_stages, case.count, actions)


def _drop_gradients(pipeline):
    for weight in pipeline.parameters():
        weight.grad = None
