"""Pieces of files: read one by one they give the records of the whole file, wherever it is cut."""

import gzip
import io
import json
import random
import tarfile
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from isobatch.packer.partitions.cut import cut_dataset, cut_from_json, cut_to_json
from isobatch.packer.sources.dataset import find_dataset
from support.cases import for_each

TEXTS = [
    "",
    "plain",
    "ümläut ✓ 漢字 🙂",
    'a "quoted" { [ text',
    "two\nlines\r\nand, commas",
    "x" * 900,
]


def records(number, seed):
    draw = random.Random(seed)
    return [
        {
            "id": f"s{place}",
            "messages": [
                {"role": "user", "content": draw.choice(TEXTS) * draw.randrange(1, 4)},
                {"role": "assistant", "content": {"nested": [1, {"id": "no"}]}},
            ],
        }
        for place in range(number)
    ]


def as_lines(rows, draw):
    """JSON lines with what files have: blank lines, CRLF, broken lines, no break at the end."""
    lines = [json.dumps(row, ensure_ascii=draw.random() < 0.5) for row in rows]
    for _ in range(4):
        lines.insert(
            draw.randrange(1, len(lines)), draw.choice(["", "  ", '{"id": "broken", "con'])
        )
    return draw.choice(["\n", "\r\n"]).join(lines) + draw.choice(["", "\n", "\n\n"])


def as_array(rows, draw):
    indent = draw.choice([None, 1])
    parts = [json.dumps(row, ensure_ascii=draw.random() < 0.5, indent=indent) for row in rows]
    parts[draw.randrange(1, len(parts))] = '{"id": "broken", "messages": [}'
    return draw.choice(["\ufeff", ""]) + "[" + ", \n".join(parts) + "]\n"


def as_objects(rows, draw):
    """Objects over several lines, one after the other."""
    return "\n".join(json.dumps(row, indent=2) for row in rows)


def write_tar(path, rows, draw):
    with tarfile.open(
        path, "w", format=draw.choice([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
    ) as tar:
        for row in rows:
            name = draw.choice(["", "a-folder/" * 20]) + row["id"]
            for suffix, data in (("json", json.dumps(row).encode()), ("txt", b"text")):
                info = tarfile.TarInfo(f"{name}.{suffix}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))


def write(folder, layout, rows, draw):
    """-> the place of the dataset."""
    folder.mkdir()
    texts = {"lines": as_lines, "array": as_array, "objects": as_objects}
    if layout in texts:
        content = texts[layout](rows, draw).encode("utf-8", "surrogatepass")
        path = folder / "a.json"
        path.write_bytes(content)
    elif layout == "gz":
        path = folder / "a.jsonl.gz"
        path.write_bytes(gzip.compress(as_lines(rows, draw).encode()))
    elif layout == "parquet":
        path = folder / "a.parquet"
        table = pa.table({"id": [row["id"] for row in rows], "text": ["words"] * len(rows)})
        pq.write_table(table, path, row_group_size=draw.choice([7, 16, 1000]))
    else:
        path = folder / "a.tar"
        write_tar(path, rows, draw)
    return str(path)


def read(part, pieces):
    source = replace(part, located=replace(part.located, pieces=pieces)).open()
    return [
        (row.value, bool(row.broken), row.position)
        for chunk in source.chunks(5, lambda _: None)
        for row in chunk.records()
    ]


@for_each("layout", ["lines", "array", "objects", "gz", "parquet", "tar"])
def test_pieces_read_one_by_one_are_the_file(layout, tmp_path):
    for seed in range(12):
        draw = random.Random(f"{layout}{seed}")
        place = write(tmp_path / f"{layout}-{seed}", layout, records(60, seed), draw)
        (part,) = find_dataset(place, None).parts
        whole = read(part, None)
        size = part.open().files()[0].size
        for num_bytes in (size // 3, size // 7, 300, 20):
            pieces = part.open().cut(max(num_bytes, 1))
            assert sum(piece.size for piece in pieces) == size
            assert layout == "gz" or len(pieces) > 1 or num_bytes > 300 or layout == "parquet"
            found = [row for piece in pieces for row in read(part, (piece,))]
            assert [row[:2] for row in found] == [row[:2] for row in whole], (seed, num_bytes)
            assert len({row[2] for row in found}) == len(found)  # positions name records
            together = read(part, tuple(pieces))
            assert together == found


def test_a_broken_line_in_a_piece_is_named_by_where_it_is(tmp_path):
    rows = [json.dumps(row) for row in records(40, 0)]
    rows[30] = '{"id": "broken", "mess'
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(rows))
    (part,) = find_dataset(str(path), None).parts
    pieces = part.open().cut(path.stat().st_size // 4)
    broken = []
    for piece in pieces:
        source = replace(part, located=replace(part.located, pieces=(piece,))).open()
        chunks = source.chunks(5, lambda _: None)
        broken += [row.broken for chunk in chunks for row in chunk.records() if row.broken]
    (text,) = broken
    begin = int(text.partition("after byte ")[2].partition(",")[0].replace(",", ""))
    assert "line" in text
    assert begin <= sum(len(row) + 1 for row in rows[:30])


def test_partitions_share_out_every_piece_once_and_each_is_like_the_whole(tmp_path):
    """Two sources in a row: no partition has only one of them."""
    sizes = {"first": 4000, "second": 2000}
    for name, number in sizes.items():
        lines = [
            json.dumps({"id": f"{name}{k}", "text": "word " * (k % 40)}) for k in range(number)
        ]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    mixture = tmp_path / "mixture.toml"
    mixture.write_text("".join(f'[[datasets]]\ndataset = "{name}.jsonl"\n' for name in sizes))
    dataset = find_dataset(str(mixture), None)
    cut = cut_dataset(dataset, 1000, seed=0)
    assert 5 <= len(cut.partitions) <= 7
    shares = np.array(
        [
            [len(read(part, part.located.pieces)) for part in partition.parts]
            for partition in cut.partitions
        ]
    )
    assert shares.sum(axis=0).tolist() == list(sizes.values())
    assert (np.abs(shares / shares.mean(axis=0) - 1) < 0.35).all()
    again = cut_dataset(dataset, 1000, seed=0)
    assert again == cut
    assert cut_dataset(dataset, 1000, seed=1) != cut
    assert cut_from_json(dataset, cut_to_json(cut)).partitions == cut.partitions
    assert len(cut_dataset(dataset, 1000, seed=0, limit=5000).partitions) == 1
    assert len(cut_dataset(dataset, 10**6, seed=0).partitions) == 1


@pytest.mark.parametrize("key", ["limit = 100\n", "limit = 100000\n"])
def test_a_limited_part_of_a_mixture_stays_whole(tmp_path, key):
    lines = [json.dumps({"id": str(k), "text": "word " * 30}) for k in range(4000)]
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    mixture = tmp_path / "mixture.toml"
    mixture.write_text(
        f'[[datasets]]\ndataset = "a.jsonl"\n[[datasets]]\ndataset = "b.jsonl"\n{key}'
    )
    cut = cut_dataset(find_dataset(str(mixture), None), 1000, seed=0)
    whole = [
        partition.parts[1]
        for partition in cut.partitions
        if partition.parts[1].located.pieces is None
    ]
    assert len(cut.partitions) > 3
    assert len(whole) == 1
