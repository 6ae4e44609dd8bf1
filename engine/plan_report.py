"""Reports of plans and steps: tables for people, plain values. Pure."""

import sys
from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from isobatch.common.consoles import SafeConsole
from isobatch.engine.charts.trace import TraceStep, path_parts
from isobatch.engine.cost_model.layer_list import layers_of
from isobatch.engine.cost_model.parallel import head_notes
from isobatch.engine.planning.plan import Plan
from isobatch.engine.planning.planner import (
    PlanResult,
    ScheduleTrial,
    SimulatedRun,
    tensor_parallel_ns,
)
from isobatch.engine.simulator.schedule import PassKind

GIB = 2**30
WIDTH = 150
"""Width of tables where the output is no terminal."""
TIME_UNITS = ((10**6, "ms"), (10**3, "us"))


def print_result(result: PlanResult, console: Console) -> None:
    """Print everything that `python -m engine plan` reports."""
    console.print(headline(result.plan))
    for note in head_notes(result.plan.model, result.plan.parallel.tp):
        console.print(f"note: {note}")
    console.print(logits_text(result.plan))
    console.print(gain_text(result))
    gap = result.plan.gap
    if gap is not None:
        console.print(
            "partition: no other one is faster for the searched step"
            if gap == 0
            else f"partition: another one may be faster for the searched step, by at most {gap:.2%}"
        )
    console.print()
    if result.free is not None:
        console.print(restriction_text(result.best, result.free))
    columns = ("", "recomputed", "step", "per sample", "speed-up", "waiting", "most memory")
    _print_table(console, columns, comparison(result))
    print_plan(result.plan, result.best, console)


def print_trials(trials: Sequence[ScheduleTrial], console: Console) -> None:
    """Print what the plan for each schedule comes to."""
    columns = ("schedule", "stages per rank", "recomputed", "step", "waiting", "most memory")
    rows: list[tuple[str, ...]] = []
    for trial in trials:
        row = trial.schedule, f"{trial.stages_per_rank}"
        if trial.result is None:
            rows.append((*row, "does not fit", "", "", ""))
            continue
        run = trial.result.best
        rows.append(
            (
                *row,
                f"{int(run.recompute.sum())} of {len(run.recompute)}",
                time_text(run.step_ns),
                f"{time_shares(run)['waiting']:.1%}",
                gib_text(run.peak_bytes.max()),
            )
        )
    _print_table(console, columns, rows)
    console.print()


def trials_to_json(trials: Sequence[ScheduleTrial]) -> list[dict[str, Any]]:
    """What the plan for each schedule comes to; `step_ns` is null where nothing fits."""
    return [
        {
            "schedule": trial.schedule,
            "stages_per_rank": trial.stages_per_rank,
            "step_ns": trial.result.best.step_ns if trial.result else None,
        }
        for trial in trials
    ]


def logits_text(plan: Plan) -> str:
    """Of which tokens the head computes logits, in one line."""
    share = plan.loads.labels.tokens.sum() / max(1, plan.loads.llm.tokens.sum())
    unknown = ", as if each had a label" if share == 1 else ", which have a label"
    return f"logits are planned for {share:.1%} of the tokens{unknown}"


def gain_text(result: PlanResult) -> str:
    """What the plan gains over what a careful user does, in one line."""
    careful = result.careful
    if int(careful.peak_bytes.max()) > result.plan.memory_bytes:
        return "the plan fits; even layers do not, with everything recomputed"
    gain = careful.sample_ns / max(result.best.sample_ns, 1e-9)
    return f"the plan is {gain:.2f}x as fast as even layers with as little recomputed as fits"


def restriction_text(run: SimulatedRun, free: SimulatedRun) -> str:
    """What a trainer's restrictions cost, in one line."""
    more = run.step_ns / max(free.step_ns, 1) - 1
    peaks = [gib_text(one.peak_bytes.max()) for one in (run, free)]
    return (
        f"the trainer's restrictions cost {more:.1%} of a step's time: {time_text(run.step_ns)} "
        f"instead of {time_text(free.step_ns)}; most memory {peaks[0]} instead of {peaks[1]}"
    )


def report_console() -> Console:
    """A console for reports, wide where the output is no terminal."""
    width = None if sys.stdout.isatty() else WIDTH
    return SafeConsole(markup=False, highlight=False, soft_wrap=True, width=width)


def print_plan(plan: Plan, run: SimulatedRun, console: Console) -> None:
    """Print a plan's stages, and how its ranks spend their time."""
    console.print()
    columns = ("stage", "layers", "recomputed", "forward", "backward", "waits", "peak")
    _print_table(console, (*columns, "if all are full"), stage_rows(plan, run), num_left=2)
    console.print()

    # shares of the time
    shares = ", ".join(f"{name} {share:.1%}" for name, share in time_shares(run).items())
    console.print(f"where the ranks' time goes: {shares}")
    communication_ns = tensor_parallel_ns(plan, run)
    if communication_ns.any():
        share = communication_ns.mean() / max(run.step_ns, 1)
        console.print(f"in passes, tensor-parallel communication: {share:.1%} of the time")
    parts = path_parts(median_step(run))
    total = max(1, sum(parts.values()))
    shares = ", ".join(f"{name} {spent / total:.1%}" for name, spent in parts.items() if spent)
    console.print(f"critical path: {shares}")
    predicted = plan.predicted
    if predicted.reduction_ns:
        spent_text = time_text(predicted.reduction_ns)
        console.print(f"after each step, gradients over replicas: {spent_text}")

    # memory
    console.print(f"{plan.training.mode}")
    console.print(memory_text(plan))
    has = f"a GPU has {gib_text(plan.memory_bytes)}"
    rank, full_rank = int(run.peak_bytes.argmax()), int(np.argmax(predicted.full_peak_bytes))
    peak, full_peak = int(run.peak_bytes[rank]), predicted.full_peak_bytes[full_rank]
    if peak > plan.memory_bytes:
        console.print(f"does not fit: rank {rank} needs {gib_text(peak)}, {has}")
    elif full_peak > plan.memory_bytes:
        console.print(
            f"may not fit: rank {full_rank} needs {gib_text(full_peak)} if all micro-batches "
            f"are full, {has}"
        )


def gib_text(size: float) -> str:
    """Bytes in GiB, of less than one two digits.

    >>> gib_text(37.17 * GIB), gib_text(0.0123 * GIB)
    ('37.2 GiB', '0.012 GiB')
    """
    return f"{size / GIB:{'.1f' if size >= GIB else '.2g'}} GiB"


def memory_text(plan: Plan) -> str:
    """The terms of the memory of the rank that needs most, if all its micro-batches are full."""
    rank = int(np.argmax(plan.predicted.full_peak_bytes))
    parts = memory_parts(plan, rank)
    total = sum(parts.values())
    unit, scale = ("GiB", GIB) if total >= GIB else ("MiB", 2**20)
    terms = " + ".join(f"{name} {size / scale:.2f}" for name, size in parts.items())
    return f"memory of rank {rank} if all are full: {terms} = {total / scale:.2f} {unit}"


def memory_parts(plan: Plan, rank: int) -> dict[str, float]:
    """Bytes of a rank's weights, gradients, optimizer state, and activations at their peak.

    Messages on their way count as activations.
    """
    layers = layers_of(plan.model, plan.parallel)
    rank_layers = [
        layers[layer]
        for stage in range(rank, len(plan.borders) - 1, plan.parallel.pp)
        for layer in range(plan.borders[stage], plan.borders[stage + 1])
    ]
    terms = [
        plan.training.mode.state_terms(
            layer.gpu_params, plan.parallel.dp, trained=plan.training.trains(layer.part)
        )
        for layer in rank_layers
    ]
    state = dict(zip(("weights", "gradients", "optimizer"), np.sum(terms, axis=0), strict=True))
    return {**state, "activations": plan.predicted.full_peak_bytes[rank] - sum(state.values())}


def headline(plan: Plan) -> str:
    """Model, GPUs, schedule and steps of a plan, in one line."""
    parallel = plan.parallel
    per_rank = f", {plan.stages_per_rank} stages per rank" if plan.stages_per_rank > 1 else ""
    if plan.deferred is not None:
        limits = " ".join(map(str, plan.deferred))
        per_rank += f", weight gradients held back by rank at most: {limits}"
    return (
        f"{plan.model.name} on {plan.cluster.name}: {_many(parallel.num_gpus, 'GPU')} = "
        f"tp {parallel.tp} x pp {parallel.pp} x dp {parallel.dp}, "
        f"{gib_text(plan.memory_bytes)} each; {plan.schedule}{per_rank}; "
        f"{_many(plan.num_steps, 'step')} of "
        f"{_many(plan.num_micro_batches, 'micro-batch', 'micro-batches')}"
    )


def _many(count: int, one: str, more: str | None = None) -> str:
    """A count with its noun.

    >>> _many(1, "GPU"), _many(2_000, "GPU")
    ('1 GPU', '2,000 GPUs')
    """
    return f"{count:,} {one if count == 1 else more or one + 's'}"


def comparison(result: PlanResult) -> list[tuple[str, ...]]:
    """A row per run, then the plan's, then the free one's; speed-ups are over a careful user's."""
    rows: list[tuple[str, ...]] = []
    careful = result.careful.sample_ns
    for run in (*result.runs, *([result.free] if result.free else [])):
        peak = int(run.peak_bytes.max())
        too_much = ", does not fit" if peak > result.plan.memory_bytes else ""
        rows.append(
            (
                run.name,
                f"{int(run.recompute.sum())} of {len(run.recompute)}",
                time_text(run.step_ns),
                time_text(run.sample_ns),
                f"{careful / max(run.sample_ns, 1e-9):.2f}x",
                f"{time_shares(run)['waiting']:.1%}",
                f"{gib_text(peak)}{too_much}",
            )
        )
    return rows


def stage_rows(plan: Plan, run: SimulatedRun) -> list[tuple[str, ...]]:
    """A row per stage; figures of a rank are in the row of its first stage."""
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
                gib_text(run.peak_bytes[rank]) if is_first else "",
                gib_text(predicted.full_peak_bytes[rank]) if is_first else "",
            )
        )
    return rows


def time_shares(run: SimulatedRun) -> dict[str, float]:
    """Shares of the ranks' time, which add up to 1, over the steps of all data-parallel ranks.

    Waiting includes that for the slowest data-parallel rank.
    """
    spent = {"forward": 0, "backward": 0, "recomputation": 0, "encoding ahead": 0}
    for number, step in enumerate(run.steps):
        program = step.timeline.program
        schedule, times = program.schedule, program.duration_ns
        kinds = schedule.kinds
        goes_back = np.isin(kinds, (PassKind.BACKWARD, PassKind.INPUT_GRAD))
        again = run.recompute_ns(number)[schedule.stages, schedule.micro_batches][goes_back].sum()
        spent["forward"] += int(times[kinds == PassKind.FORWARD].sum())
        spent["encoding ahead"] += int(times[kinds == PassKind.ENCODE].sum())
        spent["recomputation"] += int(again)
        backward = times[goes_back | (kinds == PassKind.WEIGHT_GRAD)].sum()
        spent["backward"] += int(backward - again)
    times = np.array([step.step_ns for step in run.steps]).reshape(-1, run.dp)
    ranks = run.steps[0].timeline.program.schedule.num_ranks
    whole = max(1, int(times.max(axis=1).sum()) * run.dp * ranks)
    shares = {name: value / whole for name, value in spent.items() if value}
    return {**shares, "waiting": 1 - sum(shares.values())}


def stage_names(plan: Plan) -> list[str]:
    """The layers of each stage, for people."""
    return [layers_text(plan.layer_names[first:end]) for first, end in pairwise(plan.borders)]


def layers_text(names: Sequence[str]) -> str:
    """Neighbouring layers, a range for those of one kind.

    >>> layers_text(["patches", "layer 0", "layer 1", "layer 2", "head"])
    'patches, layer 0-2, head'
    """
    runs = [list(group) for _, group in groupby(names, _without_number)]
    ends = [f"-{run[-1].rpartition(' ')[2]}" if len(run) > 1 else "" for run in runs]
    return ", ".join(run[0] + end for run, end in zip(runs, ends, strict=True))


def median_step(run: SimulatedRun) -> TraceStep:
    """The step of median time of a run."""
    number = run.median
    return TraceStep(
        title=run.name.removeprefix("+ "),
        simulated=run.steps[number],
        recompute_ns=run.recompute_ns(number),
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


def time_text(time_ns: float) -> str:
    """A time for people, three digits or a bit more.

    >>> [time_text(value) for value in (0, 999, 1_500, 12_345_678, 1_234_567_890, 12_345_678_901)]
    ['0', '999 ns', '1.5 us', '12.3 ms', '1,235 ms', '12.35 s']
    """
    if time_ns >= 10**10:
        return f"{time_ns / 10**9:,.2f} s"
    for size, unit in TIME_UNITS:
        if time_ns >= size:
            value = time_ns / size
            return f"{value:,.0f} {unit}" if value >= 100 else f"{float(f'{value:.3g}'):g} {unit}"
    return f"{time_ns:g} ns" if time_ns else "0"


def _without_number(name: str) -> str:
    kind, _, number = name.rpartition(" ")
    return kind if number.isdigit() else name


def _print_table(
    console: Console, columns: Sequence[str], rows: Iterable[Sequence[str]], num_left: int = 1
) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for place, column in enumerate(columns):
        table.add_column(column, justify="left" if place < num_left else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)
