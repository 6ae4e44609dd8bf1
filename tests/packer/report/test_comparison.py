"""Two builds in one table, what limits the fill, and foreign names on the report's pages."""

import io
import json
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from isobatch.common.types import Groups, Limits
from isobatch.packer.report.comparison import compare
from isobatch.packer.report.figures import make_report
from isobatch.packer.report.fill_limits import fill_lines, unused_tokens
from isobatch.packer.report.html import render_html, write_comparison
from isobatch.packer.report.terminal import print_comparison, print_report
from support.builds.command import run_packer
from support.builds.raw_data import good_records, options, write_dataset
from support.builds.report_data import make_counts, read_page, write_build
from support.cases import for_each

HOSTILE = '<script>alert(1)</script>"><img src=x onerror=alert(2)>\x1b[31m[bold]'


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    folder = tmp_path_factory.mktemp("builds")
    write_build(folder / "a", make_counts(900), rejected={"missing_image": 4}, sources=2)
    write_build(folder / "b", make_counts(500, images=False), rejected={"empty_image": 1})
    return [make_report(folder / name, dp=4) for name in "ab"]


def hostile(report):
    """The report as it would be of data in which everything has a hostile name."""
    return replace(
        report,
        sources={HOSTILE: next(iter(report.sources.values())), "ours": report.sources["set1"]},
        rejected={HOSTILE: 2},
        rejected_first={HOSTILE: HOSTILE},
        never_read={HOSTILE: {HOSTILE: (3, HOSTILE), "column": (None, "")}},
        limits_explained=(HOSTILE,),
        notes=(HOSTILE,),
        model=HOSTILE,
    )


def test_the_table_has_each_figure_source_reason_and_key_of_both(reports):
    first = replace(reports[0], never_read={"x": {"license": (7, "MIT"), "url": (None, "")}})
    table = compare([first, reports[1]])
    assert table.headings == ["A", "B"]
    assert table.rows["samples packed"] == ["900", "500"]
    assert table.rows["samples rejected"] == ["4", "1"]
    assert table.rows["rejected: missing_image"] == ["4", "-"]
    assert table.rows["rejected: empty_image"] == ["-", "1"]
    assert table.rows["source: set1"] == ["50.0%", "-"]
    assert table.rows["source: set0"] == ["50.0%", "100.0%"]
    assert table.rows["never read: license"] == ["7 records", "-"]
    assert table.rows["never read: url"] == ["a column", "-"]
    assert "GPU hours" not in table.rows
    assert table.rows["ViT waiting"][1] == "0%"
    text = io.StringIO()
    print_comparison(["one/a", "two/b"], table, Console(file=text, width=80))
    assert max(map(len, text.getvalue().splitlines())) <= 80
    assert "A  one/a" in text.getvalue()


def test_foreign_names_are_text_on_both_pages_and_in_the_terminal(reports, tmp_path):
    report = hostile(reports[0])
    write_comparison([report, report], [HOSTILE, "b"], tmp_path / "page.html")
    for source in (render_html(report), (tmp_path / "page.html").read_text("utf-8")):
        page = read_page(source)
        assert not {"script", "img", "iframe", "link"} & set(page.tags)
        assert not {"src", "onerror", "href"} & set(page.attributes)
        assert page.text.count("<script>alert(1)</script>") >= 3
        assert "\x1b" not in source
        assert "ours" in page.text, "a source of such a name is no method"
    text = io.StringIO()
    console = Console(file=text, width=400)
    print_report(report, console)
    print_comparison([HOSTILE, "b"], compare([report, report]), console)
    assert "\x1b" not in text.getvalue()
    assert text.getvalue().count("[bold]") >= 5


def test_unused_tokens_are_told_by_what_limits_each_group():
    limits = Limits(max_seq_len=10, max_vision=4, min_seq_len=9, min_vision=4)
    tokens = np.array([5, 1, 6, 4, 4, 3, 2])
    vision = np.array([2, 2, 0, 1, 0, 0, 0])
    # vision is full: 4 free; a sample alone: 4 free; another: 6 free ... each of 10
    groups = Groups(np.array([0, 1, 2, 3, 4, 5, 6]), np.array([0, 2, 3, 5, 7]))
    unused = unused_tokens(groups, tokens, vision, limits)
    assert unused == pytest.approx({"vision": 4 / 40, "alone": 4 / 40, "others": (2 + 5) / 40})
    assert sum(unused.values()) == pytest.approx(1 - tokens.sum() / 40)


LIMITS = Limits(max_seq_len=100, max_vision=40, min_seq_len=90, min_vision=36)
ADVICE = [
    ({"vision": 0.009, "alone": 0.0, "others": 0.001}, (50, 50), "nothing"),
    ({"vision": 0.20, "alone": 0.01, "others": 0.0}, (50, 75), "--max-vision 60 or more"),
    ({"vision": 0.20, "alone": 0.01, "others": 0.0}, (50, 20), "--max-vision 41 or more"),
    ({"vision": 0.01, "alone": 0.20, "others": 0.0}, (50, 50), "is alone: --max-seq-len 200"),
    ({"vision": 0.01, "alone": 0.0, "others": 0.2}, (50, 50), "short of choice: --max-seq-len 200"),
]


@for_each(("unused", "bounds", "words"), ADVICE)
def test_what_to_change_follows_from_what_limits(unused, bounds, words):
    said, advice = fill_lines(unused, dict(zip(("tokens", "vision"), bounds, strict=True)), LIMITS)
    assert words in advice
    for kind, share in unused.items():
        assert (kind == "alone" and not share) or share == 0 or f"{share:.2%}"[:3] in said


def test_the_fill_is_what_the_unused_parts_leave(reports):
    for report in reports:
        assert 1 - sum(report.unused.values()) == pytest.approx(report.fill)


def test_the_command_answers_for_one_build_or_two(capsys, monkeypatch, tmp_path):
    def run(*arguments):
        return run_packer(capsys, monkeypatch, *arguments)

    dataset = write_dataset(tmp_path / "raw", good_records(tmp_path / "raw", 30))
    values = {name: options(dataset, "")[name] for name in ("model", "tokenizer")}
    given = [f"--{name}={value}" for name, value in values.items()]
    places = [tmp_path / name for name in ("one", "two")]
    for place, cap in zip(places, (512, 1024), strict=True):
        arguments = ["--dataset", dataset, "--out", place, "--max-seq-len", cap, "--workers", 1]
        assert run("build", *given, *arguments)[0] == 0
    asked = ["--gpu", "h100", "--gpus", 2, "--price", 2]
    status, printed, _ = run("report", *places, *asked, "--html", tmp_path / "page.html")
    assert status == 0
    rows = {line[:23].strip(): line[23:].split() for line in printed.splitlines()}
    assert rows["cap: LLM tokens"] == ["512", "1,024"]
    assert {"GPU hours", "GPU hours saved", "cost of an epoch"} <= rows.keys()
    assert "What the GPU hours assume" in (tmp_path / "page.html").read_text("utf-8")
    status, printed, _ = run("report", *places, *asked, "--json")
    both = json.loads(printed)["builds"]
    assert [build["limits"]["max_seq_len"] for build in both] == [512, 1024]
    assert [build["dp_world_size"] for build in both] == [2, 2]
    status, printed, _ = run("report", places[0], *asked, "--html", tmp_path / "page.html")
    assert status == 0
    assert "predicted: Isobatch" in printed
    assert "assumed: one epoch of 30 samples" in printed
    assert "What this assumes" in (tmp_path / "page.html").read_text("utf-8")
    wrong = [
        ([*places, places[0]], "not 3"),
        ([places[0], "--gpus", 8], "add --gpu"),
        ([places[0], "--gpu", "h100", "--gpus", 6, "--dp", 4], "no multiple of --dp 4"),
        ([places[0], "--gpu", "h100", "--mfu", 2], "--mfu is 2"),
    ]
    for arguments, words in wrong:
        status, _, said = run("report", *arguments)
        assert (status, said.count("\n")) == (2, 1)
        assert words in said
    counts = places[0] / "counts.parquet"
    assert run("group", counts, "--out", tmp_path / "groups")[0] == 0
    status, _, said = run("report", tmp_path / "groups", "--gpu", "h100")
    assert status == 2
    assert "build with a --model" in said
