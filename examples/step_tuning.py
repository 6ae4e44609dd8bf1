"""`train_pipeline.py --tune`: PipeTune's tuner as the loader's step planner, which chooses how each
step shall run.

The loader asks it in the threads that work ahead, so its time is hidden unless steps are shorter
than planning them. What it chose for a rank comes with the step, as `StepBatches.note`: an
`engine.tuning.step_planner.StepNote`.
"""

from __future__ import annotations

from functools import partial
from math import inf
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from pipeline_layout import Layout
from pipeline_models import PipelineModel, kinds_text

from balance.errors import ConfigError
from engine.cost_model.costs import Costs, frozen_costs
from engine.cost_model.loads import Loads
from engine.cost_model.profile_table import FARTHEST, Profile, profiled_costs, read_profile
from engine.cost_model.sample_loads import sample_loads
from engine.runtime.errors import peer_errors
from engine.tuning.precompute import EncodeRanks, frozen_encoder
from engine.tuning.step_planner import StepNote, TunedSteps
from engine.tuning.tune import PartitionedModel, TuneOptions


def make_tuner(
    profile: Profile,
    layout: Layout,
    model: PipelineModel,
    *,
    encode: EncodeRanks | None,
    memory_bytes: int | None,
    effort: int,
) -> TunedSteps:
    """The planner that tunes each step by measured costs; `encode` None: "own", if the first stage
    has all of it.

    Micro-batches become no larger than costs are trusted for, unless the build's own are; those are
    tried all the same. ConfigError if nothing can be encoded ahead, but shall be, or if the profile
    is of less than is trained.
    """
    cost, borders = partial(costs_of, profile, model.trained), np.array(layout.borders)
    known = cost(profile.loads)
    if encode is None:
        encode = "own" if 0 < model.layered.first_trained <= borders[1] else "never"
    if encode != "never":
        frozen_encoder(known, borders)
    most = int(profile.loads.llm.tokens.max())
    pipeline = PartitionedModel(
        cost=cost,
        borders=borders,
        recompute=np.array(layout.recompute),
        schedule=layout.schedule,
        stages_per_rank=layout.stages_per_rank,
        memory_bytes=memory_bytes,
    )
    options = TuneOptions(
        max_seq_len=most, largest_len=int(FARTHEST * most), encode=encode, effort=effort
    )
    return TunedSteps(
        pipeline=pipeline, options=options, loads=partial(sample_loads, model=model.preset)
    )


def costs_of(profile: Profile, trained: tuple[bool, ...], loads: Loads) -> Costs:
    """What a profile says, also about micro-batches that are larger than any that was measured."""
    return frozen_costs(profiled_costs(profile, loads, farthest=inf), trained)


def read_own_profile(path: Path, model: PipelineModel) -> Profile:
    """A profile of a model's layers. ConfigError if it is of others, by their names or their
    sizes.
    """
    profile = read_profile(path)
    again = "profile it with examples/plan_pipeline.py and the same --model and --config"
    if profile.names != model.names:
        raise ConfigError(
            f"{path} is a profile of {kinds_text(profile.names)}; the model has {kinds_text(model.names)}: {again}"
        )
    measured = profile.costs.param_counts[list(profile.layers)].tolist()
    # one that nobody measured may leave them out
    if any(measured) and measured != model.param_counts:
        rows = zip(model.names, measured, model.param_counts, strict=True)
        layer, found, own = next(row for row in rows if row[1] != row[2])
        raise ConfigError(
            f"{path} is a profile of a model whose {layer} has {found:,} parameters; the model's has {own:,}: {again}"
        )
    return profile


def check_same_step(note: StepNote) -> None:
    """ConfigError on all ranks unless all planned the same step: else samples would be trained on
    twice, or never.
    """
    both = torch.tensor([note.fingerprint, -note.fingerprint])
    with peer_errors(range(dist.get_world_size())):
        dist.all_reduce(both, op=dist.ReduceOp.MAX)
    if int(both.sum()):
        raise ConfigError(
            "the ranks tuned the step differently: give all of them the same build, plan and profile"
        )
