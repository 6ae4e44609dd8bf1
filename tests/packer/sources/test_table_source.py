"""Parquet files and `save_to_disk` folders: every row once, in order, whatever the blocks; damage
has a name.
"""

import json
import pickle
import sys
from dataclasses import replace
from itertools import chain

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isobatch.common.errors import ConfigError, DataError
from isobatch.counting.records.record import RawRecord
from isobatch.counting.records.user_map import ALL_COLUMNS
from isobatch.packer.sources import table_source as tables
from isobatch.packer.sources.base import FilePiece, Located, RecordChunk
from isobatch.packer.sources.detect import locate, open_located
from isobatch.packer.sources.table_source import TableChunk, TableSource, _chunks
from support.builds.layouts import CONVERSATION, IMAGE, SCHEMA, write_saved
from support.builds.raw_data import parse_record


def rows(count, image=b"pixels"):
    return [
        {
            "id": f"r{number}",
            "image": None
            if number % 3
            else {"bytes": image + bytes([number % 256]), "path": f"{number}.png"},
            "conversations": [
                {"from": "human", "value": f"Q{number}"},
                {"from": "gpt", "value": f"A{number}"},
            ],
            "unused": "x" * 100,
        }
        for number in range(count)
    ]


def write_parquet(path, values, row_group_size=7, schema=SCHEMA):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(values, schema=schema), path, row_group_size=row_group_size)


def open_place(place, **changes):
    located = locate(str(place), known=[])
    return open_located(located, "set", changes.get("data_root", located.folder))


def chunks_of(source, num_records=10):
    """The chunks as another process gets them."""
    return [
        pickle.loads(pickle.dumps(chunk)) for chunk in source.chunks(num_records, lambda _: None)
    ]


def read(source, num_records=10):
    return list(chain.from_iterable(chunk.records() for chunk in chunks_of(source, num_records)))


def without(values, *names):
    return [{key: item for key, item in value.items() if key not in names} for value in values]


@pytest.mark.parametrize("num_records", [1, 5, 10, 1000])
@pytest.mark.parametrize("layout", ["parquet", "saved"])
def test_every_row_comes_once_and_in_order(tmp_path, layout, num_records):
    values = rows(100)
    if layout == "parquet":
        write_parquet(tmp_path / "data" / "train-00000-of-00002.parquet", values[:60])
        write_parquet(tmp_path / "data" / "train-00001-of-00002.parquet", values[60:])
    else:
        write_saved(tmp_path, values)
    source = open_place(tmp_path)
    chunks = chunks_of(source, num_records)
    records = [list(chunk.records()) for chunk in chunks]
    assert max(map(len, records)) <= num_records
    assert [record.value for record in chain(*records)] == without(values, "unused")
    assert not any(record.broken for record in chain(*records))
    assert len(records) < 60 or num_records < 7  # small blocks are joined


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 5000)), max_size=12),
    st.integers(1, 30),
)
def test_chunks_cover_each_row_of_the_blocks_exactly_once(blocks, num_records):
    carried = []

    def new(numbers, first_row, skip, count):
        chunk = TableChunk("", "", (), numbers, first_row, skip, count)
        starts = [sum(rows for rows, _ in blocks[:number]) for number in numbers]
        assert starts[0] == first_row
        assert sum(blocks[number][0] for number in numbers) >= skip + count
        carried.append(chunk)
        return chunk

    covered = []
    tables_bytes, tables.CHUNK_BYTES = tables.CHUNK_BYTES, 1000
    records, TableChunk.records = (
        TableChunk.records,
        lambda self: (
            RawRecord(row, row) for row in range(self.first_row, self.first_row + self.count)
        ),
    )
    try:
        for chunk in _chunks(new, blocks, num_records, FilePiece("a")):
            if isinstance(chunk, RecordChunk):
                found = chunk.values
            else:
                found = range(
                    chunk.first_row + chunk.skip, chunk.first_row + chunk.skip + chunk.count
                )
            assert len(found) <= num_records
            covered += found
    finally:
        tables.CHUNK_BYTES, TableChunk.records = tables_bytes, records
    assert covered == list(range(sum(rows for rows, _ in blocks)))


def test_a_row_group_of_many_bytes_is_cut_by_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "CHUNK_BYTES", 50_000)
    write_parquet(tmp_path / "a.parquet", rows(60, image=bytes(10_000)), row_group_size=60)
    chunks = chunks_of(open_place(tmp_path), 1000)
    assert 3 < len(chunks) < 10
    assert [record.position for chunk in chunks for record in chunk.records()] == list(range(60))


def test_a_block_that_would_be_reread_too_often_is_read_by_the_leader(tmp_path):
    write_parquet(tmp_path / "a.parquet", rows(90), row_group_size=90)
    chunks = chunks_of(open_place(tmp_path), 10)
    assert all(isinstance(chunk, RecordChunk) for chunk in chunks)
    assert [record.value["id"] for chunk in chunks for record in chunk.records()] == [
        f"r{n}" for n in range(90)
    ]


def test_progress_ends_at_the_size_of_the_files(tmp_path):
    write_parquet(tmp_path / "a.parquet", rows(50))
    write_parquet(tmp_path / "b.parquet", rows(90), row_group_size=90)
    source = open_place(tmp_path)
    told = []
    list(source.chunks(10, told.append))
    assert sum(told) == sum(info.size for info in source.files())
    assert min(told) >= 0


def test_a_row_without_an_id_is_named_by_its_file_and_row(tmp_path):
    write_parquet(tmp_path / "b" / "x.parquet", without(rows(20), "id"), schema=SCHEMA.remove(0))
    records = read(open_place(tmp_path), 3)
    assert [parse_record(record, "set").sample_id for record in records] == [
        f"b/x.parquet:{n}" for n in range(20)
    ]


def test_images_come_as_structs_binaries_or_paths(tmp_path):
    turns = rows(1)[0]["conversations"]
    schema = pa.schema([("images", pa.list_(IMAGE)), ("conversations", CONVERSATION)])
    write_parquet(
        tmp_path / "a.parquet",
        [
            {
                "images": [{"bytes": b"1", "path": None}, {"bytes": None, "path": "p.png"}],
                "conversations": turns,
            }
        ],
        schema=schema,
    )
    schema = pa.schema([("jpg", pa.large_binary()), ("conversations", CONVERSATION)])
    write_parquet(tmp_path / "b.parquet", [{"jpg": b"2", "conversations": turns}], schema=schema)
    schema = pa.schema([("image", pa.string()), ("conversations", CONVERSATION)])
    write_parquet(
        tmp_path / "c.parquet", [{"image": "q.png", "conversations": turns}], schema=schema
    )
    samples = [parse_record(record, "set") for record in read(open_place(tmp_path))]
    assert [[media.data or media.name for media in sample.images] for sample in samples] == [
        [b"1", "p.png"],
        [b"2"],
        ["q.png"],
    ]


def test_a_text_that_is_no_unicode_costs_its_row(tmp_path):
    bad = pa.Array.from_buffers(
        pa.string(), 3, [None, *pa.array([b"one", b"t\xffo", b"three"]).buffers()[1:]]
    )
    pq.write_table(pa.table({"text": bad}), tmp_path / "a.parquet")
    records = read(open_place(tmp_path))
    assert [record.value.get("text") for record in records] == ["one", None, "three"]
    assert "row 1" in records[1].broken
    assert parse_record(records[1], "set").sample_id == "a.parquet:1"


def test_a_table_without_a_known_column_is_one_clear_error(tmp_path):
    pq.write_table(pa.table({"label": [1], "pixels": [b"x"]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"label, pixels; expected one of .*conversations"):
        read(open_place(tmp_path))


@pytest.mark.parametrize("damage", ["cut", "overwritten", "empty", "gone"])
def test_a_damaged_parquet_file_is_named(tmp_path, damage):
    path = tmp_path / "a.parquet"
    write_parquet(path, rows(100))
    source = open_place(tmp_path)
    chunks = chunks_of(source)
    data = path.read_bytes()
    {
        "cut": lambda: path.write_bytes(data[: len(data) // 2]),
        "overwritten": lambda: path.write_bytes(
            data[:4] + bytes(len(data) // 2) + data[4 + len(data) // 2 :]
        ),
        "empty": lambda: path.write_bytes(b""),
        "gone": path.unlink,
    }[damage]()
    with pytest.raises(DataError, match=r"a\.parquet"):
        list(chain.from_iterable(chunk.records() for chunk in chunks))
    if damage != "overwritten":
        with pytest.raises(DataError, match=r"a\.parquet"):
            chunks_of(source)


@pytest.mark.parametrize("kept", [0.03, 0.5, 1])
def test_a_cut_arrow_stream_is_named(tmp_path, kept):
    write_saved(tmp_path, rows(40), num_files=1)
    path = tmp_path / "data-00000-of-00001.arrow"
    data = path.read_bytes()
    path.write_bytes(data[: min(int(len(data) * kept), len(data) - 8)])
    with pytest.raises(
        DataError, match=r"data-00000-of-00001\.arrow: damaged or cut short.*without the end mark"
    ):
        chunks_of(open_place(tmp_path))


@pytest.mark.parametrize(
    "content",
    [b"hello, this is no Arrow stream", bytes(100), b"\xff\xff\xff\xff" + bytes(range(90))],
)
def test_what_is_no_arrow_stream_is_named(tmp_path, content):
    write_saved(tmp_path, rows(3), num_files=1)
    (tmp_path / "data-00000-of-00001.arrow").write_bytes(content)
    with pytest.raises(DataError, match="damaged or cut short"):
        chunks_of(open_place(tmp_path))


def test_compressed_arrow_streams_are_read(tmp_path):
    write_saved(tmp_path, rows(40), options=pa.ipc.IpcWriteOptions(compression="zstd"))
    assert [record.value for record in read(open_place(tmp_path))] == without(rows(40), "unused")


def test_dictionary_columns_are_read_as_their_values(tmp_path):
    table = pa.table({"text": pa.array(["a", "b", "a"]).dictionary_encode()})
    write_saved(tmp_path, rows(1), num_files=1)
    with pa.ipc.new_stream(tmp_path / "data-00000-of-00001.arrow", table.schema) as writer:
        writer.write_table(table)
    assert [record.value["text"] for record in read(open_place(tmp_path))] == ["a", "b", "a"]


def test_a_body_cut_before_the_end_mark_is_named(tmp_path):
    write_saved(tmp_path, rows(40), num_files=1)
    path = tmp_path / "data-00000-of-00001.arrow"
    path.write_bytes(path.read_bytes()[:3000] + tables.END_MARK)
    with pytest.raises(DataError, match=r"data-00000-of-00001\.arrow: cannot be read: Expected"):
        chunks_of(open_place(tmp_path))


def test_what_datasets_saves_is_read(tmp_path):
    values = [{"id": f"r{n}", "text": f"text {n}"} for n in range(30)]
    datasets.Dataset.from_list(values).save_to_disk(tmp_path, num_shards=3)
    chunks = chunks_of(open_place(tmp_path))
    assert not any(isinstance(chunk, RecordChunk) for chunk in chunks)
    assert [record.value for chunk in chunks for record in chunk.records()] == values


def test_a_saved_folder_in_an_object_store_is_streamed(tmp_path, monkeypatch):
    write_saved(tmp_path, rows(40))
    source = open_place(tmp_path)
    monkeypatch.setattr(tables, "is_uri", lambda _: True)
    told = []
    chunks = list(source.chunks(10, told.append))
    assert all(isinstance(chunk, RecordChunk) for chunk in chunks)
    found = [record.value for chunk in chunks for record in chunk.records()]
    assert found == without(rows(40), "unused")
    assert sum(told) == sum(info.size for info in source.files())


def test_without_the_extra_a_saved_folder_says_what_to_install(tmp_path, monkeypatch):
    write_saved(tmp_path, rows(3))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"pip install huggingface_hub datasets"):
        chunks_of(open_place(tmp_path))


def save_splits(folder, *splits):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": list(splits)}))
    for number, split in enumerate(splits):
        write_saved(folder / split, rows(number + 1))


def test_of_a_dataset_dict_the_train_split_is_read(tmp_path):
    save_splits(tmp_path / "a", "test", "train")
    assert len(read(open_place(tmp_path / "a"))) == 2
    assert len(read(open_place(f"{tmp_path / 'a'}@test"))) == 1
    save_splits(tmp_path / "b", "only")
    assert len(read(open_place(tmp_path / "b"))) == 1
    save_splits(tmp_path / "c", "test", "validation")
    with pytest.raises(ConfigError, match="splits test, validation; say which one"):
        open_place(tmp_path / "c")
    with pytest.raises(ConfigError, match="no 'dev'"):
        open_place(f"{tmp_path / 'c'}@dev")


@pytest.mark.parametrize("state", ["{", "[]", "{}", '{"_data_files": [5]}', '{"_data_files": []}'])
def test_a_damaged_state_is_named(tmp_path, state):
    write_saved(tmp_path, rows(3))
    (tmp_path / "state.json").write_text(state)
    with pytest.raises(DataError, match=r"state\.json"):
        open_place(tmp_path)


def test_rows_selected_by_an_index_are_refused(tmp_path):
    write_saved(tmp_path, rows(3))
    state = json.loads((tmp_path / "state.json").read_text()) | {
        "_indices_data_files": [{"filename": "i.arrow"}]
    }
    (tmp_path / "state.json").write_text(json.dumps(state))
    with pytest.raises(ConfigError, match="flatten_indices"):
        open_place(tmp_path)


def test_a_source_names_its_files_for_the_manifest(tmp_path):
    write_parquet(tmp_path / "a.parquet", rows(3))
    source = open_place(tmp_path)
    assert isinstance(source, TableSource)
    assert source.describe() == [
        {"name": "a.parquet", "size": (tmp_path / "a.parquet").stat().st_size}
    ]
    with pytest.raises(DataError, match=r"b\.parquet: cannot be read"):
        open_located(
            Located("parquet", str(tmp_path), ("b.parquet",)), "set", str(tmp_path)
        ).files()


UNREAD = [
    {"id": str(n), "text": f"T{n}", "level": "hard" if n > 8 else None, "empty": None, "raw": b"ab"}
    for n in range(12)
]


@pytest.mark.parametrize("layout", ["parquet", "arrow"])
def test_columns_that_nothing_reads_are_named_with_a_value(tmp_path, layout):
    table = pa.Table.from_pylist(UNREAD)
    if layout == "parquet":
        pq.write_table(table, tmp_path / "a.parquet", row_group_size=4)
    else:
        write_saved(tmp_path, UNREAD, 1, schema=table.schema)
    expected = {"level": '"hard"', "raw": "bytes of 2"}
    located = locate(str(tmp_path), known=[])
    for keep, left in (((), ["level", "raw"]), (("raw",), ["level"]), ((ALL_COLUMNS,), [])):
        source = open_located(replace(located, keep=keep), "set", located.folder)
        assert source.unread_columns() == {name: expected[name] for name in left}


def test_a_piece_looks_for_such_columns_in_its_own_files_alone(tmp_path, monkeypatch):
    for number in range(3):
        values = [{"text": "T", f"level{number}": "hard"}]
        pq.write_table(pa.Table.from_pylist(values), tmp_path / f"{number}.parquet")
    located = locate(str(tmp_path), known=[])
    pieces = (FilePiece("1.parquet", size=9), FilePiece("2.parquet", size=9))
    source = open_located(replace(located, pieces=pieces), "set", located.folder)
    monkeypatch.setattr(type(source.folder), "info", None)
    assert source.unread_columns() == {"level1": '"hard"'}
    nothing = open_located(replace(located, pieces=()), "set", located.folder)
    assert nothing.unread_columns() == {}
