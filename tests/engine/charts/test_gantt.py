"""Gantt charts: a bar for every pass, and figures that are those of the simulation."""

import re
from xml.etree import ElementTree

import numpy as np
import pytest

from isobatch.engine.charts.gantt import (
    CHART_PX,
    ZOOMS,
    GanttStep,
    gantt_page,
    path_parts,
    write_gantt,
)
from isobatch.engine.simulator.schedule import SCHEDULES, PassKind
from isobatch.engine.simulator.simulate import transfers
from support.costs.chart_steps import chart_step

GIB = 2**30


@pytest.fixture(scope="module", params=SCHEDULES)
def step(request):
    return chart_step(
        request.param, 4, 6, 2 if request.param == "interleaved" else 1, num_layers=16
    )


def parsed(page):
    """The page's charts as an element tree: it must be well-formed."""
    svgs = re.findall(r'<svg class="zoomed".*?</svg>', page, re.DOTALL)
    return [ElementTree.fromstring(svg) for svg in svgs]


def rectangles(chart, *classes):
    return [r for r in chart.iter("rect") if r.get("class").split()[0] in classes]


def share(rectangle, name):
    return float(rectangle.get(name).rstrip("%")) / 100


def test_every_pass_is_a_bar_in_its_time(step):
    (chart,) = parsed(gantt_page([step], title="A step"))
    timeline = step.simulated.timeline
    bars = rectangles(chart, "forward", "backward", "input", "weight")
    assert len(bars) == len(timeline.program.schedule)
    longest = timeline.step_ns
    np.testing.assert_allclose(
        [share(bar, "x") for bar in bars], timeline.start_ns / longest, atol=1e-6
    )
    widths = (timeline.end_ns - timeline.start_ns) / longest
    np.testing.assert_allclose([share(bar, "width") for bar in bars], widths, atol=1e-6)
    tops = [int(bar.get("y")) for bar in bars]
    assert len(set(tops)) == timeline.program.schedule.num_ranks
    for place, bar in enumerate(bars):
        action = timeline.program.schedule.action(place)
        assert (
            f"of micro-batch {action.micro_batch}, stage {action.stage}:" in bar.find("title").text
        )


def test_recomputation_is_the_first_part_of_its_bar(step):
    (chart,) = parsed(gantt_page([step], title="A step"))
    timeline, schedule = step.simulated.timeline, step.simulated.timeline.program.schedule
    again = rectangles(chart, "again")
    goes_back = np.isin(schedule.kinds, (PassKind.BACKWARD, PassKind.INPUT_GRAD))
    spent = np.where(goes_back, step.recompute_ns[schedule.stages, schedule.micro_batches], 0)
    assert len(again) == (spent > 0).sum() > 0
    starts = timeline.start_ns[spent > 0] / timeline.step_ns
    np.testing.assert_allclose([share(part, "x") for part in again], starts, atol=1e-6)
    np.testing.assert_allclose(
        [share(part, "width") for part in again], spent[spent > 0] / timeline.step_ns, atol=1e-6
    )


def test_what_crosses_ranks_is_a_strip(step):
    (chart,) = parsed(gantt_page([step], title="A step"))
    assert len(rectangles(chart, "send")) == transfers(step.simulated.timeline).crosses.sum()


def test_numbers_stand_where_there_is_room(step):
    (chart,) = parsed(gantt_page([step], title="A step"))
    numbers = [text for text in chart.iter("text") if text.get("class").startswith("number")]
    assert len(numbers) == len(step.simulated.timeline.program.schedule)
    widths = {
        share(bar, "x") + share(bar, "width") / 2: share(bar, "width") for bar in chart.iter("rect")
    }
    for number in numbers:
        zoom = int(number.get("class").rpartition("n")[2])
        assert zoom in ZOOMS
        middle = share(number, "x")
        width = widths[min(widths, key=lambda other: abs(other - middle))]
        assert width * CHART_PX * zoom > 6 * len(number.text)


def test_parts_of_the_critical_path_add_up_to_the_step(step):
    parts = path_parts(step)
    assert sum(parts.values()) == step.simulated.step_ns
    assert min(parts.values()) >= 0
    plain = GanttStep(title="", text="", simulated=step.simulated)
    assert "recomputation" not in path_parts(plain)
    goes_back = parts["backward"] + parts["input gradient"] + parts["recomputation"]
    assert path_parts(plain)["backward"] + path_parts(plain)["input gradient"] == goes_back


def test_steps_share_one_scale():
    short, long = chart_step("1f1b", 2, 3, num_layers=8), chart_step("1f1b", 2, 9, num_layers=8)
    charts = parsed(gantt_page([short, long], title="Two"))
    ends = [
        max(share(bar, "x") + share(bar, "width") for bar in chart.iter("rect")) for chart in charts
    ]
    assert ends[1] == pytest.approx(1, abs=1e-5)
    assert ends[0] == pytest.approx(short.simulated.step_ns / long.simulated.step_ns, abs=1e-5)


def test_memory_beyond_what_a_gpu_has_is_marked(step):
    peaks = step.simulated.memory.peak_bytes
    page = gantt_page([step], title="A step", memory_bytes=int(peaks.max()) - 1)
    assert page.count("<i>") == (peaks == peaks.max()).sum()
    assert "<i>" not in gantt_page([step], title="A step", memory_bytes=int(peaks.max()))
    for peak in peaks:
        assert f"peak {peak / GIB:.1f} GiB" in page


def test_what_people_wrote_is_text_not_markup(tmp_path):
    step = chart_step("1f1b", 2, 2, num_layers=4)
    hostile = GanttStep(
        title="<script>1</script>",
        text="a < b",
        simulated=step.simulated,
        stage_names=['"><img src=x>', "b"],
    )
    write_gantt([hostile], tmp_path / "chart.html", title="<b>&")
    page = (tmp_path / "chart.html").read_text()
    assert "<script" not in page
    assert "<img" not in page
    assert "&lt;script&gt;" in page


def test_a_page_is_the_same_each_time(step):
    assert gantt_page([step], title="A step") == gantt_page([step], title="A step")
