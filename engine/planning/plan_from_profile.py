"""A plan out of a profile: predictions from what was measured, not from a cluster's data sheet.
Pure.

For a partition that is already chosen: searched over `profiled_costs`, or run
(`engine.runtime.profiling.partition_trials`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from balance.errors import ConfigError
from balance.types import IntArray
from engine.cost_model.costs import Costs
from engine.cost_model.layer_list import layers_of
from engine.cost_model.loads import Loads, PhaseLoads
from engine.cost_model.profile_table import COLUMNS, PHASES, Profile, profiled_costs
from engine.planning.plan import Plan
from engine.planning.planner import PlanRequest, predict, simulate_run
from engine.simulator.evaluate import evaluate


def measured_costs(profile: Profile, places: IntArray) -> Costs:
    """What some of the micro-batches that were measured cost, as measured: nothing is fitted."""
    rows, measured = np.array(profile.layers), profile.costs.take(places)
    columns = {
        name: getattr(measured, name)[rows]
        for name in (*COLUMNS, "state_bytes", "param_counts", "sends_grad")
    }
    columns["send_ns"][-1] = 0
    return Costs(names=profile.names, kinds=tuple(measured.kinds[row] for row in rows), **columns)


def plan_of_profile(
    request: PlanRequest,
    profile: Profile,
    borders: IntArray,
    recompute: NDArray[np.bool_],
    places: IntArray | None = None,
) -> Plan:
    """The plan with this partition and these recomputed layers, its times and bytes from a profile.

    `places`: of the request's micro-batches among those measured, if they are; then nothing is
    fitted. Of the request's cluster only the reduction of gradients over replicas is taken.
    ConfigError if the profile is of another list of layers than the request's model, or of
    micro-batches too small (`profiled_costs`).
    """
    layers = layers_of(request.model, request.parallel)
    if len(layers) != len(profile.names):
        raise ConfigError(
            f"the profile has {len(profile.names)} layers, the model {request.model.name} {len(layers)}: give the "
            "preset of the model that was measured"
        )
    count = request.num_micro_batches
    every = (
        profiled_costs(profile, request.loads)
        if places is None
        else measured_costs(profile, places)
    )
    pipelines = [
        every.take(np.arange(first, first + count)) for first in range(0, len(request.loads), count)
    ]
    found = simulate_run(request, "measured", pipelines, request.loads, borders, recompute)
    full = profiled_costs(profile, request.full.take(np.zeros(count, np.int64)))
    full_peak = evaluate(
        full, borders, recompute, request.make_schedule(len(borders) - 1)
    ).memory.peak_bytes
    return Plan(
        model=request.model,
        cluster=request.cluster,
        parallel=request.parallel,
        training=request.training,
        schedule=request.schedule,
        stages_per_rank=request.stages_per_rank,
        num_micro_batches=count,
        memory_bytes=request.memory_bytes,
        full=request.full,
        loads=request.loads,
        layer_names=profile.names,
        borders=tuple(int(border) for border in borders),
        recompute=tuple(np.flatnonzero(recompute).tolist()),
        predicted=predict(request, found, full_peak),
    )


def largest_micro_batch(loads: Loads) -> Loads:
    """One micro-batch with the most of everything that any of them has: the `full` of a request.

    >>> largest_micro_batch(Loads.constant(3, images=2, vit_tokens_per_image=5, seq_len=7)).vision.tokens.tolist()
    [10]
    """
    phases = {phase: getattr(loads, phase) for phase in PHASES}
    return Loads(
        **{
            phase: PhaseLoads(
                **{
                    name: getattr(own, name).max(keepdims=True)
                    for name in ("tokens", "squares", "items")
                }
            )
            for phase, own in phases.items()
        }
    )
