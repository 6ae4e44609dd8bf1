"""The drawn demo is kept and checked; whatever is wrong with what is kept, the demo is the same."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from isobatch.common.cache_files import DEMOS, MAX_BYTES
from isobatch.packer.build import Builder
from isobatch.packer.config import BuildConfig
from isobatch.packer.demo import kept_demo
from isobatch.packer.demo.dataset import write_demo
from isobatch.packer.demo.kept_demo import demo_key, place_demo, read_kept
from isobatch.shards.manifest import read_manifest
from tests.support.builds.packed import quiet

FEW = 12


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "isobatch" / "demo"


@pytest.fixture
def drawings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A number of samples for each time that the demo is drawn."""
    drawn: list[int] = []
    draw = kept_demo.draw_demo
    monkeypatch.setattr(kept_demo, "draw_demo", lambda num: drawn.append(num) or draw(num))
    return drawn


def digests(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(f.relative_to(folder)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


def placed(folder: Path) -> dict[str, str]:
    place_demo(folder, num_samples=FEW)
    return digests(folder)


def test_it_is_drawn_once_and_equal_to_what_is_written_without_a_cache(
    tmp_path: Path, cache: Path, drawings: list[int]
) -> None:
    write_demo(tmp_path / "written", num_samples=FEW)
    for name in ("first", "again"):
        assert placed(tmp_path / name) == digests(tmp_path / "written")
    assert drawings == [FEW]
    assert [path.name for path in cache.iterdir()] == [demo_key(FEW) + DEMOS]


def test_a_damaged_file_is_drawn_again(tmp_path: Path, cache: Path, drawings: list[int]) -> None:
    whole = placed(tmp_path / "whole")
    file = cache / (demo_key(FEW) + DEMOS)
    content = file.read_bytes()
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 1
    damaged = [b"", content[:20], content[:-1], bytes(flipped), content + b"x"]
    for number, wrong in enumerate(damaged):
        file.write_bytes(wrong)
        assert read_kept(FEW) is None
        assert placed(tmp_path / str(number)) == whole
        assert file.read_bytes()[:32] == content[:32]
    assert len(drawings) == 1 + len(damaged)


def test_a_folder_that_cannot_be_written_is_no_error(
    tmp_path: Path, cache: Path, drawings: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text("a file where the folder would be")
    one = placed(tmp_path / "one")
    cache.unlink()
    monkeypatch.setattr(Path, "replace", full_disk)
    assert placed(tmp_path / "other") == one
    assert list(cache.iterdir()) == []
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    assert placed(tmp_path / "last") == one
    assert drawings == [FEW] * 3


def full_disk(*_: object) -> None:
    raise OSError(28, os.strerror(28))


def no_home() -> Path:
    raise RuntimeError("Could not determine home directory.")


def test_other_code_never_reads_it(
    tmp_path: Path, drawings: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    placed(tmp_path / "one")
    source = Path(kept_demo._pictures.__file__)
    changed = tmp_path / "pictures.py"
    changed.write_bytes(source.read_bytes() + b"\n")
    monkeypatch.setattr(kept_demo._pictures, "__file__", str(changed))
    placed(tmp_path / "other")
    monkeypatch.setattr("PIL.__version__", "0")
    placed(tmp_path / "with another Pillow")
    assert drawings == [FEW] * 3


def test_files_of_other_versions_go_when_they_are_many(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MAX_BYTES, DEMOS, 1 << 20)
    cache.mkdir(parents=True)
    (cache / f"old{DEMOS}").write_bytes(bytes(1 << 20))
    placed(tmp_path / "new")
    assert [path.name for path in cache.iterdir()] == [demo_key(FEW) + DEMOS]


def test_processes_that_draw_at_once_write_the_same(tmp_path: Path, cache: Path) -> None:
    call = "import sys; from pathlib import Path; from isobatch.packer.demo.kept_demo import *;"
    call += f" place_demo(Path(sys.argv[1]), num_samples={FEW})"
    folders = [tmp_path / str(number) for number in range(3)]
    processes = [subprocess.Popen([sys.executable, "-c", call, str(path)]) for path in folders]
    assert [process.wait() for process in processes] == [0, 0, 0]
    one, *others = map(digests, folders)
    assert others == [one, one]
    assert [path.name for path in cache.iterdir()] == [demo_key(FEW) + DEMOS]
    assert read_kept(FEW) is not None


def test_builds_with_and_without_it_have_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drawings: list[int]
) -> None:
    monkeypatch.setattr(
        "isobatch.packer.build.place_demo", lambda folder: place_demo(folder, num_samples=FEW)
    )
    manifests = []
    for name in ("drawn", "kept"):
        config = BuildConfig(dataset="demo", out=str(tmp_path / name), workers=1)
        Builder(config, quiet()).build()
        manifests.append(read_manifest(config.out).hash)
    assert manifests[0] == manifests[1]
    assert drawings == [FEW]
