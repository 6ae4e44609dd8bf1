"""A dry run says what the build then gives, for every source and format, and leaves nothing."""

import gzip
import json
import os
import random
import signal
import subprocess
import sys
import time
from functools import partial

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from isobatch.common.errors import ConfigError, DataError
from isobatch.packer import group
from isobatch.packer.config import BuildConfig
from isobatch.packer.dry_run import draw, estimate
from isobatch.packer.dry_run.estimate import estimate_build
from isobatch.packer.report.figures import make_report
from isobatch.shards.manifest import read_manifest
from support.builds.command import run_packer
from support.builds.layouts import write_mds, write_saved, write_tar
from support.builds.packed import build, quiet
from support.builds.raw_data import good_records, options, record, write_dataset, write_image
from support.builds.remote_builds import upload, use
from support.cases import for_each

FEW = 60


def predict(place, **changes):
    config = BuildConfig(**options(place, "nowhere/out", max_rejected=1.0, **changes))
    return estimate_build(config, quiet())


def built(place, out, **changes):
    """Totals, rejected samples by reason, report and bytes of a build."""
    summary = build(place, out, max_rejected=1.0, **changes)
    num_bytes = sum(path.stat().st_size for path in out.rglob("*.*") if path.suffix != ".html")
    rejected = {reason: entry.number for reason, entry in summary.rejected.items()}
    return summary.totals, rejected, make_report(str(out)), num_bytes


def state(folder):
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*")}


# --- small datasets are read whole: what is said is what comes ---


TEXTS = [record(number, answer="word " * (number % 50)) for number in range(FEW)]
PAGES = [{"id": str(number), "text": "word " * (number % 50 + 1)} for number in range(FEW)]


def write_gz(folder, image):
    lines = "\n".join(map(json.dumps, TEXTS)).encode()
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines))


def write_parquet(folder, image):
    columns = {"id": [row["id"] for row in TEXTS], "image": [image] * FEW}
    columns["conversations"] = [
        [{**turn, "value": "<image>" * (not k) + turn["value"]} for k, turn in enumerate(turns)]
        for turns in (row["conversations"] for row in TEXTS)
    ]
    pq.write_table(pa.table(columns), folder / "a.parquet", row_group_size=17)


def write_tars(folder, image):
    for name in ("0", "1"):
        members = [
            (f"{name}-{row['id']}.{suffix}", data)
            for row in PAGES
            for suffix, data in (("png", image), ("txt", row["text"].encode()))
        ]
        write_tar(folder / f"{name}.tar", members)


def write_image_folder(folder, image):
    names = [f"{number}.jpg" for number in range(FEW)]
    for number, name in enumerate(names):
        write_image(folder / name, 40 + number, 50, number)
    table = [{"file_name": name, "text": "A picture. " * 9} for name in names]
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, table)))


def write_mixture(folder, *lines):
    write_dataset(folder / "a", TEXTS[:40])
    write_dataset(folder / "b", [row | {"id": f"b{row['id']}"} for row in TEXTS[20:]])
    parts = [
        f'[[datasets]]\ndataset = "{name}"\n{line}' for name, line in zip("ab", lines, strict=True)
    ]
    (folder / "mix.toml").write_text("\n".join(parts))


def write_rows(folder, image, **options):
    """Records with pictures of which one is missing."""
    rows = good_records(folder, FEW)
    rows[7]["image"] = "images/none.png"
    write_dataset(folder, rows, **options)


def write_build(folder, image):
    write_rows(folder / "raw", image)
    build(folder / "raw", folder / "packed", max_rejected=1.0)


CSV = "\n".join(["text", *(row["text"] for row in PAGES)])
MDS = {"id": "str", "text": "str"}
WRITERS = {
    "array": write_rows,
    "lines": partial(write_rows, lines=True),
    "limit": write_rows,
    "gz": write_gz,
    "parquet": write_parquet,
    "save_to_disk": lambda folder, _: write_saved(folder, TEXTS),
    "tar": write_tars,
    "csv": lambda folder, _: (folder / "a.csv").write_text(CSV),
    "mds": lambda folder, _: write_mds(folder, MDS, PAGES),
    "image_folder": write_image_folder,
    "build": write_build,
    "weights": lambda folder, _: write_mixture(folder, "weight = 3", "weight = 1"),
    "repeat": lambda folder, _: write_mixture(folder, "repeat = 2.5", "limit = 11"),
}
INSIDE = {"build": "packed", "weights": "mix.toml", "repeat": "mix.toml"}


@for_each("kind", list(WRITERS))
def test_what_is_read_whole_is_said_exactly(kind, tmp_path):
    folder = tmp_path / kind
    folder.mkdir()
    write_image(tmp_path / "image.png", 60, 40, 0)
    WRITERS[kind](folder, (tmp_path / "image.png").read_bytes())
    place, needs = folder / INSIDE.get(kind, ""), {"limit": 41} if kind == "limit" else {}
    before = state(tmp_path)
    said = predict(place, **needs)
    assert state(tmp_path) == before
    totals, rejected, report, num_bytes = built(place, tmp_path / f"{kind}-out", **needs)
    for name in ("num_read", "num_repeated", "num_packed", "num_rejected", "num_groups"):
        assert getattr(said, name) == totals[name], (kind, name)
    assert said.rejected == rejected
    assert (said.limits, said.fill) == (report.limits, report.fill)
    assert said.num_drawn == said.num_read
    assert set(said.intervals.values()) == {0.0}
    assert said.num_bytes == pytest.approx(num_bytes, rel=0.25, abs=9000)
    assert not [note for note in said.notes if not note.startswith("counting computed")]


@for_each("format", ["arrow", "webdataset", "energon", "refs"])
def test_bytes_are_those_of_the_format(format, tmp_path):
    place = write_dataset(tmp_path / format, good_records(tmp_path / format))
    said = predict(place, format=format, max_seq_len=1024, keep_columns=("id",))
    out = tmp_path / f"{format}-out"
    build(place, out, format=format, max_seq_len=1024, keep_columns=("id",))
    shards = sum(shard.size for shard in read_manifest(str(out)).shards)
    # the rest are tables, whose size counts with data of that size
    assert shards < said.num_bytes < shards + 30_000


def test_the_demo_is_drawn_elsewhere(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("isobatch.packer.build.place_demo", few_demo)
    status, out, _ = run_packer(
        capsys, monkeypatch, "build", "--dataset", "demo", "--dry-run", "--json", "--workers", 1
    )
    said = json.loads(out)
    assert status == 0
    assert said["num_packed"] == FEW
    assert list(tmp_path.iterdir()) == []


def few_demo(folder):
    write_dataset(folder, good_records(folder))


# --- of larger ones a part is read ---

SAMPLES = 4000


def sorted_texts(seed=0):
    """Short ones, then long ones, and some that cannot be used: more and more of them."""
    rng = random.Random(seed)
    rows = []
    for number in range(SAMPLES):
        length = rng.randrange(1, 8) + number // 100
        rows.append(record(number, text="word", answer="word " * length))
        if rng.random() < 0.04 * number / SAMPLES:
            rows[-1]["conversations"] = []
    return rows


def write_large(folder, kind):
    folder.mkdir()
    rows = sorted_texts()
    if kind in ("array", "lines"):
        write_dataset(folder, rows, lines=kind == "lines")
    elif kind == "gz":
        lines = "\n".join(map(json.dumps, rows)).encode()
        (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    elif kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), folder / "a.parquet", row_group_size=130)
    elif kind == "tar":
        for first in range(0, SAMPLES, 500):
            some = rows[first : first + 500]
            members = [(f"{row['id']}.json", json.dumps(row).encode()) for row in some]
            write_tar(folder / f"{first:04d}.tar", members)
    else:
        write_dataset(folder / "a", rows)
        write_dataset(folder / "b", sorted_texts(1)[: SAMPLES // 2], lines=True)
        parts = 'dataset = "a"\nweight = 3', 'dataset = "b"\nweight = 2'
        folder = folder / "mix.toml"
        folder.write_text("\n".join(f"[[datasets]]\n{part}" for part in parts))
    return folder


@for_each("kind", ["lines", "array", "gz", "parquet", "tar", "mixture"])
def test_a_part_says_what_the_whole_gives(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(draw, "LEAST", 600)
    monkeypatch.setattr(estimate, "MOST_TIMES", 1.0)
    place = write_large(tmp_path / kind, kind)
    changes = {"max_seq_len": 1024, "max_vision": 8, "chunk_records": 512}
    said = predict(place, **changes)
    totals, rejected, report, num_bytes = built(place, tmp_path / f"{kind}-out", **changes)
    assert said.num_drawn < 0.4 * totals["num_read"]
    # a tenth, or what the dry run itself says
    for name in ("num_packed", "num_groups"):
        sure = max(0.1, said.intervals[name])
        assert getattr(said, name) == pytest.approx(totals[name], rel=sure), (kind, name)
        assert 0 < said.intervals[name] < 0.3
    assert said.num_bytes == pytest.approx(num_bytes, rel=0.12)
    assert said.fill == pytest.approx(report.fill, abs=0.01)
    assert said.num_read == pytest.approx(totals["num_read"], rel=0.1)
    assert said.num_read + said.num_repeated == said.num_packed + said.num_rejected
    assert said.rejected.keys() == rejected.keys()
    for reason, number in rejected.items():
        # of some eighty unusable ones a dozen are drawn
        assert said.rejected[reason] == pytest.approx(number, abs=0.1 * totals["num_read"])
        assert number / 3 < said.rejected[reason] < 3 * number


def test_caps_by_a_part_are_said_to_be_so_and_more_is_drawn_where_it_is_needed(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(draw, "LEAST", 300)
    place = write_large(tmp_path / "lines", "lines")
    monkeypatch.setattr(estimate, "BUSY", 0.0)
    few, again = (predict(place, max_seq_len=1024, max_vision=8) for _ in range(2))
    for name in ("num_read", "num_packed", "num_groups", "num_bytes", "rejected", "limits"):
        assert getattr(again, name) == getattr(few, name)
    monkeypatch.setattr(estimate, "WIDEST", few.intervals["num_groups"] / 2)
    monkeypatch.setattr(estimate, "BUSY", 1e9)
    more = predict(place)
    assert more.num_drawn > 1.8 * few.num_drawn
    assert [note[:8] for note in more.notes] == ["caps are", "counting"]
    assert not few.notes
    assert few.intervals.keys() - more.intervals.keys() == {"num_groups"}


def test_partitions_are_those_of_the_build_and_so_are_their_caps(tmp_path):
    place = tmp_path / "raw"
    rows = [record(n, answer="word " * (n % 40)) for n in range(2600)]
    write_dataset(place, rows, lines=True)
    changes = {"partition_samples": 1000, "chunk_records": 256}
    said = predict(place, **changes)
    totals, _, report, _ = built(place, tmp_path / "out", **changes)
    shards = read_manifest(str(tmp_path / "out")).shards
    # what they leave over has the number after theirs
    assert said.num_partitions == max(int(shard.name.split("-")[1]) for shard in shards) > 1
    assert (said.limits, said.limits_explained) == (report.limits, list(report.limits_explained))
    assert said.num_groups == pytest.approx(totals["num_groups"], rel=0.1)


@pytest.mark.server
def test_a_bucket_is_read_and_nothing_is_written_there(s3, tmp_path, monkeypatch):
    use(monkeypatch, s3)
    folder = write_dataset(tmp_path / "raw", good_records(tmp_path / "raw"), lines=True)
    uri = upload(s3, folder, f"{tmp_path.name}/raw")
    config = BuildConfig(**options(uri, f"{s3.uri}/{tmp_path.name}/out"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    said = estimate_build(config, quiet())
    totals, *_ = built(folder, tmp_path / "out")
    assert said.num_groups == totals["num_groups"]
    assert not (tmp_path / "cache").exists()


# --- times and costs ---


def test_costs_are_the_price_of_all_workers_until_the_last_is_done(tmp_path):
    place = write_dataset(tmp_path / "raw", [record(n) for n in range(20)])
    config = BuildConfig(**options(place, tmp_path / "out", partitions="3/8", workers=4))
    said = estimate_build(config, quiet(), price=0.5)
    assert [row.workers for row in said.workers] == [32, 1]
    for row in said.workers:
        assert row.core_hours == pytest.approx(row.workers * row.seconds / 3600)
        assert row.cost == pytest.approx(row.core_hours * 0.5)
    assert said.seconds == said.workers[0].seconds <= said.workers[1].seconds
    assert predict(place).workers[0].cost is None
    assert min(said.stages.values()) >= 0


def test_more_workers_take_no_more_time_and_partitions_bound_them():
    stages = {"read": 4.0, "count": 60.0, "group": 10.0, "write": 30.0, "tables": 2.0}
    for partitions in (1, 3, 16, 100):
        times = [estimate.elapsed(stages, workers, partitions) for workers in range(1, 300)]
        assert times[0] == pytest.approx(sum(stages.values()))
        whole = [times[workers - 1] for workers in (1, partitions, 2 * partitions)]
        assert whole == sorted(whole, reverse=True)
        if partitions > 1:
            assert whole[1] == pytest.approx(times[0] / partitions)
    # what one process reads, groups and finishes is never divided
    assert estimate.elapsed(stages, 10_000, 1) == pytest.approx(16.0, abs=0.02)


def test_what_takes_as_long_for_few_samples_as_for_many_is_not_multiplied(tmp_path, monkeypatch):
    write_dataset(tmp_path, [record(n, answer="word " * (n % 50)) for n in range(FEW)])
    mixture = tmp_path / "mix.toml"
    mixture.write_text('[[datasets]]\ndataset = "annotations.jsonl"\nrepeat = 200\n')
    (tmp_path / "annotations.jsonl").write_text("\n".join(map(json.dumps, TEXTS)))
    choose = group.choose_limits

    def slow(*args, **options):
        time.sleep(2)
        return choose(*args, **options)

    monkeypatch.setattr(group, "choose_limits", slow)
    monkeypatch.setattr(estimate, "POPULATION", 300)
    said = predict(mixture)
    assert said.num_packed == 200 * FEW
    assert 2 <= said.stages["group"] < 2 * 40 / 2


def test_cpu_time_of_a_small_build_is_that_of_the_build(tmp_path):
    place = write_dataset(tmp_path, [record(n) for n in range(64)])
    tokenizer = options("", "")["tokenizer"]
    command = [sys.executable, "-m", "packer", "build", "--model", "internvl_1_5", "--workers", "4"]
    command += [
        "--dataset",
        str(place),
        "--tokenizer",
        str(tokenizer),
        "--out",
        str(tmp_path / "o"),
    ]
    dry = subprocess.run([*command, "--dry-run", "--json"], check=True, capture_output=True)
    before = os.times()
    subprocess.run(command, check=True, capture_output=True)
    after = os.times()
    took = after.children_user + after.children_system
    took -= before.children_user + before.children_system
    assert took / 2 < json.loads(dry.stdout)["cpu_seconds"] < 2 * took


# --- the command ---


def test_the_command_says_what_it_drew_and_leaves_a_finished_build_alone(
    tmp_path, capsys, monkeypatch
):
    place = write_dataset(tmp_path / "raw", good_records(tmp_path / "raw"))
    build(place, tmp_path / "out")
    before = state(tmp_path)
    places = ["--dataset", place, "--out", tmp_path / "out", "--workers", 1, "--overwrite"]
    command = [
        "build",
        *places,
        "--model",
        "internvl_1_5",
        "--tokenizer",
        options("", "")["tokenizer"],
    ]
    price = ["--dry-run", "--price-per-core-hour", "0.04"]
    status, out, _ = run_packer(capsys, monkeypatch, *command, *price)
    assert status == 0
    assert "drawn     60 samples, 100.0% of 60" in out
    assert "cost" in out
    assert "groups" in out
    assert state(tmp_path) == before
    status, out, _ = run_packer(capsys, monkeypatch, *command, *price, "--json")
    assert json.loads(out)["workers"][0].keys() == {"workers", "seconds", "core_hours", "cost"}
    status, _, err = run_packer(capsys, monkeypatch, *command, "--price-per-core-hour", "1")
    assert (status, err.count("\n")) == (2, 1)
    assert "--price-per-core-hour is for --dry-run" in err


def test_what_cannot_be_predicted_is_one_clear_line(tmp_path):
    empty = write_dataset(tmp_path / "empty", [])
    with pytest.raises(DataError, match="holds no records"):
        predict(empty)
    bad = write_dataset(tmp_path / "bad", [{"id": str(n)} for n in range(9)])
    with pytest.raises(DataError, match="nothing to pack: all 9 samples"):
        predict(bad)
    long = write_dataset(tmp_path / "long", [record(n, answer="word " * 90) for n in range(9)])
    with pytest.raises(DataError, match="nothing to pack"):
        predict(long, max_seq_len=20)
    with pytest.raises(ConfigError, match="no usable record has a value in score"):
        predict(long, keep_columns=("score",))
    with pytest.raises(DataError, match="nowhere"):
        predict(tmp_path / "nowhere")
    half = [record(n) for n in range(9)] + [{"id": f"x{n}"} for n in range(3)]
    place = write_dataset(tmp_path / "half", half)
    said = estimate_build(BuildConfig(**options(place, "nowhere/out")), quiet())
    assert "the build would stop: 25.0% of the samples cannot be used" in said.notes[0]


def test_one_that_is_stopped_leaves_nothing(tmp_path):
    rows = [record(n, answer="word " * 400) for n in range(4000)]
    place = write_dataset(tmp_path / "raw", rows)
    folder = tmp_path / "temporary"
    folder.mkdir()
    config = tmp_path / "build.toml"
    values = options(place, tmp_path / "out", workers=2)
    config.write_text(
        "\n".join(f"{key} = {json.dumps(x, default=str)}" for key, x in values.items())
    )
    command = [sys.executable, "-m", "isobatch.packer", "build", "--config", config, "--dry-run"]
    environment = os.environ | {"TMPDIR": str(folder)}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    while not list(folder.glob("packer-dry-run-*/out/staging/*")):
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate()
    assert process.returncode == 143
    assert err.splitlines()[-1].startswith("error: stopped")
    assert list(folder.iterdir()) == []
    assert not (tmp_path / "out").exists()
