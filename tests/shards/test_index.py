"""Manifest and index: unfinished, foreign and damaged builds are refused; columns come from the
right rows.
"""

import json

import numpy as np
import pyarrow as pa
import pytest

from balance.errors import DamagedShard, DataError
from shards.index import BATCH_ROWS, GroupIndex
from shards.manifest import read_manifest
from support.builds.shard_fixture import INDEX_SCHEMA, group_samples, make_samples, write_build


@pytest.fixture
def build(tmp_path):
    return write_build(tmp_path / "build", group_samples(make_samples(20)))


def rewrite_manifest(build, **changes):
    path = build / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_missing_directory_and_an_unfinished_build_are_told_apart(build, tmp_path):
    with pytest.raises(DataError, match="no such folder"):
        read_manifest(tmp_path / "nowhere")
    (build / "manifest.json").unlink()
    with pytest.raises(DataError, match="no finished build; run the same `packer build`"):
        read_manifest(build)


@pytest.mark.parametrize("changes", [{"format_version": 1}, {"format": "zip"}])
def test_a_build_of_another_version_is_refused(build, changes):
    rewrite_manifest(build, **changes)
    with pytest.raises(DataError, match=r"format_version 2, arrow, webdataset, refs"):
        read_manifest(build)


@pytest.mark.parametrize(
    "content", [b"{", b"[]", b"\xff", b'{"format_version": 2, "format": "arrow"}']
)
def test_a_file_that_is_no_manifest_gives_one_line(build, content):
    (build / "manifest.json").write_bytes(content)
    with pytest.raises(DataError, match=r"manifest.json: not a manifest of Isobatch") as error:
        read_manifest(build)
    assert "\n" not in str(error.value)


def test_the_hash_changes_with_any_byte(build):
    before = read_manifest(build).hash
    rewrite_manifest(build, seed=1)
    assert read_manifest(build).hash != before


def write_big_index(path, num_groups):
    rows = np.arange(num_groups)
    columns = {
        field.name: pa.array(rows % 1_000_003, field.type)
        if pa.types.is_integer(field.type)
        else pa.array([[]] * num_groups, field.type)
        for field in INDEX_SCHEMA
    }
    with pa.ipc.new_file(str(path), INDEX_SCHEMA) as writer:
        writer.write_table(pa.table(columns, schema=INDEX_SCHEMA), max_chunksize=BATCH_ROWS)


def test_columns_come_from_the_asked_rows_of_all_record_batches(tmp_path):
    num_groups = 2 * BATCH_ROWS + 10
    write_big_index(tmp_path / "index.arrow", num_groups)
    index = GroupIndex(tmp_path / "index.arrow", num_groups)
    groups = np.array([num_groups - 1, 0, BATCH_ROWS, BATCH_ROWS - 1, 2 * BATCH_ROWS, 7, 7])
    assert index.column("num_loss_tokens", groups).tolist() == groups.tolist()
    assert index.column("offset", groups[:0]).tolist() == []
    assert index.row(BATCH_ROWS + 3, "shard", "length") == (BATCH_ROWS + 3, BATCH_ROWS + 3)


def test_only_the_asked_record_batches_are_mapped(tmp_path):
    write_big_index(tmp_path / "index.arrow", 3 * BATCH_ROWS)
    index = GroupIndex(tmp_path / "index.arrow", 3 * BATCH_ROWS)
    before = pa.total_allocated_bytes()
    index.column("num_samples", np.array([5, 2 * BATCH_ROWS]))
    assert sorted(index._batches) == [0, 2]
    assert pa.total_allocated_bytes() == before  # views into the mapped file, not copies


@pytest.mark.parametrize("num_groups", [BATCH_ROWS, 3 * BATCH_ROWS, 2 * BATCH_ROWS - 1])
def test_an_index_that_does_not_fit_the_manifest_is_refused(tmp_path, num_groups):
    write_big_index(tmp_path / "index.arrow", 2 * BATCH_ROWS)
    with pytest.raises(DamagedShard, match="does not fit the manifest"):
        GroupIndex(tmp_path / "index.arrow", num_groups).row(num_groups - 1, "shard")


def test_a_missing_or_cut_index_is_refused(tmp_path):
    path = tmp_path / "index.arrow"
    with pytest.raises(DamagedShard, match="cannot be opened"):
        GroupIndex(path, 10)
    write_big_index(path, 10)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DamagedShard, match="cannot be opened"):
        GroupIndex(path, 10)
