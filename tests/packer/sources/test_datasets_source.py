"""Formats that only `datasets` knows: found, streamed in order, named when damaged."""

import pickle
import subprocess
import sys
from itertools import chain

import pytest
from PIL import Image

from isobatch.common.errors import ConfigError, DataError
from isobatch.counting.records.media import open_media
from isobatch.counting.records.record import RawSample
from isobatch.packer.sources.detect import locate, open_located
from isobatch.shards.folders import open_folder
from support.builds.raw_data import parse_record


def source_of(place, data_root=None):
    located = locate(str(place), known=[])
    return open_located(located, "set", str(data_root or located.folder))


def read(place, data_root=None, num_records=10):
    chunks = source_of(place, data_root).chunks(num_records, lambda _: None)
    return list(chain.from_iterable(pickle.loads(pickle.dumps(c)).records() for c in chunks))


def samples(place, **options):
    return [parse_record(record, "set") for record in read(place, **options)]


def write_questions(path, first, count):
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"Q{n},A{n},{n}" for n in range(first, first + count)]
    path.write_text("\n".join(["question,answer,unused", *lines]) + "\n")


def test_a_folder_of_csv_files_is_read_in_order(tmp_path):
    write_questions(tmp_path / "a.csv", 0, 25)
    write_questions(tmp_path / "b.csv", 25, 5)
    source = source_of(tmp_path)
    told = []
    chunks = list(source.chunks(10, told.append))
    assert [len(chunk.values) for chunk in chunks] == [10, 10, 5, 5]
    assert sum(told) == sum(info.size for info in source.files())
    assert [entry["name"] for entry in source.describe()] == ["a.csv", "b.csv"]
    found = samples(tmp_path)
    assert [[turn.text for turn in s.turns] for s in found] == [
        [f"Q{n}", f"A{n}"] for n in range(30)
    ]
    assert [s.sample_id for s in found[24:26]] == ["a.csv:24", "b.csv:0"]


def test_one_file_may_be_named(tmp_path):
    write_questions(tmp_path / "a.csv", 0, 3)
    write_questions(tmp_path / "b.csv", 3, 3)
    assert [s.sample_id for s in samples(tmp_path / "b.csv")] == ["b.csv:0", "b.csv:1", "b.csv:2"]


def test_of_several_splits_the_named_one_is_read(tmp_path):
    write_questions(tmp_path / "train.csv", 0, 3)
    write_questions(tmp_path / "test.csv", 3, 1)
    assert len(read(tmp_path)) == 3
    assert len(read(f"{tmp_path}@test")) == 1


def test_each_line_of_a_text_file_is_a_text_and_blank_lines_are_none(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    assert [(s.sample_id, s.turns[0].text) for s in samples(tmp_path)] == [
        ("a.txt:0", "one"),
        ("a.txt:2", "two"),
    ]


def write_pictures(folder, table="metadata.csv"):
    (folder / "sub").mkdir(parents=True)
    for name in ("a.png", "sub/b.png"):
        Image.new("RGB", (8, 8)).save(folder / name)
    if table.endswith(".csv"):
        (folder / table).write_text("file_name,text\na.png,<image>one\nsub/b.png,<image>two\n")
    else:
        lines = (
            '{"file_name": "a.png", "text": "one"}',
            '{"file_name": "sub/b.png", "text": "two"}',
        )
        (folder / table).write_text("\n".join(lines))


@pytest.mark.parametrize("table", ["metadata.csv", "metadata.jsonl"])
@pytest.mark.parametrize("below", [False, True])
def test_an_image_folder_gives_its_files_by_their_path(tmp_path, table, below):
    write_pictures(tmp_path / "set", table)
    root = tmp_path if below else tmp_path / "set"
    found = samples(tmp_path / "set", data_root=root)
    prefix = "set/" if below else ""
    assert [s.images[0].name for s in found] == [f"{prefix}a.png", f"{prefix}sub/b.png"]
    for sample in found:
        assert open_media(open_folder(str(root)), sample.images[0], "image").read(4) == b"\x89PNG"


@pytest.mark.parametrize("place", ["set", "./set/", "set/../set"])
def test_an_image_folder_may_be_named_by_a_relative_path(tmp_path, monkeypatch, place):
    write_pictures(tmp_path / "set")
    monkeypatch.chdir(tmp_path)
    assert [s.images[0].name for s in samples(place)] == ["a.png", "sub/b.png"]
    assert samples(place, data_root=".")[0].images[0].name == "set/a.png"


def test_an_image_folder_outside_the_data_root_is_refused(tmp_path):
    write_pictures(tmp_path / "set")
    with pytest.raises(ConfigError, match="image folders hold their own images"):
        source_of(tmp_path / "set", data_root=tmp_path / "set" / "sub")


def test_a_damaged_picture_is_left_to_the_counter(tmp_path):
    write_pictures(tmp_path / "set")
    (tmp_path / "set" / "a.png").write_bytes(b"no picture")
    assert all(isinstance(sample, RawSample) for sample in samples(tmp_path / "set"))


def test_a_damaged_file_is_one_line_that_names_it(tmp_path):
    write_questions(tmp_path / "a.csv", 0, 3)
    with (tmp_path / "a.csv").open("a") as file:
        file.write("1,2,3,4,5,6\n")
    with pytest.raises(DataError, match=r"a\.csv: `datasets` cannot read it as csv: ") as caught:
        read(tmp_path)
    assert "\n" not in str(caught.value)


def test_columns_without_content_are_one_clear_error(tmp_path):
    (tmp_path / "a.csv").write_text("label,score\n1,2\n")
    with pytest.raises(DataError, match=r"a\.csv: has the columns label, score; expected one of"):
        read(tmp_path)


def test_a_folder_that_datasets_does_not_know_is_one_line(tmp_path):
    (tmp_path / "notes.dat").write_text("x")
    with pytest.raises(DataError, match="no dataset in") as caught:
        locate(str(tmp_path), known=[])
    assert "\n" not in str(caught.value)


def test_without_the_extra_it_is_named(tmp_path, monkeypatch):
    write_questions(tmp_path / "a.csv", 0, 3)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"no dataset in .* pip install huggingface_hub datasets"):
        locate(str(tmp_path), known=[])


def test_datasets_is_imported_only_where_it_is_used():
    check = "import sys, packer.cli, packer.build; assert 'datasets' not in sys.modules"
    subprocess.run([sys.executable, "-c", check], check=True, timeout=120)


def test_columns_that_nothing_reads_are_named_with_a_value(tmp_path):
    (tmp_path / "a.csv").write_text("question,answer,level\nWhat?,A cat.,\nWho?,Eve.,hard\n")
    assert source_of(tmp_path / "a.csv").unread_columns() == {"level": '"hard"'}
