"""Plan a vision-language model's pipeline from measurements: profile its layers, run partitions,
take the best.

    torchrun --nproc-per-node 2 examples/plan_pipeline.py BUILD_DIR --out DIR
    torchrun --nproc-per-node 2 examples/train_pipeline.py BUILD_DIR --plan DIR/plan.json

`profile.json` holds what every layer takes and holds, for all that plans
(`engine.cost_model.profile_table`). The partitions that rank best by it are run for three steps
each (OmniBal 4.2); `evidence.json` says which, and how long they took. The fastest becomes
`plan.json`, with as few recomputed layers as fit. Nothing is trained. All of it with the first step
of the build that has images.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from pipeline_models import open_model
from pipeline_start import GIB, common_options, gib, join, open_loader, positive

from balance.errors import ConfigError, DataError, IsobatchError
from balance.presets import ModelPreset
from engine.cost_model.clusters import load_cluster
from engine.cost_model.layer_list import phases_of
from engine.cost_model.parallel import Parallelism, Training
from engine.cost_model.profile_table import Profile, misfit, write_profile
from engine.planning.plan import Plan, write_plan
from engine.planning.plan_from_profile import largest_micro_batch
from engine.planning.planner import PlanRequest
from engine.runtime.batch_loads import batch_loads
from engine.runtime.pipeline import PipelineOptions
from engine.runtime.profiling.measure_plan import choose_plan, profile_step
from engine.runtime.profiling.partition_trials import (
    Measured,
    TrialOptions,
    evidence,
    write_evidence,
)
from loaders import MicroBatch, StreamingLoader

MOST_STEPS = 17
"""Of which one must have something for every phase of the model."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and plan; 0 if done, 2 if build, ranks and options do not fit together."""
    args = parse(argv)
    torch.set_num_threads(args.threads)
    try:
        plan(args, join(args.device))
    except IsobatchError as error:
        print(error, file=sys.stderr)
        return 2
    dist.destroy_process_group()
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = common_options("Plan a vision-language model's pipeline from measurements")
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        help="folder for profile.json, evidence.json and plan.json",
    )
    parser.add_argument("--schedule", default="1f1b", help="1f1b, gpipe, interleaved, zero_bubble")
    parser.add_argument("--stages-per-rank", type=positive, default=1, help="for interleaved")
    parser.add_argument("--micro-batches-per-step", type=positive, default=4)
    parser.add_argument("--most-run", type=positive, default=12, help="partitions to run")
    parser.add_argument(
        "--cluster", default="h100", help="preset that the plan names for what was not measured"
    )
    parser.add_argument(
        "--memory-gib", type=gib, help="of a rank (default: what the cluster's preset calls usable)"
    )
    return parser.parse_args(argv)


def plan(args: argparse.Namespace, device: torch.device) -> None:
    """Measure, choose, write. All ranks; the first one writes."""
    everyone = [list(range(dist.get_world_size()))]
    # the first rank has the first stage in every partition
    loader = open_loader(args, everyone, args.micro_batches_per_step, device)
    torch.manual_seed(args.seed)  # the same weights on all ranks
    model = open_model(args.model, args.config, loader)
    options = PipelineOptions(
        schedule=args.schedule,
        stages_per_rank=args.stages_per_rank,
        device=device,
        autocast=torch.bfloat16 if args.bf16 else None,
    )
    batches = first_of_all_phases(loader, model.preset)
    loader.close()
    request = ask(args, model.preset, batches)
    profile = profile_step(model.layered, request, batches, loader.image_token_id, options)
    trials = TrialOptions(most_run=args.most_run)
    measured, chosen = choose_plan(model.layered, request, profile, batches, options, trials)
    if dist.get_rank() == 0:
        write(args.out, profile, measured, chosen)
        print(describe(profile, measured, model.names))


def first_of_all_phases(loader: StreamingLoader, model: ModelPreset) -> list[MicroBatch]:
    """The first step that brings something to every phase of a model. ConfigError if none of the
    first ones does.
    """
    phases = dict.fromkeys(phases_of(model).values())
    for batches in islice(loader, MOST_STEPS):
        loads = batch_loads(batches, model)
        if all(getattr(loads, phase).tokens.any() for phase in phases):
            return batches
    raise ConfigError(
        f"none of the first {MOST_STEPS} steps has something for each of {' and '.join(phases)}: give more "
        "--micro-batches-per-step, or a build with images; or plan with `python -m engine plan`"
    )


def ask(args: argparse.Namespace, model: ModelPreset, batches: Sequence[MicroBatch]) -> PlanRequest:
    """What the plan is wanted for."""
    cluster, loads = load_cluster(args.cluster), batch_loads(batches, model)
    return PlanRequest(
        model=model,
        cluster=cluster,
        parallel=Parallelism(pp=dist.get_world_size()),
        training=Training(),
        schedule=args.schedule,
        stages_per_rank=args.stages_per_rank,
        num_micro_batches=len(batches),
        memory_bytes=cluster.usable_memory_bytes
        if args.memory_gib is None
        else int(args.memory_gib * GIB),
        loads=loads,
        full=largest_micro_batch(loads),
    )


def write(folder: Path, profile: Profile, measured: Measured, chosen: Plan) -> None:
    """Keep what was measured and chosen. DataError if that cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_profile(profile, folder / "profile.json")
        write_evidence(measured, folder / "evidence.json")
        write_plan(chosen, folder / "plan.json")
    except OSError as error:
        raise DataError(f"{folder}: {error.strerror}") from None


def describe(profile: Profile, measured: Measured, names: Sequence[str]) -> str:
    """What was measured and chosen, for people."""
    found = evidence(measured)
    lines = [
        f"profile: fits are off by at most {misfit(profile):.0%}",
        "  predicted   measured  borders",
    ]
    for row in found["candidates"]:
        times = [
            f"{row[name]:8.1f} ms" if row[name] else "          -"
            for name in ("predicted_ms", "median_ms")
        ]
        lines.append(
            f"{times[0]} {times[1]}  {row['borders']}{'  <- chosen' * (row['borders'] == found['chosen'])}"
        )
    lines += [
        f"stage {stage}: {', '.join(names[first:end])}"
        for stage, (first, end) in enumerate(
            zip(found["chosen"], found["chosen"][1:], strict=False)
        )
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
