"""Traces of steps as JSON, for ui.perfetto.dev and chrome://tracing.

A process per step and rank with a row of passes, a row of sends per receiver, and a counter of
memory. Several steps begin at the same time, one below the other. Times are microseconds, with the
simulator's nanoseconds as decimals.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from isobatch.common.types import IntArray
from isobatch.engine.simulator.evaluate import Memory, SimulatedStep
from isobatch.engine.simulator.schedule import PassKind
from isobatch.engine.simulator.simulate import Timeline, critical_path, transfers

GIB = 2**30
KIND_NAMES = {
    PassKind.FORWARD: "forward",
    PassKind.BACKWARD: "backward",
    PassKind.INPUT_GRAD: "input gradient",
    PassKind.WEIGHT_GRAD: "weight gradient",
    PassKind.ENCODE: "encode ahead",
}
_RECOMPUTING = (PassKind.BACKWARD, PassKind.INPUT_GRAD)
COMPUTE_ROW = 0
"""Row of a rank's own passes; sends to rank r are in row r + 1."""

Event = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceStep:
    """A simulated step, its title, and what of its backward passes is recomputation."""

    title: str
    simulated: SimulatedStep
    recompute_ns: IntArray | None = None
    """(stages, micro_batches), at the beginning of backward passes."""


def make_trace(timeline: Timeline, memory: Memory | None = None) -> dict[str, Any]:
    """The trace of a step, plain JSON; that of a measured one has no memory."""
    return _document(_events(timeline, memory, None))


def write_trace(steps: Sequence[TraceStep], path: Path) -> None:
    """Write the trace of some simulated steps: 4 MB per 16,384 operations."""
    events: list[Event] = []
    first = 0
    for step in steps:
        timeline = step.simulated.timeline
        for event in _events(timeline, step.simulated.memory, step.recompute_ns):
            if event["name"] == "process_name":
                event["args"] = {"name": f"{step.title}, {event['args']['name']}"}
            if event["name"] == "process_sort_index":
                event["args"] = {"sort_index": first + event["pid"]}
            if "id" in event:  # of an arrow
                event["id"] = f"{first}.{event['id']}"
            events.append({**event, "pid": first + event["pid"]})
        first += timeline.program.schedule.num_ranks
    path.write_text(json.dumps(_document(events), separators=(",", ":")), "utf-8")


def path_parts(step: TraceStep) -> dict[str, int]:
    """Parts of the critical path, in nanoseconds; they add up to the step."""
    timeline = step.simulated.timeline
    schedule = timeline.program.schedule
    path = critical_path(timeline)
    kinds, spent = schedule.kinds[path], (timeline.end_ns - timeline.start_ns)[path]
    parts = {name: int(spent[kinds == kind].sum()) for kind, name in KIND_NAMES.items()}
    if step.recompute_ns is not None:
        again = step.recompute_ns[schedule.stages[path], schedule.micro_batches[path]]
        for kind in _RECOMPUTING:
            parts[KIND_NAMES[kind]] -= int(again[kinds == kind].sum())
        parts["recomputation"] = int(again[np.isin(kinds, _RECOMPUTING)].sum())
    parts["sends"] = timeline.step_ns - int(spent.sum())
    return parts


def _document(events: list[Event]) -> dict[str, Any]:
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _events(
    timeline: Timeline, memory: Memory | None, recompute_ns: IntArray | None
) -> list[Event]:
    events = [*_rows(timeline), *_passes(timeline), *_sends(timeline)]
    if recompute_ns is not None:
        events += _recomputations(timeline, recompute_ns)
    return events if memory is None else [*events, *_memory(timeline, memory)]


def _rows(timeline: Timeline) -> Iterator[Event]:
    schedule = timeline.program.schedule
    sent = transfers(timeline)
    ranks = schedule.ranks
    links = np.stack([ranks[sent.sources], ranks[sent.targets]], axis=1)[sent.crosses]
    for rank in range(schedule.num_ranks):
        yield _meta("process_name", rank, COMPUTE_ROW, name=f"rank {rank}")
        yield _meta("process_sort_index", rank, COMPUTE_ROW, sort_index=rank)
        yield _meta("thread_name", rank, COMPUTE_ROW, name="compute")
    for rank, receiver in np.unique(links, axis=0).tolist():
        yield _meta("thread_name", rank, receiver + 1, name=f"send to rank {receiver}")


def _meta(what: str, rank: int, row: int, **arguments: Any) -> Event:
    return {"ph": "M", "name": what, "pid": rank, "tid": row, "args": arguments}


def _passes(timeline: Timeline) -> Iterator[Event]:
    schedule = timeline.program.schedule
    on_path = set(critical_path(timeline))
    for index, rank in enumerate(schedule.ranks.tolist()):
        kind, stage, micro_batch = schedule.action(index)
        start, end = timeline.start_ns[index], timeline.end_ns[index]
        yield {
            "ph": "X",
            "name": f"{KIND_NAMES[kind]} {micro_batch}",
            "cat": "compute",
            "pid": rank,
            "tid": COMPUTE_ROW,
            "ts": _us(start),
            "dur": _us(end - start),
            "args": {"stage": stage, "micro_batch": micro_batch, "critical": index in on_path},
        }


def _recomputations(timeline: Timeline, recompute_ns: IntArray) -> Iterator[Event]:
    """Recomputation, drawn inside the passes that it begins."""
    schedule = timeline.program.schedule
    for index in np.flatnonzero(np.isin(schedule.kinds, _RECOMPUTING)).tolist():
        _, stage, micro_batch = schedule.action(index)
        if again := int(recompute_ns[stage, micro_batch]):
            yield {
                "ph": "X",
                "name": "recomputation",
                "cat": "recompute",
                "pid": int(schedule.ranks[index]),
                "tid": COMPUTE_ROW,
                "ts": _us(timeline.start_ns[index]),
                "dur": again / 1000,
            }


def _sends(timeline: Timeline) -> Iterator[Event]:
    """Sends between ranks, each with an arrow to the pass that waits for it."""
    schedule = timeline.program.schedule
    sent = transfers(timeline)
    ranks = schedule.ranks.tolist()
    for edge in np.flatnonzero(sent.crosses & (sent.end_ns > sent.start_ns)).tolist():
        source, target = int(sent.sources[edge]), int(sent.targets[edge])
        start, end = sent.start_ns[edge], sent.end_ns[edge]
        row = {"cat": "send", "pid": ranks[source], "tid": ranks[target] + 1, "ts": _us(start)}
        action = schedule.action(source)
        what = "gradient" if action.kind in (PassKind.BACKWARD, PassKind.INPUT_GRAD) else "output"
        name = f"{what} {action.micro_batch}"
        arguments = {"stage": action.stage, "micro_batch": action.micro_batch}
        yield {"ph": "X", "name": name, "dur": _us(end - start), "args": arguments, **row}
        yield {"ph": "s", "name": name, "id": edge, **row}
        arrival = {"pid": ranks[target], "tid": COMPUTE_ROW, "ts": _us(timeline.start_ns[target])}
        yield {"ph": "f", "bp": "e", "name": name, "cat": "send", "id": edge, **arrival}


def _memory(timeline: Timeline, memory: Memory) -> Iterator[Event]:
    for index, rank in enumerate(timeline.program.schedule.ranks.tolist()):
        yield _counter(rank, timeline.start_ns[index], memory.during_bytes[index])
        yield _counter(rank, timeline.end_ns[index], memory.after_bytes[index])


def _counter(rank: int, when_ns: np.int64, value_bytes: np.int64) -> Event:
    row = {"pid": rank, "tid": COMPUTE_ROW, "ts": _us(when_ns)}
    return {"ph": "C", "name": "memory", **row, "args": {"GiB": int(value_bytes) / GIB}}


def _us(time_ns: np.int64) -> float:
    return int(time_ns) / 1000
