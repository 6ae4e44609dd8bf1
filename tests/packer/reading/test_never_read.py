"""Keys that nothing reads are named by builds, reports, and loaders without a build."""

import io
import json

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from isobatch.loaders import BalancedLoader
from isobatch.packer.build import Builder
from isobatch.packer.config import BuildConfig
from isobatch.packer.demo.dataset import demo_tokenizer_path
from isobatch.packer.report.figures import make_report
from isobatch.packer.report.html import render_html
from isobatch.packer.report.terminal import print_build, print_report
from isobatch.shards.manifest import read_manifest
from support.builds.packed import digests, quiet
from support.builds.raw_data import options, record, write_dataset

NUM = 60
MODEL = {"model": "tiny", "tokenizer": str(demo_tokenizer_path()), "max_tokens": 512, "workers": 0}
LINE = (
    'never read: options (40 records, e.g. ["A", "B"]), conversations[].score (6 records, e.g. 1.5)'
)


def rows():
    made = []
    for number in range(NUM):
        row = record(number, answer="word " * (1 + number % 9))
        row |= {"url": "x", "note": "", "options": ["A", "B"]} if number % 3 else {"kept": number}
        if number % 10 == 0:
            row["conversations"][1]["score"] = 1.5
        made.append(row)
    made.append({"id": "bad", "level": "of a record that is rejected"})
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("unread") / "raw", rows())


def packed(folder, out, **changes):
    given = {"keep_columns": ("kept",), "max_seq_len": 512, "max_rejected": 0.5, "chunk_records": 7}
    config = BuildConfig(**options(folder, out, **given | changes))
    return Builder(config, quiet()).build()


EXPECTED = {"options": [40, '["A", "B"]'], "conversations[].score": [6, "1.5"]}


def printed(show, *args):
    console = Console(file=io.StringIO(), width=200)
    show(*args, console)
    return console.file.getvalue()


def test_summary_manifest_and_report_name_them(folder, tmp_path):
    summary = packed(folder, tmp_path / "out")
    (found,) = read_manifest(tmp_path / "out").values["never_read"].values()
    assert dict(found) == EXPECTED
    report = make_report(tmp_path / "out")
    assert LINE in printed(print_build, summary, report)
    assert LINE in printed(print_report, report)
    assert json.loads(json.dumps(report.to_json()))["never_read"]
    assert "conversations[].score" in render_html(report)


def test_builds_without_such_keys_say_nothing(tmp_path):
    folder = write_dataset(tmp_path / "raw", [record(number) for number in range(NUM)])
    summary = packed(folder, tmp_path / "out", keep_columns=())
    assert "never_read" not in read_manifest(tmp_path / "out").values
    report = make_report(tmp_path / "out")
    assert "never read" not in printed(print_build, summary, report).lower()
    assert "Never read" not in render_html(report)


def test_they_do_not_depend_on_chunks_or_processes(folder, tmp_path):
    packed(folder, tmp_path / "one")
    packed(folder, tmp_path / "two", workers=2, chunk_records=7)
    assert digests(tmp_path / "one") == digests(tmp_path / "two")
    packed(folder, tmp_path / "three", chunk_records=1024)
    (found,) = read_manifest(tmp_path / "three").values["never_read"].values()
    assert dict(found) == EXPECTED


@pytest.mark.parametrize("in_memory", [True, False])
def test_a_loader_without_a_build_says_it_once_and_reports_it(
    folder, tmp_path, monkeypatch, capfd, in_memory
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    data = rows() if in_memory else str(folder)
    loader = BalancedLoader(
        data, **MODEL, keep_columns=("kept",), max_rejected=0.5, dp_rank=0, dp_world_size=1
    )
    for _ in range(2):
        assert sum(batch.num_samples for step in loader for batch in step) == NUM
    assert capfd.readouterr().err.count(LINE) == 1
    (found,) = loader.report()["never_read"].values()
    assert {path: list(each) for path, each in found.items()} == EXPECTED
    loader.write_report(tmp_path / "page.html")
    assert "conversations[].score" in (tmp_path / "page.html").read_text()
    loader.save_build(tmp_path / "saved")
    (saved,) = read_manifest(tmp_path / "saved").values["never_read"].values()
    assert dict(saved) == EXPECTED
    loader.close()


@pytest.mark.parametrize("layout", ["parquet", "saved"])
def test_columns_that_records_come_without_are_named(tmp_path, monkeypatch, capfd, layout):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    columns = {"kept": list(range(NUM)), "level": [None, "hard"] * (NUM // 2)}
    rows = [record(number) for number in range(NUM)]
    table = {key: [row[key] for row in rows] for key in rows[0]}
    given = {**table, **columns, "empty": [""] * NUM, "split": ["train"] * NUM}
    folder = tmp_path / "raw"
    if layout == "saved":
        datasets.Dataset.from_dict(given).save_to_disk(folder)
    else:
        folder.mkdir()
        pq.write_table(pa.table(given), folder / "a.parquet")
    summary = packed(folder, tmp_path / "out")
    (found,) = read_manifest(tmp_path / "out").values["never_read"].values()
    assert dict(found) == {"level": [None, '"hard"']}
    line = 'never read: level (a column, e.g. "hard")'
    assert line in printed(print_build, summary, make_report(tmp_path / "out"))
    assert "a column" in render_html(make_report(tmp_path / "out"))
    loader = BalancedLoader(
        str(folder), **MODEL, keep_columns=("kept",), dp_rank=0, dp_world_size=1
    )
    next(iter(loader))
    assert line in capfd.readouterr().err
    loader.close()
