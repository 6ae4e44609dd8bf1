"""LLaVA-NeXT's YAML of datasets: the sampling rules of its own code, as a mixture.

https://github.com/LLaVA-VL/LLaVA-NeXT/blob/main/llava/train/train.py (LazySupervisedDataset) and
https://github.com/LLaVA-VL/LLaVA-NeXT/blob/main/scripts/train/onevision.yaml
"""

import io
import json
import math
import random

import pyarrow.parquet as pq
import pytest
import yaml
from rich.console import Console

from isobatch.common.errors import ConfigError
from isobatch.packer.build import Builder
from isobatch.packer.config import BuildConfig
from isobatch.packer.count.record_table import read_records
from isobatch.packer.progress import StageProgress
from isobatch.packer.sources.dataset import find_dataset
from isobatch.packer.sources.trainers.sampling import Sampling, parse_sampling
from support.builds.raw_data import options, record


def write_json(folder, name, count):
    folder.mkdir(exist_ok=True)
    values = [record(number) | {"id": f"{name}{number}"} for number in range(count)]
    (folder / f"{name}.json").write_text(json.dumps(values))


def packed_ids(place, out, **changes):
    """Ids of the samples of a build."""
    Builder(
        BuildConfig(**options(place, out, **changes)), StageProgress(Console(file=io.StringIO()))
    ).build()
    return pq.read_table(out / "counts.parquet").column("sample_id").to_pylist()


def write_yaml(folder, *entries):
    path = folder / "mix.yaml"
    path.write_text(yaml.safe_dump({"datasets": list(entries)}))
    return path


def entry(path, strategy=None):
    return {"json_path": path} | ({"sampling_strategy": strategy} if strategy else {})


def theirs(values, strategy):
    """LLaVA-NeXT's own lines, without what it draws."""
    number = None
    if ":" in strategy:
        strategy, number = strategy.split(":")
        if "%" in number:
            number = math.ceil(int(number.split("%")[0]) * len(values) / 100)
        else:
            number = int(number)
    if strategy == "first" and number is not None:
        return values[:number]
    return values[-number:] if strategy == "end" and number is not None else values


def test_first_and_end_take_what_llava_next_takes():
    draw = random.Random(0)
    for _ in range(300):
        total, number = draw.randrange(40), draw.randrange(1, 250)
        strategy = f"{draw.choice(['first', 'end'])}:{number}{draw.choice(['', '%'])}"
        chosen = parse_sampling(strategy).chosen(total)
        kept = [place for place, taken in enumerate(chosen) if taken]
        assert kept == theirs(list(range(total)), strategy), strategy


def test_drawn_records_are_as_many_and_by_the_seed():
    drawn = {tuple(Sampling("random", 5, seed=seed).seeded(seed).chosen(40)) for seed in range(20)}
    assert {sum(each) for each in drawn} == {5}
    assert len(drawn) > 15
    assert sum(Sampling("random", 15, is_percentage=True).chosen(7)) == 2
    assert sum(parse_sampling("random:150%").chosen(7)) == 7


@pytest.fixture
def place(tmp_path):
    folder = tmp_path / "raw"
    for name, count in (("a", 20), ("b", 9)):
        write_json(folder, name, count)
    return folder


def test_a_yaml_of_datasets_is_a_mixture(place, tmp_path):
    file = write_yaml(
        place,
        entry("a.json", "first:50%"),
        entry("a.json", "random:3"),
        entry("{a,b}.json", "end:4"),
        entry(str(place / "b.json")),
    )
    packed = packed_ids(file, tmp_path / "out", data_root=str(place))
    assert len(packed) == 10 + 3 + 4 + 4 + 9
    once = {name.partition("#")[0] for name in packed}
    assert {f"a{n}" for n in (*range(10), *range(16, 20))} <= once
    assert {f"b{n}" for n in range(9)} <= once
    names = [part.name for part in find_dataset(str(file), str(place)).parts]
    assert names == ["a", "a-2", "a-3", "b", "b-2"]


def test_json_lines_are_sampled_too(place, tmp_path):
    lines = "".join(json.dumps(each) + "\n" for each in json.loads((place / "b.json").read_text()))
    (place / "c.jsonl").write_text(lines)
    file = write_yaml(place, entry("c.jsonl", "end:40%"), entry("c.jsonl", "first:200%"))
    packed = packed_ids(file, tmp_path / "out", data_root=str(place))
    assert len(packed) == 4 + 9
    assert {name for name in packed if name.endswith("#2")} == {f"b{n}#2" for n in range(5, 9)}


def test_without_a_build_the_same_records_are_read(place, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = write_yaml(place, entry("a.json", "first:5"), entry("a.json", "random:3"))
    found = {}
    for seed in (0, 1):
        table = read_records(str(file), str(place), (), seed, StageProgress())
        found[seed] = [table.record(row).value["id"] for row in range(len(table))]
    packed = packed_ids(file, tmp_path / "out", data_root=str(place), seed=1)
    assert found[0][:5] == found[1][:5] == [f"a{n}" for n in range(5)]
    assert found[0] != found[1]
    assert sorted(name.partition("#")[0] for name in packed) == sorted(found[1])


def test_braces_in_a_path_name_several_files(place):
    parts = find_dataset(f"{place}/{{a,b}}.json", None).parts
    assert [part.located.names for part in parts] == [("a.json",), ("b.json",)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1", "no list `datasets`"),
        ("[1]", "not an object"),
        ("datasets: [", "not valid YAML"),
        ("datasets: [{json_path: a.json, weight: 2}]", "unknown key 'weight'; known: json_path, "),
        ("datasets: [{json_path: a.json, sampling_strategy: last:3}]", "'last:3'; known: all, f"),
        ("datasets: [{json_path: a.json, sampling_strategy: end:0}]", "NeXT takes all records; s"),
        ("datasets: [{json_path: a.json, sampling_strategy: random:0%}]", "takes no record; say a"),
        ("datasets: [{json_path: a.json, sampling_strategy: 3}]", "sampling is 3, but should"),
    ],
)
def test_a_wrong_yaml_is_one_line(place, text, message):
    (place / "mix.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        find_dataset(str(place / "mix.yaml"), None)
