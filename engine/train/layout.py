"""Partition, ranks and schedule of a run, from plan and options: `Layout`."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from isobatch.common.errors import ConfigError
from isobatch.engine.planning.partition import even_partition
from isobatch.engine.planning.plan import Plan
from isobatch.engine.simulator.schedule import default_stages
from isobatch.engine.train.models.open_model import PipelineModel, kinds_text
from isobatch.engine.train.options import PARTS, TrainConfig
from isobatch.models.presets import ModelPreset


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Which rank runs which layers, in which order."""

    borders: tuple[int, ...]
    recompute: tuple[bool, ...]
    pipelines: tuple[tuple[int, ...], ...]
    """Ranks of each replica, first stage first."""
    schedule: str
    stages_per_rank: int
    deferred: tuple[int, ...] | None
    """Weight gradients that each rank may hold back; None: as many as the schedule does."""
    micro_batches: int
    """Micro-batches of a step and replica."""


def make_replicas(world_size: int, count: int, plan: Plan | None) -> tuple[tuple[int, ...], ...]:
    """Ranks of each pipeline: adjacent ones, unless the plan places replicas next to each other."""
    if count < 1 or world_size % count:
        raise ConfigError(
            f"--dp is {count}; {world_size} processes cannot form as many pipelines of equal length"
        )
    length = world_size // count
    if plan and plan.parallel.innermost == "replicas":
        return tuple(tuple(range(first, world_size, count)) for first in range(count))
    return tuple(tuple(range(first, first + length)) for first in range(0, world_size, length))


def apply_plan(plan: Plan, model: PipelineModel, num_ranks: int) -> None:
    """Freeze the plan's frozen parts. ConfigError if it is for another model or number of ranks."""
    parallel = plan.parallel
    if parallel.tp != 1 or parallel.pp != num_ranks:
        raise ConfigError(
            f"the plan is for pipelines of {parallel.pp} ranks, tp {parallel.tp}: start"
            f" {parallel.pp} processes per replica, or plan with --pp {num_ranks} --tp 1"
        )
    if plan.layer_names != model.names or _widths(plan.model) != _widths(model.preset):
        raise ConfigError(
            f"the plan is for {plan.model.name} ({kinds_text(plan.layer_names)}, widths"
            f" {_widths(plan.model)}); the model is {model.preset.name}"
            f" ({kinds_text(model.names)}, widths {_widths(model.preset)}): plan with a preset of"
            " these sizes, or by `python -m engine measure`"
        )
    model.freeze([part for part in PARTS if not plan.training.trains(part)])


def make_layout(
    config: TrainConfig, plan: Plan | None, num_layers: int, pipelines: tuple[tuple[int, ...], ...]
) -> Layout:
    """The options over the plan; without a plan, equally many layers per stage. ConfigError."""
    schedule = config.schedule or (plan.schedule if plan else "1f1b")
    stages_per_rank = config.stages_per_rank or (
        plan.stages_per_rank if plan else default_stages(schedule)
    )
    num_stages = len(pipelines[0]) * stages_per_rank
    even = even_partition(np.ones(num_layers, np.int64), num_stages).tolist()
    deferred = None
    if plan and (plan.schedule, plan.stages_per_rank) == (schedule, stages_per_rank):
        deferred = plan.deferred
    return Layout(
        borders=tuple(config.partition or (plan.borders if plan else even)),
        recompute=_recomputed(config.recompute, plan, num_layers),
        pipelines=pipelines,
        schedule=schedule,
        stages_per_rank=stages_per_rank,
        deferred=deferred,
        micro_batches=num_micro_batches(config, plan),
    )


def num_micro_batches(config: TrainConfig, plan: Plan | None) -> int:
    """Micro-batches of a step and replica."""
    return config.micro_batches_per_step or (plan.num_micro_batches if plan else 4)


def layout_text(layout: Layout, names: tuple[str, ...]) -> str:
    """Layers of each stage, schedule and ranks, for people."""
    stages = "\n".join(
        f"stage {stage}: {', '.join(names[first:end])}"
        for stage, (first, end) in enumerate(pairwise(layout.borders))
    )
    ranks = f"{len(layout.pipelines)} x {len(layout.pipelines[0])} ranks"
    return f"{stages}\n{layout.schedule}, {ranks}, {layout.micro_batches} micro-batches each"


def _recomputed(choice: str | None, plan: Plan | None, num_layers: int) -> tuple[bool, ...]:
    """Layers recomputed at first; before memory is adapted, all."""
    if choice == "plan" and plan is None:
        raise ConfigError("--recompute plan needs a plan; with --plan auto give none, all or adapt")
    if choice in ("plan", None) and plan is not None:
        return tuple(plan.recompute_mask.tolist())
    return (choice in ("all", "adapt"),) * num_layers


def _widths(preset: ModelPreset) -> tuple[int, ...]:
    """Widths of vision encoder and language model."""
    return tuple(shape.hidden_size for shape in (preset.vit, preset.llm) if shape is not None)
