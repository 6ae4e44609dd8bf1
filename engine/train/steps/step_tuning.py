"""`train --tune`: PipeTune's tuner as the source's step planner.

The source asks it in the threads that work ahead, so its time is hidden unless steps are shorter
than planning them. Its choice comes with the step, as the note of `SourceStep`: a
`engine.tuning.step_planner.StepNote`. Also here: profiles read for the model that trains.
"""

from functools import partial
from math import inf

import numpy as np
import torch

from isobatch.common.errors import ConfigError
from isobatch.engine.cost_model.costs import Costs, frozen_costs
from isobatch.engine.cost_model.loads import Loads, sample_loads
from isobatch.engine.cost_model.profile_table import FARTHEST, Profile, profiled_costs, read_profile
from isobatch.engine.planning.plan import Plan
from isobatch.engine.runtime.communication.collectives import all_gather
from isobatch.engine.train.layout import Layout
from isobatch.engine.train.models.open_model import PipelineModel, kinds_text
from isobatch.engine.train.options import TrainConfig
from isobatch.engine.tuning.precompute import frozen_encoder
from isobatch.engine.tuning.step_planner import StepNote, TunedSteps
from isobatch.engine.tuning.tune import PartitionedModel, TuneOptions


def make_tuner(
    config: TrainConfig, plan: Plan | None, layout: Layout, model: PipelineModel
) -> TunedSteps:
    """Planner that tunes each step by measured costs, for the memory of a rank.

    Micro-batches grow no larger than costs are trusted for, unless the build's own are. ConfigError
    if --encode asks for what cannot be encoded ahead, or the profile lacks costs of trained layers.
    """
    memory = config.memory_bytes
    if memory is None and plan is not None:
        memory = plan.memory_bytes
    profile = read_model_profile(config, plan, model)
    cost = partial(costs_of, profile, model.trained)
    borders = np.array(layout.borders)
    measured = cost(profile.loads)
    encode = config.encode
    if encode is None:
        encode = "own" if 0 < model.stack.first_trained <= borders[1] else "never"
    if encode != "never":
        frozen_encoder(measured, borders)
    max_tokens = int(profile.loads.llm.tokens.max())
    return TunedSteps(
        pipeline=PartitionedModel(
            cost=cost,
            borders=borders,
            recompute=np.array(layout.recompute),
            schedule=layout.schedule,
            stages_per_rank=layout.stages_per_rank,
            deferred=layout.deferred,
            memory_bytes=memory,
        ),
        options=TuneOptions(
            max_seq_len=max_tokens,
            largest_len=int(FARTHEST * max_tokens),
            encode=encode,
            effort=config.effort,
        ),
        loads=partial(sample_loads, model=model.preset),
    )


def costs_of(profile: Profile, trained: tuple[bool, ...], loads: Loads) -> Costs:
    """Costs by a profile, also for micro-batches larger than any that was measured."""
    return frozen_costs(profiled_costs(profile, loads, farthest=inf), trained)


def read_model_profile(config: TrainConfig, plan: Plan | None, model: PipelineModel) -> Profile:
    """The profile of a model's layers. ConfigError if it is of others, by names, sizes or dtype."""
    path = config.profile
    mode = config.training_mode(plan.training.mode if plan else None)
    if path is None:
        raise ConfigError("no --profile: give profile.json of `python -m engine measure`")
    profile = read_profile(path)
    advice = "profile it by `python -m engine measure` with the same --model and --config"
    if profile.precision not in (None, mode.precision):
        raise ConfigError(
            f"{path} was measured in {profile.precision}, the run is in {mode.precision}: measure"
            f" with --precision {mode.precision}"
        )
    if profile.names != model.names:
        raise ConfigError(
            f"{path} is a profile of {kinds_text(profile.names)}; the model has"
            f" {kinds_text(model.names)}: {advice}"
        )
    measured = profile.costs.param_counts[list(profile.layers)].tolist()
    # a profile that was not measured may leave them out
    if any(measured) and measured != model.param_counts:
        rows = zip(model.names, measured, model.param_counts, strict=True)
        layer, count, model_count = next(row for row in rows if row[1] != row[2])
        raise ConfigError(
            f"{path} is a profile of a model whose {layer} has {count:,} parameters; the model's"
            f" has {model_count:,}: {advice}"
        )
    return profile


def check_same_step(note: StepNote) -> None:
    """ConfigError on all ranks unless all planned the same step: samples might be lost.

    All agree on the samples of each replica, and the ranks of a replica on its micro-batches.
    """
    local_plan = torch.tensor([note.rank, note.fingerprint, note.pipeline_fingerprint])
    replicas, steps, rank_plans = torch.stack(all_gather(local_plan)).T.tolist()
    if len(set(steps)) > 1 or len(set(zip(replicas, rank_plans, strict=True))) > len(set(replicas)):
        raise ConfigError(
            "the ranks tuned the step differently: give all the same build, plan and profile"
        )
