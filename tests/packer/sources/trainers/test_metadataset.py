"""Metadatasets of Energon: shares, subsets, files in other datasets, and what is refused.

Next to Energon's own reading they are in tests/support/frameworks/checks/energon_source_checks.py.
"""

import base64
import json
import re
import sqlite3
from pathlib import Path

import pytest
import yaml

from isobatch.common.errors import ConfigError, DataError
from isobatch.counting.records.media import Media
from isobatch.packer.sources.dataset import find_dataset
from support import ROOT
from support.builds.layouts import CRUDE, JPEG, pair, write_prepared

PAGE = ROOT / "docs" / "pack.md"
ALL = [f"{number}" for number in range(10)]


@pytest.fixture
def data(tmp_path):
    """Three prepared datasets of ten samples each in four shards, and JSON lines."""
    for name in ("a", "b", "c"):
        shards = {f"s{n}.tar": [pair(key) for key in ALL[3 * n : 3 * n + 3]] for n in range(4)}
        split = {"split_parts": {"train": ["s{0..3}.tar"], "val": ["s1.tar"]}}
        write_prepared(tmp_path / name, shards, about=CRUDE, split=split)
    rows = [{"id": key, "text": f"Text {key}."} for key in ALL]
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def write(folder, train, name="mix.yaml", **more):
    values = {"__module__": "megatron.energon", "__class__": "MetadatasetV2"}
    values |= {"splits": {"train": train}} | more
    (folder / name).write_text(yaml.safe_dump(values))
    return folder / name


def parts(place):
    return find_dataset(str(place), None).parts


def ids(part, chunk=2):
    chunks = part.open().chunks(chunk, lambda _: None)
    records = [record for chunk in chunks for record in chunk.records()]
    return [record.value.get("id", record.value.get("__key__")) for record in records]


def test_weights_are_shares_and_repetitions_are_repeats(data):
    inner = {"blend": [{"path": "b", "weight": 3}, {"path": "c"}]}
    write(data, inner, "inner.yaml")
    blend = [{"path": "a", "weight": 2}, {"path": "./inner.yaml", "weight": 1}]
    found = {part.name: part.weight for part in parts(write(data, {"blend": blend}))}
    assert found == pytest.approx({"a": 2 / 3, "b": 1 / 4, "c": 1 / 12})
    often = {"blend_epochized": [{"path": "b", "repetitions": 2.5}, {"path": "c"}]}
    write(data, often, "inner.yaml")
    often = [{"path": "a"}, {"path": "inner.yaml", "repetitions": 2}, {"path": "a"}]
    found = parts(write(data, {"blend_epochized": often}))
    repeats = {part.name: part.repeat for part in found}
    assert repeats == {"a": 1, "b": 5, "c": 2, "a-2": 1}
    assert {part.weight for part in found} == {None}


def test_shares_of_a_metadataset_in_another_mixture_are_not_lost(data):
    write(data, {"blend": [{"path": "b", "weight": 3}, {"path": "c"}]}, "inner.yaml")
    mixture = data / "all.toml"
    mixture.write_text('[[datasets]]\ndataset = "inner.yaml"\n[[datasets]]\ndataset = "a"\n')
    with pytest.raises(ConfigError, match=r"inner\.yaml is a mixture with weights.* of its own"):
        find_dataset(str(mixture), str(data))


def test_every_part_has_a_name_to_itself(data):
    (data / "a").rename(data / "lines")
    (data / "b").rename(data / "lines-2")
    paths = ["lines", "lines.jsonl", "lines.jsonl", "lines-2", "lines.jsonl"]
    found = parts(write(data, {"blend": [{"path": path} for path in paths]}))
    names = ["lines", "lines-4", "lines-2", "lines-2-2", "lines-3"]
    assert [part.name for part in found] == names


def test_splits_are_those_that_are_asked_for(data):
    (part,) = parts(write(data, {"path": "a"}))
    assert ids(part) == ALL
    splits = {"train": {"path": "a"}, "val": {"path": "b"}, "other": {"path": "a"}}
    splits["other"]["split_part"] = "val"
    place = write(data, {}, splits=splits)
    assert ids(parts(f"{place}@val")[0]) == ALL[3:6]
    assert ids(parts(f"{place}@other")[0]) == ALL[3:6]
    with pytest.raises(ConfigError, match="has the splits other, train, val, and no 'best'"):
        parts(f"{place}@best")


@pytest.mark.parametrize(
    ("ranges", "expected"),
    [
        ([["20%", "70%"]], ALL[2:7]),
        ([[4, 8]], ALL[4:8]),
        ([[4, "end"]], ALL[4:]),
        ([["50%", "100%"], ["20%", "80%"]], ALL[5:8]),
        ([["0%", "50%"], [2, 8]], ALL[2:5]),
        ([["0%", "0%"]], []),
    ],
)
@pytest.mark.parametrize("path", ["a", "lines.jsonl"])
def test_a_subset_is_a_stretch_of_the_samples(data, path, ranges, expected):
    *outer, own = ranges
    blend = {"blend": [{"path": path, "subset": {"range": own}}]}
    for limits in outer:
        blend["subset"] = {"range": limits}
    (part,) = parts(write(data, blend))
    for chunk in (1, 3, 100):
        assert ids(part, chunk) == expected


def index_of(folder, names):
    """The index that `energon prepare` writes, with one sample per member."""
    with sqlite3.connect(folder / ".nv-meta" / "index.sqlite") as index:
        index.execute(
            "CREATE TABLE samples (tar_file_id INTEGER, sample_key TEXT, sample_index INTEGER)"
        )
        index.execute(
            "CREATE TABLE sample_parts (tar_file_id INTEGER, sample_index INTEGER, part_name TEXT,"
            " content_byte_offset INTEGER, content_byte_size INTEGER)"
        )
        for number, (key, suffix, size) in enumerate(names):
            index.execute("INSERT INTO samples VALUES (0, ?, ?)", (key, number))
            part = (number, suffix, 512 * number, size)
            index.execute("INSERT INTO sample_parts VALUES (0, ?, ?, ?, ?)", part)


def test_names_of_files_are_looked_up_where_the_metadataset_says(data):
    index_of(data / "b", [("0", "jpg", 254), ("deep/1", "left.jpg", 99)])
    turn = {"role": "user", "content": [{"type": "image", "image": "0.jpg"}]}
    rows = [
        {"id": "0", "images": ["0.jpg", "deep/1.left.jpg"], "text": "0.jpg"},
        {"id": "1", "messages": [turn], "image": None},
        {"id": "2", "image": "lost.jpg"},
    ]
    (data / "lines.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    entry = {"path": "lines.jsonl", "aux": {"pixels": "b"}}
    (part,) = parts(write(data, entry))
    chunks = part.open().chunks(2, lambda _: None)
    first, second, third = [record.value for chunk in chunks for record in chunk.records()]
    found = [(one.container, one.offset, one.size) for one in first["images"]]
    assert found == [("b/s0.tar", 0, 254), ("b/s0.tar", 512, 99)]
    assert first["text"] == "0.jpg"
    assert second["messages"][0]["content"][0]["image"].size == 254
    assert third["image"] == "lost.jpg"
    (data / "files").mkdir()
    (data / "files" / "0.jpg").write_bytes(b"")
    entry["aux"] = {"pixels": "b", "files": {"fs_path": "files"}}
    (part,) = parts(write(data, entry))
    *_, third = [
        r.value for chunk in part.open().chunks(9, lambda _: None) for r in chunk.records()
    ]
    assert third["image"].name == "files/lost.jpg"  # of which the reader says that it is missing


@pytest.mark.parametrize("root", [None, ".", ".."])
def test_files_of_an_aux_are_below_the_data_root(data, root):
    (data / "in" / "files").mkdir(parents=True)
    (data / "in" / "files" / "0.jpg").write_bytes(b"x")
    index_of(data / "b", [("0", "png", 254)])
    row = {"id": "0", "image": ["0.jpg", "0.png"]}
    (data / "in" / "lines.jsonl").write_text(json.dumps(row))
    entry = {"path": "lines.jsonl", "aux": {"files": "filesystem://files", "b": "../b"}}
    place = write(data / "in", entry)
    (part,) = find_dataset(str(place), root and str(data / root)).parts
    (chunk,) = part.open().chunks(1, lambda _: None)
    file, member = next(chunk.records()).value["image"]
    assert (Path(part.data_root) / file.name).samefile(data / "in" / "files" / "0.jpg")
    assert (Path(part.data_root) / member.container).samefile(data / "b" / "s0.tar")
    with pytest.raises(ConfigError, match=r"`aux` \(b\) .* must be under the data root"):
        find_dataset(str(place), str(data / "in"))


def test_only_paths_of_files_are_looked_up_in_a_folder(data):
    (data / "files").mkdir()
    kept = [
        {"image": f"data:image/png;base64,{base64.b64encode(JPEG).decode()}"},
        {"image": base64.b64encode(JPEG).decode()},
        {"images": ["https://x/y.png", str(data / "z.png"), "file:///z.png", ""]},
        {"image": {"data": "iVBORw0KGgo=", "media_type": "image/png"}},
    ]
    turn = {"type": "image_url", "image_url": {"url": "a.png", "detail": "auto"}}
    found = [turn, {"type": "video", "video": ["b.png"]}, {"image": {"<image_00>": "c.png"}}]
    found.append({"type": "image", "path": "e.png"})
    info = {"image_info": [{"image_name": "d.png", "raw_url": "https://x/d.png", "sim": "no"}]}
    (data / "lines.jsonl").write_text(json.dumps({"kept": kept, "found": [*found, info]}))
    entry = {"path": "lines.jsonl", "aux": {"files": "filesystem://files"}}
    (part,) = parts(write(data, entry))
    (chunk,) = part.open().chunks(1, lambda _: None)
    record = next(chunk.records()).value
    assert record["kept"] == kept
    turn["image_url"]["url"] = Media("files/a.png")
    found[1]["video"][0] = Media("files/b.png")
    found[2]["image"]["<image_00>"] = Media("files/c.png")
    found[3]["path"] = Media("files/e.png")
    info["image_info"][0]["image_name"] = Media("files/d.png")
    assert record["found"] == [*found, info]


@pytest.mark.parametrize("name", ["a#b", "a?b", "a%41b"])
def test_any_name_of_a_folder_can_hold_an_index(data, name):
    (data / "b").rename(data / name)
    index_of(data / name, [("0", "jpg", 254)])
    (data / "lines.jsonl").write_text(json.dumps({"id": "0", "image": "0.jpg"}))
    before = sorted(data.iterdir())
    (part,) = parts(write(data, {"path": "lines.jsonl", "aux": {"pixels": name}}))
    (chunk,) = part.open().chunks(1, lambda _: None)
    assert next(chunk.records()).value["image"].container == f"{name}/s0.tar"
    assert sorted(data.iterdir()) == sorted([*before, data / "mix.yaml"])


def test_an_index_is_opened_once(data, monkeypatch):
    (data / "lines.jsonl").write_text(json.dumps({"id": "0", "image": "no.jpg"}))
    aux = {str(number): f"aux/{number}" for number in range(20)}
    for place in aux.values():
        write_prepared(data / place, {"s0.tar": [pair("0")]}, about=CRUDE)
        index_of(data / place, [])
    opened, connect = [], sqlite3.connect
    monkeypatch.setattr(
        sqlite3, "connect", lambda *args, **how: opened.append(1) or connect(*args, **how)
    )
    entry = {"path": "lines.jsonl", "aux": aux}
    for part in parts(
        write(data, {"blend": [entry, entry | {"aux": {"0": "aux/0", "b": "aux/1"}}]})
    ):
        assert ids(part) + ids(part) == ["0", "0"]
    assert len(opened) == len(aux)


def test_a_damaged_index_of_another_dataset_is_one_line(data):
    place = write(data, {"path": "lines.jsonl", "aux": {"pixels": "b"}})
    index = data / "b" / ".nv-meta" / "index.sqlite"
    rows = [{"id": "0", "text": "x", "image": "0.jpg"}]
    (data / "lines.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    index.write_bytes(b"no database" * 100)
    with pytest.raises(DataError, match=r"index.sqlite: cannot be read: file is not a database"):
        ids(parts(place)[0])
    index.unlink()
    index_of(data / "b", [("0", "jpg", 254)])
    info = json.dumps({"shard_counts": {}})
    (data / "b" / ".nv-meta" / ".info.json").write_text(info)
    with pytest.raises(DataError, match=r"index.sqlite: cannot be read: list index"):
        ids(parts(place)[0])


def test_the_file_of_the_docs_is_read(data):
    (data / "a").rename(data / "captions")
    (data / "b").rename(data / "pixels")
    (data / "lines.jsonl").rename(data / "chat.jsonl")
    index_of(data / "pixels", [])
    (text,) = re.findall(r"```yaml\n# mix.yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (data / "mix.yaml").write_text(text)
    captions, chat = parts(data / "mix.yaml")
    assert (captions.name, captions.weight, len(ids(captions))) == ("captions", 0.75, 10)
    assert (chat.name, chat.weight, ids(chat)) == ("chat", 0.25, ALL[:9])


def test_what_nothing_reads_is_reported(data):
    blend = [{"path": "a", "subflavors": {"x": 1}, "shuffle_over_epochs_multiplier": 3}]
    (part,) = parts(write(data, {"blend": blend}))
    assert dict(part.located.unread) == {
        "subflavors of mix.yaml": '{"x": 1}',
        "shuffle_over_epochs_multiplier of mix.yaml": "3",
    }


@pytest.mark.parametrize(
    ("train", "error", "message"),
    [
        ({"join": [{"path": "a"}], "joiner": "f"}, ConfigError, "`join` joins samples by code"),
        ({"blend": [{"path": "a", "weight": 0}]}, ConfigError, "weight is 0; give a number above"),
        ({"blend": [{"path": "a", "weight": "x"}]}, ConfigError, "dataset 1: weight is x; give"),
        ({"blend": [{"path": "a", "repetitions": 2}]}, ConfigError, "unknown key 'repetitions'"),
        ({"blend": []}, ConfigError, "`blend` has no datasets; give one, or leave it out"),
        ({"blend": {"path": "a"}}, ConfigError, "`blend` is not a list of datasets"),
        (
            {"path": "a", "wheight": 1},
            ConfigError,
            "unknown key 'wheight'; known: aux, dataset_con",
        ),
        ({"path": "none"}, DataError, "none is no dataset that `energon prepare` has prepared"),
        ({"path": "none.yaml"}, DataError, "no metadataset .*none.yaml"),
        ({"path": "none.jsonl"}, DataError, "no file .*none.jsonl"),
        ({"path": "mix.yaml"}, ConfigError, "nested more than 16 deep"),
        ({"path": "a", "split_part": "dev"}, ConfigError, "splits train, val, and no 'dev'"),
        ({"path": "a", "subset": {"range": ["80%", "20%"]}}, ConfigError, r"give \{range: \[25%"),
        ({"path": "a", "subset": {"range": [2, 20]}}, ConfigError, r"subset \[2, 20\] of 10 samp"),
        ({"path": "a", "aux": {"x": "b"}}, DataError, "aux x: .* has no .nv-meta/index.sqlite"),
        ({"path": "a", "aux": {"x": "filesystem://no"}}, DataError, "aux x: no folder .*no"),
        ({"path": "a", "dataset_config": "no.yaml"}, DataError, "no no.yaml, which `energon prep"),
        ({"path": "msc://x/y"}, ConfigError, "msc:// is no object store that packer knows"),
        ({}, ConfigError, "no `path` of a dataset"),
        ([], ConfigError, "is a list, not an object with keys"),
    ],
)
def test_what_is_not_read_is_one_line(data, train, error, message):
    place = write(data, train)
    with pytest.raises(error, match=message) as caught:
        [ids(part) for part in parts(place)]
    assert "\n" not in str(caught.value)


def test_blends_of_two_kinds_do_not_mix(data):
    write(data, {"blend_epochized": [{"path": "a"}]}, "inner.yaml")
    place = write(data, {"blend": [{"path": "inner.yaml"}, {"path": "b"}]})
    with pytest.raises(ConfigError, match="a `blend_epochized` inside of a blend by weight"):
        parts(place)
