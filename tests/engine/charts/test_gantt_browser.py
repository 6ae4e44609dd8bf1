"""The charts in a real browser: quiet, without network, every bar to be seen, and no text over
another.
"""

from itertools import pairwise

import pytest
from PIL import Image

from isobatch.engine.charts.gantt import write_gantt
from support.browser import find_browser, open_browser
from support.costs.chart_steps import chart_step

PROGRAM = find_browser()
pytestmark = pytest.mark.skipif(
    PROGRAM is None,
    reason="no headless Chromium: run scripts/get_browser.py, put one in PATH, or name one in"
    " ISOBATCH_BROWSER",
)
MODES = {"light": False, "dark": True}
EDGE = 1.0
"""CSS pixels that neighbours may share."""
MEASURE = """(() => {
  const box = (element) => { const r = element.getBoundingClientRect();
    return {text: element.textContent, name: element.getAttribute("class"),
      left: r.left, right: r.right, top: r.top, bottom: r.bottom}; };
  return {
    page_width: document.documentElement.scrollWidth,
    charts: [...document.querySelectorAll("svg.zoomed")].map((svg) => ({...box(svg),
      bars: [...svg.querySelectorAll("rect")].map(box),
      texts: [...svg.querySelectorAll("text")].map(box).filter((b) => b.right > b.left)})),
    names: [...document.querySelectorAll(
        ".names div, .card b, .card span, .legend span, .zooms label, h1, h2, p")]
      .map((element) => ({...box(element), clipped: element.scrollWidth > element.clientWidth + 1
        && element.clientWidth > 0})),
  };
})()"""
PASSES = ("forward", "backward", "input", "weight")


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with open_browser(PROGRAM, tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture(scope="module")
def steps():
    return [
        chart_step("1f1b", 4, 8),
        chart_step("zero_bubble", 4, 8),
        chart_step("interleaved", 4, 8, 2),
    ]


@pytest.fixture(scope="module")
def small_page(tmp_path_factory, steps):
    path = tmp_path_factory.mktemp("small") / "gantt.html"
    write_gantt(steps, path, title="Simulated steps", memory_bytes=40 * 2**30)
    return path


@pytest.fixture(scope="module")
def large_page(tmp_path_factory):
    path = tmp_path_factory.mktemp("large") / "gantt.html"
    write_gantt([chart_step("1f1b", 16, 256)], path, title="Large")
    return path


def evaluate(browser, expression):
    answer = browser.call("Runtime.evaluate", expression=expression, returnByValue=True)
    return answer["result"].get("value")


def passes(chart):
    return [bar for bar in chart["bars"] if bar["name"].split()[0] in PASSES]


def overlapping(boxes):
    """Pairs of boxes that share more than an edge."""
    boxes = sorted((box for box in boxes if box["text"].strip()), key=lambda box: box["left"])
    found = []
    for number, one in enumerate(boxes):
        for other in boxes[number + 1 :]:
            if other["left"] >= one["right"] - EDGE:
                break
            if min(one["bottom"], other["bottom"]) - max(one["top"], other["top"]) > EDGE:
                found.append((one["text"], other["text"]))
    return found


def look(browser, path, width, *, dark=False):
    """Open a page, check what holds for every page, and -> what it shows."""
    browser.open(path, width=width, dark=dark)
    shown = evaluate(browser, MEASURE)
    assert browser.complaints() == []
    assert browser.requests() == [path.resolve().as_uri()], (
        "the page needs something from elsewhere"
    )
    assert shown["page_width"] <= width, "the page is wider than the window"
    return shown


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("width", [420, 1300])
def test_charts_are_readable(browser, small_page, steps, width, mode, tmp_path):
    shown = look(browser, small_page, width, dark=MODES[mode])
    assert [name["text"] for name in shown["names"] if name["clipped"]] == []
    for chart, step in zip(shown["charts"], steps, strict=True):
        assert chart["right"] - chart["left"] >= 900
        assert len(passes(chart)) == len(step.simulated.timeline.program.schedule)
        assert min(bar["right"] - bar["left"] for bar in passes(chart)) > 5
        assert {round(bar["bottom"] - bar["top"]) for bar in passes(chart)} == {21}
        assert overlapping(chart["texts"]) == []
        assert len(chart["texts"]) > 20
        for box in (*chart["bars"], *chart["texts"]):
            assert chart["left"] - EDGE <= box["left"] <= box["right"] <= chart["right"] + EDGE
            assert chart["top"] <= box["top"] <= box["bottom"] <= chart["bottom"]
    browser.screenshot(tmp_path / "page.png")
    with Image.open(tmp_path / "page.png") as taken:
        corner = taken.convert("L").getpixel((2, 2))
        colours = {
            colour for count, colour in taken.convert("RGB").getcolors(1 << 24) if count > 200
        }
    assert corner < 60 if MODES[mode] else corner > 240
    wanted = {
        "light": [(20, 119, 106), (180, 84, 26), (125, 53, 9)],
        "dark": [(61, 182, 164), (224, 138, 79), (185, 98, 42)],
    }
    assert colours >= set(wanted[mode]), (
        "forward, backward and recomputation are not all to be seen"
    )


def test_bars_of_a_rank_do_not_overlap(browser, small_page):
    for chart in look(browser, small_page, 1300)["charts"]:
        rows = {}
        for bar in passes(chart):
            rows.setdefault(bar["top"], []).append(bar)
        assert len(rows) == 4
        for row in rows.values():
            row.sort(key=lambda bar: bar["left"])
            assert all(one["right"] <= other["left"] + 0.1 for one, other in pairwise(row))


def test_a_large_step_is_readable_when_zoomed(browser, large_page):
    """Numbers appear as there is room, until each of 8,192 bars has one."""
    shown = look(browser, large_page, 1300)
    (chart,) = shown["charts"]
    assert len(passes(chart)) == 2 * 16 * 256
    zooms = evaluate(browser, "[...document.querySelectorAll('input.zoom')].map((i) => i.id)")
    assert len(zooms) > 2
    numbers, widths = [], []
    for zoom in zooms:
        evaluate(browser, f"document.getElementById('{zoom}').click()")
        (chart,) = evaluate(browser, MEASURE)["charts"]
        assert overlapping(chart["texts"]) == []
        inside = [text for text in chart["texts"] if text["name"].startswith("number")]
        numbers.append(len(inside))
        widths.append(chart["right"] - chart["left"])
        assert len(chart["texts"]) - len(inside) > 3, "no times on the axis"
    assert numbers == sorted(numbers)
    assert numbers[-1] == 2 * 16 * 256
    factors = [int(zoom.rpartition("-")[2]) for zoom in zooms]
    assert [width / widths[0] for width in widths] == pytest.approx(factors, rel=0.01)


def test_buttons_zoom_their_own_chart_only(browser, small_page):
    shown = look(browser, small_page, 1300)
    before = [chart["right"] - chart["left"] for chart in shown["charts"]]
    evaluate(browser, "document.getElementById('chart2-3').click()")
    after = [chart["right"] - chart["left"] for chart in evaluate(browser, MEASURE)["charts"]]
    assert [new / old for new, old in zip(after, before, strict=True)] == pytest.approx(
        [1, 1, 3], rel=0.01
    )
