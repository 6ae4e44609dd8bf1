"""`--map`: records through a user's function, in builds of every source and number of workers."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from isobatch.common.errors import ConfigError, DataError
from isobatch.counting.records.user_map import load_map
from isobatch.shards.manifest import read_manifest
from support.builds.packed import build, digests
from support.builds.raw_data import write_dataset

CODE = """
from __future__ import annotations
from dataclasses import dataclass


@dataclass
class Settings:
    every: int


def split(record):
    number = record["number"]
    if number % 7 == 0:
        return None
    if number % 7 == 1:
        return "too dull"
    if number % 7 == 2:
        raise {True: KeyError, False: SystemExit}[number < 35]("score")
    if number % 7 == 3:
        return 17
    record["conversations"] = [
        {"from": "human", "value": record["ask"]}, {"from": "gpt", "value": record["say"]}
    ]
    if number % 7 == 4:
        return [record, {**record, "id": f"again{number}"}]
    if number % 7 == 5:
        return []
    return record


NOT_A_FUNCTION = 3
"""
ROWS = [{"id": f"r{k}", "number": k, "ask": f"What is {k}?", "say": "A number."} for k in range(70)]


@pytest.fixture
def code(tmp_path, monkeypatch):
    (tmp_path / "my_map.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    return f"{tmp_path / 'my_map.py'}:split"


@pytest.mark.thorough
def test_records_become_one_many_or_none_with_a_reason(tmp_path, code):
    raw = write_dataset(tmp_path / "raw", [*ROWS, {"id": "bare", "number": 6}])
    (tmp_path / "table").mkdir()
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "table" / "a.parquet")
    found = {}
    for name, place, changes in [
        ("one", raw, {"workers": 1}),
        ("two", raw, {"workers": 2, "chunk_records": 16}),
        ("by name", raw, {"workers": 1, "map": "my_map:split"}),
        ("table", tmp_path / "table", {"workers": 1}),
    ]:
        out = tmp_path / name
        build(place, out, **{"map": code, "max_rejected": 0.5, **changes})
        rows = pq.read_table(out / "rejected.parquet").to_pylist()
        ids = set(pq.read_table(out / "counts.parquet").column("sample_id").to_pylist())
        assert ids == {f"r{k}" for k in range(70) if k % 7 in (4, 6)} | {
            f"again{k}" for k in range(4, 70, 7)
        }
        said = {row["sample_id"]: (row["reason"], row["detail"]) for row in rows}
        assert said["r0"] == ("left_out", "my_map:split gives none") == said["r5"]
        assert said["r1"] == ("left_out", "too dull")
        assert said["r2"] == ("map_failed", "my_map:split: KeyError: 'score'")
        assert said["r37"] == ("map_failed", "my_map:split: SystemExit: score")
        assert said["r3"] == ("map_failed", "my_map:split gives int, not a record")
        assert ("bare" in said) == (place == raw)
        totals = read_manifest(out).values["totals"]
        assert totals["num_read"] == totals["num_packed"] + totals["num_rejected"]
        found[name] = digests(out)
    assert found["one"] == found["two"] == found["by name"]


def test_the_functions_code_is_part_of_the_build(tmp_path, code):
    raw = write_dataset(tmp_path / "raw", [row for row in ROWS if row["number"] % 7 == 6])
    build(raw, tmp_path / "out", map=code, workers=1)
    mapped = read_manifest(tmp_path / "out").values["config"]["map"]
    assert mapped == load_map(code).identity()
    assert mapped["function"] == "my_map:split"
    assert str(tmp_path) not in str(read_manifest(tmp_path / "out").values)
    build(raw, tmp_path / "out", map=code, workers=1)  # the same one
    (tmp_path / "my_map.py").write_text(CODE + "# changed\n")
    with pytest.raises(DataError, match="finished build of other data or settings"):
        build(raw, tmp_path / "out", map=code, workers=1)


def test_a_function_that_cannot_be_loaded_is_one_line_before_anything_is_read(tmp_path, code):
    (tmp_path / "broken.py").write_text("1 / 0")
    (tmp_path / "script.py").write_text("raise SystemExit(0)")
    for spec, message in [
        ("split", "give module:function"),
        (":split", "give module:function"),
        ("no_such_module:split", "ModuleNotFoundError"),
        (f"{tmp_path}/nowhere.py:split", "FileNotFoundError"),
        (f"{tmp_path}/broken.py:split", "ZeroDivisionError"),
        (f"{tmp_path}/script.py:split", "SystemExit: 0"),
        (f"{tmp_path}/my_map.py:nothing", "has no function nothing"),
        (f"{tmp_path}/my_map.py:NOT_A_FUNCTION", "has no function NOT_A_FUNCTION"),
        ("builtins:len", "has no function len"),
    ]:
        with pytest.raises(ConfigError, match="--map ") as error:
            build(tmp_path, tmp_path / "out", map=spec)
        assert message in str(error.value), spec
    assert not (tmp_path / "out").exists()
