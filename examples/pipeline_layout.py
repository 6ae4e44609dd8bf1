"""Which rank runs what of a model, in which order: `Layout`, out of a plan or of the command's
options.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from pipeline_models import PARTS, PipelineModel, kinds_text

from balance.errors import ConfigError
from balance.presets import ModelPreset
from engine.planning.partition import even_partition
from engine.planning.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Which rank runs what, in which order."""

    borders: tuple[int, ...]
    recompute: tuple[bool, ...]
    pipelines: tuple[tuple[int, ...], ...]
    """Ranks of each replica, first stage first."""
    schedule: str
    stages_per_rank: int
    micro_batches: int


def replicas(world_size: int, count: int, plan: Plan | None) -> tuple[tuple[int, ...], ...]:
    """The ranks of each pipeline: one pipeline's beside each other, unless the plan has those of
    one stage so.
    """
    if count < 1 or world_size % count:
        raise ConfigError(
            f"--dp is {count}; {world_size} processes cannot be so many pipelines of equal length"
        )
    length = world_size // count
    if plan and plan.parallel.innermost == "replicas":
        return tuple(tuple(range(first, world_size, count)) for first in range(count))
    return tuple(tuple(range(first, first + length)) for first in range(0, world_size, length))


def follow(plan: Plan, model: PipelineModel, num_ranks: int) -> None:
    """Freeze what the plan does not train. ConfigError if it is for another model, or for other
    ranks.
    """
    if plan.parallel.tp != 1 or plan.parallel.pp != num_ranks:
        raise ConfigError(
            f"the plan is for pipelines of {plan.parallel.pp} ranks, tp {plan.parallel.tp}; here are {num_ranks}: "
            f"start {plan.parallel.pp} processes per replica, or plan with --pp {num_ranks} --tp 1"
        )
    if plan.layer_names != model.names or _widths(plan.model) != _widths(model.preset):
        raise ConfigError(
            f"the plan is for {plan.model.name} ({kinds_text(plan.layer_names)}, widths {_widths(plan.model)}); the "
            f"model is {model.preset.name} ({kinds_text(model.names)}, widths {_widths(model.preset)}): plan with a "
            "preset of these sizes, or by examples/plan_pipeline.py"
        )
    model.freeze([part for part in PARTS if not plan.training.trains(part)])


def lay_out(
    args: argparse.Namespace, plan: Plan | None, num_layers: int, pipelines: Sequence[Sequence[int]]
) -> Layout:
    """What the options say, else the plan; without one, as many layers in each stage. ConfigError
    if they clash.
    """
    stages_per_rank = args.stages_per_rank or (plan.stages_per_rank if plan else 1)
    borders = even_partition(
        np.ones(num_layers, np.int64), len(pipelines[0]) * stages_per_rank
    ).tolist()
    return Layout(
        borders=tuple(args.borders or (plan.borders if plan else borders)),
        recompute=recomputed(args.recompute, plan, num_layers),
        pipelines=tuple(map(tuple, pipelines)),
        schedule=args.schedule or (plan.schedule if plan else "1f1b"),
        stages_per_rank=stages_per_rank,
        micro_batches=micro_batches(args, plan),
    )


def micro_batches(args: argparse.Namespace, plan: Plan | None) -> int:
    """Of a step and replica."""
    return args.micro_batches_per_step or (plan.num_micro_batches if plan else 4)


def recomputed(choice: str | None, plan: Plan | None, num_layers: int) -> tuple[bool, ...]:
    """Which layers are recomputed at first: before memory is adapted, all."""
    if choice == "plan" and plan is None:
        raise ConfigError("--recompute plan needs a plan; with --plan auto give none, all or adapt")
    if choice in ("plan", None) and plan is not None:
        return tuple(plan.recompute_mask.tolist())
    return (choice in ("all", "adapt"),) * num_layers


def describe(layout: Layout, names: tuple[str, ...]) -> str:
    """What is run, for people."""
    stages = "\n".join(
        f"stage {stage}: {', '.join(names[first:end])}"
        for stage, (first, end) in enumerate(pairwise(layout.borders))
    )
    count = f"{len(layout.pipelines)} x {len(layout.pipelines[0])} ranks, {layout.micro_batches} micro-batches each"
    return f"{stages}\n{layout.schedule}, {count}"


def _widths(preset: ModelPreset) -> tuple[int, ...]:
    """Of vision encoder and language model."""
    return tuple(shape.hidden_size for shape in (preset.vit, preset.llm) if shape is not None)
