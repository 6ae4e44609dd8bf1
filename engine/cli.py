"""`python -m engine`: plan a training run, simulate plans, train."""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from isobatch.common.command_line import (
    ConfigOption,
    JsonOption,
    new_app,
    read_config,
    require_writable,
    run_app,
    with_options,
)
from isobatch.common.config import options_of, preset_names
from isobatch.common.consoles import messages, print_line
from isobatch.engine.charts.trace import write_trace
from isobatch.engine.plan_config import BEST, PlanConfig, changed_request, plan_request
from isobatch.engine.plan_report import (
    median_step,
    print_plan,
    print_result,
    print_trials,
    report_console,
    run_to_json,
    trials_to_json,
)
from isobatch.engine.planning import planner
from isobatch.engine.planning.plan import read_plan, write_plan
from isobatch.engine.planning.planner import ScheduleTrial, SimulatedRun, plan_best_schedule
from isobatch.engine.planning.search.limits import SearchLimits
from isobatch.engine.planning.trainers.plan_for import TrainerPlan, plan_for
from isobatch.engine.planning.trainers.settings import FILES, settings_text
from isobatch.engine.simulator.schedule import SCHEDULES

PLAN_NAME, TRACE_NAME = "plan.json", "trace.json"
FREE_SHARE = 0.5
"""Share of the time for the plan without a trainer's restrictions, where one is asked for."""

app = new_app(
    "engine",
    "Plan how a vision-language model is trained on a pipeline of GPUs, without any GPU.\n\n"
    "Try it: python -m engine plan --model internvl_1_5 --images 9 --seq-len 4096 --tp 2",
)


@app.command()
@with_options(PlanConfig, *(name for name, *_ in options_of(PlanConfig)))
def plan(
    context: typer.Context,
    build: Annotated[
        str | None,
        typer.Argument(help="Folder of a build: what `packer build --out` wrote.", metavar="BUILD"),
    ] = None,
    config: ConfigOption = None,
    out: Annotated[Path | None, typer.Option(help="Folder for plan.json and trace.json.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Choose stages and recomputation, and predict a step's time.

    For a packed build, or for equal micro-batches (--model, --images, --seq-len). Compared with
    what careful users do without a plan: even layers, as little recomputed as fits.

    With --for only what a trainer can express is searched. Its settings are printed, and what they
    cost next to the plan without them.

    Assumed: AdamW with float32 moments; float32 gradients; of bf16 weights also float32 masters;
    optimizer state shared out over replicas. Change it by --precision and --zero-stage.
    """
    begun = time.monotonic()
    options = read_config(PlanConfig, context, command="engine plan")
    if out is not None:
        require_writable("--out", out)
    with messages.status("reading") as status:
        request, random = plan_request(options)
        status.update("planning")
        limits = SearchLimits(deadline_s=begun + options.time_limit)
        trials: tuple[ScheduleTrial, ...] = ()
        free_limits = limits if options.trainer is None else limits.part(FREE_SHARE)
        if options.schedule == BEST:
            result, trials = plan_best_schedule(request, random=random, limits=free_limits)
        else:
            result = planner.plan(request, random=random, limits=free_limits)
        planned: TrainerPlan | None = None
        if options.trainer is not None:
            is_any = options.schedule == BEST
            planned = plan_for(
                options.trainer, request, result, best_schedule=is_any, limits=limits
            )
            result = planned.result
    taken_s = time.monotonic() - begun
    if out is not None:
        _draw((result.careful, result.best), out)
        write_plan(result.plan, out / PLAN_NAME)
    text = "" if planned is None else settings_text(planned)
    names = [PLAN_NAME, TRACE_NAME]
    if out is not None and planned is not None:
        names.append(FILES[planned.trainer])
        (out / names[-1]).write_text(text, "utf-8")
    if as_json:
        runs = [run_to_json(run) for run in result.runs]
        report = {"plan": result.plan.to_json(), "runs": runs, "seconds": taken_s}
        if result.free is not None:
            report |= {"free": run_to_json(result.free), "settings": text}
        print(json.dumps(report | ({"schedules": trials_to_json(trials)} if trials else {})))
    else:
        if trials:
            print_trials(trials, report_console())
        print_result(result, report_console())
        print(f"planned in {taken_s:.1f} s")
        _print_written(out, *names)
        if planned is not None:
            print(f"\n{text}", end="")


@app.command()
def simulate(
    plan_file: Annotated[
        Path, typer.Argument(help="plan.json of `python -m engine plan`.", metavar="PLAN")
    ],
    schedule: Annotated[
        str | None, typer.Option(help=f"{', '.join(SCHEDULES)}. Default: the plan's.")
    ] = None,
    micro_batches: Annotated[
        int | None, typer.Option(min=1, help="Per step and replica. Default: the plan's.")
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            help=f"Preset, or a .toml file: {', '.join(preset_names('clusters'))}. Default: the"
            " plan's."
        ),
    ] = None,
    memory_gib: Annotated[
        float | None,
        typer.Option(help="GiB of a GPU that may be used. Default: the plan's, or --cluster's."),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Folder for trace.json.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Simulate a plan, also with other settings.

    Its partition and its recomputed layers stay as they are; the schedule, the number of
    micro-batches and the cluster may be others.
    """
    read = read_plan(plan_file)
    request = changed_request(read, schedule, micro_batches, cluster, memory_gib)
    run = planner.simulate_run(
        request,
        "simulated",
        request.split(request.costs(request.loads)),
        request.loads,
        read.border_array,
        read.recompute_mask,
    )
    changed = planner.make_plan(request, run, request.costs(request.full_step))
    same = changed.inputs_hash == read.inputs_hash
    changed = replace(changed, layer_names=read.layer_names, gap=read.gap if same else None)
    if out is not None:
        _draw((run,), out)
    if as_json:
        print(json.dumps({"plan": changed.to_json(), "run": run_to_json(run)}))
    else:
        console = report_console()
        was, now = read.num_micro_batches, request.num_micro_batches
        console.print(
            f"a step takes {run.step_ns / 1e6:,.1f} ms; "
            f"planned for {read.predicted.step_ns / 1e6:,.1f} ms"
            + (f" with {was} micro-batches instead of {now}" if was != now else "")
        )
        print_plan(changed, run, console)
        _print_written(out, TRACE_NAME)


def _forward(name: str, text: str) -> None:
    """Register a command of `engine.train.cli`, which is imported only when it is called."""

    def command(context: typer.Context) -> None:
        from isobatch.engine.train.cli import run_command  # noqa: PLC0415 - torch takes seconds to import

        run_command([name, *context.args])

    settings = {"ignore_unknown_options": True, "allow_extra_args": True}
    app.command(name, help=text, add_help_option=False, context_settings=settings)(command)


_forward("train", "Train a model as a pipeline, by a plan. Under torchrun.")
_forward("measure", "Plan from measurements on the ranks that will train. Under torchrun.")


def main() -> None:
    """Run the call in `sys.argv`."""
    run_app(app, "python -m engine")


def _draw(runs: tuple[SimulatedRun, ...], out: Path) -> None:
    """The trace of these runs' median steps."""
    out.mkdir(parents=True, exist_ok=True)
    write_trace([median_step(run) for run in runs], out / TRACE_NAME)


def _print_written(out: Path | None, *names: str) -> None:
    if out is not None:
        print_line(f"written: {', '.join(str(out / name) for name in names)}")
