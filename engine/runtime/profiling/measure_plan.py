"""A plan from measurements: layers profiled, the best partitions run.

The steps of OmniBal 4.2 for a model that every rank holds: `profile_step`, then `choose_plan`. A
trial recomputes as few layers as fit if all micro-batches were `request.full`. Trains nothing.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from isobatch.common.types import IntArray
from isobatch.engine.cost_model.analytical import layer_names
from isobatch.engine.cost_model.costs import MEMORY
from isobatch.engine.cost_model.layer_list import layers_of, phases_of
from isobatch.engine.cost_model.profile_table import Profile, measured_costs, profiled_costs
from isobatch.engine.planning.partition import even_partition
from isobatch.engine.planning.plan import Plan, PlanRequest
from isobatch.engine.planning.planner import plan_from_profile
from isobatch.engine.planning.recompute import choose_recompute
from isobatch.engine.runtime.batch_loads import batch_loads
from isobatch.engine.runtime.pipeline import Pipeline, PipelineOptions
from isobatch.engine.runtime.profiling._probe_batches import probe_batches
from isobatch.engine.runtime.profiling.measure_layers import (
    LayerLabels,
    MeasureOptions,
    measure_layers,
)
from isobatch.engine.runtime.profiling.partition_trials import (
    MeasuredPartitions,
    TrialOptions,
    TrialStep,
    measure_partitions,
    temporary_pipelines,
)
from isobatch.engine.runtime.stage_io import Batch, LayerStack

REPEATS = 5
"""Runs of every pass; the first warms up."""


def profile_step(
    model: LayerStack,
    request: PlanRequest,
    batches: Sequence[Batch],
    vision_token_ids: Sequence[int],
    options: PipelineOptions,
) -> Profile:
    """Profile of a model's layers, for parts of a step's micro-batches and then for these.

    The same on all ranks of the world, which form one pipeline, cut evenly. The request is for
    `batches` and `model`. ConfigError as `measure_layers` and `first_samples`.
    """
    listed = layers_of(request.model, request.parallel)
    ranks = list(range(dist.get_world_size()))
    schedule = request.make_schedule()
    borders = even_partition(np.ones(len(model.layers), np.int64), schedule.num_stages)
    parts = probe_batches(batches, request.loads, vision_token_ids)
    with temporary_pipelines(model):
        return measure_layers(
            Pipeline(model, borders, [False] * len(model.layers), [ranks], options),
            parts,
            batch_loads(parts, request.model),
            LayerLabels(
                names=layer_names(listed),
                kinds=[layer.kind for layer in listed],
                phases=phases_of(request.model),
            ),
            MeasureOptions(repeats=REPEATS, apart=schedule.splits_backward),
        )


def choose_plan(
    model: LayerStack,
    request: PlanRequest,
    profile: Profile,
    batches: Sequence[Batch],
    options: PipelineOptions,
    trials: TrialOptions | None = None,
) -> tuple[MeasuredPartitions, Plan]:
    """Run the partitions that rank best by `profile`; -> the trials, and the fastest as a plan.

    The same on all ranks. Arguments and profile of `profile_step`; errors of `measure_partitions`.
    """
    places = np.arange(len(profile.loads))[-len(batches) :]
    costs = measured_costs(profile, places)
    full = profiled_costs(profile, request.full.take(np.zeros(len(batches), np.int64)))
    # times of this step; memory of the largest micro-batches, but at least what was measured
    sized = replace(
        costs, **{name: np.maximum(getattr(full, name), getattr(costs, name)) for name in MEMORY}
    )

    def recompute(borders: IntArray) -> NDArray[np.bool_]:
        schedule = request.make_schedule()
        return choose_recompute(sized, borders, schedule, request.memory_bytes)

    step = TrialStep(
        batches=batches,
        normalizer=batches[0].loss_normalizer,
        pipelines=[list(range(dist.get_world_size()))],
        options=options,
        recompute=recompute,
    )
    measured = measure_partitions(model, costs, step, trials)
    borders = measured.bmp.best.borders
    return measured, plan_from_profile(request, profile, borders, recompute(borders), places)
