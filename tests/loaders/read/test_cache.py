"""The cache on disk: what is read is what was written, the limit holds at every moment, nothing is
left behind.
"""

import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isobatch.loaders.read.cache import BLOCK_BYTES, Cache
from support import ranks
from support.loading.cache_files import content, on_disk

START_S = 60


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 12), st.integers(0, 20_000)), max_size=60))
def test_files_come_back_whole_and_the_limit_holds_whatever_is_written_and_read(
    tmp_path_factory, actions
):
    root = tmp_path_factory.mktemp("cache")
    limit, sizes = 50_000, {}
    for writes, number, size in actions:
        cache = Cache(
            root, f"build-{number % 2}", limit
        )  # each time a process of its own, as it were
        name = f"{number // 6:05d}/{number}"
        found = cache.read(name)
        if found is not None:
            assert found == content(number, sizes[name])
        elif writes:
            cache.write(name, content(number, size))
            sizes[name] = size
            assert cache.has(name)
        assert on_disk(root) <= limit


def test_what_was_not_used_for_longest_leaves_first(tmp_path):
    cache = Cache(tmp_path, "build", 10 * BLOCK_BYTES)
    used = OrderedDict()
    rng = np.random.default_rng(0)
    for _ in range(400):
        name = str(rng.integers(25))
        if cache.read(name) is None:
            cache.write(name, name.encode())
        used[name] = None
        used.move_to_end(name)
        there = [other for other in used if cache.has(other)]
        assert there == [*used][-len(there) :]
        assert len(there) >= min(len(used), 9)


def test_a_pinned_file_stays_and_one_larger_than_the_cache_is_not_stored(tmp_path):
    cache = Cache(tmp_path, "build", 10 * BLOCK_BYTES, pinned="index")
    cache.write("index", bytes(6 * BLOCK_BYTES))
    for number in range(30):
        cache.write(str(number), b"x")
    assert cache.has("index")
    cache.write("large", bytes(5 * BLOCK_BYTES))
    assert not cache.has("large")
    assert on_disk(tmp_path) <= 10 * BLOCK_BYTES
    another = Cache(tmp_path, "another", 10 * BLOCK_BYTES)
    another.write("large", bytes(9 * BLOCK_BYTES))
    assert another.has("large")
    assert not cache.has("index")


def test_empty_folders_of_earlier_builds_go(tmp_path):
    Cache(tmp_path, "old", 3 * BLOCK_BYTES).write("00000/1", b"old")
    cache = Cache(tmp_path, "new", 3 * BLOCK_BYTES)
    for number in range(6):
        cache.write(f"00000/{number}", b"new")
    Cache(tmp_path, "new", 3 * BLOCK_BYTES)
    assert not (tmp_path / "old" / "00000").exists()


def test_a_smaller_limit_holds_from_the_start(tmp_path):
    big = Cache(tmp_path, "build", 100 * BLOCK_BYTES)
    for number in range(50):
        big.write(str(number), b"x")
    Cache(tmp_path, "build", 20 * BLOCK_BYTES)
    assert on_disk(tmp_path) <= 20 * BLOCK_BYTES


def test_a_size_of_zero_keeps_and_makes_nothing(tmp_path):
    cache = Cache(tmp_path / "none", "build", 0)
    cache.write("a", b"x")
    assert cache.read("a") is None
    assert not (tmp_path / "none").exists()


def test_many_threads_share_one_cache(tmp_path):
    cache = Cache(tmp_path, "build", 20 * BLOCK_BYTES)

    def use(number):
        name = str(number % 40)
        found = cache.read(name)
        if found is None:
            cache.write(name, content(number % 40, 3000))
        return found is None or found == content(number % 40, 3000)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(use, np.random.default_rng(0).integers(0, 1000, 600).tolist()))
    assert on_disk(tmp_path) <= 20 * BLOCK_BYTES
    assert not [*tmp_path.rglob(".tmp-*")]


def test_a_cache_that_cannot_be_written_says_so_once_and_is_none(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.warns(RuntimeWarning, match="Not a directory; going on without storing") as said:
        cache = Cache(tmp_path / "file" / "cache", "build", 1 << 20)
    cache.write("a", b"x")
    assert cache.read("a") is None
    assert len(said) == 1


def test_an_error_in_the_middle_of_writing_leaves_no_file(tmp_path):
    cache = Cache(tmp_path, "build", 1 << 20)
    with pytest.raises(KeyError), cache.writing("a", 10):
        raise KeyError("the content could not be had")
    with pytest.warns(RuntimeWarning, match="Input/output error"), cache.writing("b", 10):
        raise OSError(5, "Input/output error")
    assert on_disk(tmp_path) == 0
    cache.write("c", b"x")
    assert not cache.has("c")


def run(folder, code, *arguments):
    """Begin a program; -> its process, and a function that waits for what it prints."""
    folder.mkdir()
    (folder / "program.py").write_text(code)
    (process,) = ranks.start(1, folder, folder / "program.py", *arguments)

    def wait_for(printed):
        deadline = time.monotonic() + START_S
        while not (folder / "stdout").exists() or (folder / "stdout").read_text() != printed:
            assert process.is_alive(), (folder / "stderr").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.005)

    return process, wait_for


HOLD = """
import signal, sys
from pathlib import Path
from isobatch.loaders.read.cache import locked
with locked(Path(sys.argv[1]) / "size", 5):
    print("held", flush=True)
    signal.pause()
"""


def test_a_process_that_stops_with_the_lock_held_stops_nobody_else(tmp_path, monkeypatch):
    monkeypatch.setattr("isobatch.loaders.read.cache.LOCK_WAIT_S", 0.2)
    cache = Cache(tmp_path / "cache", "build", 1 << 20)
    cache.write("a", b"x")
    child, wait_for = run(tmp_path / "child", HOLD, tmp_path / "cache")
    try:
        wait_for("held\n")
        started = time.monotonic()
        cache.write("b", b"x")
        assert time.monotonic() - started < 60  # the other one holds it for ever
        assert (cache.read("a"), cache.read("b")) == (b"x", None)
    finally:
        child.kill()
        child.join()
    cache.write("b", b"x")
    assert cache.read("b") == b"x"


WRITER = """
import sys
from pathlib import Path
import numpy as np
from isobatch.loaders.read.cache import Cache
from support.loading.cache_files import content
cache = Cache(Path(sys.argv[1]), "build", int(sys.argv[2]))
rng = np.random.default_rng(int(sys.argv[3]))
print("ready", flush=True)
while True:
    number = int(rng.integers(0, 60))
    found = cache.read(str(number))
    if found is None:
        cache.write(str(number), content(number, 30_000 + 1000 * number))
    elif found != content(number, 30_000 + 1000 * number):
        sys.exit("a wrong byte")
"""


def test_killed_processes_leave_whole_files_and_the_limit_holds_all_the_time(tmp_path):
    limit, root = 500_000, tmp_path / "cache"
    children = [run(tmp_path / f"{seed}", WRITER, root, limit, seed) for seed in range(3)]
    try:
        for _, wait_for in children:
            wait_for("ready\n")
        for child, _ in children:
            until = time.monotonic() + 0.5
            while time.monotonic() < until:
                assert on_disk(root) <= limit
            assert child.is_alive()
            child.kill()
            child.join()
    finally:
        for child, _ in children:
            child.kill()
            child.join()
    cache = Cache(root, "build", limit)
    assert not [*root.rglob(".tmp-*")]
    stored = [number for number in range(60) if cache.has(str(number))]
    # four of the largest, while what the killed ones were writing took the place of more
    assert len(stored) >= 3
    assert all(
        cache.read(str(number)) == content(number, 30_000 + 1000 * number) for number in stored
    )
    # the sum that is kept next to the files is theirs
    assert int.from_bytes((root / "size").read_bytes(), "little") == on_disk(root)
