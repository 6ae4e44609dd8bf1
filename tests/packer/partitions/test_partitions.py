"""Builds of several partitions: the same bytes whoever packs them, and nothing is lost."""

import contextlib
import gzip
import json
import subprocess
import sys
import tarfile
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from isobatch.common.errors import ConfigError, DataError
from isobatch.loaders import StreamingLoader
from isobatch.packer.build import Builder
from isobatch.packer.config import BuildConfig
from isobatch.packer.report import figures
from isobatch.packer.report.figures import make_report
from isobatch.packer.verify import require_intact, verify_build
from isobatch.shards.manifest import is_complete, read_manifest
from support.builds.packed import build, digests, quiet, read_index, read_samples
from support.builds.raw_data import (
    CUT,
    SAMPLES,
    UNUSABLE,
    options,
    record,
    write_dataset,
)


def test_every_sample_is_in_it_once_or_rejected_and_all_is_numbered_through(raw, packed):
    manifest = read_manifest(packed)
    assert len({file.name.split("-")[1] for file in manifest.shards}) > 2
    totals = manifest.values["totals"]
    assert totals["num_read"] == SAMPLES
    assert (totals["num_packed"], totals["num_rejected"]) == (SAMPLES - 2, 2)
    require_intact(verify_build(packed, quiet(), workers=1))
    ids = [row["sample_id"] for row in read_samples(packed)]
    assert sorted(ids) == sorted({f"s{n}" for n in range(SAMPLES)} - UNUSABLE)
    counts, groups, rejected = (
        pq.read_table(packed / f"{name}.parquet").to_pylist()
        for name in ("counts", "groups", "rejected")
    )
    positions = [row["position"] for row in (*counts, *rejected)]
    assert sorted(positions) == list(range(SAMPLES))
    assert [row["position"] for row in rejected] == sorted(row["position"] for row in rejected)
    index = read_index(packed).to_pylist()
    for group, row in zip(groups, index, strict=True):
        assert [counts[place]["sample_id"] for place in group["samples"]] == row["sample_ids"]
    assert manifest.values["config"]["partition_samples"] == 1000
    with contextlib.closing(StreamingLoader(packed)) as loader:
        loaded = Counter(name for step in loader for batch in step for name in batch.sample_ids)
    assert loaded.keys() == set(ids)
    assert set(loaded.values()) == {1}


def test_a_report_of_some_partitions_has_the_totals_of_all(packed, monkeypatch):
    whole = make_report(packed)
    tables = [pq.ParquetFile(packed / f"{name}.parquet") for name in ("counts", "groups")]
    number = tables[0].num_row_groups
    assert all(table.num_row_groups == number > 2 for table in tables)
    monkeypatch.setattr(figures, "MOST_SAMPLES", SAMPLES * 2 // number + 1)
    drawn = make_report(packed)
    totals = ("num_read", "num_packed", "num_rejected", "rejected", "num_groups", "num_steps")
    assert [getattr(drawn, name) for name in totals] == [getattr(whole, name) for name in totals]
    groups = pa.concat_tables(tables[1].read_row_group(place) for place in (0, number // 2))
    assert len(drawn.loads["ours"]["llm_tokens"]) == len(groups) < whole.num_groups
    assert drawn.loads["ours"]["llm_tokens"].sum() == pc.sum(groups.column("seq_len")).as_py()
    assert drawn.fill == pytest.approx(whole.fill, abs=0.02)
    # of the few samples with images others are in each partition
    bounds, near = whole.lower_bounds, {"tokens": 0.02, "vision": 0.4}
    assert all(
        drawn.lower_bounds[name] == pytest.approx(bounds[name], rel=near[name]) for name in near
    )
    assert any("whole partitions" in note for note in drawn.notes)
    assert not whole.notes


@pytest.mark.parametrize("workers", [3])
def test_workers_change_no_byte(raw, packed, tmp_path, workers):
    build(raw, tmp_path / "out", workers=workers, **CUT)
    assert digests(tmp_path / "out") == digests(packed)


def test_shares_in_any_order_and_twice_end_as_one_build(raw, packed, tmp_path, capfd):
    out = tmp_path / "out"
    order = [3, 1, 3, 1, 2]
    for place, share in enumerate(order):
        summary = build(raw, out, partitions=f"{share}/3", **CUT)
        assert (summary is not None) == (place == len(order) - 1)
        assert is_complete(str(out)) == (place == len(order) - 1)
    assert digests(out) == digests(packed)
    assert build(raw, out, partitions="2/3", **CUT).already_complete
    with pytest.raises(ConfigError, match="--overwrite with --partitions"):
        Builder(BuildConfig(**options(raw, out, partitions="2/3", **CUT)), quiet()).build(
            overwrite=True
        )
    for wrong in ("0/4", "5/4", "1", "a/b", "1/4/2"):
        with pytest.raises(ConfigError, match=f"--partitions {wrong}: give K/N"):
            build(raw, out, partitions=wrong, **CUT)


def test_shares_at_one_time_complete_one_build(raw, packed, tmp_path):
    """Four jobs begin together, two of them with the same share."""
    settings = options(raw, tmp_path / "out", **CUT)
    config = tmp_path / "build.toml"
    config.write_text("".join(f"{name} = {value!r}\n" for name, value in settings.items()))
    command = [sys.executable, "-m", "isobatch.packer", "build", "--config", str(config)]
    jobs = [
        subprocess.Popen(
            [*command, "--partitions", f"{share}/3"], stderr=subprocess.PIPE, text=True
        )
        for share in (1, 2, 3, 2)
    ]
    for job in jobs:
        _, said = job.communicate(timeout=300)
        assert job.returncode == 0, said
    (tmp_path / "out" / "report.html").unlink()
    assert digests(tmp_path / "out") == digests(packed)


def test_a_share_of_other_data_or_settings_is_refused(raw, tmp_path):
    out = tmp_path / "out"
    assert build(raw, out, partitions="1/3", **CUT) is None
    with pytest.raises(DataError, match="unfinished build of other data or settings"):
        build(raw, out, partitions="2/3", **(CUT | {"partition_samples": 1500}))
    with pytest.raises(DataError, match="unfinished build of other data or settings"):
        build(raw, out, partitions="2/3", seed=5, **CUT)


def test_what_a_failed_build_has_cut_is_not_used_for_other_data(tmp_path):
    noise = np.random.default_rng(1)
    rows = [record(number, text=noise.bytes(40).hex()) for number in range(2000)]
    bad = [row | {"conversations": []} for row in rows]
    folder, out = write_dataset(tmp_path / "raw", bad), tmp_path / "out"
    with pytest.raises(DataError, match="none of the first records"):
        build(folder, out, **CUT)
    write_dataset(folder, [*rows, *(row | {"id": f"more-{row['id']}"} for row in rows)])
    assert build(folder, out, **CUT).totals["num_packed"] == 4000
    two = tmp_path / "two.toml"
    parts = (f'[[datasets]]\nname = "{name}"\ndataset = "{folder}"\n' for name in "ab")
    two.write_text("".join(parts))
    write_dataset(folder, bad)
    with pytest.raises(DataError, match="none of the first records"):
        build(folder, tmp_path / "other", **CUT)
    with pytest.raises(DataError, match="none of the first records"):
        build(two, tmp_path / "other", **CUT)


def test_keys_of_tars_are_those_of_one_group_of_the_build(raw, tmp_path):
    build(raw, tmp_path / "out", **CUT, format="webdataset")
    keys = Counter()
    for path in (tmp_path / "out" / "shards").iterdir():
        with tarfile.open(path) as tar:
            keys.update({name.partition(".")[0] for name in tar.getnames()})
    assert len(keys) == SAMPLES - len(UNUSABLE)
    assert set(keys.values()) == {1}


def test_weights_repeats_and_kept_columns_hold_over_all_partitions(raw, tmp_path):
    mixture = tmp_path / "mixture.toml"
    mixture.write_text(
        f'[[datasets]]\nname = "a"\ndataset = "{raw}"\nweight = 3\n'
        f'[[datasets]]\nname = "b"\ndataset = "{raw}"\nweight = 1\n'
    )
    first = build(mixture, tmp_path / "first", keep_columns=("score",), **CUT)
    sources = Counter(
        row["source"] for row in pq.read_table(tmp_path / "first" / "counts.parquet").to_pylist()
    )
    usable = SAMPLES - 2
    assert sources == {"a": usable, "b": round(usable / 3)}
    assert first.totals["num_packed"] == sum(sources.values())
    assert read_manifest(tmp_path / "first").extras == {"score": "double"}
    out = tmp_path / "shares"
    shares = [f"{share}/3" for share in (2, 1, 3)]
    for share in (*shares, *shares):  # each counts first, and packs when all are counted
        build(mixture, out, keep_columns=("score",), partitions=share, **CUT)
    assert digests(out) == digests(tmp_path / "first")
    repeated = tmp_path / "repeated.toml"
    repeated.write_text(f'[[datasets]]\ndataset = "{raw}"\nrepeat = 1.5\n')
    summary = build(repeated, tmp_path / "repeated", **CUT)
    assert summary.totals["num_packed"] == usable * 3 // 2
    with pytest.raises(ConfigError, match="no usable record has a value in nothing"):
        build(raw, tmp_path / "none", keep_columns=("nothing",), **CUT)


def test_too_many_unusable_records_are_told_for_all_partitions(tmp_path):
    rows = [record(number, answer="word " * 20) for number in range(2000)]
    for row in rows[:400]:
        row["image"] = "none.png"
    folder = write_dataset(tmp_path / "raw", rows, lines=True)
    with pytest.raises(DataError, match=r"400 of 2,000 samples \(20\.0%\) cannot be used"):
        build(folder, tmp_path / "out", **CUT)
    summary = build(folder, tmp_path / "more", max_rejected=0.25, **CUT)
    assert summary.totals["num_rejected"] == 400
    for row in rows:
        row["image"] = "none.png"
    folder = write_dataset(tmp_path / "bad", rows, lines=True)
    with pytest.raises(DataError, match="none of the first records"):
        build(folder, tmp_path / "nothing", **CUT)


def test_a_partition_of_unusable_records_alone_has_no_groups(tmp_path):
    """Two compressed files, which stay whole: of one nothing can be used."""
    noise = np.random.default_rng(0)  # which does not get small
    rows = [record(number, text=noise.bytes(40).hex()) for number in range(3000)]
    for row in rows[1500:]:
        row["conversations"] = []
    raw = tmp_path / "raw.toml"
    for name, part in (("a", rows[:1500]), ("b", rows[1500:])):
        lines = "\n".join(json.dumps(row) for row in part)
        (tmp_path / f"{name}.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
        with raw.open("a") as file:
            file.write(f'[[datasets]]\ndataset = "{name}.jsonl.gz"\n')
    settings = CUT | {"partition_samples": 1000, "max_rejected": 1.0}
    summary = build(raw, tmp_path / "out", **settings)
    assert (summary.totals["num_packed"], summary.totals["num_rejected"]) == (1500, 1500)
    assert "partition_samples" in read_manifest(tmp_path / "out").values["config"]
    require_intact(verify_build(tmp_path / "out", quiet(), workers=1))
    # what nobody can begin in the middle of is one partition
    again = build(tmp_path / "out", tmp_path / "again", **settings)
    assert again.totals["num_packed"] == 1500
    assert "partition_samples" not in read_manifest(tmp_path / "again").values["config"]


def test_one_partition_says_nothing_of_partitions(raw, tmp_path):
    build(raw, tmp_path / "out", max_seq_len=2048)
    values = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert "partition_samples" not in values["config"]
    assert {shard["name"] for shard in values["shards"]} == {"shards/shard-00000.arrow"}
