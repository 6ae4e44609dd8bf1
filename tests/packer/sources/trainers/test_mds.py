"""MDS datasets: ranges of samples, places of files, columns that are not read, and damage.

Next to MosaicML's own writer and reader they are in
tests/support/frameworks/checks/mds_source_checks.py.
"""

import hashlib
import io
import json
import tracemalloc

import numpy as np
import pytest
from PIL import Image

from isobatch.common.errors import ConfigError, DataError
from isobatch.packer.sources.detect import locate, open_located
from support.builds.layouts import JPEG, write_mds
from support.builds.packed import build, read_samples

COLUMNS = {"id": "str", "image": "jpeg", "caption": "str", "about": "json", "tokens": "ndarray"}


def rows(count):
    return [
        {"id": f"s{n}", "image": JPEG[: 40 + n], "caption": f"A cat {n}.", "about": [n]}
        | {"tokens": b"12345678"}
        for n in range(count)
    ]


def open_place(place, **changes):
    located = locate(str(place), known=[])
    return open_located(located, "set", str(changes.get("data_root", located.folder)))


def records(source, chunk=3):
    chunks = source.chunks(chunk, lambda _: None)
    return [record for chunk in chunks for record in chunk.records()]


@pytest.mark.parametrize("chunk", [1, 3, 4, 100])
def test_samples_come_in_order_and_files_stay_where_they_are(tmp_path, chunk):
    place = write_mds(tmp_path / "in" / "set", COLUMNS, rows(10))
    found = records(open_place(place, data_root=tmp_path), chunk)
    assert [record.value["id"] for record in found] == [f"s{n}" for n in range(10)]
    assert [record.value["caption"] for record in found] == [f"A cat {n}." for n in range(10)]
    for number, record in enumerate(found):
        media = record.value["image"]
        data = (tmp_path / media.container).read_bytes()
        assert data[media.offset : media.offset + media.size] == JPEG[: 40 + number]
        assert set(record.value) == {"id", "image", "caption"}


def test_columns_that_no_record_is_read_from_are_named(tmp_path):
    source = open_place(write_mds(tmp_path, COLUMNS, rows(2)))
    assert source.unread_columns() == {"about": "[0]", ".tokens": '"ndarray, 8 bytes"'}
    place = write_mds(tmp_path / "other", {"tokens": "ndarray"}, [{"tokens": b"12345678"}])
    with pytest.raises(DataError, match="has the columns tokens; expected one of TEXT, "):
        records(open_place(place))


def test_a_damaged_sample_costs_only_itself(tmp_path):
    place = write_mds(tmp_path, {"text": "str", "about": "json"}, [{"text": "x", "about": 1}] * 4)
    shard = place / "shard.00000.mds"
    data = bytearray(shard.read_bytes())
    start = int.from_bytes(data[8:12], "little")
    data[start : start + 4] = b"\xff\xff\xff\xff"
    shard.write_bytes(data)
    found = records(open_place(place))
    assert [record.reason if record.broken else "" for record in found] == [
        "", "broken_member", "", ""
    ]  # fmt: skip
    assert "sample 1: its columns are longer than the sample" in found[1].broken


def pil(mode, size, pixels):
    return np.array([*size, len(mode)], "<u4").tobytes() + mode.encode() + pixels


def test_raw_pixels_are_an_image_if_they_are_as_many_as_it_says(tmp_path):
    images = {mode: Image.new(mode, (9, 3), 1) for mode in ("1", "L", "P", "I;16")}
    images |= {mode: Image.new(mode, (9, 3), (1, 2, 3, 4)[: len(mode)]) for mode in ("LA", "RGBA")}
    whole = [pil(mode, image.size, image.tobytes()) for mode, image in images.items()]
    broken = [pil("RGB", (60_000, 60_000), b"x" * 30), pil("RGB", (3, 3), b"x" * 28)]
    broken += [
        pil("L", (0, (1 << 32) - 1), b""),
        pil("CMYK", (1, 1), b"x" * 4),
        pil("L", (1, 1), b"x")[:5],
    ]
    samples = [{"text": "x", "image": data} for data in (*whole, *broken)]
    place = write_mds(tmp_path, {"text": "str", "image": "pil"}, samples, 20)
    found = records(open_place(place))
    for record, image in zip(found, images.values(), strict=False):
        with Image.open(io.BytesIO(record.value["image"].data)) as stored:
            assert stored.mode == image.mode
            assert np.array_equal(np.asarray(stored), np.asarray(image))
    problems = [record.broken.partition(": ")[2] for record in found if record.broken]
    assert problems == [
        "pil: 30 bytes where it says 10,800,000,000 bytes of 60,000 x 60,000 pixels",
        "pil: 28 bytes where it says 27 bytes of 3 x 3 pixels",
        "pil: 0 bytes where it says 0 bytes of 0 x 4,294,967,295 pixels",
        "pil: mode 'CMYK'; read are 1, L, P, LA, I;16, RGB, RGBA",
        "pil: 5 bytes are too few for a size and a mode",
    ]


def write_lines(folder, lines, kind, **changes):
    """A shard of lines as `JSONWriter` and `CSVWriter` write it, and its table."""
    head = b"about,text\n" if kind == "csv" else b""
    data = head + b"".join(lines)
    ends = len(head) + np.cumsum([0, *map(len, lines)])
    table = np.uint32(len(lines)).tobytes() + ends.astype("<u4").tobytes() + b"{}"
    about = {"text": "str", "about": "int"}
    shard = {"format": kind, "version": 2, "compression": None, "samples": len(lines)}
    shard |= {"newline": "\n", "zip_data": None, "zip_meta": None}
    shard |= {"columns": about, "column_names": sorted(about), "column_encodings": ["int", "str"]}
    for part, content in (("data", data), ("meta", table)):
        (folder / f"0.{part}").write_bytes(content)
        file = {"basename": f"0.{part}", "bytes": len(content)}
        shard[f"raw_{part}"] = file | {"hashes": {"md5": hashlib.md5(content).hexdigest()}}
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": [shard | changes]}))
    return folder


@pytest.mark.parametrize(
    ("kind", "lines", "problem"),
    [
        ("json", [b'{"text": "A", "about": 1}\n', b'{"text": "B"\n'], "Expecting"),
        ("json", [b'{"text": "A"}\n', b"[1]\n"], "is not an object of texts and numbers"),
        ("json", [b'{"text": "A"}\n', b'{"about": 1}\n'], "has no column 'text'"),
        ("csv", [b"1,A\n", b"1,A,B\n"], "the line has 3 columns, not 2"),
        ("csv", [b"1,A\n", b"one,B\n"], "invalid literal for int"),
        ("csv", [b"1,A\n", b"1,\xff\n"], "can't decode byte 0xff"),
    ],
)
@pytest.mark.parametrize("chunk", [1, 9])
def test_a_damaged_line_costs_only_itself(tmp_path, kind, lines, problem, chunk):
    first, second, third = records(
        open_place(write_lines(tmp_path, [*lines, lines[0]], kind)), chunk
    )
    assert first.value["text"] == third.value["text"] == "A"
    assert "0.data, sample 1: " in second.broken
    assert problem in second.broken


def test_a_table_of_lines_that_does_not_fit_is_one_line(tmp_path):
    place = write_lines(tmp_path, [b"1,A\n"] * 3, "csv", samples=2)
    with pytest.raises(DataError, match=r"0.data: its table of samples does not fit index.json"):
        records(open_place(place))
    index = json.loads((place / "index.json").read_text())
    del index["shards"][0]["raw_meta"]
    (place / "index.json").write_text(json.dumps(index))
    with pytest.raises(DataError, match=r"not as MDSWriter writes it \('raw_meta'\)"):
        open_place(place)


def test_hashes_are_checked_and_those_of_other_libraries_are_reported(tmp_path):
    place = write_lines(tmp_path, [b"1,A\n"] * 3, "csv")
    index = json.loads((place / "index.json").read_text())
    index["shards"][0]["raw_data"]["hashes"]["xxh64"] = "12"
    (place / "index.json").write_text(json.dumps(index))
    assert locate(str(place), known=[]).unread == (("xxh64 of index.json", "not checked"),)
    (place / "0.data").write_bytes((place / "0.data").read_bytes().replace(b"A", b"B"))
    with pytest.raises(DataError, match=r"0.data: its md5 is not that of index.json: it is damag"):
        records(open_place(place))


def test_the_look_at_unread_columns_leaves_hashes_to_the_reading(tmp_path):
    place = write_lines(tmp_path, [b"1,A\n"] * 3, "csv")
    (place / "0.data").write_bytes((place / "0.data").read_bytes().replace(b"A", b"B"))
    source = open_place(place)
    assert source.unread_columns() == {"about": "1"}
    checked = [chunk.is_checked for chunk in source.chunks(1, lambda _: None)]
    assert checked == [True, False, False]  # a shard's hashes once
    with pytest.raises(DataError, match="its md5 is not that of"):
        records(source)


def test_a_table_of_samples_that_does_not_fit_is_one_line(tmp_path):
    place = write_mds(tmp_path, {"text": "str"}, [{"text": "x"}] * 4)
    shard = place / "shard.00000.mds"
    data = bytearray(shard.read_bytes())
    data[12:16] = b"\xff\xff\xff\x0f"
    shard.write_bytes(data)
    with pytest.raises(DataError, match=r"mds: its table of samples does not fit index.json"):
        records(open_place(place))


@pytest.mark.parametrize("count", [1, 2, 4, 5, 1000, 1 << 62])
def test_a_wrong_number_of_samples_is_one_line(tmp_path, count):
    source = open_place(write_mds(tmp_path, {"text": "str"}, [{"text": "xx"}] * 3, samples=count))
    chunk = next(source.chunks(3, lambda _: None))
    with pytest.raises(DataError, match=r"mds: its table of samples does not fit index.json"):
        list(chunk.records())


def test_a_negative_number_of_samples_is_one_line(tmp_path):
    place = write_mds(tmp_path, {"text": "str"}, [{"text": "x"}], samples=-4)
    with pytest.raises(DataError, match=r"index.json: not as MDSWriter writes it \(-4 samples"):
        open_place(place)


@pytest.mark.parametrize("text", ['{"shards": 1, "format": ""}', '{"shards": [{"format": 1}]}'])
def test_an_index_that_is_damaged_is_one_line(tmp_path, text):
    (tmp_path / "index.json").write_text(text)
    with pytest.raises(DataError, match=r"index.json: not as MDSWriter writes it .*"):
        open_place(tmp_path)


def test_other_files_of_the_name_are_annotations(tmp_path):
    (tmp_path / "index.json").write_text('[{"id": "a", "text": "A text."}]')
    assert records(open_place(tmp_path))[0].value["text"] == "A text."


def test_splits_are_folders(tmp_path):
    for name in ("train", "val"):
        write_mds(tmp_path / name, {"text": "str"}, [{"text": name}])
    assert records(open_place(tmp_path))[0].value["text"] == "train"
    assert records(open_place(f"{tmp_path}@val"))[0].value["text"] == "val"
    with pytest.raises(ConfigError, match="has the splits train, val, and no 'best'"):
        open_place(f"{tmp_path}@best")
    with pytest.raises(ConfigError, match=r"index.json has no splits, so no 'val'"):
        open_place(f"{tmp_path / 'train'}@val")


def test_names_of_columns_are_told(tmp_path):
    place = write_mds(tmp_path / "in", {"question_text": "str", "reply": "bytes"}, [
        {"question_text": "What?", "reply": b"A cat."}
    ])  # fmt: skip
    build(place, tmp_path / "out", columns=("question=question_text", "answer=reply"))
    assert len(read_samples(tmp_path / "out")) == 1


def test_memory_does_not_grow_with_the_samples(tmp_path):
    peaks = []
    for count in (1000, 20_000):
        place = write_mds(tmp_path / str(count), {"text": "str"}, [{"text": "x"}] * count, 5000)
        source = open_place(place)
        tracemalloc.start()
        seen = sum(1 for chunk in source.chunks(100, lambda _: None) for _ in chunk.records())
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert seen == count
    assert peaks[1] < peaks[0] + 8 * 4 * 5000 + np.int64(1 << 16)
