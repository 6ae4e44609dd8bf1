"""`train_pipeline.py --tune`: PipeTune's tuner as the loader's step planner, which chooses how each step shall run.

The loader asks it in the threads that work ahead, so its time is hidden unless steps are shorter than planning them.
What it chose for a rank comes with the step, as `StepBatches.note`: an `engine.tune_steps.StepNote`.
"""

from __future__ import annotations

from functools import partial
from math import inf

import numpy as np
import torch
import torch.distributed as dist
from pipeline_layout import Layout

from balance.errors import ConfigError
from balance.presets import ModelPreset
from engine.costs import Costs
from engine.frozen_costs import frozen_costs
from engine.loads import Loads
from engine.precompute import Where, frozen_encoder
from engine.profile_costs import FARTHEST, Profile, profiled_costs
from engine.runtime.faults import peers
from engine.sample_loads import sample_loads
from engine.tune import Pipeline, TuneOptions
from engine.tune_steps import StepNote, TunedSteps


def make_tuner(
    profile: Profile,
    layout: Layout,
    preset: ModelPreset,
    *,
    trained: tuple[bool, ...],
    encode: Where,
    memory_bytes: int | None,
    effort: int,
) -> TunedSteps:
    """The planner that tunes each step by measured costs; `trained` says which layers are.

    Micro-batches become no larger than costs are trusted for, unless the build's own are; those are tried all the same.
    ConfigError if nothing can be encoded ahead, but shall be, or if the profile is of less than is trained.
    """
    cost, borders = partial(costs_of, profile, trained), np.array(layout.borders)
    known = cost(profile.loads)
    if encode != "never":
        frozen_encoder(known, borders)
    most = int(profile.loads.llm.tokens.max())
    pipeline = Pipeline(
        cost=cost,
        borders=borders,
        recompute=np.array(layout.recompute),
        schedule=layout.schedule,
        stages_per_rank=layout.stages_per_rank,
        memory_bytes=memory_bytes,
    )
    options = TuneOptions(max_seq_len=most, largest_len=int(FARTHEST * most), encode=encode, effort=effort)
    return TunedSteps(pipeline=pipeline, options=options, loads=partial(sample_loads, model=preset))


def costs_of(profile: Profile, trained: tuple[bool, ...], loads: Loads) -> Costs:
    """What a profile says, also about micro-batches that are larger than any that was measured."""
    return frozen_costs(profiled_costs(profile, loads, farthest=inf), trained)


def check_profile(profile: Profile, names: tuple[str, ...]) -> None:
    """ConfigError unless these layers were measured."""
    if profile.names != names:
        raise ConfigError(f"the profile has the layers {', '.join(profile.names)}; the model {', '.join(names)}")


def default_encode(first_trained: int, borders: tuple[int, ...]) -> Where:
    """In idle time of the first stage's own rank, if the layers in front are frozen and all in the first stage."""
    return "own" if 0 < first_trained <= borders[1] else "never"


def check_same_step(note: StepNote) -> None:
    """ConfigError on all ranks unless all planned the same step: else samples would be trained on twice, or never."""
    both = torch.tensor([note.fingerprint, -note.fingerprint])
    with peers(range(dist.get_world_size())):
        dist.all_reduce(both, op=dist.ReduceOp.MAX)
    if int(both.sum()):
        raise ConfigError("the ranks tuned the step differently: give all of them the same build, plan and profile")
