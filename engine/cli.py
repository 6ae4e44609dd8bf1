"""`python -m engine`: plan a training run and simulate plans, without a GPU and without torch."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from balance.command_line import ConfigOption, JsonOption, new_app, read_config, run_app
from balance.config import preset_names
from engine.charts.gantt import write_gantt
from engine.charts.trace import write_trace
from engine.plan_config import PARTS, PlanConfig, changed_request, plan_request
from engine.plan_report import chart_step, print_plan, print_result, run_to_json
from engine.planning import planner
from engine.planning.plan import Plan, read_plan, write_plan
from engine.planning.planner import SimulatedRun
from engine.simulator.schedule import SCHEDULES

PLAN_NAME, GANTT_NAME, TRACE_NAME = "plan.json", "gantt.html", "trace.json"
WIDTH = 150
"""Width of tables where the output is no terminal."""


def _presets(folder: str) -> str:
    return ", ".join(preset_names(folder))


BuildPlace = Annotated[
    str | None,
    typer.Argument(help="Folder of a build: what `packer build --out` wrote.", metavar="BUILD"),
]
PlanFile = Annotated[
    Path, typer.Argument(help="plan.json of `python -m engine plan`.", metavar="PLAN")
]
ModelOption = Annotated[
    str | None,
    typer.Option(help=f"Without a build: model preset, or a .toml file: {_presets('models')}."),
]
ImagesOption = Annotated[
    int | None, typer.Option(min=0, help="Without a build: image patches of a micro-batch.")
]
SeqLenOption = Annotated[
    int | None, typer.Option(min=1, help="Without a build: LLM tokens of a micro-batch.")
]
SamplesOption = Annotated[
    int | None, typer.Option(min=1, help="Without a build: samples that share these. Default: 1.")
]
ClusterOption = Annotated[
    str | None,
    typer.Option(help=f"Cluster preset, or a .toml file: {_presets('clusters')}. Default: h100."),
]
TpOption = Annotated[
    int | None, typer.Option(min=1, help="GPUs of a tensor-parallel group. Default: 1.")
]
PpOption = Annotated[int | None, typer.Option(min=1, help="Ranks of the pipeline. Default: 4.")]
DpOption = Annotated[int | None, typer.Option(min=1, help="Replicas of the pipeline. Default: 1.")]
MicroBatchesOption = Annotated[
    int | None, typer.Option(min=1, help="Micro-batches per step and replica. Default: 16.")
]
ScheduleOption = Annotated[str | None, typer.Option(help=f"{', '.join(SCHEDULES)}. Default: 1f1b.")]
StagesOption = Annotated[
    int | None, typer.Option(min=1, help="Stages per rank; more than 1 for interleaved.")
]
MemoryOption = Annotated[
    float | None,
    typer.Option(help="GiB of a GPU that may be used. Default: by the cluster's preset."),
]
StepsOption = Annotated[
    int | None, typer.Option(min=1, help="Steps of the epoch to simulate. Default: 4.")
]
SeedOption = Annotated[
    int | None, typer.Option(min=0, help="Seed of the epoch's order, as the loaders'. Default: 0.")
]
FrozenOption = Annotated[
    list[str] | None,
    typer.Option(help=f"Part that is not trained, may be repeated: {', '.join(PARTS)}."),
]
SearchOption = Annotated[
    str | None,
    typer.Option(help="exact: the fastest partition; bmp: OmniBal's search. Default: exact."),
]
BatchOption = Annotated[
    int | None,
    typer.Option(min=1, help="Samples of a random micro-batch to compare with. Default: 4."),
]
OutOption = Annotated[
    Path | None, typer.Option(help="Folder for plan.json, gantt.html and trace.json.")
]
ChartOption = Annotated[
    Path | None, typer.Option("--out", help="Folder for gantt.html and trace.json.")
]

app = new_app(
    "engine",
    "Plan how a vision-language model is trained on a pipeline of GPUs, without any GPU.\n\n"
    "Try it: python -m engine plan --model internvl_1_5 --images 9 --seq-len 4096 --tp 2",
)


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
    """Choose each stage's layers and which layers are recomputed, and predict the time of a step.

    For a packed build, or for equal micro-batches (--model, --images, --seq-len). The plan is
    compared with what trainers do without one: random samples, parameters split evenly, every layer
    recomputed.
    """
    begun = time.perf_counter()
    options = read_config(PlanConfig, context, command="engine plan")
    request, random = plan_request(options)
    result = planner.plan(request, search=options.search, random=random)
    taken_s = time.perf_counter() - begun
    if out is not None:
        _draw(result.plan, (result.runs[0], result.best), out)
        write_plan(result.plan, out / PLAN_NAME)
    if as_json:
        runs = [run_to_json(run) for run in result.runs]
        values = {"plan": result.plan.to_json(), "runs": runs, "gap": result.gap}
        print(json.dumps({**values, "seconds": taken_s}))
    else:
        spent = planner.tensor_parallel_ns(request, result.best)
        print_result(result, _console(), tensor_parallel_ns=spent)
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
    """Simulate a plan, also with another schedule, number of micro-batches or cluster.

    Its partition and its recomputed layers stay as they are.
    """
    read = read_plan(plan_file)
    request = changed_request(read, schedule, micro_batches, cluster, memory_gib)
    run = planner.simulate_run(
        request,
        "simulated",
        request.pipelines(request.loads),
        request.loads,
        read.border_array,
        read.recompute_mask,
    )
    changed = replace(
        planner.make_plan(request, run, request.full_costs()), layer_names=read.layer_names
    )
    if out is not None:
        _draw(changed, (run,), out)
    if as_json:
        print(json.dumps({"plan": changed.to_json(), "run": run_to_json(run)}))
    else:
        console = _console()
        was, now = read.num_micro_batches, request.num_micro_batches
        console.print(
            f"a step takes {run.step_ns / 1e6:,.1f} ms; "
            f"planned for {read.predicted.step_ns / 1e6:,.1f} ms"
            + (f" with {was} micro-batches instead of {now}" if was != now else "")
        )
        spent = planner.tensor_parallel_ns(request, run)
        print_plan(changed, run, console, tensor_parallel_ns=spent)
        _print_written(out, GANTT_NAME, TRACE_NAME)


def _forward(name: str, text: str) -> None:
    """Register a command of `engine.train.cli`, which is imported only when it is called."""

    def command(context: typer.Context) -> None:
        from engine.train.cli import make_app  # noqa: PLC0415 - torch takes seconds to import

        make_app()([name, *context.args], prog_name="python -m engine", standalone_mode=False)

    settings = {"ignore_unknown_options": True, "allow_extra_args": True}
    app.command(name, help=text, add_help_option=False, context_settings=settings)(command)


_forward("train", "Train a model as a pipeline, by a plan. Under torchrun.")
_forward("measure", "Plan from measurements on the ranks that will train. Under torchrun.")


def main() -> None:
    """Run the call in `sys.argv`."""
    run_app(app, "python -m engine")


def _draw(plan: Plan, runs: tuple[SimulatedRun, ...], out: Path) -> None:
    """Charts of these runs, and the trace of the last one."""
    out.mkdir(parents=True, exist_ok=True)
    steps = [chart_step(plan, run) for run in runs]
    title = f"{plan.model.name} on {plan.cluster.name}"
    write_gantt(steps, out / GANTT_NAME, title=title, memory_bytes=plan.memory_bytes)
    write_trace(steps[-1].simulated, out / TRACE_NAME)


def _print_written(out: Path | None, *names: str) -> None:
    if out is not None:
        print(f"written: {', '.join(str(out / name) for name in names)}")


def _console() -> Console:
    return Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else WIDTH)
