"""How a place is recognised by looking at it: files, folders, splits and Hub ids, or one line about
what is wrong.
"""

import json
import sys
from types import SimpleNamespace
from urllib.parse import quote

import datasets
import huggingface_hub
import pytest

from isobatch.common.errors import ConfigError, DataError
from isobatch.packer.sources.detect import locate, open_located, split_of
from isobatch.packer.sources.hub import HubId, parse_hub_id
from support.cases import for_each

KNOWN = ["demo", "llava665k"]


def touch(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
    return folder


def found(place):
    located = locate(str(place), known=KNOWN)
    return located.layout, located.names


@pytest.mark.parametrize(
    ("names", "layout", "expected"),
    [
        (["annotations.json", "other.json"], "annotations", ("annotations.json",)),
        (["a.jsonl.gz", "images/x.jpg"], "annotations", ("a.jsonl.gz",)),
        (
            ["part-10.jsonl", "part-9.jsonl", "part-7.jsonl"],
            "annotations",
            ("part-7.jsonl", "part-9.jsonl", "part-10.jsonl"),
        ),
        (
            ["data/train-00000-of-00001.parquet", "dataset_infos.json"],
            "parquet",
            ("data/train-00000-of-00001.parquet",),
        ),
        (["b.parquet", "a/c.parquet", "README.md"], "parquet", ("a/c.parquet", "b.parquet")),
        (["test.parquet", "train.parquet"], "parquet", ("train.parquet",)),
        (["val/0.tar", "train/1.tar", "train/0.tar"], "tar", ("train/0.tar", "train/1.tar")),
        (["00000.tar", "00000.parquet", "00000_stats.json"], "tar", ("00000.tar",)),
        (["x-train.arrow", "dataset_info.json"], "arrow", ("x-train.arrow",)),
    ],
)
def test_a_folder_is_recognised_by_its_files(tmp_path, names, layout, expected):
    assert found(touch(tmp_path, *names)) == (layout, expected)


@pytest.mark.parametrize(
    "name", ["a.json", "a.jsonl.gz", "a.parquet", "a.arrow", "a.tar", "a.tar.gz", "a.tgz", "a.dat"]
)
def test_a_file_is_read_as_what_its_name_says(tmp_path, name):
    layout = {"parquet": "parquet", "arrow": "arrow", "tar": "tar", "tgz": "tar"}.get(
        name.split(".")[1], "annotations"
    )
    assert found(touch(tmp_path, name) / name) == (layout, (name,))


@pytest.mark.parametrize(
    ("names", "error", "message"),
    [
        ([], DataError, "no dataset in"),
        (["x.dat"], DataError, "no dataset in"),
        (["a.json", "b.json"], ConfigError, "2 annotation files"),
        (["mix558k.json", "mix665k.json"], ConfigError, "2 annotation files"),
        (["a.parquet", "b.tar"], ConfigError, "several layouts"),
        (["manifest.json", "index.arrow"], DataError, "manifest.json: not a manifest"),
        (
            ["test.parquet", "validation.parquet"],
            ConfigError,
            "splits test, validation; say which one",
        ),
        (["train.parquet", "more.parquet"], ConfigError, "more.parquet belongs to no split"),
    ],
)
def test_what_is_not_clear_is_one_line(tmp_path, names, error, message):
    with pytest.raises(error, match=message) as caught:
        locate(str(touch(tmp_path, *names)), known=KNOWN)
    assert "\n" not in str(caught.value)


def test_a_split_may_be_named_behind_the_place(tmp_path):
    touch(tmp_path, "test.parquet", "train.parquet")
    assert found(f"{tmp_path}@test") == ("parquet", ("test.parquet",))
    with pytest.raises(ConfigError, match="splits test, train, and no 'dev'"):
        found(f"{tmp_path}@dev")


def test_what_is_not_there_is_one_line_that_lists_the_known_names(tmp_path):
    for place in (tmp_path / "none", "nonsense", "./a/b.json", "a/b.parquet"):
        with pytest.raises(DataError, match=r"neither a file.*demo, llava665k"):
            locate(str(place), known=KNOWN)


@for_each(
    ("name", "split"),
    [
        ("train.parquet", "train"),
        ("data/validation-00000-of-00001-abc.parquet", "validation"),
        ("a/test_1.jsonl", "test"),
        ("training/x.parquet", "training"),
        ("default/my_split/0000.parquet", "my_split"),
        ("default/partial-train/0001.parquet", "partial-train"),
        ("special-00000-of-00009.parquet", "special"),
        ("trainer.parquet", ""),
        ("00000.parquet", ""),
        ("part1/set/00000.tar", ""),
        ("laion-00000-of-00009.tar", ""),
    ],
)
def test_the_split_stands_in_the_name(name, split):
    assert split_of(name) == split


def test_hub_ids_are_told_from_paths():
    assert parse_hub_id("a/b") == HubId("a/b")
    assert parse_hub_id("a/b.c:d@e") == HubId("a/b.c", "d", "e")
    for place in ("a", "a/b/c", "/a/b", "./a", "../a", "a b/c", "s3://a/b", "a/b@", "a/b:"):
        assert parse_hub_id(place) is None


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A repository org/name with the files of a folder, as the clients of the Hub would give it."""
    fake = SimpleNamespace(folder=tmp_path, error=None, card=None, downloads=[])
    load = datasets.load_dataset_builder

    def repo_info(repo, *, repo_type):
        assert (repo, repo_type) == ("org/name", "dataset")
        if fake.error:
            raise fake.error
        return SimpleNamespace(id=repo, sha="abc", card_data=fake.card, siblings=[])

    def load_dataset_builder(place, config, data_files=None):
        builder = load(str(fake.folder) if place == "org/name" else place, config)
        builder.config.data_files = {
            split: [
                f"hf://datasets/org/name@c0ffee{quote(name[len(str(tmp_path)) :])}"
                for name in names
            ]
            for split, names in builder.config.data_files.items()
        }
        return builder

    def snapshot_download(repo, *, repo_type, revision, allow_patterns):
        fake.downloads.append((repo, revision, allow_patterns))
        return str(fake.folder)

    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: SimpleNamespace(repo_info=repo_info))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(datasets, "load_dataset_builder", load_dataset_builder)
    return fake


CONFIGS = """---
configs:
- config_name: ai2d
  data_files:
  - split: train
    path: ai2d/*.parquet
- config_name: cocoqa
  data_files:
  - split: train
    path: cocoqa/*.parquet
  - split: dev
    path: cocoqa-dev/*.parquet
---
"""


def cauldron(folder):
    touch(folder, "ai2d/0.parquet", "cocoqa/[1].parquet", "cocoqa-dev/2.parquet")
    (folder / "README.md").write_text(CONFIGS)


@pytest.mark.parametrize(
    ("place", "layout", "names"),
    [
        ("org/name:ai2d", "parquet", ("ai2d/0.parquet",)),
        ("org/name:cocoqa", "parquet", ("cocoqa/[1].parquet",)),
        ("org/name:cocoqa@dev", "parquet", ("cocoqa-dev/2.parquet",)),
    ],
)
def test_the_files_of_a_configuration_and_a_split_are_chosen(hub, place, layout, names):
    cauldron(hub.folder)
    assert found(place) == (layout, names)


def test_files_are_downloaded_at_the_revision_that_was_looked_at(hub):
    cauldron(hub.folder)
    located = locate("org/name:cocoqa", known=KNOWN)
    assert located.folder == str(hub.folder)
    assert hub.downloads == [("org/name", "c0ffee", ["cocoqa/[[]1].parquet"])]


def test_other_formats_of_the_hub_keep_their_builder_and_its_options(hub):
    (hub.folder / "README.md").write_text(
        '---\nconfigs:\n- config_name: notes\n  data_files: notes.csv\n  sep: ";"\n---\n'
    )
    (hub.folder / "notes.csv").write_text("text;x\nhello;1\n")
    located = locate("org/name", known=KNOWN)
    assert (located.layout, located.names) == ("csv", ("notes.csv",))
    assert dict(located.options) == {"sep": ";"}
    (chunk,) = open_located(located, "set", located.folder).chunks(10, lambda _: None)
    assert [record.value["text"] for record in chunk.records()] == ["hello"]


def test_json_of_the_hub_is_read_as_annotations(hub):
    (hub.folder / "train.jsonl").write_text('{"text": "a"}')
    assert found("org/name") == ("annotations", ("train.jsonl",))


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("org/name", r"org/name: .*'ai2d', 'cocoqa'.*; say which one: org/name:CONFIG"),
        ("org/name:x", r"org/name:x: .*'x' not found.*'ai2d', 'cocoqa'"),
        ("org/name:ai2d@dev", "org/name:ai2d has the splits train, and no 'dev'"),
    ],
)
def test_a_hub_id_that_is_not_precise_enough_is_one_line(hub, place, message):
    cauldron(hub.folder)
    with pytest.raises(ConfigError, match=message) as caught:
        locate(place, known=KNOWN)
    assert "\n" not in str(caught.value)


def test_a_folder_with_the_first_part_of_a_dataset_only_is_named(tmp_path):
    touch(tmp_path, "default/partial-train/0000.parquet")
    with pytest.raises(ConfigError, match="only the first 5 GB"):
        locate(str(tmp_path), known=KNOWN)
    assert found(f"{tmp_path}@partial-train")[1] == ("default/partial-train/0000.parquet",)


@pytest.mark.parametrize(
    "error", [OSError("no route to host\nsecond line"), KeyError(), RuntimeError("404: not found")]
)
def test_a_hub_that_gives_nothing_is_one_line(hub, error):
    hub.error = error
    with pytest.raises(
        DataError, match="no file or folder org/name, and the Hugging Face Hub gave"
    ) as caught:
        locate("org/name", known=KNOWN)
    assert "\n" not in str(caught.value)


def test_a_download_that_fails_is_one_line(hub, monkeypatch):
    (hub.folder / "train.jsonl").write_text('{"text": "a"}')

    def fail(*_, **__):
        raise OSError("disk full")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(DataError, match=r"org/name could not be downloaded .* disk full"):
        locate("org/name", known=KNOWN)


def test_without_the_extra_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"pip install huggingface_hub datasets"):
        locate("org/name", known=KNOWN)


def test_an_empty_dataset_dict_is_named(tmp_path):
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": []}))
    with pytest.raises(DataError, match=r"dataset_dict\.json: lists no splits"):
        locate(str(tmp_path), known=KNOWN)
