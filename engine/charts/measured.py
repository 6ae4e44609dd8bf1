"""A step as it was measured, in the form of a simulated one: so that charts and traces show both,
one beside the other.

Pure. `Pipeline.timeline` gathers when each pass ran on all ranks; `measured_timeline` makes a
`Timeline` of it. When a result arrived is known only where a rank waited for it: then it was there
when the pass began. Others are shown as if they took no time. Memory is not measured pass by pass,
so charts show the prediction's and say so.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from balance.types import IntArray
from engine.charts.format_time import time_text
from engine.charts.gantt import GanttStep, gantt_page
from engine.charts.trace import Event, make_trace
from engine.simulator.evaluate import SimulatedStep
from engine.simulator.program import Program
from engine.simulator.simulate import Timeline

TURN_NS = 200_000
"""What a rank takes at most from one pass to the next if it waits for nothing."""


def measured_timeline(program: Program, start_ns: IntArray, end_ns: IntArray) -> Timeline:
    """The timeline of a step whose passes ran from `start_ns` to `end_ns`, on one clock;
    (operations,) int64.

    Of `program` only the edges count. The step begins with its first pass, on any rank.
    """
    first = int(start_ns.min(initial=int(end_ns.max(initial=0))))
    start, end = start_ns - first, end_ns - first
    edge_ns = np.zeros_like(program.edge_ns)
    measured = replace(program, duration_ns=end - start, edge_ns=edge_ns)
    ranks, free = program.schedule.ranks.tolist(), dict[tuple[int, int], int]()
    awaited = _awaited(measured, start, end)
    for source, edge in _edges(program):
        target = int(program.edge_targets[edge])
        way = ranks[source], ranks[target]
        if way[0] != way[1]:
            ready = max(int(end[source]), free.get(way, 0))
            if edge in awaited:
                edge_ns[edge] = max(0, int(start[target]) - ready)
            free[way] = ready + int(edge_ns[edge])
    return Timeline(program=measured, start_ns=start, end_ns=end)


def _edges(program: Program) -> Iterator[tuple[int, int]]:
    """(the operation that makes it, edge)."""
    offsets = program.edge_offsets.tolist()
    for source in range(len(program.schedule)):
        for edge in range(offsets[source], offsets[source + 1]):
            yield source, edge


def _awaited(program: Program, start: IntArray, end: IntArray) -> set[int]:
    """Edges for which an operation's rank waited, the latest one for each."""
    schedule, ranks = program.schedule, program.schedule.ranks.tolist()
    before = np.concatenate([[0], end[:-1]])
    before[schedule.rank_offsets[:-1][np.diff(schedule.rank_offsets) > 0]] = 0
    last: dict[int, tuple[int, int]] = {}
    for source, edge in _edges(program):
        target = int(program.edge_targets[edge])
        if ranks[source] != ranks[target]:
            last[target] = max(last.get(target, (0, edge)), (int(end[source]), edge))
    return {
        edge
        for target, (made, edge) in last.items()
        if made > before[target] or start[target] - before[target] > TURN_NS
    }


def compare_steps(
    predicted: SimulatedStep, measured: Timeline, *, title: str = "Step"
) -> list[GanttStep]:
    """Charts of the prediction and of the measurement, for `charts.gantt.write_gantt`."""
    ratio = measured.step_ns / max(predicted.step_ns, 1)
    text = f"{time_text(measured.step_ns)}, {ratio:.3f} of the prediction. The memory shown is that of the prediction."
    return [
        GanttStep(title=f"{title}, predicted", text="Simulated.", simulated=predicted),
        GanttStep(
            title=f"{title}, measured", text=text, simulated=replace(predicted, timeline=measured)
        ),
    ]


def compare_trace(predicted: SimulatedStep, measured: Timeline) -> dict[str, Any]:
    """A trace with the measured ranks below the predicted ones; memory of the prediction only."""
    more = predicted.timeline.program.schedule.num_ranks
    own = make_trace(replace(predicted, timeline=measured))["traceEvents"]
    events = [
        *(_named(event, "predicted") for event in make_trace(predicted)["traceEvents"]),
        *(_below(_named(event, "measured"), more) for event in own if event["ph"] != "C"),
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_comparison(
    predicted: SimulatedStep, measured: Timeline, chart: Path, trace: Path, *, title: str
) -> None:
    """Write chart (HTML) and trace (JSON) of a step, prediction and measurement side by side."""
    chart.write_text(gantt_page(compare_steps(predicted, measured), title=title), "utf-8")
    trace.write_text(json.dumps(compare_trace(predicted, measured), separators=(",", ":")), "utf-8")


def _named(event: Event, what: str) -> Event:
    if event["name"] != "process_name":
        return event
    return {**event, "args": {"name": f"{event['args']['name']}, {what}"}}


def _below(event: Event, more: int) -> Event:
    """Of another process; arrows between its rows have ids of their own."""
    moved = {**event, "pid": event["pid"] + more}
    if event["name"] == "process_sort_index":
        moved["args"] = {"sort_index": event["args"]["sort_index"] + more}
    return {**moved, "id": f"measured {event['id']}"} if "id" in event else moved
