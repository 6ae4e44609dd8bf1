"""Datasets that are named by their place: the samples and ids of `packer build --dataset`."""

import fcntl
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from isobatch.common.cache_files import LENGTHS, MAX_BYTES, RECORDS, kept_files
from isobatch.common.errors import ConfigError, DataError
from isobatch.loaders import BalancedLoader
from isobatch.packer.build import Builder
from isobatch.packer.cli import app
from isobatch.packer.config import BuildConfig
from isobatch.packer.count import record_table
from isobatch.packer.count.record_table import read_records
from isobatch.packer.demo.dataset import write_demo
from isobatch.packer.sources import detect
from isobatch.packer.sources.base import Located
from isobatch.shards.folders import open_folder, open_object_folder
from support.builds.layouts import write_tar
from support.builds.packed import quiet
from support.builds.raw_data import options, record, write_dataset
from support.loading.online_data import OPTIONS, built_samples, records, samples_of


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "isobatch" / "records"


def loaded(place, **changes):
    given = {"max_tokens": 1024, "max_vision": 24, "pixel_dtype": torch.uint8, "workers": 0}
    loader = BalancedLoader(place, **OPTIONS | given | changes)
    batches = [batch for step in loader for batch in step]
    loader.close()
    return samples_of(batches, loader.image_token_id), loader, batches


def packed(place, out, **changes):
    Builder(BuildConfig(**options(place, out, max_seq_len=1024, **changes)), quiet()).build()
    return built_samples(out)


def write_tables(folder, rows, source):
    """Two Parquet files of records without ids, with their images inside."""
    values = [
        {
            "conversations": row["conversations"],
            "images": [
                {"bytes": (source / name).read_bytes(), "path": None}
                for name in ([row["image"]] if isinstance(row["image"], str) else row["image"])
            ]
            if "image" in row
            else [],
        }
        for row in rows
    ]
    folder.mkdir()
    for number, part in enumerate((values[:30], values[30:])):
        pq.write_table(pa.Table.from_pylist(part), folder / f"train-{number:05d}-of-00002.parquet")


def write_places(folder):
    """Name -> (place, options), of all kinds."""
    rows = records(folder / "raw", 60)
    # an id twice, and one that looks like the number that it would get
    rows[7]["id"] = rows[8]["id"] = rows[3]["id"]
    rows[9]["id"] = f"{rows[3]['id']}#2"
    write_dataset(folder / "raw", rows)
    write_tables(folder / "tables", rows, folder / "raw")
    (folder / "lines").mkdir()
    (folder / "lines" / "some.jsonl").write_text("\n".join(json.dumps(row) for row in rows[:20]))
    photo = next((folder / "raw" / "images").iterdir()).read_bytes()
    members = [
        (f"{number}.{suffix}", content)
        for number in range(12)
        for suffix, content in (("jpg", photo), ("txt", f"a caption {number}".encode()))
    ]
    write_tar(folder / "tars" / "00000.tar", members)
    (folder / "mixed.toml").write_text(
        '[[datasets]]\ndataset = "raw"\nrepeat = 1.5\n[[datasets]]\ndataset = "tars"\n'
        '[[datasets]]\ndataset = "lines/some.jsonl"\ndata_root = "raw"\nlimit = 9\n'
    )
    return {
        "a folder": (folder / "raw", {}),
        "a file": (str(folder / "raw" / "annotations.json"), {}),
        "a data root": (folder / "lines" / "some.jsonl", {"data_root": str(folder / "raw")}),
        "tables": (folder / "tables", {}),
        "tars": (folder / "tars", {}),
        "a mixture": (folder / "mixed.toml", {}),
    }


def test_samples_and_ids_are_those_of_the_packers_build(tmp_path, cache, monkeypatch):
    for name, (place, given) in write_places(tmp_path).items():
        found, loader, _ = loaded(place, **given)
        assert found == packed(str(place), tmp_path / "packed" / name, **given), name
        assert not loader.rejected, name
    ids = set(loaded(tmp_path / "mixed.toml")[0])
    assert {"s3#2", "s3#3", "s3#4", "s0#2"} <= ids
    # on the Hub: what its files are called is asked there, and nothing else
    located = Located("parquet", str(tmp_path / "tables"), ())
    names = [path.name for path in (tmp_path / "tables").iterdir()]
    hub = Located("", located.folder, tuple(sorted(names)))
    monkeypatch.setattr(detect, "fetch_files", lambda *_: hub)
    assert loaded("owner/name")[0].keys() == packed("owner/name", tmp_path / "packed/hub").keys()


def test_the_demo_is_drawn_once(tmp_path, monkeypatch):
    monkeypatch.setattr(record_table, "DEMO_SAMPLES", 30)
    caps = {"max_tokens": 2048, "max_vision": None}
    found, loader, _ = loaded("demo", **caps)
    write_demo(tmp_path / "demo", num_samples=30)
    changes = {"max_seq_len": 2048, "data_root": str(tmp_path / "demo")}
    out = tmp_path / "packed"
    Builder(BuildConfig(**options("demo", out, **changes)), quiet()).build()
    assert found == built_samples(out)
    assert loader.report()["sources"] == {"demo": 1.0}
    (drawn,) = (tmp_path / "cache" / "isobatch" / "demo").glob("*/annotations.json")
    begun = drawn.stat().st_mtime_ns
    loaded("demo", **caps)
    assert drawn.stat().st_mtime_ns == begun


def test_records_are_read_once_and_again_when_files_change(tmp_path, cache, monkeypatch):
    rows = records(tmp_path / "raw", 20, images=False)
    folder = write_dataset(tmp_path / "raw", rows)
    read = []
    plain = record_table._read_all
    monkeypatch.setattr(record_table, "_read_all", lambda *given: (read.append(1), plain(*given)))
    # as ranks of a machine do
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: read_records(str(folder), None, ("id",), 0, quiet()), range(4)))
    first = loaded(folder, keep_columns=("id",))
    assert loaded(folder, keep_columns=("id",))[0] == first[0]
    assert [name for batch in first[2] for name in batch.extras["id"]] == [
        name for batch in first[2] for name in batch.sample_ids
    ]
    assert len(read) == 1
    assert len(list(cache.glob("*.arrow"))) == 1

    # a transform sees all columns; here one fails
    def marked(row):
        return row | {"id": row["id"] + (row["more"] if row["id"] != "s1" else "!")}

    with pytest.raises(DataError, match="KeyError: 'more'"):
        loaded(folder, transform=marked)
    write_dataset(tmp_path / "raw", [row | {"more": "!"} for row in rows])
    os.utime(folder / "annotations.json", (time.time() + 5,) * 2)
    changed = loaded(folder, transform=marked)
    assert changed[0].keys() == {f"{name}!" for name in first[0]}
    assert len(read) == 3


def test_lengths_are_kept_for_the_same_copies_and_transform(tmp_path):
    folder = write_dataset(tmp_path / "raw", records(tmp_path / "raw", 40, images=False))
    mixture = tmp_path / "mixed.toml"
    mixture.write_text('[[datasets]]\ndataset = "raw"\nrepeat = 0.5\n')

    def longer(row):
        turns = row["conversations"]
        return row | {"conversations": [*turns[:1], turns[1] | {"value": turns[1]["value"] * 2}]}

    cache, seen = tmp_path / "lengths", {}
    for name, place, given in (
        ("plain", folder, {}),
        ("longer", folder, {"transform": longer}),
        ("half", mixture, {}),
        ("the other half", mixture, {"seed": 1}),
    ):
        found, loader, _ = loaded(place, lengths_cache=cache, **given)
        assert not loader.rejected, name
        seen[name] = found
        again, loader, _ = loaded(place, lengths_cache=cache, **given)
        assert (again, loader.report()["measured"]) == (found, len(found)), name
    assert len(list(cache.glob("*.lengths"))) == 4
    assert len(seen["half"]) == len(seen["the other half"]) == 20
    assert seen["half"].keys() != seen["the other half"].keys()


def test_bad_records_and_bad_places_are_named(tmp_path):
    rows = [record(number, answer="fine") for number in range(30)]
    rows[3] = record(3, ["../outside.png"])
    rows[4] = {"id": "s4"}
    lines = [json.dumps(row) for row in rows]
    lines[5] = lines[5][:-9]
    folder = tmp_path / "raw"
    folder.mkdir()
    (folder / "some.jsonl").write_text("\n".join(lines))
    found, loader, _ = loaded(folder, max_rejected=0.2)
    with pytest.raises(DataError, match="cannot be used"):
        packed(str(folder), tmp_path / "out")
    told = json.loads(json.dumps([(each.sample_id, each.reason) for each in loader.rejected]))
    Builder(
        BuildConfig(**options(folder, tmp_path / "kept", max_seq_len=1024, max_rejected=0.2)),
        quiet(),
    ).build()
    table = pq.read_table(tmp_path / "kept" / "rejected.parquet")
    listed = zip(*(table.column(name).to_pylist() for name in ("sample_id", "reason")), strict=True)
    assert told == [list(each) for each in listed]
    assert len(found) == 27
    (tmp_path / "empty.jsonl").write_text("[]")
    for place, error, message in (
        ("", ConfigError, "dataset is empty"),
        (tmp_path / "nowhere", DataError, "no dataset"),
        ("llava665k", DataError, "data-root"),
        (tmp_path / "empty.jsonl", DataError, "holds no records"),
    ):
        with pytest.raises(error, match=message) as caught:
            loaded(place)
        # a known dataset lists all that is missing
        assert place == "llava665k" or "\n" not in str(caught.value)


@pytest.mark.server
def test_a_dataset_in_an_object_store(tmp_path, s3, monkeypatch):
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    for function in (open_folder, open_object_folder):
        function.cache_clear()
    folder = write_dataset(tmp_path / "raw", records(tmp_path / "raw", 20))
    place = f"s3://{s3.bucket}/{tmp_path.name}"
    bucket = open_object_folder(place)
    for path in folder.rglob("*.*"):
        bucket.put(str(path.relative_to(folder)), Path(path))
    assert loaded(place)[0] == loaded(folder)[0]
    for function in (open_folder, open_object_folder):
        function.cache_clear()


def test_kept_records_and_lengths_have_a_limit(cache, tmp_path, monkeypatch, capsys):
    """The file in use stays, those in use elsewhere too; of others those used longest ago go."""
    lengths, places = tmp_path / "lengths", []
    for name in "abcd":
        write_dataset(tmp_path / name, records(tmp_path / name, 20, images=False))
        places.append(str(tmp_path / name))
    for place in places[:3]:
        loaded(place, lengths_cache=lengths)
    kept = {kind: kept_files(folder, kind) for kind, folder in both(cache, lengths).items()}
    for kind, files in kept.items():
        assert len(files) == 3
        # room for three and a half
        monkeypatch.setitem(MAX_BYTES, kind, int(3.5 * max(file.num_bytes for file in files)))
    loaded(places[0], lengths_cache=lengths)  # used again
    loaded(places[3], lengths_cache=lengths)
    for kind, folder in both(cache, lengths).items():
        first, second, third = (file.path for file in kept[kind])
        left = {file.path for file in kept_files(folder, kind)}
        assert len(left) == 3
        assert {first, third} < left
        assert second not in left
    # one that another process reads just now
    held = kept[RECORDS][0].path
    with held.with_suffix(".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        numbers = run_cache(capsys, str(lengths), "--clean")
        assert (numbers["records"]["files"], numbers["lengths"]["files"]) == (1, 0)
        assert numbers["records"]["bytes"] == held.stat().st_size
        assert numbers["lengths"]["freed_bytes"] > 0
    assert run_cache(capsys, "--clean")["records"]["files"] == 0
    assert not [*lengths.iterdir()]
    assert loaded(places[0])[1].report()["records"] == 20


def both(cache, lengths):
    return {RECORDS: cache, LENGTHS: lengths}


def run_cache(capsys, *arguments):
    app(["cache", *arguments, "--json"], standalone_mode=False)
    return json.loads(capsys.readouterr().out)
