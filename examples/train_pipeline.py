"""Train the tiny vision-language model as a pipeline, by a plan: loader -> plan -> runtime.

    torchrun --nproc-per-node 2 examples/train_pipeline.py BUILD_DIR --plan plan/plan.json [--steps 60]
    torchrun --nproc-per-node 4 examples/train_pipeline.py BUILD_DIR --plan auto --dp 2 --state DIR --trace trace.json

All ranks of one pipeline read the same micro-batches, each with a loader of its own: so only activations and gradients
travel, and images are decoded where the first stage is. `--plan auto` cuts the layers evenly. With `--state`, a run
goes on behind the last step that it saved, with the same or another plan, number of stages and number of replicas.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from tiny_vlm_layers import KINDS, layer_names, make_layers
from train_tiny import endless, make_model

from balance.errors import ConfigError, IsobatchError
from engine.partition import even_partition
from engine.plan import Plan, read_plan
from engine.runtime.carries import LayeredModel
from engine.runtime.faults import LossNotFinite, PeerLost
from engine.runtime.pipeline import Pipeline, PipelineOptions
from engine.runtime.saving import Progress, load_state, save_state
from engine.runtime.steps import StepResult
from engine.trace import timeline_trace
from loaders import MicroBatch, StreamingLoader

MIB = 2**20


def main(argv: Sequence[str] | None = None) -> int:
    """Train, print a line per step; 0 if done, 1 if the run failed, 2 if build, plan and ranks do not fit together."""
    args = parse(argv)
    torch.set_num_threads(1)  # tensors this small lose more to threads than they gain
    try:
        run = start(args)
    except IsobatchError as error:
        print(error, file=sys.stderr)
        return 2
    try:
        train(run, args)
    except (PeerLost, LossNotFinite) as error:
        print(error, file=sys.stderr)
        return 1
    dist.destroy_process_group()
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train a tiny vision-language model as a pipeline, by a plan")
    parser.add_argument("build", help="output directory of `packer build --model tiny`")
    parser.add_argument("--plan", required=True, help="plan.json of `python -m engine plan`; auto: layers cut evenly")
    parser.add_argument("--dp", type=int, help="replicas of the pipeline (default: the plan's; auto: 1)")
    parser.add_argument("--schedule", help="1f1b, gpipe, interleaved, zero_bubble (default: the plan's; auto: 1f1b)")
    parser.add_argument("--stages-per-rank", type=int, help="for interleaved (default: the plan's; auto: 1)")
    parser.add_argument("--micro-batches-per-step", type=int, help="per replica (default: the plan's; auto: 4)")
    parser.add_argument("--steps", type=int, default=60, help="in all, those before a resume included")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--clip", type=float, default=1.0, help="largest norm of the gradients; inf: any")
    parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--state", type=Path, help="folder to go on from, if it has a state, and to save in")
    parser.add_argument("--save-every", type=int, default=10, help="steps between two saves in --state")
    parser.add_argument(
        "--figures", type=Path, help="file to which each step's figures are appended, as a line of JSON"
    )
    parser.add_argument("--trace", type=Path, help="file for the last step as it was measured, for ui.perfetto.dev")
    return parser.parse_args(argv)


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


@dataclass(slots=True, kw_only=True)
class Run:
    """All that one rank trains with."""

    pipeline: Pipeline
    loader: StreamingLoader
    optimizer: torch.optim.Optimizer | None
    """None where nothing is trained."""
    device: torch.device
    num_ranks: int
    """Ranks per pipeline."""
    step: int
    """Steps that are done."""


def start(args: argparse.Namespace) -> Run:
    """Meet the other ranks, and make this one's part. ConfigError or DataError if that cannot be."""
    device = join(args.device)
    plan = None if args.plan == "auto" else read_plan(Path(args.plan))
    world_size, rank = dist.get_world_size(), dist.get_rank()
    num_replicas = args.dp or (plan.parallel.dp if plan else 1)
    if num_replicas < 1 or world_size % num_replicas:
        raise ConfigError(f"--dp is {num_replicas}; {world_size} processes cannot be so many pipelines of equal length")
    micro_batches = args.micro_batches_per_step or (plan.num_micro_batches if plan else 4)
    places = replicas(world_size, num_replicas, plan)
    own = next(place for place, ranks in enumerate(places) if rank in ranks)
    loader = StreamingLoader(
        args.build,
        dp_rank=own,
        dp_world_size=num_replicas,
        micro_batches_per_step=micro_batches,
        seed=args.seed,
        device=device if device.type == "cuda" else None,
        # only the first stage sees pixels
        decode_images=places[own][0] == rank,
    )
    torch.manual_seed(args.seed)  # the same weights on all ranks
    model = make_layers(make_model(loader))
    if plan:
        follow(plan, model, len(places[own]))
    layout = Layout(
        pipelines=places,
        micro_batches=micro_batches,
        **lay_out(plan, len(model.layers), len(places[own]), args),
    )
    options = PipelineOptions(
        schedule=layout.schedule,
        stages_per_rank=layout.stages_per_rank,
        device=device,
        autocast=torch.bfloat16 if args.bf16 else None,
    )
    pipeline = Pipeline(model, layout.borders, layout.recompute, layout.pipelines, options)
    trained = [weight for weight in pipeline.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=args.lr) if trained else None
    done = load_state(args.state, pipeline.layers, optimizer) if args.state else None
    if done:
        loader.load_state_dict(done.loader)
        pipeline.steps_run = done.step
    if rank == 0:
        print(describe(layout, layer_names(model), done))
    return Run(
        pipeline=pipeline,
        loader=loader,
        optimizer=optimizer,
        device=device,
        num_ranks=len(places[own]),
        step=done.step if done else 0,
    )


def join(kind: str) -> torch.device:
    """Meet the other ranks; -> this one's device. Without torchrun, there are no others."""
    backend, device = "gloo", torch.device(kind)
    if kind == "cuda":
        backend, device = "cpu:gloo,cuda:nccl", torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device


def replicas(world_size: int, count: int, plan: Plan | None) -> tuple[tuple[int, ...], ...]:
    """The ranks of each pipeline: one pipeline's beside each other, unless the plan has those of one stage so."""
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
    for layer in model.layers:
        layer.requires_grad_(plan.training.trains(KINDS[type(layer)][1]))


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


def describe(layout: Layout, names: tuple[str, ...], done: Progress | None) -> str:
    """What is run, for people."""
    stages = "\n".join(
        f"stage {stage}: {', '.join(names[first:end])}" for stage, (first, end) in enumerate(pairwise(layout.borders))
    )
    count = f"{len(layout.pipelines)} x {len(layout.pipelines[0])} ranks, {layout.micro_batches} micro-batches each"
    return f"{stages}\n{layout.schedule}, {count}" + (f"; goes on behind step {done.step - 1}" if done else "")


def train(run: Run, args: argparse.Namespace) -> None:
    """Train until `--steps` are done."""
    begun, result = time.perf_counter(), None
    for _, batches in zip(range(args.steps - run.step), endless(run.loader), strict=False):
        result = train_step(run, batches, args.clip)
        now = time.perf_counter()
        report(run, measure(run, batches, result, now - begun), args.figures)
        begun = now
        run.step += 1
        if args.state and (run.step % args.save_every == 0 or run.step == args.steps):
            progress = Progress(step=run.step, loader=run.loader.state_dict())
            save_state(args.state, run.pipeline.layers, run.optimizer, progress)
            begun = time.perf_counter()
    if args.trace and result is not None:
        timeline = run.pipeline.timeline(result)
        if dist.get_rank() == 0:
            args.trace.write_text(json.dumps(timeline_trace(timeline)))
    if args.state and dist.get_rank() == 0:
        print(f"saved behind step {run.step - 1}")


def train_step(run: Run, batches: list[MicroBatch], clip: float) -> StepResult:
    """One optimizer step."""
    if run.optimizer is not None:
        run.optimizer.zero_grad()
    result = run.pipeline.step(batches, batches[0].num_loss_tokens)
    run.pipeline.reduce_gradients()  # over replicas, once per step
    run.pipeline.clip_gradients(clip)
    if run.optimizer is not None:
        run.optimizer.step()
    return result


def measure(run: Run, batches: list[MicroBatch], result: StepResult, seconds: float) -> dict[str, float]:
    """What there is to say of a step, over all ranks."""
    busy_ns, span_ns = int((result.end_ns - result.start_ns).sum()), int(result.end_ns.max(initial=0))
    tokens = sum(len(batch.input_ids) for batch in batches)
    own = torch.tensor(
        [result.loss, busy_ns, span_ns, tokens, run.pipeline.peak_bytes() or 0], dtype=torch.float64, device=run.device
    )
    ranks = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(ranks, own)
    table = torch.stack(ranks).cpu().numpy()  # (ranks, figures)
    stats = run.loader.stats()
    return {
        "step": run.step,
        "loss": float(table[:, 0].sum()) / run.num_ranks,
        "seconds": seconds,
        "tokens": int(table[:, 3].sum()) // run.num_ranks,
        # of the time from a step's first pass to its last one, on any rank
        "waiting": 1 - float(table[:, 1].mean() / table[:, 2].max()),
        "dist_ratio_vit": stats.dist_ratio_vit,
        "dist_ratio_llm": stats.dist_ratio_llm,
        "peak_mib": float(table[:, 4].max()) / MIB,
    }


def report(run: Run, found: dict[str, float], log: Path | None) -> None:
    """A line for people, and one for machines."""
    if dist.get_rank() != 0:
        return
    memory = f"  memory {found['peak_mib']:,.0f} MiB" if run.device.type == "cuda" else ""
    print(
        f"step {found['step']:4d}  loss {found['loss']:.4f}  tokens {found['tokens']:6d}  "
        f"{1000 * found['seconds']:6.0f} ms  waiting {found['waiting']:5.1%}  "
        f"dist ratio {found['dist_ratio_vit']:.2%} {found['dist_ratio_llm']:.2%}{memory}",
        flush=True,
    )
    if log is not None:
        with log.open("a") as file:
            file.write(f"{json.dumps(found)}\n")


if __name__ == "__main__":
    sys.exit(main())
