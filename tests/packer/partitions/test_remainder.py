"""What partitions leave over is packed together: small ones fill as one does, and lose nothing."""

import io
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from isobatch.balance.grouping.caps import GroupOptions
from isobatch.common.types import Counts, Limits
from isobatch.packer import build as build_module
from isobatch.packer import group
from isobatch.packer.changes.remove import remove_samples
from isobatch.packer.changes.sample_names import SampleNames
from isobatch.packer.count.remainder import ROWS
from isobatch.packer.group import group_within
from isobatch.packer.partitions import pack_all
from isobatch.packer.partitions.cut import cut_dataset
from isobatch.packer.partitions.partition import PackedPartition
from isobatch.packer.report import figures
from isobatch.packer.report.figures import make_report
from isobatch.packer.verify import require_intact, verify_build
from isobatch.shards.manifest import read_manifest
from support.builds.packed import build, quiet, read_samples
from support.builds.raw_data import good_records, write_dataset
from support.cases import for_each

NUMBER = 480
OPTIONS = {"max_seq_len": 2048, "shard_mb": 1, "max_rejected": 0.1}
SAMPLES = 60
"""Of a partition: so few, which no option allows, that each of eight has a few groups."""


def in_partitions(monkeypatch, samples=SAMPLES, leave=1):
    """Cut datasets into partitions of so few samples, of which each leaves so many groups over."""

    def cut(dataset, _, seed, **options):
        return cut_dataset(dataset, samples, seed, **options)

    monkeypatch.setattr(build_module, "cut_dataset", cut)
    monkeypatch.setattr(group, "FULL", 1.0)
    monkeypatch.setattr(group, "FEW_GROUPS", leave)
    monkeypatch.setattr(group, "MOST_LEFT", leave)


@pytest.fixture(scope="module")
def folder(shared):
    return shared("remainder raw", lambda place: write_dataset(place, good_records(place, NUMBER)))


@pytest.fixture(scope="module")
def whole(folder, shared):
    """The dataset in one partition."""
    make = lambda place: build(folder, place / "out", **OPTIONS)  # noqa: E731
    return shared("remainder whole", make) / "out"


def by_id(out):
    return {row["sample_id"]: row for row in read_samples(out)}


def partitions_of(out):
    return {int(shard.name.split("-")[1]) for shard in read_manifest(out).shards}


def test_small_partitions_have_the_groups_of_one_and_without_it_more(
    folder, whole, tmp_path, monkeypatch
):
    numbers = {"one": read_manifest(whole).num_groups}
    for name, leave in (("many", 4), ("apart", 0)):
        in_partitions(monkeypatch, leave=leave)
        numbers[name] = build(folder, tmp_path / name, **OPTIONS).totals["num_groups"]
    assert numbers["many"] <= numbers["one"] * 1.02 < numbers["apart"]


@for_each("form", ["arrow", "webdataset", "energon", "refs"])
def test_every_format_has_every_sample_once(folder, whole, tmp_path, monkeypatch, form):
    in_partitions(monkeypatch)
    out = tmp_path / form
    build(folder, out, **OPTIONS, format=form)
    require_intact(verify_build(out, quiet(), workers=1))
    totals = read_manifest(out).values["totals"]
    expected = read_manifest(whole).values["totals"]
    assert {**totals, "num_groups": 0} == {**expected, "num_groups": 0}
    assert len(partitions_of(out)) > 4
    counts = pq.read_table(out / "counts.parquet")
    assert sorted(counts.column("position").to_pylist()) == list(range(NUMBER))
    if form == "arrow":
        assert by_id(out) == by_id(whole)


def test_content_that_came_with_the_records_is_left_over_with_them(tmp_path, monkeypatch):
    """Images and lists of images as a video, as bytes in cells of a table."""

    def picture(seed, size):
        content = io.BytesIO()
        Image.fromarray(np.random.default_rng(seed).integers(0, 255, size, np.uint8)).save(
            content, "PNG"
        )
        return {"bytes": content.getvalue(), "path": f"{seed}.png"}

    cell = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    turn = pa.list_(pa.struct([("from", pa.string()), ("value", pa.string())]))
    kinds = [("id", pa.string()), ("conversations", turn), ("image", pa.list_(cell))]
    schema = pa.schema([*kinds, ("video", pa.list_(pa.list_(cell)))])
    rows = [
        {
            "id": f"s{number}",
            "conversations": [
                {"from": "human", "value": f"<image>\n<video>\nWhat? {'word ' * number}"},
                {"from": "gpt", "value": "That."},
            ],
            "image": [picture(number, (40, 30 + number, 3))],
            "video": [[picture(1000 * number + k, (32, 40, 3)) for k in range(4)]],
        }
        for number in range(48)
    ]
    (tmp_path / "raw").mkdir()
    table = pa.Table.from_pylist(rows, schema)
    pq.write_table(table, tmp_path / "raw" / "a.parquet", row_group_size=3)
    options = {"model": "qwen2_5_vl", "max_seq_len": 400, "workers": 1}
    build(tmp_path / "raw", tmp_path / "one", **options)
    in_partitions(monkeypatch, samples=12)
    build(tmp_path / "raw", tmp_path / "many", **options)
    assert len(partitions_of(tmp_path / "many")) > 2
    assert by_id(tmp_path / "many") == by_id(tmp_path / "one")


def test_copies_are_counted_once_as_records(folder, tmp_path, monkeypatch):
    in_partitions(monkeypatch)
    mixture = tmp_path / "mixture.toml"
    mixture.write_text(
        "".join(
            f'[[datasets]]\nname = "{name}"\ndataset = "{folder}"\nrepeat = {repeat}\n'
            for name, repeat in (("a", 1), ("b", 3))
        )
    )
    summary = build(mixture, tmp_path / "out", **OPTIONS)
    totals = summary.totals
    assert (totals["num_read"], totals["num_repeated"]) == (2 * NUMBER, 2 * NUMBER)
    assert totals["num_packed"] == 4 * NUMBER
    counts = pq.read_table(tmp_path / "out" / "counts.parquet")
    positions, times = np.unique(counts.column("position"), return_counts=True)
    assert positions.tolist() == list(range(2 * NUMBER))
    assert sorted(times.tolist()) == [1] * NUMBER + [3] * NUMBER
    require_intact(verify_build(tmp_path / "out", quiet(), workers=1))


def test_copies_keep_their_ids_where_they_are_left_over(folder, tmp_path, monkeypatch):
    mixture = tmp_path / "mixture.toml"
    mixture.write_text(f'[[datasets]]\nname = "a"\ndataset = "{folder}"\nrepeat = 3\n')
    build(mixture, tmp_path / "one", **OPTIONS)
    in_partitions(monkeypatch, leave=4)
    build(mixture, tmp_path / "many", **OPTIONS)
    assert len(partitions_of(tmp_path / "many")) > 4
    assert by_id(tmp_path / "many") == by_id(tmp_path / "one")


def test_samples_of_one_id_have_no_other_where_they_are_left_over(folder, tmp_path, monkeypatch):
    """So that `packer remove` finds all of them: copies of two sources are all `ID` or `ID#2`."""
    in_partitions(monkeypatch, leave=10)
    mixture = tmp_path / "mixture.toml"
    part = '[[datasets]]\nname = "{}"\ndataset = "{}"\nrepeat = 2\n'
    mixture.write_text(part.format("a", folder) + part.format("b", folder))
    build(mixture, tmp_path / "out", **OPTIONS)
    ids = pq.read_table(tmp_path / "out" / "counts.parquet").column("sample_id").to_pylist()
    assert not [name for name in ids if name.count("#") > 1]
    names = SampleNames(ids=("s0", "s1"))
    assert remove_samples(str(tmp_path / "out"), names, quiet(), workers=1).num_samples == 8
    require_intact(verify_build(tmp_path / "out", quiet(), workers=1, absent=names))


def test_some_remainders_are_packed_by_tasks_of_their_own(folder, whole, tmp_path, monkeypatch):
    in_partitions(monkeypatch)
    monkeypatch.setattr(pack_all, "PER_REMAINDER", 3)
    build(folder, tmp_path / "out", **OPTIONS)
    assert by_id(tmp_path / "out") == by_id(whole)
    last = max(partitions_of(tmp_path / "out"))
    assert last >= 9  # eight partitions, and three of their remainders


def test_a_report_reads_no_partition_that_has_left_all_over(folder, tmp_path, monkeypatch):
    in_partitions(monkeypatch, leave=10**6)
    monkeypatch.setattr(pack_all, "PER_REMAINDER", 3)
    out = tmp_path / "out"
    build(folder, out, **OPTIONS)
    assert min(partitions_of(out)) >= 7  # only remainders have groups
    whole = make_report(out)
    monkeypatch.setattr(figures, "MOST_SAMPLES", 1)
    drawn = make_report(out)
    assert drawn.num_groups == whole.num_groups
    assert drawn.notes
    assert 0 < len(drawn.loads["ours"]["llm_tokens"]) < whole.num_groups


def test_a_file_that_is_gone_when_it_is_packed_is_rejected_there(folder, tmp_path, monkeypatch):
    in_partitions(monkeypatch, samples=15)
    raw = write_dataset(tmp_path / "raw", good_records(tmp_path / "raw", 60))
    rows = json.loads((raw / "annotations.json").read_text())
    chosen = []

    def pack(self, decisions):
        with_images = []
        for number in self._partitions:
            with self.results.opened(number, [ROWS]) as place:
                table = pa.ipc.open_file(pa.memory_map(str(place / ROWS))).read_all()
            with_images += [row for row in table.to_pylist() if row["images"]]
        chosen.append(with_images[0]["sample_id"])
        (raw / with_images[0]["images"][0]["name"]).unlink()
        return original(self, decisions)

    original = pack_all.PartitionRun.finish
    monkeypatch.setattr(pack_all.PartitionRun, "finish", pack)
    summary = build(raw, tmp_path / "out", **OPTIONS)
    assert summary.totals["num_packed"] + summary.totals["num_rejected"] == len(rows)
    rejected = pq.read_table(tmp_path / "out" / "rejected.parquet").to_pylist()
    assert chosen[0] in {row["sample_id"] for row in rejected}
    place = next(row["position"] for row in rejected if row["sample_id"] == chosen[0])
    counts = pq.read_table(tmp_path / "out" / "counts.parquet").to_pylist()
    assert place in {row["position"] for row in counts if row["sample_id"] == chosen[0]}
    require_intact(verify_build(tmp_path / "out", quiet(), workers=1))


def test_a_partition_of_a_version_that_left_nothing_over_is_still_read(
    folder, tmp_path, monkeypatch
):
    in_partitions(monkeypatch)
    original, kept = pack_all.PartitionRun.finish, []

    def finish(self, decisions):
        kept.extend(self._read(self._partitions))
        return original(self, decisions)

    monkeypatch.setattr(pack_all.PartitionRun, "finish", finish)
    build(folder, tmp_path / "out", **OPTIONS)
    values = json.loads(kept[0].to_json())
    assert sum(values.pop("remainder")) > 0
    del values["is_remainder"]
    assert PackedPartition.from_json(json.dumps(values)).remainder == []


@for_each(("cap", "number"), [(1000, 300), (1000, 3000), (9000, 3000), (9000, 30), (700, 2000)])
def test_the_least_filled_groups_are_left_over(cap, number):
    tokens = np.random.default_rng(2).integers(10, 700, number)
    zeros = np.zeros_like(tokens)
    counts = Counts(
        **{name: zeros for name in Counts.__dataclass_fields__ if name != "num_text_tokens"},
        num_text_tokens=tokens,
    )
    limits = Limits(max_seq_len=cap, max_vision=1, min_seq_len=0, min_vision=0)

    def grouped(grouping, *, leave):
        options = GroupOptions(seed=0, max_seq_len=cap, grouping=grouping)
        return group_within(counts, limits, options, [], leave=leave)

    for grouping in ("fit", "isf"):
        whole, some = grouped(grouping, leave=False), grouped(grouping, leave=True)
        assert len(whole.remainder) == 0
        used = np.concatenate([some.groups.samples, some.remainder])
        assert sorted(used.tolist()) == list(range(number))
    # those of ISF are not made even, so all can be seen: as few are gone as make the others full
    fills = sorted(whole.groups.sum(tokens), reverse=True)
    stay = sorted(some.groups.sum(tokens), reverse=True)
    assert stay == fills[: len(stay)]
    if len(fills) < 32:
        assert len(stay) == 0
        return
    enough = [n for n in range(17) if np.mean(fills[: len(fills) - n]) >= 0.997 * cap]
    assert len(fills) - len(stay) == min([*enough, 16])
