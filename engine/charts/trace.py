"""Traces of steps as JSON, for ui.perfetto.dev and chrome://tracing.

A process per rank with a row of passes, a row of sends per receiver, and a counter of memory. Times
are microseconds, with the simulator's nanoseconds as decimals.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

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
COMPUTE_ROW = 0
"""Row of a rank's own passes; sends to rank r are in row r + 1."""

Event = dict[str, Any]


def make_trace(timeline: Timeline, memory: Memory | None = None) -> dict[str, Any]:
    """The trace of a step, plain JSON; that of a measured one has no memory."""
    events = [*_rows(timeline), *_passes(timeline), *_sends(timeline)]
    events += [] if memory is None else _memory(timeline, memory)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_trace(simulated: SimulatedStep, path: Path) -> None:
    """Write the trace of a simulated step: 4 MB per 16,384 operations."""
    trace = make_trace(simulated.timeline, simulated.memory)
    path.write_text(json.dumps(trace, separators=(",", ":")), "utf-8")


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


def _sends(timeline: Timeline) -> Iterator[Event]:
    """Sends between ranks, each with an arrow to the pass that waits for it."""
    schedule = timeline.program.schedule
    sent, ranks = transfers(timeline), schedule.ranks.tolist()
    for edge in np.flatnonzero(sent.crosses & (sent.end_ns > sent.start_ns)).tolist():
        source, target = int(sent.sources[edge]), int(sent.targets[edge])
        start, end = sent.start_ns[edge], sent.end_ns[edge]
        row = {"cat": "send", "pid": ranks[source], "tid": ranks[target] + 1, "ts": _us(start)}
        made = schedule.action(source)
        what = "gradient" if made.kind in (PassKind.BACKWARD, PassKind.INPUT_GRAD) else "output"
        name = f"{what} {made.micro_batch}"
        arguments = {"stage": made.stage, "micro_batch": made.micro_batch}
        yield {"ph": "X", "name": name, "dur": _us(end - start), "args": arguments, **row}
        yield {"ph": "s", "name": name, "id": edge, **row}
        arrival = {"pid": ranks[target], "tid": COMPUTE_ROW, "ts": _us(timeline.start_ns[target])}
        yield {"ph": "f", "bp": "e", "name": name, "cat": "send", "id": edge, **arrival}


def _memory(timeline: Timeline, memory: Memory) -> Iterator[Event]:
    schedule = timeline.program.schedule
    for index, rank in enumerate(schedule.ranks.tolist()):
        yield _counter(rank, timeline.start_ns[index], memory.during_bytes[index])
        yield _counter(rank, timeline.end_ns[index], memory.after_bytes[index])


def _counter(rank: int, when_ns: np.int64, value_bytes: np.int64) -> Event:
    row = {"pid": rank, "tid": COMPUTE_ROW, "ts": _us(when_ns)}
    return {"ph": "C", "name": "memory", **row, "args": {"GiB": int(value_bytes) / GIB}}


def _us(time_ns: np.int64) -> float:
    return int(time_ns) / 1000
