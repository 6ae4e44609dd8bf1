"""Manifest and index: unfinished, foreign and damaged builds are refused; columns come from the
right rows, in both versions of the format.
"""

import json
import random
import re
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from isobatch.common.errors import DamagedShard, DataError
from isobatch.common.types import COUNT_COLUMNS
from isobatch.shards.index import (
    INDEX_COLUMNS,
    IndexPart,
    index_schema,
    join_parts,
    merge_index,
    open_index,
    read_rows,
)
from isobatch.shards.manifest import read_manifest
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
    formats = "arrow, webdataset, energon, refs"
    with pytest.raises(DataError, match=f"format_version 2, 3 and 4, {formats}"):
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


ROWS = 4
"""Rows of a record batch in these tests."""
GROUPS = group_samples(make_samples(90))
NUMBERS = ("shard", "offset", "length", "checksum", "num_samples", *COUNT_COLUMNS)


@pytest.fixture(params=[2, 3], ids=["version 2", "version 3"])
def batched(request, tmp_path, monkeypatch):
    """A build whose index has several record batches, the last one shorter."""
    for module in ("isobatch.shards.index", "support.builds.shard_fixture"):
        monkeypatch.setattr(f"{module}.BATCH_ROWS", ROWS)
    folder = write_build(tmp_path / "batched", GROUPS, version=request.param)
    assert len(GROUPS) > 4 * ROWS
    assert len(GROUPS) % ROWS
    return folder


def expected(name, groups):
    sums = [sum(sample.counts.get(name, 1) for sample in GROUPS[group]) for group in groups]
    return np.array(sums, np.int64)


def content(index):
    """All that can be read of an index."""
    return [index.column(name).tolist() for name in NUMBERS], [*map(index.sample_ids, range(ROWS))]


def test_columns_rows_and_ids_are_those_of_the_groups(batched):
    index = open_index(read_manifest(batched))
    last = len(GROUPS) - 1
    for groups in ([last, 0, ROWS, ROWS - 1, 2 * ROWS], [7, 7], [], [*range(last, -1, -1)]):
        for name in ("num_samples", "num_loss_tokens"):
            found = index.column(name, np.array(groups, np.int64))
            assert found.dtype == np.int64
            assert found.tolist() == expected(name, groups).tolist()
    assert index.column("num_samples").tolist() == expected("num_samples", range(last + 1)).tolist()
    assert index.row(last, "num_samples") == (len(GROUPS[-1]),)
    ids = [tuple(sample.sample_id for sample in group) for group in GROUPS]
    assert [index.sample_ids(group) for group in range(last + 1)] == ids
    assert index.num_ids().tolist() == [len(each) for each in ids]


def test_only_the_asked_record_batches_are_read_and_none_is_copied(batched):
    index = open_index(read_manifest(batched))
    before = pa.total_allocated_bytes()
    index.column("num_samples", np.array([ROWS + 1, 3 * ROWS]))
    assert sorted(index._batches._batches) == [1, 3]
    assert pa.total_allocated_bytes() == before  # views into the mapped file


def test_a_flipped_bit_anywhere_is_found_or_changes_nothing(batched):
    manifest = read_manifest(batched)
    whole = content(open_index(manifest))
    paths = sorted(batched.glob("*.arrow"))
    rng, found = random.Random(0), []
    for _ in range(100):
        path = rng.choice(paths)
        kept = path.read_bytes()
        damaged = bytearray(kept)
        damaged[rng.randrange(len(kept))] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        try:
            assert content(open_index(manifest)) == whole
        except DamagedShard as error:
            found.append(str(error))
        path.write_bytes(kept)
    assert len(found) > 30  # others are in padding, header, footer, or in ids not asked for
    pattern = rf"{batched}/\w+\.arrow: .*checksum.*packer verify"
    assert all(re.match(pattern, each) and "\n" not in each for each in found), found


def test_an_index_that_does_not_fit_the_manifest_is_refused(batched):
    manifest = read_manifest(batched)
    for num_groups in (len(GROUPS) + ROWS, len(GROUPS) - 1):
        with pytest.raises(DamagedShard, match="does not fit the manifest"):
            open_index(replace(manifest, num_groups=num_groups)).column("shard")


def test_a_missing_or_cut_index_is_refused(batched):
    manifest, path = read_manifest(batched), batched / "index.arrow"
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    with pytest.raises(DamagedShard, match=r"index.arrow: has \d+ bytes, the manifest says \d+"):
        open_index(manifest).column("shard")
    path.unlink()
    with pytest.raises(DamagedShard, match=r"index.arrow: cannot be opened"):
        open_index(manifest).column("shard")
    path.write_bytes(whole)
    if manifest.version > 2:
        (batched / "sample_ids.arrow").unlink()
        index = open_index(manifest)
        index.column("shard")  # nobody needs the ids
        with pytest.raises(DamagedShard, match=r"sample_ids.arrow: cannot be opened"):
            index.sample_ids(0)


def test_any_rows_of_many_record_batches_are_gathered_in_their_order(batched):
    rng, index = np.random.default_rng(0), open_index(read_manifest(batched))
    whole = index.column("offset")
    for count in (0, 1, 2, len(GROUPS), 10 * len(GROUPS)):
        groups = rng.integers(0, len(GROUPS), count)
        assert np.array_equal(index.column("offset", groups), whole[groups])
    for wrong in (-1, len(GROUPS)):
        with pytest.raises(IndexError):
            index.column("offset", np.array([0, wrong]))


def test_each_column_of_the_index_is_as_wide_as_its_largest_value(tmp_path):
    widths = {0: 8, 255: 8, 256: 16, 65_535: 16, 65_536: 32, 2**32 - 1: 32, 2**32: 64}
    for largest, bits in widths.items():
        assert {str(each.type) for each in index_schema(dict.fromkeys(INDEX_COLUMNS, largest))} == {
            f"uint{bits}"
        }
    values = {name: [0, 7, 200] for name in INDEX_COLUMNS}
    values |= {
        "offset": [0, 5_000, 2**33],
        "length": [5_000, 70_000, 65_536],
        "checksum": [1, 2**64 - 1, 5],
        "num_vit_tokens": [0, 256, 65_535],
    }
    part = IndexPart(shard=0)
    part.rows = [pa.table({**values, "sample_ids": [["a"], ["b"], ["c"]]}, schema=INDEX_SCHEMA)]
    part.save(tmp_path / "part.arrow")
    figures = join_parts([tmp_path / "part.arrow"], tmp_path / "rows.arrow")
    assert (figures.num_groups, figures.largest["offset"]) == (3, 2**33)
    merge_index([read_rows(tmp_path / "rows.arrow")], [figures], [1], tmp_path)
    with pa.ipc.open_file(tmp_path / "index.arrow") as written:
        table = written.read_all()
    types = {"offset": "uint64", "length": "uint32", "checksum": "uint64"}
    types |= {"num_vit_tokens": "uint16"}
    for name in INDEX_COLUMNS:
        assert str(table.schema.field(name).type) == types.get(name, "uint8")
        assert table.column(name).to_pylist() == values[name]


def test_a_manifest_without_the_types_of_the_columns_is_refused(batched):
    content = json.loads((batched / "manifest.json").read_text())
    if content["format_version"] == 2:
        assert "types" not in content["files"][0]
        return
    for types in ({}, {"shard": "uint8"}, {**content["files"][0]["types"], "length": "string"}):
        content["files"][0]["types"] = types
        (batched / "manifest.json").write_text(json.dumps(content))
        with pytest.raises(DamagedShard, match=r"index.arrow: .*types .*; build again"):
            open_index(read_manifest(batched))
