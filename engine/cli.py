"""`python -m engine`: plan a training run, and simulate plans. Needs no GPU and no torch."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import typer
from rich.console import Console

from balance.baseline_samplers import BATCH_SIZE
from balance.command_line import ConfigOption, JsonOption, new_app, read_config, run_app
from balance.errors import ConfigError
from balance.presets import AnyresRule, NativeRule, load_model
from engine.charts.gantt import write_gantt
from engine.charts.trace import write_trace
from engine.cli_options import (
    BatchOption,
    BuildPlace,
    ChartOption,
    ClusterOption,
    DpOption,
    FrozenOption,
    ImagesOption,
    MemoryOption,
    MicroBatchesOption,
    ModelOption,
    OutOption,
    PlanFile,
    PpOption,
    SamplesOption,
    ScheduleOption,
    SearchOption,
    SeedOption,
    SeqLenOption,
    StagesOption,
    StepsOption,
    TpOption,
)
from engine.cost_model.clusters import load_cluster
from engine.cost_model.loads import Loads
from engine.plan_config import PlanConfig, gib_bytes
from engine.plan_report import print_plan, print_result, run_to_json, shown_step
from engine.planning.build_steps import read_build
from engine.planning.plan import Plan, read_plan, write_plan
from engine.planning.planner import (
    PlanRequest,
    SimulatedRun,
    predict,
    simulate_run,
    tensor_parallel_ns,
)

PLAN_NAME, GANTT_NAME, TRACE_NAME = "plan.json", "gantt.html", "trace.json"

app = new_app(
    "engine",
    "Plan how a vision-language model is trained on a pipeline of GPUs, without any GPU.\n\n"
    "Try it: python -m engine plan --model internvl_1_5 --images 9 --seq-len 4096 --tp 2",
)
WIDTH = 150
"""Of tables, where the output is no terminal."""


@app.command()
def plan(
    context: typer.Context,
    build: BuildPlace = None,
    model: ModelOption = None,
    images: ImagesOption = None,
    seq_len: SeqLenOption = None,
    samples: SamplesOption = None,
    cluster: ClusterOption = None,
    tp: TpOption = None,
    pp: PpOption = None,
    dp: DpOption = None,
    micro_batches: MicroBatchesOption = None,
    schedule: ScheduleOption = None,
    stages_per_rank: StagesOption = None,
    memory_gib: MemoryOption = None,
    steps: StepsOption = None,
    seed: SeedOption = None,
    frozen: FrozenOption = None,
    search: SearchOption = None,
    batch_size: BatchOption = None,
    config: ConfigOption = None,
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Which layers each stage gets, which are computed again to save memory, and what a step will
    take.

    Of a packed build, or of equal micro-batches (--model, --images, --seq-len). Beside the plan
    stands what trainers do without one: random samples, parameters split evenly, every layer
    recomputed.
    """
    begun = time.perf_counter()
    chosen = read_config(PlanConfig, context, command="engine plan")
    request, random = _request(chosen)
    result = planner.plan(request, search=chosen.search, random=random)
    taken_s = time.perf_counter() - begun
    if out is not None:
        _draw(result.plan, (result.runs[0], result.best), out)
        write_plan(result.plan, out / PLAN_NAME)
    if as_json:
        runs = [run_to_json(each) for each in result.runs]
        print(
            json.dumps(
                {"plan": result.plan.to_json(), "runs": runs, "gap": result.gap, "seconds": taken_s}
            )
        )
    else:
        print_result(
            result, _console(), tensor_parallel_ns=tensor_parallel_ns(request, result.best)
        )
        print(f"planned in {taken_s:.1f} s")
        _print_written(out, PLAN_NAME, GANTT_NAME, TRACE_NAME)


@app.command()
def simulate(
    plan_file: PlanFile,
    schedule: ScheduleOption = None,
    micro_batches: MicroBatchesOption = None,
    cluster: ClusterOption = None,
    memory_gib: MemoryOption = None,
    out: ChartOption = None,
    as_json: JsonOption = False,
) -> None:
    """Simulate a plan again: as it is, or with another schedule, number of micro-batches or
    cluster.

    Its partition and its recomputed layers stay as they are.
    """
    read = read_plan(plan_file)
    request = _again(read, schedule, micro_batches, cluster, memory_gib)
    costs = request.pipelines(request.loads)
    borders, recompute = np.array(read.borders), read.recompute_mask
    simulated = simulate_run(request, "simulated", costs, request.loads, borders, recompute)
    full = request.costs(request.full.take(np.zeros(request.num_micro_batches, np.int64)))
    full_run = simulate_run(request, "full", [full], request.full, borders, recompute)
    changed = replace(
        read,
        cluster=request.cluster,
        schedule=request.schedule,
        num_micro_batches=request.num_micro_batches,
        memory_bytes=request.memory_bytes,
        loads=request.loads,
        predicted=predict(request, simulated, full_run.peak_bytes),
    )
    if out is not None:
        _draw(changed, (simulated,), out)
    if as_json:
        print(json.dumps({"plan": changed.to_json(), "run": run_to_json(simulated)}))
    else:
        console = _console()
        was, now = read.num_micro_batches, request.num_micro_batches
        console.print(
            f"a step takes {simulated.step_ns / 1e6:,.1f} ms; planned for {read.predicted.step_ns / 1e6:,.1f} ms"
            + (f" with {was} micro-batches instead of {now}" if was != now else "")
        )
        print_plan(
            changed, simulated, console, tensor_parallel_ns=tensor_parallel_ns(request, simulated)
        )
        _print_written(out, GANTT_NAME, TRACE_NAME)


def main() -> None:
    """Run the call in `sys.argv`."""
    run_app(app, "python -m engine")


def _request(config: PlanConfig) -> tuple[PlanRequest, Loads | None]:
    """What is asked, and random micro-batches to compare with, if there is data."""
    cluster, count = load_cluster(config.cluster), config.micro_batches
    settings: dict[str, Any] = {
        "cluster": cluster,
        "parallel": config.parallel,
        "training": config.training,
        "schedule": config.schedule,
        "stages_per_rank": config.stages_per_rank,
        "num_micro_batches": count,
        "memory_bytes": cluster.usable_memory_bytes
        if config.memory_gib is None
        else gib_bytes(config.memory_gib),
    }
    if config.build is None:
        loads = _equal_loads(config)
        model = load_model(config.model or "")
        return PlanRequest(
            model=model, loads=loads, full=loads.take(np.zeros(1, np.int64)), **settings
        ), None
    build = read_build(Path(config.build))
    size = config.batch_size or min(BATCH_SIZE, build.mean_group_size)
    asked = {"dp": config.dp, "micro_batches": count, "steps": config.steps, "seed": config.seed}
    loads, random = build.stream_steps(**asked), build.random_steps(batch_size=size, **asked)
    return PlanRequest(
        model=build.model, loads=loads, full=build.full_micro_batch(), **settings
    ), random


def _equal_loads(config: PlanConfig) -> Loads:
    """One step of equal micro-batches."""
    rule, images, seq_len = (
        load_model(config.model or "").vision,
        config.images or 0,
        config.seq_len or 0,
    )
    if isinstance(rule, NativeRule):
        raise ConfigError(
            f"model {config.model} takes images of any size: what --images cost is not known; give a build"
        )
    if not isinstance(rule, AnyresRule) and images * rule.llm_tokens_per_patch > seq_len:
        raise ConfigError(
            f"{images} image patches are {images * rule.llm_tokens_per_patch:,} LLM tokens, --seq-len is {seq_len:,}; "
            "give fewer images or a longer sequence"
        )
    return Loads.constant(
        config.dp * config.micro_batches,
        images=images,
        vit_tokens_per_image=rule.vit_tokens_per_patch,
        seq_len=seq_len,
        samples=config.samples,
    )


def _again(
    plan: Plan,
    schedule: str | None,
    micro_batches: int | None,
    cluster: str | None,
    memory_gib: float | None,
) -> PlanRequest:
    """What a plan was made for, with some of it changed."""
    on = plan.cluster if cluster is None else load_cluster(cluster)
    memory = plan.memory_bytes if cluster is None else on.usable_memory_bytes
    count = micro_batches or plan.num_micro_batches
    return PlanRequest(
        model=plan.model,
        cluster=on,
        parallel=plan.parallel,
        training=plan.training,
        schedule=schedule or plan.schedule,
        stages_per_rank=plan.stages_per_rank,
        num_micro_batches=count,
        memory_bytes=memory if memory_gib is None else gib_bytes(memory_gib),
        loads=_cut_anew(plan, count),
        full=plan.full,
    )


def _cut_anew(plan: Plan, count: int) -> Loads:
    """A plan's micro-batches in steps of another number, each replica's in their order."""
    # (steps, dp, micro_batches) -> (dp, all of the replica's)
    places = np.arange(len(plan.loads)).reshape(
        plan.num_steps, plan.parallel.dp, plan.num_micro_batches
    )
    own = places.swapaxes(0, 1).reshape(plan.parallel.dp, -1)
    steps = own.shape[1] // count
    if not steps:
        raise ConfigError(
            f"the plan has {own.shape[1]} micro-batches per replica, not {count}; plan with more --steps"
        )
    cut = own[:, : steps * count].reshape(plan.parallel.dp, steps, count).swapaxes(0, 1)
    return plan.loads.take(cut.ravel())


def _draw(plan: Plan, runs: tuple[SimulatedRun, ...], out: Path) -> None:
    """Charts of these runs, and the trace of the last one."""
    out.mkdir(parents=True, exist_ok=True)
    steps = [shown_step(plan, each) for each in runs]
    title = f"{plan.model.name} on {plan.cluster.name}"
    write_gantt(steps, out / GANTT_NAME, title=title, memory_bytes=plan.memory_bytes)
    write_trace(steps[-1].simulated, out / TRACE_NAME)


def _print_written(out: Path | None, *names: str) -> None:
    if out is not None:
        print(f"written: {', '.join(str(out / name) for name in names)}")


def _console() -> Console:
    return Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else WIDTH)
