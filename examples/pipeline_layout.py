"""Which rank runs what of the tiny model, in which order: `Layout`, out of a plan or of the command's options."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from tiny_vlm_layers import KINDS, layer_names

from balance.errors import ConfigError
from engine.partition import even_partition
from engine.plan import Plan
from engine.runtime.carries import LayeredModel


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
    """The ranks of each pipeline: one pipeline's beside each other, unless the plan has those of one stage so."""
    if count < 1 or world_size % count:
        raise ConfigError(f"--dp is {count}; {world_size} processes cannot be so many pipelines of equal length")
    length = world_size // count
    if plan and plan.parallel.innermost == "replicas":
        return tuple(tuple(range(first, world_size, count)) for first in range(count))
    return tuple(tuple(range(first, first + length)) for first in range(0, world_size, length))


def follow(plan: Plan, model: LayeredModel, num_ranks: int) -> None:
    """Freeze what the plan does not train. ConfigError if it is for another model, or for other ranks."""
    if plan.parallel.tp != 1 or plan.parallel.pp != num_ranks:
        raise ConfigError(
            f"the plan is for pipelines of {plan.parallel.pp} ranks, tp {plan.parallel.tp}; here are {num_ranks}: "
            f"start {plan.parallel.pp} processes per replica, or plan with --pp {num_ranks} --tp 1"
        )
    if plan.layer_names != layer_names(model):
        raise ConfigError(f"the plan has the layers {', '.join(plan.layer_names)}: plan a build made with --model tiny")
    freeze(model, [part for _, part in KINDS.values() if not plan.training.trains(part)])


def freeze(model: LayeredModel, parts: Sequence[str]) -> None:
    """Train these parts of the model no more."""
    for layer in model.layers:
        if KINDS[type(layer)][1] in parts:
            layer.requires_grad_(False)


def lay_out(plan: Plan | None, num_layers: int, num_ranks: int, args: argparse.Namespace) -> dict[str, object]:
    """Partition, recomputed layers and schedule: the plan's, or as many layers in each stage, none recomputed."""
    stages_per_rank = args.stages_per_rank or (plan.stages_per_rank if plan else 1)
    even = even_partition(np.ones(num_layers, np.int64), num_ranks * stages_per_rank)
    return {
        "borders": plan.borders if plan else tuple(even.tolist()),
        "recompute": tuple(plan.recompute_mask.tolist()) if plan else (False,) * num_layers,
        "schedule": args.schedule or (plan.schedule if plan else "1f1b"),
        "stages_per_rank": stages_per_rank,
    }


def describe(layout: Layout, names: tuple[str, ...]) -> str:
    """What is run, for people."""
    stages = "\n".join(
        f"stage {stage}: {', '.join(names[first:end])}" for stage, (first, end) in enumerate(pairwise(layout.borders))
    )
    count = f"{len(layout.pipelines)} x {len(layout.pipelines[0])} ranks, {layout.micro_batches} micro-batches each"
    return f"{stages}\n{layout.schedule}, {count}"
