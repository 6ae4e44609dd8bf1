"""Train the tiny vision-language model as a pipeline, by a plan: loader -> plan -> runtime.

    torchrun --nproc-per-node 2 examples/train_pipeline.py BUILD_DIR --plan plan/plan.json [--steps 60]
    torchrun --nproc-per-node 4 examples/train_pipeline.py BUILD_DIR --plan auto --dp 2 --state DIR --trace trace.json
    torchrun --nproc-per-node 2 examples/train_pipeline.py BUILD_DIR --plan plan.json --tune --profile profile.json

All ranks of one pipeline read the same micro-batches, each with a loader of its own: so only activations and gradients
travel, and images are decoded where the first stage is. `--plan auto` cuts the layers evenly. With `--tune`, each step
is packed anew and gets a schedule of its own (`step_tuning.py`). With `--state`, a run goes on behind the last step
that it saved, with the same or another plan, number of stages and number of replicas.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from pipeline_layout import Layout, describe, follow, freeze, lay_out, replicas
from step_figures import Measured, gather, report
from step_tuning import check_profile, check_same_step, default_encode, make_tuner
from tiny_vlm_layers import KINDS, layer_names, make_layers
from train_tiny import endless, make_model

from balance.errors import ConfigError, DataError, IsobatchError
from balance.presets import ModelPreset
from engine.plan import Plan, read_plan
from engine.profile_costs import read_profile
from engine.runtime.carries import LayeredModel
from engine.runtime.pipeline import Pipeline, PipelineOptions
from engine.runtime.saving import Progress, load_state, save_state
from engine.runtime.steps import StepResult
from engine.trace import timeline_trace
from engine.tune_steps import StepNote, TunedSteps
from loaders import StreamingLoader
from loaders.assemble import StepBatches


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
    except IsobatchError as error:
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
    parser.add_argument(
        "--freeze",
        choices=sorted({part for _, part in KINDS.values()}),
        action="append",
        default=[],
        help="part that is not trained, besides those of the plan; may be repeated",
    )
    parser.add_argument("--tune", action="store_true", help="pack each step anew, with a schedule of its own")
    parser.add_argument("--profile", type=Path, help="for --tune: what the layers take, as they were measured")
    parser.add_argument(
        "--encode",
        choices=("never", "own", "any"),
        help="for --tune: ranks in whose idle time a frozen encoder runs ahead, none, the first stage's, or any, which "
        "then has a copy of it and decodes images (default: own, if the first stage has all of it)",
    )
    parser.add_argument(
        "--effort", type=int, default=20_000, help="for --tune: how long a search for an order may take"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--state", type=Path, help="folder to go on from, if it has a state, and to save in")
    parser.add_argument("--save-every", type=int, default=10, help="steps between two saves in --state")
    parser.add_argument(
        "--figures", type=Path, help="file to which each step's figures are appended, as a line of JSON"
    )
    parser.add_argument("--trace", type=Path, help="file for the last step as it was measured, for ui.perfetto.dev")
    return parser.parse_args(argv)


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
    if args.tune != bool(args.profile) or (args.encode and not args.tune):
        raise ConfigError("--tune needs --profile, and these and --encode go together: give both, or none of them")
    return make_run(args, join(args.device))


def make_run(args: argparse.Namespace, device: torch.device) -> Run:
    """This rank's part, once ranks have met. ConfigError or DataError if build, plan and ranks do not fit together."""
    plan = None if args.plan == "auto" else read_plan(Path(args.plan))
    dp = (plan.parallel.dp if plan else 1) if args.dp is None else args.dp
    places = replicas(dist.get_world_size(), dp, plan)
    micro_batches = args.micro_batches_per_step or (plan.num_micro_batches if plan else 4)
    loader = open_loader(args, places, micro_batches, device)
    torch.manual_seed(args.seed)  # the same weights on all ranks
    model = make_layers(make_model(loader))
    if plan:
        follow(plan, model, len(places[0]))
    freeze(model, args.freeze)
    layout = Layout(
        pipelines=places, micro_batches=micro_batches, **lay_out(plan, len(model.layers), len(places[0]), args)
    )
    if args.tune:
        tuner = tuner_of(args, plan, layout, model, loader.model)
        loader.close()
        loader = open_loader(args, places, micro_batches, device, tuner)
    pipeline = make_pipeline(args, layout, model, device)
    trained = [weight for weight in pipeline.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=args.lr) if trained else None
    done = load_state(args.state, pipeline.layers, optimizer) if args.state else None
    if done:
        loader.load_state_dict(done.loader)
        pipeline.steps_run = done.step
    if dist.get_rank() == 0:
        goes_on = f"; goes on behind step {done.step - 1}" if done else ""
        tuning = f"; each step tuned by {args.profile}" if args.tune else ""
        print(f"{describe(layout, layer_names(model))}{tuning}{goes_on}")
    return Run(
        pipeline=pipeline,
        loader=loader,
        optimizer=optimizer,
        device=device,
        num_ranks=len(places[0]),
        step=done.step if done else 0,
    )


def open_loader(
    args: argparse.Namespace,
    places: Sequence[Sequence[int]],
    micro_batches: int,
    device: torch.device,
    planner: TunedSteps | None = None,
) -> StreamingLoader:
    """The steps of this rank's replica."""
    rank = dist.get_rank()
    own = next(replica for replica, ranks in enumerate(places) if rank in ranks)
    return StreamingLoader(
        args.build,
        dp_rank=own,
        dp_world_size=len(places),
        micro_batches_per_step=micro_batches,
        seed=args.seed,
        planner=planner,
        device=device if device.type == "cuda" else None,
        # only the first stage sees pixels, and who encodes ahead
        decode_images=places[own][0] == rank or args.encode == "any",
    )


def tuner_of(
    args: argparse.Namespace, plan: Plan | None, layout: Layout, model: LayeredModel, preset: ModelPreset
) -> TunedSteps:
    """What tunes the steps."""
    profile = read_profile(args.profile)
    check_profile(profile, layer_names(model))
    return make_tuner(
        profile,
        layout,
        preset,
        trained=tuple(any(weight.requires_grad for weight in layer.parameters()) for layer in model.layers),
        encode=args.encode or default_encode(model.first_trained, layout.borders),
        memory_bytes=plan.memory_bytes if plan else None,
        effort=args.effort,
    )


def make_pipeline(args: argparse.Namespace, layout: Layout, model: LayeredModel, device: torch.device) -> Pipeline:
    """This rank's stages."""
    options = PipelineOptions(
        schedule=layout.schedule,
        stages_per_rank=layout.stages_per_rank,
        device=device,
        autocast=torch.bfloat16 if args.bf16 else None,
        encoder_ranks=range(1, len(layout.pipelines[0])) if args.encode == "any" else (),
    )
    return Pipeline(model, layout.borders, layout.recompute, layout.pipelines, options)


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


def train(run: Run, args: argparse.Namespace) -> None:
    """Train until `--steps` are done."""
    begun, before, result = time.perf_counter(), run.loader.stats(), None
    for _, batches in zip(range(args.steps - run.step), endless(run.loader), strict=False):
        after = run.loader.stats()
        result = train_step(run, batches, args.clip)
        now = time.perf_counter()
        own = Measured(
            step=run.step,
            batches=batches,
            result=result,
            seconds=now - begun,
            peak_bytes=run.pipeline.peak_bytes(),
            before=before,
            after=after,
        )
        figures = gather(own, run.num_ranks, run.device)
        if dist.get_rank() == 0:
            report(figures, args.figures)
        begun, before = now, after
        run.step += 1
        if args.state and (run.step % args.save_every == 0 or run.step == args.steps):
            progress = Progress(step=run.step, loader=run.loader.state_dict())
            save_state(args.state, run.pipeline.layers, run.optimizer, progress)
            begun = time.perf_counter()
    if args.trace and result is not None:
        write_trace(run.pipeline, result, args.trace)
    if args.state and dist.get_rank() == 0:
        print(f"saved behind step {run.step - 1}")


def train_step(run: Run, batches: StepBatches, clip: float) -> StepResult:
    """One optimizer step."""
    schedule = None
    if isinstance(batches.note, StepNote):
        check_same_step(batches.note)
        schedule = batches.note.schedule
    if run.optimizer is not None:
        run.optimizer.zero_grad()
    result = run.pipeline.step(batches, batches[0].num_loss_tokens, schedule)
    run.pipeline.reduce_gradients()  # over replicas, once per step
    run.pipeline.clip_gradients(clip)
    if run.optimizer is not None:
        run.optimizer.step()
    return result


def write_trace(pipeline: Pipeline, result: StepResult, path: Path) -> None:
    """A step as it was measured. All ranks call it. DataError if it cannot be written."""
    timeline = pipeline.timeline(result)
    if dist.get_rank() == 0:
        try:
            path.write_text(json.dumps(timeline_trace(timeline)))
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}") from None


if __name__ == "__main__":
    sys.exit(main())
