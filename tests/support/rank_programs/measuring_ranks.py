"""What ranks run in the tests of profiles and of partitions that are tried; each writes down what
it saw.
"""

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from isobatch.common.errors import ConfigError, IsobatchError
from isobatch.engine.cost_model.costs import MEMORY, NS_PER_MS, Costs
from isobatch.engine.cost_model.profile_table import profile_to_dict
from isobatch.engine.planning.recompute import InfeasiblePlan
from isobatch.engine.runtime.pipeline import Pipeline, PipelineOptions
from isobatch.engine.runtime.profiling.measure_layers import (
    LayerLabels,
    MeasureOptions,
    measure_layers,
)
from isobatch.engine.runtime.profiling.partition_trials import (
    TrialStep,
    evidence,
    measure_partitions,
)
from support.models.measured_models import (
    Durations,
    Square,
    Sum,
    WorkClock,
    chain,
    loads_of,
    rows,
    timed_model,
)

DURATIONS = (
    Durations(forward=1, input_grad=2, weight_grad=4),
    Durations(forward=3, input_grad=5, weight_grad=2),
    Durations(forward=2, input_grad=1, weight_grad=5),
)
ROWS = (2, 4, 6)
WIDTHS = (6, 10, 14, 22, 14)
COUNTS = (8, 16, 40)


def profile_timed(said):
    """Layers that take a known time; three, on two ranks. Backward passes measured together, then
    apart.
    """
    for apart in (False, True):
        with WorkClock() as clock:
            said[f"apart: {apart}"] = _profile_timed(clock, apart=apart)


def _profile_timed(clock, *, apart):
    model = timed_model(DURATIONS, clock)
    batches = [rows(count, 2) for count in ROWS]
    pipeline = Pipeline(model, [0, 2, 3], [False] * 3, [[0, 1]])
    before = [torch.full_like(weight, 5.0) for weight in pipeline.parameters()]
    for weight, gradient in zip(pipeline.parameters(), before, strict=True):
        weight.grad = gradient
    state = torch.random.get_rng_state()
    kinds = ("first", "second", "third")
    profile = measure_layers(
        pipeline,
        batches,
        loads_of(batches),
        LayerLabels(names=kinds, kinds=kinds, phases=dict.fromkeys(kinds, "llm")),
        MeasureOptions(apart=apart),
    )
    return {
        "profile": profile_to_dict(profile),
        "gradients kept": all(
            weight.grad is gradient and bool((gradient == 5).all())
            for weight, gradient in zip(pipeline.parameters(), before, strict=True)
        ),
        "generator kept": bool((state == torch.random.get_rng_state()).all()),
    }


def profile_chains(said):
    """Chains whose bytes can be counted by hand; more stages than ranks, too."""
    batches = [rows(count, WIDTHS[0]) for count in COUNTS]
    for name, follows, loss in (("gelu", nn.GELU(), Square()), ("relu", nn.ReLU(), Sum())):
        said[name] = _profile_chain(
            chain(WIDTHS, follows, loss), batches, [0, 2, 5], PipelineOptions()
        )
    frozen = chain(WIDTHS, nn.GELU(), Square())
    frozen.layers[0].requires_grad_(False)
    options = PipelineOptions(schedule="interleaved", stages_per_rank=2)
    said["frozen"] = _profile_chain(frozen, batches, [0, 1, 2, 4, 5], options)
    alike = chain((10,) * 4, nn.GELU(), Square())
    said["alike"] = _profile_chain(
        alike, [rows(8, 10)] * 2, [0, 2, 4], PipelineOptions(), kind="block"
    )
    try:
        _profile_chain(
            chain(WIDTHS, nn.GELU(), Square()), batches, [0, 2, 5], PipelineOptions(), kind="block"
        )
    except ConfigError as error:
        said["unlike"] = str(error)


def _profile_chain(model, batches, borders, options, kind=None):
    pipeline = Pipeline(model, borders, [False] * len(model.layers), [[0, 1]], options)
    names = [f"block {place}" for place in range(len(model.layers) - 1)] + ["loss"]
    kinds = [kind or name for name in names[:-1]] + ["loss"]
    profile = measure_layers(
        pipeline,
        batches,
        loads_of(batches),
        LayerLabels(names=names, kinds=kinds, phases=dict.fromkeys(kinds, "llm")),
        MeasureOptions(repeats=2),
    )
    return profile_to_dict(profile)


UNEVEN = (
    Durations(forward=3, input_grad=0, weight_grad=21),
    *[Durations(forward=3, input_grad=3, weight_grad=2)] * 3,
)
"""Forward times say to cut in the middle; all times, behind the first layer: the slower rank then
works 3/4 of that.
"""


def costs_of(durations, batches):
    """What such layers cost, known beforehand."""
    counts = np.array([len(batch.values) for batch in batches])

    def times(name):
        each = np.array([getattr(own, name) for own in durations])
        return np.rint(np.outer(each, counts) * NS_PER_MS).astype(np.int64)

    nothing = np.zeros((len(durations), len(batches)), np.int64)
    return Costs(
        names=tuple(f"layer {place}" for place in range(len(durations))),
        kinds=tuple(str(own) for own in durations),
        forward_ns=times("forward"),
        input_grad_ns=times("input_grad") * (np.arange(len(durations)) > 0)[:, np.newaxis],
        weight_grad_ns=times("weight_grad"),
        recompute_ns=times("forward"),
        send_ns=nothing,
        **dict.fromkeys(MEMORY, nothing),
        state_bytes=nothing[:, 0],
        param_counts=nothing[:, 0],
        sends_grad=np.ones(len(durations), np.bool_),
    )


def try_partitions(said):
    """The best partition is known; and what fits no memory, or is asked wrongly, ends alike on both
    ranks.
    """
    with WorkClock() as clock:
        _try_partitions(said, clock)


def _try_partitions(said, clock):
    batches = [rows(count, 2) for count in (1,) * 6]
    costs = costs_of(UNEVEN, batches)
    num_groups = len(dist.distributed_c10d._world.pg_map)
    model = timed_model(UNEVEN, clock)
    step = TrialStep(batches=batches, normalizer=6, pipelines=[[0, 1]])
    # whatever the other ranks know does not count
    own = costs if dist.get_rank() == 0 else costs_of(UNEVEN[::-1], batches)
    said["best"] = evidence(measure_partitions(model, own, step, radius=2, most_run=3))
    said["gradients"] = sum(
        weight.grad is not None for layer in model.layers for weight in layer.parameters()
    )
    said["weights"] = all(bool((layer.weight == 1).all()) for layer in model.layers)
    # the third layer has room on the first rank only
    crowded = timed_model(UNEVEN, clock, only_on={2: 0})
    said["crowded"] = evidence(measure_partitions(crowded, own, step, num_steps=1, radius=2))
    nowhere = timed_model(UNEVEN, clock, only_on={1: 1, 2: 0})
    said["nowhere"] = _failure(nowhere, own, step, num_steps=1, radius=1)
    said["radius"] = _failure(model, own, step, radius=-1)
    few = TrialStep(batches=batches, normalizer=6, pipelines=[[0, 1]], recompute=_only_even)
    said["planned"] = evidence(measure_partitions(model, own, few, num_steps=1, radius=1))
    said["groups left"] = len(dist.distributed_c10d._world.pg_map) - num_groups


def _only_even(borders):
    if borders[1] % 2:
        raise InfeasiblePlan("rank 0 needs more than it has")
    return np.arange(borders[-1]) == 0


def _failure(model, costs, step, **options):
    try:
        measure_partitions(model, costs, step, **options)
    except IsobatchError as error:
        return [type(error).__name__, str(error)]
    return None
