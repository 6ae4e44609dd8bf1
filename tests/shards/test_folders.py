"""Folders of raw data on disk, what is temporary, and the errors of a place that cannot be used."""

import errno
import itertools
import os
import sys

import pytest

from isobatch.common.errors import ConfigError, DamagedShard, DataError
from isobatch.shards.folders import (
    join,
    naming_full_disk,
    on_disk,
    open_folder,
    open_object_folder,
    split,
)
from isobatch.shards.local_folder import OutsideFolder
from support.ranks import launch


@pytest.fixture
def folder(tmp_path):
    for name in ("b.txt", "a/z.txt", "a/deep/y.txt", ".hidden", "a/.cache/x"):
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
    return tmp_path / "root"


def test_files_come_sorted_with_their_sizes_and_without_hidden_ones(folder):
    root = open_folder(str(folder))
    assert [(info.name, info.size) for info in root.files()] == [
        ("a/deep/y.txt", 12),
        ("a/z.txt", 7),
        ("b.txt", 5),
    ]
    assert [info.name for info in root.files("a/deep")] == ["a/deep/y.txt"]
    assert (root.has_folder("a"), root.has_folder("b.txt"), root.has_folder("c")) == (
        True,
        False,
        False,
    )
    assert "b.txt" in root.names()


def test_ranges_are_read_as_far_as_the_file_goes(folder):
    root = open_folder(str(folder))
    assert root.read("a/z.txt", 2, 3) == b"z.t"
    assert root.read("a/z.txt", 5) == b"xt"
    assert root.read("a/z.txt", 5, 100) == b"xt"
    assert root.read("a/z.txt", 50, 1) == b""


def test_a_changed_file_has_another_version(folder):
    root = open_folder(str(folder))
    before = root.info("b.txt").version
    os.utime(folder / "b.txt", ns=(1, 1))
    assert root.info("b.txt").version != before


def test_links_out_of_the_root_are_refused_unless_they_are_meant(folder, tmp_path):
    (tmp_path / "secret").write_bytes(b"secret")
    (folder / "link").symlink_to(tmp_path / "secret")
    (folder / "inside").symlink_to(folder / "b.txt")
    assert open_folder(str(folder)).read("inside") == b"b.txt"
    with pytest.raises(OutsideFolder):
        open_folder(str(folder)).read("link")
    assert open_folder(str(folder), follow_links=True).read("link") == b"secret"


def test_places_are_joined_and_split_alike():
    for root, name in (("s3://bucket/a", "b.json"), ("data/a", "b.json")):
        assert split(join(root, name)) == (root, name)


def test_an_unknown_kind_of_uri_and_a_missing_package_say_what_to_do(monkeypatch):
    with pytest.raises(ConfigError, match="hdfs:// is no object store that packer knows"):
        open_folder("hdfs://cluster/data")
    monkeypatch.setitem(sys.modules, "isobatch.shards.object_folder", None)
    open_object_folder.cache_clear()
    with pytest.raises(ConfigError, match=r"pip install obstore"):
        open_folder("s3://bucket/data", follow_links=True)


def test_a_folder_on_disk_is_used_as_it_is(folder):
    with on_disk(str(folder), ["b.txt"]) as place:
        assert place == folder


def test_only_a_full_disk_is_renamed():
    with (
        pytest.raises(DataError, match=r"^/work: no space left on device: make room"),
        naming_full_disk("/work"),
    ):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    limit = r"^/work: file too large: allow larger files \(ulimit -f\), then run"
    with pytest.raises(DataError, match=limit), naming_full_disk("/work"):
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    with pytest.raises(PermissionError), naming_full_disk("/work"):
        raise PermissionError(errno.EACCES, "no", "x")
    with pytest.raises(DamagedShard), naming_full_disk("/work"):
        raise DamagedShard("x")


PROGRAM = """
import sys
if __name__ == "__main__":  # not in the processes that count
    from isobatch.packer.cli import main
    from support.ranks import mount_disk
    mount_disk(sys.argv.pop(1), sys.argv.pop(1))
    main()
"""


# the demo's staged samples, which know no format, need more than the first; its 4 MB of shards
# more than the others; its one shard is written by the leading process, however many there are
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("shard_format", "size"),
    [("arrow", "100k"), *itertools.product(["arrow", "webdataset"], ["1800k", "3m"])],
)
def test_a_full_disk_is_one_line_that_names_the_folder(
    tmp_path, demo_data, small_disk, size, shard_format
):
    disk, _ = small_disk(size)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    arguments = {
        "--dataset": "demo",
        "--data-root": demo_data,
        "--out": disk,
        "--workers": 2 if size == "100k" else 1,
        "--limit": 300,
        "--format": shard_format,
    }
    build = ["build", *(each for pair in arguments.items() for each in pair)]
    done = launch(1, tmp_path / "printed", program, disk, size, *build)
    assert done.returncode == 1, done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert errors == [
        f"error: {disk}: no space left on device: make room there, then run the same command again"
    ]
    assert "Traceback" not in done.stderr
