"""Traces: every pass and every send is there, nothing overlaps in a row, and memory peaks where it
does.
"""

import json
from collections import defaultdict
from itertools import pairwise

import numpy as np
import pytest

from isobatch.engine.charts.trace import GIB, make_trace, write_trace
from isobatch.engine.simulator.evaluate import evaluate, schedule_for
from isobatch.engine.simulator.schedule import SCHEDULES
from isobatch.engine.simulator.simulate import critical_path
from support.costs.random_steps import random_costs


@pytest.fixture(params=SCHEDULES)
def outcome(request):
    rng = np.random.default_rng(3)
    costs, borders = random_costs(rng, 12, 7, most=10**9), np.array([0, 2, 3, 5, 9, 11, 12])
    schedule = schedule_for(request.param, borders, 7, 2 if request.param == "interleaved" else 1)
    return evaluate(costs, borders, rng.random(12) < 0.5, schedule)


def events_of(outcome, phase):
    return [
        event
        for event in make_trace(outcome.timeline, outcome.memory)["traceEvents"]
        if event["ph"] == phase
    ]


def test_every_pass_is_in_its_ranks_row_to_the_nanosecond(outcome):
    timeline, schedule = outcome.timeline, outcome.timeline.program.schedule
    passes = [event for event in events_of(outcome, "X") if event["cat"] == "compute"]
    assert [round(event["ts"] * 1000) for event in passes] == timeline.start_ns.tolist()
    assert [
        round((event["ts"] + event["dur"]) * 1000) for event in passes
    ] == timeline.end_ns.tolist()
    assert [event["pid"] for event in passes] == schedule.ranks.tolist()
    assert [event["args"]["stage"] for event in passes] == schedule.stages.tolist()
    critical = [place for place, event in enumerate(passes) if event["args"]["critical"]]
    assert critical == sorted(critical_path(timeline))


def test_nothing_overlaps_in_a_row(outcome):
    rows = defaultdict(list)
    for event in events_of(outcome, "X"):
        rows[event["pid"], event["tid"]].append(
            (round(event["ts"] * 1000), round(event["dur"] * 1000))
        )
    assert len(rows) > outcome.timeline.program.schedule.num_ranks  # sends too
    for row in rows.values():
        row.sort()
        for (start, takes), (following, _) in pairwise(row):
            assert start + takes <= following


def test_rows_have_names(outcome):
    named = {
        (event["pid"], event["tid"])
        for event in events_of(outcome, "M")
        if event["name"] == "thread_name"
    }
    assert named == {(event["pid"], event["tid"]) for event in events_of(outcome, "X")}


def test_arrows_lead_from_each_send_to_a_pass(outcome):
    starts, ends = events_of(outcome, "s"), events_of(outcome, "f")
    assert [event["id"] for event in starts] == [event["id"] for event in ends]
    assert len(starts) == sum(event["cat"] == "send" for event in events_of(outcome, "X")) > 0
    passes = {
        (event["pid"], event["ts"])
        for event in events_of(outcome, "X")
        if event["cat"] == "compute"
    }
    assert {(event["pid"], event["ts"]) for event in ends} <= passes


def test_the_counters_highest_values_are_the_peaks(outcome):
    most = defaultdict(float)
    for event in events_of(outcome, "C"):
        most[event["pid"]] = max(most[event["pid"]], event["args"]["GiB"])
    peaks = outcome.memory.peak_bytes / GIB
    assert [most[rank] for rank in range(len(peaks))] == pytest.approx(peaks.tolist())


def test_a_written_trace_is_the_made_one(outcome, tmp_path):
    write_trace(outcome, tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text()) == make_trace(
        outcome.timeline, outcome.memory
    )
