"""What is written behind is there at once for this process, on disk soon, and never more than so
much waits.
"""

import threading
import time

import pytest

from isobatch.loaders.read import write_behind
from isobatch.loaders.read.cache import Cache
from isobatch.loaders.read.write_behind import WriteBehind


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "isobatch-cache"]


@pytest.fixture
def cache(tmp_path):
    return Cache(tmp_path, "build", 1 << 20)


def wait_until(holds):
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_it_is_there_at_once_and_on_disk_soon(cache):
    behind = WriteBehind(cache)
    behind.write("a", b"content")
    assert behind.has("a")
    assert behind.read("a", 7) == b"content"
    wait_until(lambda: cache.read("a") == b"content")
    behind.close()
    assert not threads()


def test_closing_stores_what_waits_and_may_be_done_twice(cache, monkeypatch):
    monkeypatch.setattr(write_behind, "PAUSE_S", 60)
    behind = WriteBehind(cache)
    for number in range(50):
        behind.write(f"{number}", b"%d" % number)
    assert not cache.has("1")
    behind.close()
    behind.close()
    assert all(cache.read(f"{number}") == b"%d" % number for number in range(50))
    assert not threads()


def test_a_forgotten_one_stores_and_ends_too(cache):
    behind = WriteBehind(cache)
    behind.write("a", b"content")
    del behind
    assert cache.read("a") == b"content"
    assert not threads()


def test_beyond_the_limit_readers_store_themselves(cache, monkeypatch):
    monkeypatch.setattr(write_behind, "PAUSE_S", 60)
    monkeypatch.setattr(write_behind, "MUCH", 2)
    behind = WriteBehind(cache, max_bytes=25)
    for name in "abc":
        behind.write(name, name.encode() * 10)
    assert [cache.has(name) for name in "abc"] == [False, False, True]
    assert [bytes(behind.read(name, 10)) for name in "abc"] == [b"a" * 10, b"b" * 10, b"c" * 10]
    behind.close()


def test_much_is_not_held_back(cache, monkeypatch):
    monkeypatch.setattr(write_behind, "PAUSE_S", 60)
    behind = WriteBehind(cache, max_bytes=40)
    for name in "abcd":
        behind.write(name, name.encode() * 10)
    behind.write("e", b"")
    wait_until(lambda: cache.has("a"))
    behind.close()


def test_what_is_removed_is_not_stored(cache, monkeypatch):
    monkeypatch.setattr(write_behind, "PAUSE_S", 60)
    behind = WriteBehind(cache)
    behind.write("a", b"wrong")
    behind.remove("a")
    assert not behind.has("a")
    behind.write("a", b"right")
    behind.close()
    assert cache.read("a") == b"right"


def test_a_cache_that_stores_nothing_costs_no_thread(tmp_path):
    behind = WriteBehind(Cache(tmp_path, "build", 0))
    behind.write("a", b"content")
    assert behind.read("a") is None
    assert not threads()
