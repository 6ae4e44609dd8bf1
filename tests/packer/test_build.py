"""Properties of a whole build: nothing lost, nothing depends on the workers, a stopped build goes
on.
"""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from isobatch.common.errors import ConfigError, DataError
from isobatch.common.types import COUNT_COLUMNS
from isobatch.models.image_tokens import plan_image
from isobatch.models.presets import load_model
from isobatch.packer.build import Builder
from isobatch.packer.build_dir import locked
from isobatch.packer.config import BuildConfig
from isobatch.packer.partitions.partition import Partition
from isobatch.packer.verify import verify_build
from isobatch.shards.manifest import read_manifest
from isobatch.shards.tables import read_groups
from support import ranks
from support.builds.packed import build, digests, quiet, read_index, read_samples
from support.builds.raw_data import good_records, options, record, write_dataset, write_image


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("raw")
    return write_dataset(folder, good_records(folder))


@pytest.fixture(scope="module")
def built(dataset, tmp_path_factory):
    out = tmp_path_factory.mktemp("build") / "out"
    build(dataset, out)
    return out


def test_every_sample_is_packed_once_with_its_own_images_and_exact_counts(dataset, built):
    raw = {row["id"]: row for row in json.loads((dataset / "annotations.json").read_text())}
    samples = read_samples(built)
    assert sorted(sample["sample_id"] for sample in samples) == sorted(raw)
    counts = {row["sample_id"]: row for row in pq.read_table(built / "counts.parquet").to_pylist()}
    model = load_model("tiny")
    image_token = read_manifest(built).values["tokenizer"]["image_token_id"]
    for sample in samples:
        image = raw[sample["sample_id"]].get("image", [])
        paths = [image] if isinstance(image, str) else image
        assert sample["images"] == [(dataset / path).read_bytes() for path in paths]
        sizes = [Image.open(dataset / path).size for path in paths]
        assert list(zip(sample["image_widths"], sample["image_heights"], strict=True)) == sizes
        plans = [plan_image(model.vision, *size) for size in sizes]
        row = counts[sample["sample_id"]]
        assert row["num_image_patches"] == sum(plan.num_patches for plan in plans)
        assert row["num_vit_tokens"] == sum(plan.num_vit_tokens for plan in plans)
        assert row["num_image_tokens"] == sample["input_ids"].count(image_token)
        assert row["num_image_tokens"] == sum(plan.num_image_tokens for plan in plans)
        assert row["seq_len"] == len(sample["input_ids"]) == len(sample["labels"])
        assert row["media_bytes"] == sum(len(data) for data in sample["images"])


def test_groups_index_and_manifest_tell_the_same(built):
    manifest, index = read_manifest(built).values, read_index(built)
    groups = pq.read_table(built / "groups.parquet")
    ids = np.array(pq.read_table(built / "counts.parquet").column("sample_id").to_pylist())
    assert [
        ids[members].tolist()
        for members in map(read_groups(groups).__getitem__, range(len(groups)))
    ] == index.column("sample_ids").to_pylist()
    for name in COUNT_COLUMNS:
        assert groups.column(name).to_pylist() == index.column(name).to_pylist()
        assert sum(index.column(name).to_pylist()) == manifest["totals"][name]
    limits = manifest["limits"]
    assert max(groups.column("seq_len").to_pylist()) <= limits["max_seq_len"]
    assert max(groups.column("num_image_patches").to_pylist()) <= limits["max_vision"]
    assert not (built / "staging").exists()


@pytest.mark.parametrize("shard_format", ["arrow", "webdataset", "refs"])
def test_the_number_of_workers_does_not_change_a_byte(dataset, tmp_path, shard_format):
    for workers in (1, 2):
        build(dataset, tmp_path / str(workers), workers=workers, format=shard_format)
    assert digests(tmp_path / "1") == digests(tmp_path / "2")


def test_json_lines_give_the_same_shards_as_an_array(dataset, built, tmp_path):
    rows = json.loads((dataset / "annotations.json").read_text())
    lines = write_dataset(tmp_path / "lines", rows, lines=True)
    out = tmp_path / "out"
    build(lines, out, data_root=str(dataset))
    name = "shards/shard-00000.arrow"
    assert digests(out)[name] == digests(built)[name]


def test_absolute_paths_below_the_data_root_give_the_same_shards(tmp_path):
    rows = good_records(tmp_path / "raw", count=20)
    expected = build(write_dataset(tmp_path / "raw", rows), tmp_path / "relative", format="refs")
    for row in rows:
        names = row.get("image", [])
        names = [names] if isinstance(names, str) else names
        row["image"] = [str(tmp_path / "raw" / name) for name in names]
    write_dataset(tmp_path / "other", rows)
    build(tmp_path / "other", tmp_path / "below", data_root=str(tmp_path / "raw"), format="refs")
    name = "shards/shard-00000.arrow"
    assert digests(tmp_path / "below")[name] == digests(tmp_path / "relative")[name]
    found = build(tmp_path / "other", tmp_path / "all", data_root="/", max_rejected=0.0)
    assert found.totals["num_packed"] == expected.totals["num_packed"] == 20


def test_shards_have_about_the_wished_size_and_hold_all_groups(tmp_path):
    folder = tmp_path / "raw"
    rows = []
    for number in range(12):
        write_image(folder / f"{number}.png", 400, 400, number)
        rows.append(record(number, [f"{number}.png"]))
    build(write_dataset(folder, rows), tmp_path / "out", shard_mb=1)
    manifest = read_manifest(tmp_path / "out").values
    assert len(manifest["shards"]) > 3
    assert sum(shard["num_samples"] for shard in manifest["shards"]) == 12
    assert all(shard["size"] < 3 << 20 for shard in manifest["shards"])
    assert len(read_samples(tmp_path / "out")) == 12


def bad_dataset(folder):
    """Two good records, and one for each thing that can be wrong with one."""
    write_image(folder / "good.png", 60, 60, 1)
    data = (folder / "good.png").read_bytes()
    (folder / "cut.png").write_bytes(data[: len(data) // 2])
    (folder / "text.jpg").write_text("no image")
    (folder / "flipped.png").write_bytes(data[:2000] + bytes([data[2000] ^ 1]) + data[2001:])
    rows = [
        record(0, ["good.png"]),
        record(1),
        record(2, ["missing.png"]),
        record(3, ["cut.png"]),
        record(4, ["text.jpg"]),
        record(5, ["../good.png"]),
        record(6, answer="word " * 3000),
        record(7) | {"conversations": []},
        record(8, ["good.png"], text="<image>"),
        record(9, text="\ud800"),
        record(10, ["flipped.png"]),
    ]
    write_dataset(folder, rows, lines=True)
    path = folder / "annotations.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:5], '{"id": "broken", "conv', *lines[5:]]))
    return folder


EXPECTED_REASONS = {
    "s2": "missing_image",
    "s3": "corrupt_image",
    "s4": "corrupt_image",
    "raw:5": "broken_json",
    "s5": "outside_data_root",
    "s6": "longer_than_max_seq_len",
    "s7": "no_conversation",
    "s8": "marker_without_image",
    "s9": "invalid_utf8",
    "s10": "corrupt_image",
}


@pytest.mark.parametrize("shard_format", ["arrow", "webdataset", "refs"])
def test_what_cannot_be_used_is_listed_with_its_reason_and_the_totals_add_up(
    tmp_path, shard_format
):
    folder = bad_dataset(tmp_path / "raw")
    summary = build(folder, tmp_path / "out", format=shard_format, max_rejected=1.0)
    rejected = pq.read_table(tmp_path / "out" / "rejected.parquet").to_pylist()
    assert {row["sample_id"]: row["reason"] for row in rejected} == EXPECTED_REASONS
    assert [row["position"] for row in rejected] == sorted(row["position"] for row in rejected)
    assert all(row["detail"] for row in rejected)
    assert sorted(
        read_index(tmp_path / "out").column("sample_ids").combine_chunks().flatten().to_pylist()
    ) == [
        "s0",
        "s1",
    ]
    totals = summary.totals
    assert (totals["num_read"], totals["num_packed"], totals["num_rejected"]) == (12, 2, 10)
    assert not verify_build(tmp_path / "out", quiet(), workers=1).problems


def test_an_image_that_changes_between_counting_and_writing_is_rejected_by_name(
    dataset, tmp_path, monkeypatch
):
    folder = tmp_path / "raw"
    write_dataset(folder, good_records(folder, 20))
    victim = sorted((folder / "images").iterdir())[0]
    plain = Partition._group

    def group_then_change(self, *tables):
        grouping = plain(self, *tables)
        victim.write_bytes(b"other")
        return grouping

    monkeypatch.setattr(Partition, "_group", group_then_change)
    summary = build(folder, tmp_path / "out")
    assert {reason: entry.number for reason, entry in summary.rejected.items()} == {
        "media_changed": 1
    }
    assert summary.totals["num_packed"] == 19
    assert len(read_samples(tmp_path / "out")) == 19
    groups = pq.read_table(tmp_path / "out" / "groups.parquet")
    assert sum(groups.column("num_samples").to_pylist()) == 19
    assert not verify_build(tmp_path / "out", quiet(), workers=1).problems


def test_a_finished_build_is_left_alone_and_other_settings_are_refused(dataset, tmp_path):
    out = tmp_path / "out"
    build(dataset, out)
    before = digests(out)
    assert build(dataset, out).already_complete
    assert digests(out) == before
    another = "finished build of other data or settings"
    with pytest.raises(DataError, match=rf"{another} \(seed 0, now 1\): choose"):
        build(dataset, out, seed=1)
    with pytest.raises(DataError, match=rf"{another} \(.*model tiny, now internvl_1_5"):
        build(dataset, out, model="internvl_1_5")
    many = {"seed": 1, "max_seq_len": 300, "shard_mb": 1, "isf_iterations": 3}
    with pytest.raises(DataError, match=rf"{another} \(shard_mb .*; .*; .*; 1 more\)"):
        build(dataset, out, **many)
    other = write_dataset(tmp_path / dataset.name, [record(1)])
    with pytest.raises(DataError, match=rf"{another} \(raw_files\)"):
        build(other, out)
    with pytest.raises(DataError, match="no dataset"):
        build(tmp_path / "nowhere", out)


def test_a_second_build_in_one_process_sees_its_own_samples(tmp_path):
    for name in ("a", "b"):
        rows = [record(f"{name}{i}") for i in range(5)]
        config = BuildConfig(**options(write_dataset(tmp_path / name, rows), tmp_path / "out"))
        Builder(config, quiet()).build(overwrite=True)
    assert {sample["sample_id"] for sample in read_samples(tmp_path / "out")} == {
        f"sb{i}" for i in range(5)
    }


def test_two_builds_into_one_output_do_not_mix(dataset, tmp_path):
    with locked(tmp_path / "out"), pytest.raises(DataError, match="another packer is writing"):
        build(dataset, tmp_path / "out")
    build(dataset, tmp_path / "out")


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGKILL])
def test_no_process_outlives_a_build_that_is_stopped(tmp_path, stop):
    folder = tmp_path / "raw"
    write_dataset(folder, [record(i, answer="word " * 100) for i in range(6000)])
    arguments = [
        "--tokenizer",
        options(folder, "")["tokenizer"],
        "--out",
        str(tmp_path / "out"),
        "--workers",
        "2",
    ]
    script = "from isobatch.packer.cli import main; main()"
    command = [
        sys.executable,
        "-c",
        script,
        "build",
        "--dataset",
        str(folder),
        "--model",
        "tiny",
        *arguments,
    ]
    child = subprocess.Popen(command, start_new_session=True, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while not (tmp_path / "out" / "staging" / "parts").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    child.send_signal(stop)
    stderr = child.communicate(timeout=60)[1].decode()
    assert child.returncode == (143 if stop == signal.SIGTERM else -stop)
    assert ("stopped; run the same command again" in stderr) == (stop == signal.SIGTERM)
    if stop == signal.SIGTERM:  # an orphan of a killed leader may still say that nobody listens
        assert "Traceback" not in stderr
    while time.monotonic() < deadline and group_is_alive(child.pid):
        time.sleep(0.05)
    assert not group_is_alive(child.pid)


def group_is_alive(group):
    """Is any process of the group left, zombies aside?"""
    states = [
        path.read_text().rsplit(")", 1)[1].split()
        for path in Path("/proc").glob("[0-9]*/stat")
        if path.exists()
    ]
    return any(int(fields[2]) == group and fields[0] != "Z" for fields in states)


def test_overwrite_removes_only_what_a_build_made(dataset, tmp_path):
    out = tmp_path / "out"
    build(dataset, out)
    (out / "manifest.json-00c0ffee.tmp").write_text("{")  # of a build that was killed here
    Builder(BuildConfig(**options(dataset, out, seed=1)), quiet()).build(overwrite=True)
    assert read_manifest(out).values["seed"] == 1
    assert not list(out.glob("*.tmp"))
    (out / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match=r"thesis\.txt"):
        Builder(BuildConfig(**options(dataset, out)), quiet()).build(overwrite=True)
    assert (out / "thesis.txt").exists()
    assert (out / "manifest.json").exists()


def test_a_manifest_that_a_killed_build_left_in_part_goes_with_the_next_run(dataset, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "manifest.json-00c0ffee.tmp").write_text("{")
    build(dataset, tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.tmp"))


def test_an_unfinished_build_of_other_settings_is_not_continued(dataset, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Partition, "_write", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            build(dataset, tmp_path / "out")
    another = "unfinished build of other data or settings"
    with pytest.raises(DataError, match=rf"{another} \(seed 0, now 3\): finish"):
        build(dataset, tmp_path / "out", seed=3)
    root = tmp_path / "elsewhere"
    root.mkdir()
    with pytest.raises(DataError, match=rf"{another} \(raw_files .*, now .*elsewhere\): finish"):
        build(dataset, tmp_path / "out", data_root=str(root))


@pytest.mark.parametrize(
    "moment", ["parts/000001.arrow", "samples.arrow", "index/shard-00000.arrow"]
)
def test_a_killed_build_goes_on_and_ends_as_if_undisturbed(tmp_path, moment):
    folder = tmp_path / "raw"
    rows = good_records(folder, 120)
    write_dataset(folder, rows)
    build(folder, tmp_path / "undisturbed", shard_mb=1, workers=1)
    out = tmp_path / "killed"
    script = (
        "import io, sys, json\nfrom rich.console import Console\nfrom packer.build import Builder\n"
        "from packer.config import BuildConfig\nfrom packer.progress import StageProgress\n"
        "config = BuildConfig(**json.loads(sys.argv[1]))\n"
        "Builder(config, StageProgress(Console(file=io.StringIO()))).build()"
    )
    program = tmp_path / "program.py"
    program.write_text(script)
    values = json.dumps(options(folder, out, shard_mb=1))
    (child,) = ranks.start(1, tmp_path / "printed", program, values)
    deadline = time.monotonic() + 60
    while (
        not (out / "staging" / moment).exists() and child.is_alive() and time.monotonic() < deadline
    ):
        time.sleep(0.001)
    child.kill()
    child.join()
    assert child.exitcode in (-signal.SIGKILL, 0)
    assert not build(folder, out, shard_mb=1).totals["num_rejected"]
    assert digests(out) == digests(tmp_path / "undisturbed")


@pytest.mark.parametrize(
    ("rows", "message"),
    [([], "holds no records"), ([record(1, ["missing.png"])], "all 1 samples were rejected")],
)
def test_nothing_to_pack_is_one_clear_error(tmp_path, rows, message):
    with pytest.raises(DataError, match=message):
        build(write_dataset(tmp_path / "raw", rows), tmp_path / "out")
