"""Plans and simulated steps in words and tables, for people; the same figures as plain values for
machines. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from balance.types import IntArray
from engine.charts.format_time import time_text
from engine.charts.gantt import GanttStep, path_parts
from engine.planning.plan import Plan
from engine.planning.planner import PlanResult, SimulatedRun
from engine.simulator.schedule import PassKind

GIB = 2**30


def print_result(result: PlanResult, console: Console, *, tensor_parallel_ns: IntArray) -> None:
    """Everything that `python -m engine plan` says of a plan."""
    console.print(headline(result.plan))
    if result.gap is not None:
        console.print(
            "partition: no other one is faster for the searched step"
            if result.gap == 0
            else f"partition: at most {result.gap:.2%} slower than the fastest one for the searched step"
        )
    console.print()
    _print_table(
        console,
        ("", "recomputed", "step", "per sample", "speed-up", "waiting", "most memory"),
        comparison(result),
    )
    print_plan(result.plan, result.best, console, tensor_parallel_ns=tensor_parallel_ns)


def print_plan(
    plan: Plan, run: SimulatedRun, console: Console, *, tensor_parallel_ns: IntArray
) -> None:
    """A plan's stages, and where the time of its steps goes."""
    console.print()
    columns = (
        "stage",
        "layers",
        "recomputed",
        "forward",
        "backward",
        "waits",
        "peak",
        "if all are full",
    )
    _print_table(console, columns, stage_rows(plan, run), left=2)
    console.print()
    shares = time_shares(run)
    console.print(
        "where the ranks' time goes: "
        + ", ".join(f"{name} {share:.1%}" for name, share in shares.items())
    )
    if tensor_parallel_ns.any():
        of_it = tensor_parallel_ns.mean() / max(run.step_ns, 1)
        console.print(f"in passes, tensor-parallel communication: {of_it:.1%} of the time")
    parts = path_parts(shown_step(plan, run))
    total = max(1, sum(parts.values()))
    console.print(
        "critical path: "
        + ", ".join(f"{name} {spent / total:.1%}" for name, spent in parts.items() if spent)
    )
    if plan.predicted.reduction_ns:
        console.print(
            f"behind each step, gradients over replicas: {time_text(plan.predicted.reduction_ns)}"
        )
    most = int(run.peak_bytes.max())
    if most > plan.memory_bytes:
        rank = int(run.peak_bytes.argmax())
        console.print(
            f"does not fit: rank {rank} needs {most / GIB:.1f} GiB, a GPU has {plan.memory_bytes / GIB:.1f} GiB"
        )
    elif max(plan.predicted.full_peak_bytes) > plan.memory_bytes:
        rank = int(np.argmax(plan.predicted.full_peak_bytes))
        console.print(
            f"may not fit: rank {rank} needs {plan.predicted.full_peak_bytes[rank] / GIB:.1f} GiB if all micro-batches "
            f"are full, a GPU has {plan.memory_bytes / GIB:.1f} GiB"
        )


def headline(plan: Plan) -> str:
    """What a plan is for, in one line."""
    parallel = plan.parallel
    per_rank = f", {plan.stages_per_rank} stages per rank" if plan.stages_per_rank > 1 else ""
    return (
        f"{plan.model.name} on {plan.cluster.name}: {_many(parallel.num_gpus, 'GPU')} = tp {parallel.tp} x pp "
        f"{parallel.pp} x dp {parallel.dp}, {plan.memory_bytes / GIB:.1f} GiB each; {plan.schedule}{per_rank}; "
        f"{_many(plan.num_steps, 'step')} of {_many(plan.num_micro_batches, 'micro-batch', 'micro-batches')}"
    )


def _many(count: int, one: str, more: str | None = None) -> str:
    """So many of something.

    >>> _many(1, "GPU"), _many(2_000, "GPU")
    ('1 GPU', '2,000 GPUs')
    """
    return f"{count:,} {one if count == 1 else more or one + 's'}"


def comparison(result: PlanResult) -> list[tuple[str, ...]]:
    """A row per run, from what trainers do to the plan."""
    rows: list[tuple[str, ...]] = []
    slowest = result.runs[0].sample_ns
    for run in result.runs:
        peak = int(run.peak_bytes.max())
        too_much = ", does not fit" if peak > result.plan.memory_bytes else ""
        rows.append(
            (
                run.name,
                f"{int(run.recompute.sum())} of {len(run.recompute)}",
                time_text(run.step_ns),
                time_text(run.sample_ns),
                f"{slowest / max(run.sample_ns, 1e-9):.2f}x",
                f"{time_shares(run)['waiting']:.1%}",
                f"{peak / GIB:.1f} GiB{too_much}",
            )
        )
    return rows


def stage_rows(plan: Plan, run: SimulatedRun) -> list[tuple[str, ...]]:
    """A row per stage; what belongs to a rank stands at its first stage."""
    predicted, num_ranks = plan.predicted, plan.parallel.pp
    rows: list[tuple[str, ...]] = []
    for stage, text in enumerate(stage_names(plan)):
        first, end = plan.borders[stage], plan.borders[stage + 1]
        chosen = [layer for layer in plan.recompute if first <= layer < end]
        rank, is_first = stage % num_ranks, stage < num_ranks
        again = predicted.recompute_ns[stage]
        rows.append(
            (
                f"{stage}" if plan.stages_per_rank == 1 else f"{stage} on rank {rank}",
                text,
                f"{len(chosen)} of {end - first}",
                time_text(predicted.forward_ns[stage]),
                time_text(predicted.backward_ns[stage])
                + (f", {time_text(again)} of it again" if again else ""),
                f"{predicted.bubble_ratio[rank]:.1%}" if is_first else "",
                f"{run.peak_bytes[rank] / GIB:.1f} GiB" if is_first else "",
                f"{predicted.full_peak_bytes[rank] / GIB:.1f} GiB" if is_first else "",
            )
        )
    return rows


def time_shares(run: SimulatedRun) -> dict[str, float]:
    """What the ranks' time goes to, as shares that add up to 1; steps of all data-parallel ranks
    together.

    Waiting is also for the slowest data-parallel rank.
    """
    spent = {"forward": 0, "backward": 0, "recomputation": 0, "encoding ahead": 0}
    for place, step in enumerate(run.steps):
        program = step.timeline.program
        kinds, schedule = program.schedule.kinds, program.schedule
        goes_back = np.isin(kinds, (PassKind.BACKWARD, PassKind.INPUT_GRAD))
        again = int(
            run.recompute_ns(place)[schedule.stages, schedule.micro_batches][goes_back].sum()
        )
        spent["forward"] += int(program.duration_ns[kinds == PassKind.FORWARD].sum())
        spent["encoding ahead"] += int(program.duration_ns[kinds == PassKind.ENCODE].sum())
        spent["recomputation"] += again
        spent["backward"] += (
            int(program.duration_ns[goes_back | (kinds == PassKind.WEIGHT_GRAD)].sum()) - again
        )
    times = np.array([step.step_ns for step in run.steps]).reshape(-1, run.dp)
    ranks = run.steps[0].timeline.program.schedule.num_ranks
    whole = max(1, int(times.max(axis=1).sum()) * run.dp * ranks)
    shares = {name: value / whole for name, value in spent.items() if value}
    return {**shares, "waiting": 1 - sum(shares.values())}


def stage_names(plan: Plan) -> list[str]:
    """The layers of each stage, for people."""
    names = plan.layer_names
    return [
        layers_text(names[first:end])
        for first, end in zip(plan.borders[:-1], plan.borders[1:], strict=True)
    ]


def layers_text(names: Sequence[str]) -> str:
    """Layers in a row, equal ones together.

    >>> layers_text(["patches", "layer 0", "layer 1", "layer 2", "head"])
    'patches, layer 0-2, head'
    """
    return ", ".join(_together(list(group)) for _, group in groupby(names, _without_number))


def shown_step(plan: Plan, run: SimulatedRun) -> GanttStep:
    """The step in the middle of a run, to be drawn."""
    place = run.median
    return GanttStep(
        title=run.name.removeprefix("+ "),
        text=f"{headline(plan)}. Step {place // run.dp}, data-parallel rank {place % run.dp}: the one of median time.",
        simulated=run.steps[place],
        recompute_ns=run.recompute_ns(place),
        stage_names=stage_names(plan) if tuple(run.borders.tolist()) == plan.borders else (),
    )


def run_to_json(run: SimulatedRun) -> dict[str, Any]:
    """A run's figures, plain JSON."""
    return {
        "name": run.name,
        "borders": run.borders.tolist(),
        "recompute": np.flatnonzero(run.recompute).tolist(),
        "step_ns": run.step_ns,
        "sample_ns": round(run.sample_ns),
        "num_samples": run.num_samples,
        "peak_bytes": run.peak_bytes.tolist(),
        "time_shares": time_shares(run),
    }


def _together(names: list[str]) -> str:
    if len(names) == 1:
        return names[0]
    return f"{names[0]}-{names[-1].rpartition(' ')[2]}"


def _without_number(name: str) -> str:
    kind, _, number = name.rpartition(" ")
    return kind if number.isdigit() else name


def _print_table(
    console: Console, columns: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1
) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for place, column in enumerate(columns):
        table.add_column(column, justify="left" if place < left else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)
