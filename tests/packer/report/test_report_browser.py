"""The pages in a real browser: whole, quiet, without network, and laid out so that a person can
read them.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from isobatch.models.presets import load_model
from isobatch.packer.build import Builder
from isobatch.packer.config import BuildConfig
from isobatch.packer.inspect.html import write_group_html
from isobatch.packer.inspect.view import inspect_group
from isobatch.packer.progress import StageProgress
from isobatch.packer.report.figures import make_report
from isobatch.packer.report.gpu_hours import GpuQuestion, PackedEpoch, predict_hours
from isobatch.packer.report.html import write_comparison, write_html
from isobatch.shards.tables import GROUPS_NAME, read_groups, read_table
from support.browser import find_browser, open_browser
from support.builds.raw_data import good_records, options, record, write_dataset, write_image
from support.builds.report_data import make_counts, write_build

PROGRAM = find_browser()
pytestmark = pytest.mark.skipif(
    PROGRAM is None,
    reason="no headless Chromium: run scripts/get_browser.py, put one in PATH, or name one in"
    " ISOBATCH_BROWSER",
)
MODES = {"light": False, "dark": True}
EDGE = 1.0
"""CSS pixels that neighbours may share."""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with open_browser(PROGRAM, tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture(scope="module")
def report_page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    write_build(
        folder, make_counts(4_000), rejected={"missing_image": 12, "corrupt_image": 3}, sources=3
    )
    report = make_report(folder, dp=4)
    question = GpuQuestion(gpu="h100", num_gpus=64, price=2.5)
    counts = make_counts(4_000)
    epoch = PackedEpoch(
        counts=counts,
        groups=read_groups(read_table(folder / GROUPS_NAME)),
        limits=report.limits,
        dp=4,
        seed=0,
        num_packed=1_000_000,
    )
    hours = predict_hours(question, load_model("internvl_1_5"), epoch)
    unread = {"a long path/" * 9: {"key" * 40: (3, '"' + "value " * 40 + '"')}}
    report = replace(report, gpu_hours=hours, never_read=unread)
    write_html(report, folder / "report.html")
    places = ["s3://bucket/" + "folder" * 30, "packed"]
    write_comparison([report, report], places, folder / "comparison.html")
    return folder / "report.html"


@pytest.fixture(scope="module")
def group_page(tmp_path_factory):
    """A group with long and hostile text, many images, and one that cannot be decoded."""
    folder = tmp_path_factory.mktemp("group")
    rows = good_records(folder / "raw", 12)
    write_image(folder / "raw" / "images" / "wide.png", 900, 40, 1)
    Image.fromarray(np.zeros((40, 80, 3), np.uint8)).save(folder / "raw" / "images" / "broken.bmp")
    text = "</div><script>throw 1</script> " + "word" * 100
    rows.append(record(99, ["images/wide.png", "images/broken.bmp"], text=text))
    rows.append(
        record(98, text="long " * 600)
    )  # so that the cap leaves the others room for company
    dataset = write_dataset(folder / "raw", rows)
    config = BuildConfig(**options(dataset, folder / "out", format="refs"))
    num_groups = Builder(config, StageProgress(Console(quiet=True))).build().totals["num_groups"]
    (dataset / "images" / "broken.bmp").write_bytes(b"BM damaged")
    views = [
        inspect_group(folder / "out", group, tokenizer=config.tokenizer)
        for group in range(num_groups)
    ]
    view = next(view for view in views if "s99" in [sample.sample_id for sample in view.samples])
    write_group_html(view, folder / "group.html")
    return folder / "group.html"


def overlapping(boxes):
    """Pairs of texts whose boxes share more than an edge."""
    boxes = [
        box
        for box in boxes
        if box["text"] and box["right"] > box["left"] and box["bottom"] > box["top"]
    ]
    return [
        (one["text"], other["text"])
        for number, one in enumerate(boxes)
        for other in boxes[number + 1 :]
        if min(one["right"], other["right"]) - max(one["left"], other["left"]) > EDGE
        and min(one["bottom"], other["bottom"]) - max(one["top"], other["top"]) > EDGE
    ]


def outside(box, frame):
    return (
        box["left"] < frame["left"] - EDGE
        or box["right"] > frame["right"] + EDGE
        or box["top"] < frame["top"] - EDGE
        or box["bottom"] > frame["bottom"] + EDGE
    )


def look(browser, path: Path, width: int, mode: str, tmp_path: Path):
    """Open a page, check what holds for every page, and -> what it shows."""
    browser.open(path, width=width, dark=MODES[mode])
    shown = browser.measure()
    assert browser.complaints() == []
    assert browser.requests() == [path.resolve().as_uri()], (
        "the page needs something from elsewhere"
    )
    assert shown["page_width"] <= width, "the page is wider than the window"
    assert [block["text"] for block in shown["blocks"] if block["clipped"]] == []
    assert overlapping(shown["blocks"]) == []
    browser.screenshot(tmp_path / "page.png")
    with Image.open(tmp_path / "page.png") as taken:
        assert taken.width == width
        darkest, brightest = taken.convert("L").getextrema()
        corner = taken.convert("L").getpixel((2, 2))
    assert brightest - darkest > 150, "nothing to see"
    assert corner < 60 if MODES[mode] else corner > 240
    return shown


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("width", [420, 900, 1440])
def test_the_report_is_readable(browser, report_page, width, mode, tmp_path):
    shown = look(browser, report_page, width, mode, tmp_path)
    # what matters of each table is there without scrolling to the side
    headings = {"".join(block["text"].split()): block for block in shown["blocks"]}
    for column in ("distViT", "distLLM", "GPUhours", "cost", "timewaiting", "why,andthefirst"):
        assert 0 <= headings[column]["left"] < headings[column]["right"] <= width, column
    assert (
        len(shown["charts"]) == 10
    )  # before and after, of both loads: ranks; and samples too: distributions
    for chart in shown["charts"]:
        name = chart["text"]
        assert chart["right"] - chart["left"] > 300, name
        assert chart["bottom"] - chart["top"] > 80, name
        assert len(chart["texts"]) > 4, name
        assert overlapping(chart["texts"]) == [], name
        assert [text["text"] for text in chart["texts"] if outside(text, chart)] == [], name
        drawn = [
            s for s in chart["shapes"] if s["right"] - s["left"] > 5 and s["bottom"] - s["top"] > 10
        ]
        assert drawn, f"{name}: no bars"
        assert [s for s in chart["shapes"] if outside(s, chart)] == [], name


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("width", [420, 900, 1440])
def test_two_builds_are_next_to_each_other(browser, report_page, width, mode, tmp_path):
    shown = look(browser, report_page.parent / "comparison.html", width, mode, tmp_path)
    columns = [block for block in shown["blocks"] if block["text"] in ("A", "B")]
    assert len(columns) == 2
    assert all(0 <= block["left"] < block["right"] <= width for block in columns)


def test_a_page_prints_black_on_white_and_whole(browser, report_page):
    browser.open(report_page, width=794, dark=True)
    dark = [{"name": "prefers-color-scheme", "value": "dark"}]
    browser.call("Emulation.setEmulatedMedia", media="print", features=dark)
    shown = browser.measure()
    browser.call("Emulation.setEmulatedMedia", media="screen", features=dark)
    assert shown["background"] == "rgb(255, 255, 255)"
    assert shown["page_width"] <= 794
    # nothing can be scrolled on paper
    assert [b["text"] for b in shown["blocks"] if b["right"] > 794 + EDGE] == []


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("width", [420, 900, 1440])
def test_the_page_of_a_group_is_readable(browser, group_page, width, mode, tmp_path):
    shown = look(browser, group_page, width, mode, tmp_path)
    pictures = shown["images"]
    assert len(pictures) > 2
    for picture in pictures:
        sides = picture["right"] - picture["left"], picture["bottom"] - picture["top"]
        assert picture["natural"] == sides[0], "scaled or not shown"
        assert 1 <= min(sides) <= max(sides) <= 160
    texts = " ".join(block["text"] for block in shown["blocks"])
    assert "no picture" in texts
    assert "sample" in texts


def test_a_bad_page_is_seen_to_be_bad(browser, tmp_path):
    page = tmp_path / "bad.html"
    page.write_text(
        '<body><svg width="200" height="50"><text x="9" y="20">one thing</text>'
        '<text x="20" y="22">another</text></svg><p style="width:1500px">wide</p>'
        '<img src="elsewhere.png"><script>console.log(1); throw Error("x")</script>'
    )
    browser.open(page)
    shown = browser.measure()
    assert overlapping(shown["charts"][0]["texts"]) == [("one thing", "another")]
    assert shown["page_width"] > 1000
    methods = {event["method"] for event in browser.complaints()}
    assert methods >= {
        "Runtime.consoleAPICalled",
        "Runtime.exceptionThrown",
        "Network.loadingFailed",
    }
    assert len(browser.requests()) == 2
