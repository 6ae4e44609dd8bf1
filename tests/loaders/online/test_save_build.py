"""`save_build`: the build that the packer makes of the same dataset, whatever was measured."""

import json

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from isobatch.common.errors import ConfigError, DataError
from isobatch.counting.sample_counter import SampleCounter
from isobatch.loaders import BalancedLoader, StreamingLoader
from isobatch.packer import build as packer_build
from isobatch.packer.build import Builder
from isobatch.packer.config import BuildConfig
from isobatch.packer.partitions import partition
from isobatch.packer.verify import require_intact, verify_build
from isobatch.shards.manifest import is_complete, read_manifest
from support.builds.packed import digests, quiet
from support.builds.raw_data import options, record, write_dataset
from support.loading.online_data import OPTIONS, built_samples, records

CAPS = {"max_tokens": 1024, "max_vision": None, "max_rejected": 0.2, "workers": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A dataset with samples that cannot be used, an id twice and a column of numbers."""
    folder = tmp_path_factory.mktemp("saved") / "raw"
    rows = records(folder, 70)
    rows[4] = record(4, ["images/none.png"])
    rows[5] = record(5, answer="word " * 2000)
    rows[6] = {"id": "s6"}
    rows[9]["id"] = rows[4]["id"]  # the earlier one is of no use
    rows[11]["id"] = rows[10]["id"]
    for number, row in enumerate(rows):
        row["weight"] = number if number % 2 else number + 0.5
    return write_dataset(folder, rows)


def packed(dataset, out, **changes):
    given = {"max_seq_len": 1024, "max_rejected": 0.2, "keep_columns": ("weight",)}
    Builder(BuildConfig(**options(dataset, out, **given | changes)), quiet()).build()
    return out


def opened(dataset, **changes):
    given = OPTIONS | CAPS | {"keep_columns": ("weight",), "pixel_dtype": torch.uint8}
    return BalancedLoader(dataset, **given | changes)


@pytest.fixture
def counted(monkeypatch):
    """How many records each count had."""
    numbers, plain = [], SampleCounter.count

    def count(self, records, *args):
        given = list(records)
        numbers.append(len(given))
        return plain(self, given, *args)

    monkeypatch.setattr(SampleCounter, "count", count)
    return numbers


def rejected(out):
    """What the packer lists; details of records in memory name absolute paths."""
    table = pq.read_table(out / "rejected.parquet")
    return table.select(["position", "sample_id", "reason"]).to_pylist()


def extras(out):
    loader = StreamingLoader(out, workers=0)
    batches = [batch for step in loader for batch in step]
    return {
        name: weight
        for batch in batches
        for name, weight in zip(batch.sample_ids, batch.extras["weight"], strict=True)
    }


def test_records_in_memory_become_the_packers_build(folder, tmp_path, counted):
    rows = json.loads((folder / "annotations.json").read_text())
    expected = packed(folder, tmp_path / "packed")
    for name in ("none", "some", "all"):
        out = tmp_path / name
        loader = opened(rows, data_root=str(folder))
        del counted[:]  # what tells the dataset from others
        if name == "some":
            list(loader._reader.measure(np.arange(68, 0, -3), np.asarray))
        for _ in loader if name == "all" else ():
            pass
        known, counted[:] = sum(counted), []
        assert known == {"none": 0, "some": 23, "all": 70}[name]
        loader.save_build(out)
        assert sum(counted) == 70 - known  # the others, and each of them once
        require_intact(verify_build(str(out), quiet(), workers=1))
        assert built_samples(out) == built_samples(expected), name
        assert extras(out) == extras(expected)
        assert rejected(out) == rejected(expected)
        reasons = {"missing_image", "longer_than_max_seq_len", "no_conversation"}
        assert {each["reason"] for each in rejected(out)} == reasons
        found, wanted = (read_manifest(str(each)).values for each in (out, expected))
        different = {key for key in wanted if found[key] != wanted[key]}
        assert different <= {
            "config",
            "config_hash",
            "content_hash",
            "raw_files",
            "files",
            "shards",
        }
        assert found.keys() == wanted.keys()
        assert (out / "report.html").exists()
        assert not (out / "staging").exists()
        loader.close()


def test_a_dataset_at_a_place_becomes_the_same_bytes(folder, tmp_path, monkeypatch, counted):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    mixture = tmp_path / "mixed.toml"
    parts = [f'[[datasets]]\ndataset = "{folder}"\nname = "{name}"\n' for name in "ab"]
    mixture.write_text(f"{parts[0]}repeat = 1.4\n{parts[1]}limit = 20\nrepeat = 0.5\n")
    for number, place in enumerate((folder, mixture)):
        expected = packed(str(place), tmp_path / f"packed-{number}")
        loader = opened(place)
        for _ in loader:
            pass
        del counted[:]
        loader.save_build(tmp_path / f"saved-{number}")
        # in memory under ids with a number, which the build may number otherwise, or not drawn
        assert sum(counted) == (2, 2 + 20)[number]
        found, wanted = digests(tmp_path / f"saved-{number}"), digests(expected)
        del found["report.html"]
        assert found == wanted, place
        loader.close()


def test_only_a_whole_build_opens(folder, tmp_path, monkeypatch, capfd):
    rows = json.loads((folder / "annotations.json").read_text())
    out, loader = tmp_path / "out", opened(rows, data_root=str(folder))
    stages = {
        "group_counts": partition,
        "merge_index": packer_build,
        "write_manifest": packer_build,
    }
    for name, module in stages.items():
        with monkeypatch.context() as patch:

            def fail(*_, **__):
                raise KeyboardInterrupt

            patch.setattr(module, name, fail)
            with pytest.raises(KeyboardInterrupt):
                loader.save_build(out)
        assert not is_complete(str(out))
        with pytest.raises((ConfigError, DataError)):
            StreamingLoader(out)
    loader.save_build(out)
    assert (
        "0 of 70 samples are counted and in memory; the other 70 are read" in capfd.readouterr().err
    )
    first = digests(out)
    with pytest.raises(ConfigError, match="holds a finished build; give another folder"):
        loader.save_build(out)
    with pytest.raises(ConfigError, match=r"^/proc/none/out: no build .*No such"):
        loader.save_build("/proc/none/out")
    with pytest.raises(ConfigError, match="null: Not a directory; give a folder"):
        loader.save_build("/dev/null")
    loader.save_build(str(out), overwrite=True)
    assert digests(out) == first
    (out / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"notes\.txt, which no build made"):
        loader.save_build(out, overwrite=True)
    assert is_complete(str(out))
    with pytest.raises(DataError, match="cannot be used"):
        opened(rows, data_root=str(folder), max_rejected=0.01).save_build(tmp_path / "strict")
    second = opened(rows, data_root=str(folder), dp_rank=1, dp_world_size=2)
    second.save_build(tmp_path / "of another rank")
    assert not (tmp_path / "of another rank").exists()
