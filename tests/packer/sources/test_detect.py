"""How a place is recognised by looking at it: files, folders, splits and Hub ids, or one line about
what is wrong.
"""

import json

import huggingface_hub
import pytest

from balance.errors import ConfigError, DataError
from packer.sources.detect import locate
from packer.sources.hub import HubId, choose_parquet, fetch_parquet, parse_hub_id
from packer.sources.splits import split_of
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
    "name", ["a.json", "a.jsonl.gz", "a.parquet", "a.arrow", "a.tar", "a.tar.gz", "a.tgz", "a.txt"]
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
        (["x.txt"], DataError, "no dataset in"),
        (["a.json", "b.json"], ConfigError, "2 annotation files"),
        (["mix558k.json", "mix665k.json"], ConfigError, "2 annotation files"),
        (["a.parquet", "b.tar"], ConfigError, "several layouts"),
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


CAULDRON = ["ai2d/train-00000-of-00001.parquet", "cocoqa/train-00000-of-00002.parquet"]
CONVERTED = [
    "default/test/0000.parquet",
    "default/train/0000.parquet",
    "default/train/0001.parquet",
]


@for_each(
    ("place", "names", "chosen"),
    [
        ("o/n", ["data/test-00000-of-00001.parquet", "data/train-00000-of-00001.parquet"], [1]),
        (
            "o/n@test",
            ["data/test-00000-of-00001.parquet", "data/train-00000-of-00001.parquet"],
            [0],
        ),
        ("o/n", ["train/0.parquet", "test/0.parquet"], [0]),
        ("o/n:cocoqa", CAULDRON, [1]),
        ("o/n", CAULDRON[:1], [0]),
        ("o/n", CONVERTED, [1, 2]),
        ("o/n:default@test", CONVERTED, [0]),
        ("o/n", ["default/train/0000.parquet", "other/train/0000.parquet"], [0]),
        ("o/n@partial-train", ["default/partial-train/0000.parquet"], [0]),
    ],
)
def test_the_files_of_the_split_are_chosen(place, names, chosen):
    assert choose_parquet(names, parse_hub_id(place)) == tuple(names[number] for number in chosen)


@pytest.mark.parametrize(
    ("place", "names", "error", "message"),
    [
        ("o/n", [], DataError, "no Parquet files"),
        (
            "o/n",
            CAULDRON,
            ConfigError,
            "configurations ai2d, cocoqa; say which one: o/n:CONFIGURATION",
        ),
        ("o/n:x", CAULDRON, ConfigError, "configurations ai2d, cocoqa"),
        ("o/n:ai2d@dev", CAULDRON, ConfigError, "o/n:ai2d has the splits train, and no 'dev'"),
        ("o/n", ["default/partial-train/0000.parquet"], ConfigError, "only the first 5 GB"),
    ],
)
def test_what_is_not_precise_enough_is_one_line(place, names, error, message):
    with pytest.raises(error, match=message):
        choose_parquet(names, parse_hub_id(place))


def test_hub_ids_are_told_from_paths():
    assert parse_hub_id("a/b") == HubId("a/b")
    assert parse_hub_id("a/b.c:d@e") == HubId("a/b.c", "d", "e")
    for place in ("a", "a/b/c", "/a/b", "./a", "../a", "a b/c", "s3://a/b", "a/b@", "a/b:"):
        assert parse_hub_id(place) is None


class FakeHub:
    """Stands in for the two functions of huggingface_hub that are used."""

    def __init__(self, folder, files):
        self.folder, self.files, self.downloads = folder, files, []

    def list_repo_files(self, repo, *, repo_type, revision=None):
        assert repo_type == "dataset"
        found = self.files[revision]
        if isinstance(found, Exception):
            raise found
        return found

    def snapshot_download(self, repo, *, repo_type, revision, allow_patterns):
        self.downloads.append((repo, revision, allow_patterns))
        return self.folder


@pytest.fixture
def hub(monkeypatch, tmp_path):
    fake = FakeHub(tmp_path, {})
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: fake)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake.snapshot_download)
    return fake


def test_a_place_that_is_no_path_is_looked_up_on_the_hub(hub):
    hub.files = {None: ["README.md", "data/train-[1].parquet", "data/test.parquet"]}
    located = locate("org/name", known=KNOWN)
    assert (located.layout, located.folder, located.names) == (
        "parquet",
        str(hub.folder),
        ("data/train-[1].parquet",),
    )
    assert hub.downloads == [("org/name", None, ["data/train-[[]1].parquet"])]


def test_without_parquet_files_of_its_own_the_hubs_conversion_is_read(hub):
    hub.files = {None: ["a.json"], "refs/convert/parquet": CONVERTED}
    assert fetch_parquet(HubId("org/name"))[1] == tuple(CONVERTED[1:])
    assert hub.downloads[0][1] == "refs/convert/parquet"


@pytest.mark.parametrize(
    "error", [OSError("no route to host\nsecond line"), KeyError(), RuntimeError("404: not found")]
)
def test_a_hub_that_gives_nothing_is_one_line(hub, error):
    hub.files = {None: error}
    with pytest.raises(
        DataError, match="no file or folder org/name, and the Hugging Face Hub gave"
    ) as caught:
        locate("org/name", known=KNOWN)
    assert "\n" not in str(caught.value)


def test_a_download_that_fails_is_one_line(hub, monkeypatch):
    hub.files = {None: ["train.parquet"]}

    def fail(*_, **__):
        raise OSError("disk full")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(DataError, match=r"org/name could not be downloaded .* disk full"):
        locate("org/name", known=KNOWN)


def test_without_the_extra_it_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match=r"pip install 'isobatch\[hub\]'"):
        locate("org/name", known=KNOWN)


def test_an_empty_dataset_dict_is_named(tmp_path):
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": []}))
    with pytest.raises(DataError, match=r"dataset_dict\.json: lists no splits"):
        locate(str(tmp_path), known=KNOWN)
