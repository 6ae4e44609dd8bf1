"""`python -m engine train`: a model trained as a pipeline, by a plan.

All ranks of one pipeline read the same micro-batches, each from its own source: so only activations
and gradients are sent, and images are decoded where the first stage is. With `--tune`, each step is
repacked and gets its own schedule (`engine.train.steps.step_tuning`). With `--state`, a run resumes
after the last saved step, also with another plan, number of stages or replicas.
"""

import json
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from isobatch.common.consoles import print_line
from isobatch.common.errors import ConfigError, DataError
from isobatch.engine.charts.trace import make_trace
from isobatch.engine.planning.adaptive_recompute import OutOfMemory
from isobatch.engine.planning.plan import Plan, read_plan
from isobatch.engine.runtime.checkpoints.training_state import (
    Basis,
    Progress,
    StateSaver,
    load_state,
)
from isobatch.engine.runtime.communication.collectives import any_rank
from isobatch.engine.runtime.errors import GradientNotFinite, LossNotFinite
from isobatch.engine.runtime.pipeline import Pipeline, PipelineOptions
from isobatch.engine.runtime.stage_executor import StepResult
from isobatch.engine.train.launch import is_first_rank
from isobatch.engine.train.layout import (
    apply_plan,
    layout_text,
    make_layout,
    make_replicas,
    num_micro_batches,
)
from isobatch.engine.train.models.lora import (
    basis_of,
    export_adapters,
    merge_adapters,
    with_adapters,
)
from isobatch.engine.train.models.open_model import TINY, PipelineModel, open_model
from isobatch.engine.train.optimizer import LrFactor, lr_factor, make_optimizer, set_lr
from isobatch.engine.train.options import PARTS, TrainConfig
from isobatch.engine.train.shutdown import StoppedBySignal, StopSignal
from isobatch.engine.train.step_source import (
    OpenSource,
    SourceStep,
    StepSource,
    endless,
    source_options,
)
from isobatch.engine.train.steps._adaptation import RecomputeAdapter
from isobatch.engine.train.steps._step_report import (
    LOGGED,
    gather_figures,
    report_step,
)
from isobatch.engine.train.steps.evaluation import evaluate, open_evaluation
from isobatch.engine.train.steps.step_tuning import check_same_step, make_tuner
from isobatch.engine.tuning.step_planner import StepNote

MIB = 2**20


@dataclass(slots=True, kw_only=True)
class TrainingRun:
    """Everything that one rank trains with."""

    model: PipelineModel
    pipeline: Pipeline
    source: StepSource
    evaluated: StepSource | None
    """Samples of `--eval`."""
    optimizer: torch.optim.Optimizer | None
    """The optimizer; None if nothing on this rank is trained."""
    lr_factor: LrFactor
    num_ranks: int
    """Ranks per pipeline."""
    step: int
    """Steps that are done."""
    adapter: RecomputeAdapter | None
    saver: StateSaver | None
    skipped: int = 0
    """Steps since the start whose loss or gradients were not finite, which changed no weight."""


def train(config: TrainConfig, open_source: OpenSource, device: torch.device) -> None:
    """Train until `--steps` are done, and print a line per step. All ranks call it."""
    run_steps(make_run(config, open_source, device), config)


def make_run(config: TrainConfig, open_source: OpenSource, device: torch.device) -> TrainingRun:
    """This rank's part; ConfigError or DataError if build, plan and ranks do not fit together."""
    # plan, model and their layout
    plan = None if config.plan == "auto" else read_plan(Path(config.plan))
    mode = config.training_mode(plan.training.mode if plan else None)
    dp = (plan.parallel.dp if plan else 1) if config.dp is None else config.dp
    pipelines = make_replicas(dist.get_world_size(), dp, plan)
    options = source_options(config, pipelines, num_micro_batches(config, plan))
    for_evaluation = dict(options)
    names = "loss_normalizer", "loss_weights", "log_to"
    options |= {name: getattr(config, name) for name in names}
    source = open_source(config.build, **options)
    evaluated = None
    if config.eval is not None:
        evaluated = open_evaluation(config.eval, open_source, for_evaluation, source)
    model = open_trained(config, plan, source, len(pipelines[0]))
    layout = make_layout(config, plan, len(model.stack.layers), pipelines)
    adapter = None
    if config.recompute == "adapt":
        adapter = RecomputeAdapter(config, plan, layout, model, device)
    if config.tune:
        source.close()
        options["planner"] = make_tuner(config, plan, layout, model)
        if config.encode == "any":
            options["images"] = "patches"  # for ranks that encode ahead too
        source = open_source(config.build, **options)
    # pipeline, optimizer and their state
    pipeline_options = PipelineOptions(
        schedule=layout.schedule,
        stages_per_rank=layout.stages_per_rank,
        deferred=layout.deferred,
        device=device,
        mode=mode,
        encoder_ranks=range(1, len(pipelines[0])) if config.encode == "any" else (),
        dropout_seed=config.seed if config.lora_dropout else None,
    )
    pipeline = Pipeline(
        model.stack, layout.borders, layout.recompute, layout.pipelines, pipeline_options
    )
    optimizer = make_optimizer(pipeline.layers, [layer.part for layer in model.listed], config)
    done, saver = None, None
    if config.state:
        basis = basis_of(pipeline.layers, config) if config.lora_rank is not None else None
        done = _load(config.state, pipeline, optimizer, basis)
        saver = StateSaver(config.state, pipeline.layers, optimizer, basis=basis)
    if done:
        source.load_state_dict(done.loader)
    if is_first_rank():
        for file in filter(None, (config.figures, config.trace)):
            file.parent.mkdir(parents=True, exist_ok=True)
        resumes = f"; resumes after step {done.step - 1}" if done else ""
        tuning = f"; each step tuned by {config.profile}" if config.tune else ""
        print(f"{layout_text(layout, model.names)}{tuning}{resumes}\n{mode}", flush=True)
    return TrainingRun(
        model=model,
        pipeline=pipeline,
        source=source,
        evaluated=evaluated,
        optimizer=optimizer,
        lr_factor=lr_factor(config, config.steps),
        num_ranks=len(pipelines[0]),
        step=done.step if done else 0,
        adapter=adapter,
        saver=saver,
    )


def run_steps(run: TrainingRun, config: TrainConfig) -> None:
    """Train until `--steps` are done, with figures and saved states; then trace and export.

    StoppedBySignal on all ranks if any of them got SIGTERM: the step is finished and saved.
    """
    first = run.step
    stop = StopSignal()
    with stop.noting():
        last = _run_steps(run, config, stop)
    if config.trace and last is not None:
        timeline = run.pipeline.timeline(last)
        try:
            if is_first_rank():
                config.trace.write_text(json.dumps(make_trace(timeline)))
        except OSError as error:
            raise DataError(f"{config.trace}: {error.strerror}") from None
    if config.export and _export(run, config, config.export):
        print_line(f"wrote {config.export}")
    if config.state and run.step > first and is_first_rank():
        print(f"saved after step {run.step - 1}")


def _export(run: TrainingRun, config: TrainConfig, folder: Path) -> bool:
    """Write the model, or its adapters; -> whether this rank did. All ranks call it."""
    if config.lora_rank is not None and not config.merge:
        return export_adapters(run.model, run.pipeline, folder, config, config.config)
    if config.merge:
        run.pipeline.gather_weights()
        merge_adapters(run.model.stack.layers)
    return run.model.export(run.pipeline, folder)


def _run_steps(run: TrainingRun, config: TrainConfig, stop: StopSignal) -> StepResult | None:
    """The loop; -> the last step that was not skipped."""
    begun = time.perf_counter()
    before = run.source.stats()
    last = None
    for _, batches in zip(range(config.steps - run.step), endless(run.source), strict=False):
        after = run.source.stats()
        try:
            result = train_step(run, batches, config)
        except (LossNotFinite, GradientNotFinite, OutOfMemory):  # on all ranks
            if run.saver is not None:
                run.saver.finish()
            raise
        now = time.perf_counter()
        figures: dict[str, float] = {}
        if result is not None:
            last = result
            known = {
                "step": run.step,
                "lr": config.lr * run.lr_factor(run.step),
                "seconds": now - begun,
                "peak_mib": (run.pipeline.peak_bytes() or 0) / MIB,
            }
            figures = gather_figures(known, batches, result, (before, after), run.num_ranks)
        if run.evaluated is not None and _is_due(run.step + 1, config.eval_every, config.steps):
            loss = evaluate(run.pipeline, run.evaluated, run.num_ranks)
            figures |= {"step": run.step, "eval_loss": loss}
            now = time.perf_counter()
        if figures and is_first_rank():
            report_step(figures, config.figures)
            run.source.log({LOGGED[name]: figures[name] for name in LOGGED if name in figures})
        before = after
        run.step += 1
        stops = any_rank(stop.is_noted)
        adapts = result is not None and not stops
        begun = _finish_step(run, batches, config, stops=stops, adapts=adapts) or now
        if stops:
            saved = "nothing is saved without --state"
            if config.state is not None:
                saved = f"saved in {config.state}; the same command continues there"
            raise StoppedBySignal(f"stopped by SIGTERM after step {run.step - 1}: {saved}")
    return last


def train_step(run: TrainingRun, batches: SourceStep, config: TrainConfig) -> StepResult | None:
    """One optimizer step; None if it was skipped, on all ranks, and no weight has changed.

    LossNotFinite, GradientNotFinite on all ranks unless such steps are skipped.
    """
    run.pipeline.drop_gradients()
    run.pipeline.steps_run = run.step  # skipped ones count, for dropout
    try:
        result = _run_passes(run, batches)
        run.pipeline.reduce_gradients()  # over replicas, once per step
        run.pipeline.clip_gradients(config.clip)
    except (LossNotFinite, GradientNotFinite) as error:  # on all ranks
        if config.not_finite == "end":
            raise
        run.skipped += 1
        if is_first_rank():
            print(f"step {run.step:4d}  skipped, {run.skipped} so far: {error}", flush=True)
        return None
    if run.optimizer is not None:
        set_lr(run.optimizer, run.lr_factor(run.step))
        run.optimizer.step()
    return result


def _run_passes(run: TrainingRun, batches: SourceStep) -> StepResult:
    """Forward and backward passes of a step."""
    if run.adapter is not None:
        return run.adapter.step(run.pipeline, batches)
    schedule = None
    if isinstance(batches.note, StepNote):
        check_same_step(batches.note)
        schedule = batches.note.schedule
    return run.pipeline.step(list(batches), batches[0].loss_normalizer, schedule)


def open_trained(
    config: TrainConfig, plan: Plan | None, source: StepSource, num_ranks: int
) -> PipelineModel:
    """The model with its frozen parts. ConfigError if build, plan or options do not fit it."""
    torch.manual_seed(config.seed)  # the same weights on all ranks
    model = open_model(config.model, config.config, source)
    if config.export and model.whole is None:
        raise ConfigError(f"--export writes models of transformers; the model is {TINY}")
    if plan:
        apply_plan(plan, model, num_ranks)
    model.freeze(config.freeze)
    frozen = frozen_parts(config, plan)
    rated = [f"lr-{part}" for part in frozen if getattr(config, f"lr_{part}") is not None]
    if rated:
        raise ConfigError(
            f"--{rated[0]} is a learning rate for a part that is not trained, by --freeze, the"
            " plan or --lora-parts: leave it out, or train the part"
        )
    if config.lora_rank is not None:
        model = with_adapters(model, config, config.seed)
    return model


def frozen_parts(config: TrainConfig, plan: Plan | None) -> list[str]:
    """Parts of which nothing is trained. ConfigError if one of them is to have adapters."""
    by_plan = [part for part in PARTS if plan and not plan.training.trains(part)]
    frozen = {*by_plan, *config.freeze}
    if config.lora_rank is not None:
        if frozen.intersection(config.lora_parts):
            raise ConfigError("--freeze or the plan freezes a part of --lora-parts: give either")
        return [part for part in PARTS if part not in config.lora_parts]
    return [part for part in PARTS if part in frozen]


def _load(
    folder: Path,
    pipeline: Pipeline,
    optimizer: torch.optim.Optimizer | None,
    basis: Basis | None,
) -> Progress | None:
    """Load the newest state; the options of the optimizer stay those of the call."""
    groups = [] if optimizer is None else optimizer.param_groups
    options = [{name: group[name] for name in group if name != "params"} for group in groups]
    done = load_state(folder, pipeline.layers, optimizer, basis=basis)
    if optimizer is not None:
        for group, of_call in zip(optimizer.param_groups, options, strict=True):
            group.update(of_call)
    return done


def _is_due(step: int, every: int | None, steps: int) -> bool:
    """Whether something that is done every so many steps, and at the end, is due after a step."""
    return step == steps or (every is not None and step % every == 0)


def _finish_step(
    run: TrainingRun, batches: SourceStep, config: TrainConfig, *, stops: bool, adapts: bool
) -> float | None:
    """Save, adapt recomputation; -> when that was done, as it belongs to no step. None: nothing."""
    if run.saver is not None:
        if stops or _is_due(run.step, config.save_every, config.steps):
            run.saver.begin(Progress(step=run.step, loader=run.source.state_dict()))
        if stops or run.step == config.steps:
            run.saver.finish()
        else:
            run.saver.poll()
    adapts = adapts and run.adapter is not None and run.adapter.is_due
    if run.adapter is not None and adapts:
        run.adapter.adapt(run.pipeline, batches, run.optimizer)
    return time.perf_counter() if run.saver is not None or adapts else None
