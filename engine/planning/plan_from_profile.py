"""Plans with predictions from a profile, not from a data sheet. Pure.

For a partition that is already chosen: searched over `profiled_costs`, or run
(`engine.runtime.profiling.partition_trials`).
"""

import numpy as np

from balance.errors import ConfigError
from balance.types import BoolArray, IntArray
from engine.cost_model.layer_list import layers_of
from engine.cost_model.profile_table import Profile, measured_costs, profiled_costs
from engine.planning.plan import Plan, PlanRequest
from engine.planning.planner import make_plan, simulate_run


def plan_from_profile(
    request: PlanRequest,
    profile: Profile,
    borders: IntArray,
    recompute: BoolArray,
    indices: IntArray | None = None,
) -> Plan:
    """The plan with this partition and these recomputed layers; times and bytes from a profile.

    `indices`: the request's micro-batches among the measured ones, if they are; then nothing is
    fitted. The request's cluster gives the reduction of gradients over replicas alone. ConfigError
    if the profile has other layers than the request's model, or as `profiled_costs`.
    """
    layers = layers_of(request.model, request.parallel)
    if len(layers) != len(profile.names):
        raise ConfigError(
            f"the profile has {len(profile.names)} layers, the model {request.model.name} "
            f"{len(layers)}: give the preset of the model that was measured"
        )
    if indices is None:
        costs = profiled_costs(profile, request.loads)
    else:
        costs = measured_costs(profile, indices)
    pipelines = request.split(costs)
    run = simulate_run(request, "measured", pipelines, request.loads, borders, recompute)
    repeated = request.full.take(np.zeros(request.num_micro_batches, np.int64))
    return make_plan(request, run, profiled_costs(profile, repeated))
