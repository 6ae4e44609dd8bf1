"""`packer add`: a build with more data is a build of all of it, and its readers see either."""

import contextlib
import json
import shutil
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from isobatch.common.errors import ConfigError, DamagedShard, DataError
from isobatch.loaders import StreamingLoader
from isobatch.packer.report.figures import make_report
from isobatch.packer.verify import require_intact, verify_build
from isobatch.shards.manifest import read_manifest
from support.builds.packed import digests, quiet, read_index
from support.builds.raw_data import record, write_dataset
from support.growing.halves import FIRST, NEW, add, by_sample, pack, samples_of

QWEN = Path(__file__).parents[2] / "data" / "tokenizers" / "byte_level"


def test_a_grown_build_has_every_sample_once_and_what_was_there_stays_as_it_is(packed, halves):
    before, old = digests(packed), read_manifest(packed)
    addition = add(halves, packed)
    assert addition.is_new
    assert addition.totals["num_packed"] == NEW - 1
    manifest = read_manifest(packed)
    totals = manifest.values["totals"]
    assert (totals["num_read"], totals["num_packed"]) == (FIRST + NEW, FIRST + NEW - 2)
    assert totals["num_rejected"] == 2
    require_intact(verify_build(packed, quiet(), workers=1))
    after = digests(packed)
    changed = {name for name in before if after[name] != before[name]}
    assert changed <= {"manifest.json", "report.html"}
    assert manifest.shards[: len(old.shards)] == old.shards
    counts, rejected, groups = (
        pq.read_table(packed / manifest.table_path(f"{name}.parquet")).to_pylist()
        for name in ("counts", "rejected", "groups")
    )
    positions = [row["position"] for row in (*counts, *rejected)]
    assert sorted(positions) == list(range(FIRST + NEW))
    for group, row in zip(groups, read_index(packed).to_pylist(), strict=True):
        assert [counts[place]["sample_id"] for place in group["samples"]] == row["sample_ids"]
    assert samples_of(packed) == {row["sample_id"] for row in counts}
    assert make_report(packed).num_packed == totals["num_packed"]


def test_the_new_samples_are_as_in_a_build_of_their_own(packed, halves, tmp_path):
    shards = read_manifest(packed).values["format"]
    alone = pack(halves, tmp_path / "alone", "new", format=shards, keep_columns=("score",))
    add(halves, packed)
    contents, alone_contents = by_sample(packed), by_sample(alone)
    assert {name: contents[name] for name in alone_contents} == alone_contents


def test_a_loader_that_is_open_reads_the_old_build_to_its_end(packed, halves):
    with contextlib.closing(StreamingLoader(packed, micro_batches_per_step=2)) as loader:
        steps = iter(loader)
        seen = Counter(name for batch in next(steps) for name in batch.sample_ids)
        add(halves, packed)
        shutil.rmtree(packed / "staging", ignore_errors=True)
        seen += Counter(name for step in steps for batch in step for name in batch.sample_ids)
    assert len(seen) == FIRST - 1
    assert set(seen.values()) == {1}


def test_the_same_data_is_added_once_and_other_data_again(arrow_build, halves, tmp_path):
    add(halves, arrow_build)
    before = digests(arrow_build)
    again = add(halves, arrow_build)
    assert not again.is_new
    assert digests(arrow_build) == before
    rows = [record(1000 + number) for number in range(20)]
    for row in rows:
        row["score"] = 1
    write_dataset(tmp_path / "third", rows)
    assert add(tmp_path, arrow_build, "third").totals["num_packed"] == 20
    manifest = read_manifest(arrow_build)
    assert manifest.tables == "tables/0002"
    numbers = [file.name.split("-")[1] for file in manifest.shards]
    assert {"00001", "00002"} < set(numbers)
    require_intact(verify_build(arrow_build, quiet(), workers=1))


def test_tables_of_earlier_builds_stay_for_three_changes(arrow_build, tmp_path):
    for number in range(5):
        rows = [record(1000 + number, answer="a b c")]
        rows[0]["score"] = 1
        write_dataset(tmp_path / f"more{number}", rows)
        add(tmp_path, arrow_build, f"more{number}", max_rejected=1.0)
    assert sorted(path.name for path in (arrow_build / "tables").iterdir()) == [
        *("0002", "0003", "0004", "0005")
    ]
    assert not (arrow_build / "index.arrow").exists()
    require_intact(verify_build(arrow_build, quiet(), workers=1))


def test_partitions_and_shares_give_the_same_bytes(arrow_build, halves, tmp_path):
    other = shutil.copytree(arrow_build, tmp_path / "other")
    rows = [record(number, answer="word " * (number % 50 + 1)) for number in range(2600)]
    for row in rows:
        row["score"] = 2
    raw = write_dataset(tmp_path / "many", rows, lines=True)
    shared = {"partition_samples": 1000, "chunk_records": 256}
    add(tmp_path, arrow_build, raw.name, **shared)
    # kept columns need the counts of all, so each job is started twice
    said = [
        add(tmp_path, other, raw.name, partitions=f"{share}/2", **shared) for share in (2, 1, 2, 1)
    ]
    assert said[:3].count(None) >= 2
    left, right = (
        {name: value for name, value in digests(out).items() if name != "report.html"}
        for out in (arrow_build, other)
    )
    assert left == right
    assert len({file.name.split("-")[1] for file in read_manifest(other).shards}) > 3


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"tokenizer": "QWEN"}, "another tokenizer or chat template"),
        ({"model": "internvl_1_5"}, "was made for tiny"),
        ({"part": "texts"}, "kept columns are"),
        ({"part": "nothing"}, "none of the records can be used"),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(
    arrow_build, halves, tmp_path, changes, problem
):
    before = digests(arrow_build)
    changes = dict(changes)
    if changes.get("tokenizer") == "QWEN":
        changes["tokenizer"] = str(QWEN)
    part = changes.pop("part", "new")
    folder = halves
    if part != "new":
        rows = [record(number) for number in range(5)]
        for row in rows:
            row["score"] = "many"
            if part == "nothing":
                row["conversations"] = []
        write_dataset(tmp_path / part, rows)
        folder = tmp_path
    with pytest.raises((ConfigError, DataError), match=problem):
        add(folder, arrow_build, part, **changes)
    after = {n: v for n, v in digests(arrow_build).items() if not n.startswith("staging")}
    assert {name: after[name] for name in before} == before
    # and what was begun stops nobody who gives it up
    assert add(halves, arrow_build, discard=True).is_new
    require_intact(verify_build(arrow_build, quiet(), workers=1))


def test_an_unfinished_change_is_named_and_can_be_given_up(arrow_build, halves):
    marker = {"change": "remove", "key": "1", "base": read_manifest(arrow_build).hash}
    (arrow_build / "staging").mkdir()
    (arrow_build / "staging" / "build.json").write_text(json.dumps(marker))
    (arrow_build / "staging" / "shard-00000.arrow").write_bytes(b"work that would be lost")
    (arrow_build / "shards" / "shard-00001-00000.arrow").write_bytes(b"half")
    with pytest.raises(DataError, match="unfinished `packer remove`"):
        add(halves, arrow_build)
    with pytest.raises(DamagedShard, match="an unfinished `packer remove` left 1 file in shards"):
        require_intact(verify_build(arrow_build, quiet(), workers=1))
    add(halves, arrow_build, discard=True)
    require_intact(verify_build(arrow_build, quiet(), workers=1))


def test_data_without_a_record_is_refused_in_one_line(halves, arrow_build, tmp_path):
    before = digests(arrow_build)
    write_dataset(tmp_path / "none", [])
    with pytest.raises((ConfigError, DataError), match="none of the records can be used"):
        add(tmp_path, arrow_build, "none")
    assert before.items() <= digests(arrow_build).items()


def test_the_data_that_the_build_was_made_of_is_not_added_to_it(halves, arrow_build):
    before = digests(arrow_build)
    assert not add(halves, arrow_build, "first").is_new
    after = digests(arrow_build)
    after.pop("report.html")  # a build that has none gets one
    assert after == before
    assert add(halves, arrow_build, "first", limit=20).is_new
