"""Train a vision-language model as a pipeline, by a plan: loader -> plan -> runtime.

    torchrun --nproc-per-node 2 examples/train_pipeline.py BUILD_DIR --plan plan/plan.json [--steps
    60] torchrun --nproc-per-node 4 examples/train_pipeline.py BUILD_DIR --dp 2 --state DIR --trace
    trace.json torchrun --nproc-per-node 2 examples/train_pipeline.py BUILD_DIR --plan plan.json
    --tune --profile profile.json torchrun --nproc-per-node 8 examples/train_pipeline.py BUILD_DIR
    --model llava --config llava-1.5-7b-hf --bf16 \\
        --lr 2e-5 --plan plan.json --profile profile.json --recompute adapt --steps 1000 --state DIR --export DIR

All ranks of one pipeline read the same micro-batches, each with a loader of its own: so only
activations and gradients travel, and images are decoded where the first stage is. `--plan auto`
cuts the layers evenly. With `--tune`, each step is packed anew and gets a schedule of its own
(`step_tuning.py`). With `--state`, a run goes on behind the last step that it saved, with the same
or another plan, number of stages and number of replicas. `--export` writes what `save_pretrained`
would.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from adapted_recompute import Adaptation
from pipeline_layout import Layout, describe, follow, lay_out, micro_batches, replicas
from pipeline_models import TINY, PipelineModel, open_model
from pipeline_start import GIB, join, open_loader
from step_figures import Measured, gather, report
from step_tuning import check_same_step, make_tuner, read_own_profile
from train_options import check_options, parse
from train_tiny import endless

from balance.errors import ConfigError, DataError, IsobatchError
from engine.charts.trace import timeline_trace
from engine.planning.plan import Plan, read_plan
from engine.runtime.checkpoints.training_state import Progress, load_state, save_state
from engine.runtime.pipeline import Pipeline, PipelineOptions
from engine.runtime.stage_executor import StepResult
from engine.tuning.step_planner import StepNote, TunedSteps
from loaders import StreamingLoader
from loaders.step_builder import StepBatches


def main(argv: Sequence[str] | None = None) -> int:
    """Train, print a line per step; 0 if done, 1 if the run failed, 2 if build, plan and ranks do
    not fit together.
    """
    args = parse(argv)
    torch.set_num_threads(args.threads)
    try:
        run = start(args)
    except IsobatchError as error:
        print(error, file=sys.stderr)
        return 2
    try:
        train(run, args)
    except (
        IsobatchError
    ) as error:  # a rank that has gone, a loss that is no number, a disk that is full
        print(error, file=sys.stderr)
        return 1
    dist.destroy_process_group()
    return 0


@dataclass(slots=True, kw_only=True)
class Run:
    """All that one rank trains with."""

    model: PipelineModel
    pipeline: Pipeline
    loader: StreamingLoader
    optimizer: torch.optim.Optimizer | None
    """None where nothing is trained."""
    device: torch.device
    num_ranks: int
    """Ranks per pipeline."""
    step: int
    """Steps that are done."""
    adaptation: Adaptation | None
    """What finds the recomputed layers."""


def start(args: argparse.Namespace) -> Run:
    """Meet the other ranks, and make this one's part. ConfigError or DataError if that cannot
    be.
    """
    check_options(args)
    return make_run(args, join(args.device))


def make_run(args: argparse.Namespace, device: torch.device) -> Run:
    """This rank's part, once ranks have met. ConfigError or DataError if build, plan and ranks do
    not fit together.
    """
    plan = None if args.plan == "auto" else read_plan(Path(args.plan))
    dp = (plan.parallel.dp if plan else 1) if args.dp is None else args.dp
    pipelines = replicas(dist.get_world_size(), dp, plan)
    loader = open_loader(args, pipelines, micro_batches(args, plan), device)
    torch.manual_seed(args.seed)  # the same weights on all ranks
    model = open_model(args.model, args.config, loader)
    if args.export and model.whole is None:
        raise ConfigError(f"--export writes models of transformers; the model is {TINY}")
    if plan:
        follow(plan, model, len(pipelines[0]))
    model.freeze(args.freeze)
    layout = lay_out(args, plan, len(model.layered.layers), pipelines)
    adaptation = Adaptation(args, plan, layout, model) if args.recompute == "adapt" else None
    if args.tune:
        tuner = tuner_of(args, plan, layout, model)
        loader.close()
        loader = open_loader(
            args,
            pipelines,
            layout.micro_batches,
            device,
            planner=tuner,
            decode=args.encode == "any",
        )
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
        print(f"{describe(layout, model.names)}{tuning}{goes_on}", flush=True)
    return Run(
        model=model,
        pipeline=pipeline,
        loader=loader,
        optimizer=optimizer,
        device=device,
        num_ranks=len(pipelines[0]),
        step=done.step if done else 0,
        adaptation=adaptation,
    )


def tuner_of(
    args: argparse.Namespace, plan: Plan | None, layout: Layout, model: PipelineModel
) -> TunedSteps:
    """What tunes the steps."""
    memory_bytes = plan.memory_bytes if plan else None
    return make_tuner(
        read_own_profile(args.profile, model),
        layout,
        model,
        encode=args.encode,
        memory_bytes=memory_bytes if args.memory_gib is None else int(args.memory_gib * GIB),
        effort=args.effort,
    )


def make_pipeline(
    args: argparse.Namespace, layout: Layout, model: PipelineModel, device: torch.device
) -> Pipeline:
    """This rank's stages."""
    options = PipelineOptions(
        schedule=layout.schedule,
        stages_per_rank=layout.stages_per_rank,
        device=device,
        autocast=torch.bfloat16 if args.bf16 else None,
        encoder_ranks=range(1, len(layout.pipelines[0])) if args.encode == "any" else (),
    )
    return Pipeline(model.layered, layout.borders, layout.recompute, layout.pipelines, options)


def train(run: Run, args: argparse.Namespace) -> None:
    """Train until `--steps` are done, and write what is wanted of it."""
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
        before = after
        run.step += 1
        begun = finish_step(run, batches, args) or now
    if args.trace and result is not None:
        write_trace(run.pipeline, result, args.trace)
    if args.export and run.model.export(run.pipeline, args.export):
        print(f"wrote {args.export}")
    if args.state and result is not None and dist.get_rank() == 0:
        print(f"saved behind step {run.step - 1}")


def train_step(run: Run, batches: StepBatches, clip: float) -> StepResult:
    """One optimizer step."""
    schedule = None
    if isinstance(batches.note, StepNote):
        check_same_step(batches.note)
        schedule = batches.note.schedule
    if run.optimizer is not None:
        run.optimizer.zero_grad()
    if run.adaptation is None:
        result = run.pipeline.step(batches, batches[0].num_loss_tokens, schedule)
    else:
        result = run.adaptation.step(run.pipeline, batches)
    run.pipeline.reduce_gradients()  # over replicas, once per step
    run.pipeline.clip_gradients(clip)
    if run.optimizer is not None:
        run.optimizer.step()
    return result


def finish_step(run: Run, batches: StepBatches, args: argparse.Namespace) -> float | None:
    """Save, adapt recomputation; -> when that was done, for it is no part of the next step. None:
    nothing was.
    """
    saves = args.state and (run.step % args.save_every == 0 or run.step == args.steps)
    if saves:
        progress = Progress(step=run.step, loader=run.loader.state_dict())
        save_state(args.state, run.pipeline.layers, run.optimizer, progress)
    adapts = run.adaptation is not None and run.adaptation.is_due
    if run.adaptation is not None and adapts:
        run.adaptation.adapt(run.pipeline, batches, run.optimizer)
    return time.perf_counter() if saves or adapts else None


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
