"""Kept columns of raw records, from every kind of source to micro-batches, whoever packs them."""

import dataclasses
import gzip
import io
import json
from datetime import date
from itertools import chain

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from rich.console import Console

from isobatch.common.errors import ConfigError
from isobatch.loaders import StreamingLoader
from isobatch.packer.build import Builder
from isobatch.packer.config import BuildConfig
from isobatch.packer.inspect.html import render_group
from isobatch.packer.inspect.terminal import print_group
from isobatch.packer.inspect.view import inspect_group
from isobatch.packer.progress import StageProgress
from isobatch.shards.manifest import read_manifest
from isobatch.shards.tables import REJECTED_NAME, read_table
from support.builds.layouts import write_saved, write_tar
from support.builds.raw_data import good_records, options, record, write_dataset
from support.loading import step_planners
from support.loading.step_planners import dispatch, repack

torch.set_num_threads(1)
NUM = 24
TYPES = {
    "weight": "double",
    "caption_id": "int64",
    "reviewed": "bool",
    "title": "string",
    "token_ids": "list<int64>",
    "box": "list<double>",
    "meta": "json",
    "tags": "json",
    "label": "json",
    "huge": "json",
}
"""Column -> its type, by the values of `extras_of`."""
ALL = ",".join(TYPES)


def extras_of(number):
    """Columns of a record, of which each sample lacks some."""
    values = {
        "weight": number if number % 2 else 1.5 + number / 3,
        "caption_id": 2**60 + number,
        "reviewed": number % 3 == 0,
        "title": f"Ünï {number}",
        "token_ids": list(range(number % 4)),
        "box": [1, 2.5, number] if number % 2 else [],
        "meta": json.loads("[" * 100 + "1" + "]" * 100) if number == 1 else {"score": [None]},
        "tags": ["a", str(number)],
        "label": number if number % 2 else str(number),
        "huge": 2**70 + number if number % 2 else number / 7,
    }
    return {
        name: value for place, (name, value) in enumerate(values.items()) if number % 11 != place
    }


def expected(number, names=TYPES):
    """What a micro-batch has of a record: numbers of a double column are floats."""
    values = {name: extras_of(number).get(name) for name in sorted(names)}
    if values.get("weight") is not None:
        values["weight"] = float(values["weight"])
    if values.get("box") is not None:
        values["box"] = [float(each) for each in values["box"]]
    return values


def build(folder, out, keep=ALL, console=None, **changes):
    config = options(folder, out, keep_columns=(keep,) if keep else (), **changes)
    console = console or Console(file=io.StringIO())
    return Builder(BuildConfig(**config), StageProgress(console)).build()


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    folder = tmp_path_factory.mktemp("raw")
    records = good_records(folder, NUM)
    rows = [extras_of(number) | row | {"unkept": 1} for number, row in enumerate(records)]
    return write_dataset(folder, rows)


@pytest.fixture(scope="module")
def builds(raw, tmp_path_factory):
    root = tmp_path_factory.mktemp("builds")
    caps = {"max_seq_len": 400, "max_vision": 12}
    for form in ("arrow", "webdataset", "refs"):
        build(raw, root / form, format=form, **caps)
    build(raw, root / "plain", keep="", **caps)
    return root


@pytest.fixture(autouse=True)
def _longest_sample(monkeypatch):
    monkeypatch.setattr(step_planners, "MAX_LEN", 400)


def load(place, rank=0, world=1, **given):
    return StreamingLoader(place, dp_rank=rank, dp_world_size=world, images="encoded", **given)


def extras_in(step):
    """(sample, its extras) of each sample of a step's micro-batches and encoders' batches."""
    for batch in chain(step, *step.encoders.values()):
        for place, sample_id in enumerate(batch.sample_ids):
            yield sample_id, {name: values[place] for name, values in batch.extras.items()}


MODES = [
    {},
    {"regroup": "epoch", "regroup_window": 8},
    {"planner": repack},
    {"planner": dispatch, "micro_batches_per_step": 2},
]


def test_each_sample_has_the_values_of_its_record_in_every_format_and_mode(builds):
    for form in ("arrow", "webdataset", "refs"):
        assert read_manifest(builds / form).extras == TYPES
        for mode in MODES:
            steps = [step for rank in range(2) for step in load(builds / form, rank, 2, **mode)]
            found = dict(pair for step in steps for pair in extras_in(step))
            # as text, because 1 == 1.0 == True
            assert {one: repr(values) for one, values in found.items()} == {
                f"s{number}": repr(expected(number)) for number in range(NUM)
            }


def test_samples_of_a_build_without_a_column_have_none_and_empty_batches_no_value(builds, tmp_path):
    rows = [record(number) | {"reward": 0.5} for number in range(100, 130)]
    build(write_dataset(tmp_path / "raw", rows), tmp_path / "other", keep="reward", max_seq_len=60)
    datasets = [(builds / "arrow", 1.0), (builds / "plain", 1.0), (tmp_path / "other", 1.0)]
    for mode in ({}, {"planner": repack}):
        loaders = [load(datasets, rank, 3, micro_batches_per_step=20, **mode) for rank in range(3)]
        batches = [batch for loader in loaders for step in loader for batch in step]
        (names,) = {tuple(batch.extras) for batch in batches}
        assert sorted(names) == sorted([*TYPES, "reward"])
        assert mode or any(not batch.num_samples for batch in batches)
        for batch in batches:
            assert {len(values) for values in batch.extras.values()} == {batch.num_samples}
        rewards = [reward for batch in batches for reward in batch.extras["reward"]]
        weights = [weight for batch in batches for weight in batch.extras["weight"]]
        assert rewards.count(0.5) == 30
        assert rewards.count(None) == 2 * NUM
        assert len(weights) - weights.count(None) == sum(
            "weight" in extras_of(n) for n in range(NUM)
        )


def test_what_a_trainer_changes_is_its_own(builds):
    loader = load(builds / "arrow", regroup="epoch", regroup_window=8)
    for _ in range(2):
        for step in loader:
            for batch in step:
                for values in batch.extras["tags"]:
                    assert values is None or len(values) == 2
                    if values is not None:
                        values.append("mine")


def test_tensors_that_a_transform_makes_of_extras_are_moved(builds):
    def tensors(batch, rngs):
        weights = [1.0 if weight is None else weight for weight in batch.extras["weight"]]
        return dataclasses.replace(batch, extras={"weight": torch.tensor(weights), "title": ["x"]})

    for (batch,) in load(builds / "arrow", batch_transform=tensors, device="meta"):
        assert batch.extras["weight"].device.type == "meta"
        assert batch.extras["title"] == ["x"]


def test_chunks_do_not_change_the_build_and_no_column_leaves_no_trace(raw, builds, tmp_path):
    build(raw, tmp_path / "other", max_seq_len=400, max_vision=12, chunk_records=7)
    first, other = (read_manifest(place) for place in (builds / "arrow", tmp_path / "other"))
    assert first.hash == other.hash
    plain = read_manifest(builds / "plain").values
    assert "extras" not in plain
    assert "keep_columns" not in plain["config"]
    assert not next(iter(load(builds / "plain")))[0].extras
    again = build(raw, tmp_path / "other", max_seq_len=400, max_vision=12)
    assert again.already_complete


def test_a_column_that_no_record_has_is_named_with_those_that_exist(raw, tmp_path):
    shown = io.StringIO()
    console = Console(file=shown, width=1000)
    with pytest.raises(
        ConfigError, match=r"has a value in wieght, Tags; the .* box, caption_id, con"
    ):
        build(raw, tmp_path / "out", keep="wieght,Tags, weight,weight", console=console)
    assert "note: no 'wieght' (--keep-columns) in the first records, which have box, " in (
        shown.getvalue()
    )
    build(raw, tmp_path / "out", keep=" weight , tags ")  # the same folder is free for a right one
    assert read_manifest(tmp_path / "out").extras == {"weight": "double", "tags": "json"}


def test_values_that_are_no_json_reject_their_sample(tmp_path):
    texts = [{"id": str(n), "text": f"text {n}", "note": "x"} for n in range(9)]
    rows = [row | {"when": date(2026, 1, 1) if row["id"] < "2" else None} for row in texts]
    (tmp_path / "raw").mkdir()
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "raw" / "rows.parquet")
    (tmp_path / "raw" / "more.jsonl").write_text("")
    lines = [json.dumps(row | {"when": 1}) for row in texts]
    lines[2] = lines[2].replace('"x"', "[" * 102 + "]" * 102)
    lines[3] = lines[3].replace('"x"', '"\\ud800"')
    (tmp_path / "lines.jsonl").write_text("\n".join(lines))
    mixture = '[[datasets]]\ndataset = "raw/rows.parquet"\n[[datasets]]\ndataset = "lines.jsonl"\n'
    (tmp_path / "mix.toml").write_text(mixture)
    build(tmp_path / "mix.toml", tmp_path / "out", keep="when,note", max_rejected=0.5)
    lost = read_table(tmp_path / "out" / REJECTED_NAME).to_pylist()
    assert [(row["sample_id"], row["reason"]) for row in lost] == [
        ("0", "bad_column"),
        ("1", "bad_column"),
        ("2", "bad_column"),
        ("3", "invalid_utf8"),
    ]
    assert lost[0]["detail"] == "a kept column holds a date, which is not JSON"


def write_source(kind, folder, rows):
    """Records in a layout; -> the dataset to read."""
    folder.mkdir()
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet", row_group_size=4)
    elif kind == "save_to_disk":
        write_saved(folder, rows, schema=pa.Table.from_pylist(rows).schema)
    elif kind == "tar":
        members = [(f"{row['id']}.json", json.dumps(row).encode()) for row in rows]
        write_tar(folder / "rows.tar", members)
    elif kind == "jsonl.gz":
        lines = "\n".join(map(json.dumps, rows))
        (folder / "rows.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    else:
        lines = [f"{row['id']},text {row['id']},{row['weight']}" for row in rows]
        (folder / "rows.csv").write_text("\n".join(["id,text,weight", *lines]))
    return folder


@pytest.mark.parametrize("kind", ["parquet", "save_to_disk", "tar", "jsonl.gz", "csv"])
def test_every_kind_of_source_keeps_its_columns(kind, tmp_path):
    rows = [record(number) | {"weight": number / 4, "unkept": "x"} for number in range(12)]
    place = write_source(kind, tmp_path / "raw", rows)
    for limit in (None, 9):
        out = tmp_path / f"out-{limit}"
        build(place, out, keep="weight", limit=limit, chunk_records=4)
        found = dict(pair for step in load(out) for pair in extras_in(step))
        assert found == {f"s{number}": {"weight": number / 4} for number in range(limit or 12)}
    with pytest.raises(ConfigError, match=r"value in other; the records have .*, weight$"):
        build(place, tmp_path / "wrong", keep="other")


def test_inspect_shows_the_values_of_each_sample(builds):
    view = inspect_group(builds / "webdataset", 0)
    same = inspect_group(builds / "arrow", 0)
    assert [sample.extras for sample in view.samples] == [sample.extras for sample in same.samples]
    shown = io.StringIO()
    print_group(same, Console(file=shown, width=100))
    for sample in same.samples:
        assert sample.extras == expected(int(sample.sample_id[1:]))
        for text in (shown.getvalue(), render_group(same)):
            assert f"caption_id: {json.dumps(sample.extras['caption_id'])}" in text
    assert same.to_json()["samples"][0]["extras"] == same.samples[0].extras


def test_a_filter_by_a_kept_column_gets_one_line(builds):
    line = r"no column 'weight' \(kept columns are in the shards, not here\); they have position, "
    with pytest.raises(ConfigError, match=line):
        StreamingLoader(builds / "arrow", filter=lambda columns: columns["weight"])
