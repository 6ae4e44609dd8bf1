"""Traces: every pass and every send is there, nothing overlaps in a row, and memory peaks where it
does.
"""

import json
from collections import defaultdict
from itertools import pairwise

import numpy as np
import pytest

from isobatch.engine.charts.trace import GIB, TraceStep, make_trace, path_parts, write_trace
from isobatch.engine.simulator.evaluate import evaluate
from isobatch.engine.simulator.schedule import SCHEDULES, PassKind
from isobatch.engine.simulator.simulate import critical_path
from support.costs.chart_steps import chart_step
from support.costs.random_costs import schedule_for
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


def written(steps, tmp_path):
    write_trace(steps, tmp_path / "trace.json")
    return json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_a_written_trace_is_the_made_one_under_the_steps_title(outcome, tmp_path):
    events = written([TraceStep(title="A step", simulated=outcome)], tmp_path)
    made = make_trace(outcome.timeline, outcome.memory)["traceEvents"]
    assert len(events) == len(made)
    for event, own in zip(events, made, strict=True):
        expected = {**own, "id": 0}
        if own["name"] == "process_name":
            expected["args"] = {"name": f"A step, {own['args']['name']}"}
        assert {**event, "id": 0} == expected


def test_steps_have_processes_and_arrows_of_their_own_on_one_scale(tmp_path):
    short, long = chart_step("1f1b", 2, 3, num_layers=8), chart_step("1f1b", 3, 9, num_layers=9)
    events = written([short, long], tmp_path)
    passes = [event for event in events if event.get("cat") == "compute"]
    ends = [
        max(round((e["ts"] + e["dur"]) * 1000) for e in passes if e["pid"] in ranks)
        for ranks in (range(2), range(2, 5))
    ]
    assert ends == [short.simulated.step_ns, long.simulated.step_ns]
    order = [event for event in events if event["name"] == "process_sort_index"]
    assert [(event["pid"], event["args"]["sort_index"]) for event in order] == [
        (number, number) for number in range(5)
    ]
    arrows = [event["id"] for event in events if event["ph"] == "s"]
    assert len(arrows) == len(set(arrows)) > 0


@pytest.mark.parametrize("name", SCHEDULES)
def test_recomputation_begins_its_backward_pass(name, tmp_path):
    step = chart_step(name, 4, 6, 2 if name == "interleaved" else 1, num_layers=16)
    timeline, schedule = step.simulated.timeline, step.simulated.timeline.program.schedule
    goes_back = np.isin(schedule.kinds, (PassKind.BACKWARD, PassKind.INPUT_GRAD))
    spent = np.where(goes_back, step.recompute_ns[schedule.stages, schedule.micro_batches], 0)
    again = [e for e in written([step], tmp_path) if e.get("cat") == "recompute"]
    assert len(again) == (spent > 0).sum() > 0
    starts = timeline.start_ns[spent > 0].tolist()
    assert [round(event["ts"] * 1000) for event in again] == starts
    assert [round(event["dur"] * 1000) for event in again] == spent[spent > 0].tolist()
    assert [event["pid"] for event in again] == schedule.ranks[spent > 0].tolist()


@pytest.mark.parametrize("name", SCHEDULES)
def test_parts_of_the_critical_path_add_up_to_the_step(name):
    step = chart_step(name, 4, 6, 2 if name == "interleaved" else 1, num_layers=16)
    parts = path_parts(step)
    assert sum(parts.values()) == step.simulated.step_ns
    assert min(parts.values()) >= 0
    plain = TraceStep(title="", simulated=step.simulated)
    assert "recomputation" not in path_parts(plain)
    goes_back = parts["backward"] + parts["input gradient"] + parts["recomputation"]
    assert path_parts(plain)["backward"] + path_parts(plain)["input gradient"] == goes_back
