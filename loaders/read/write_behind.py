"""`WriteBehind`: stores into the cache in a background thread.

A group can be read while it is only in memory, so storing waits until reading pauses or much is
waiting. The thread is `nice`; when more than `max_bytes` wait, readers store what they read.
"""

import os
import threading
import time
import weakref
from collections import OrderedDict
from typing import Any

from isobatch.loaders.read.cache import Cache

BEHIND_BYTES = 128 << 20
MUCH = 0.75
"""Share of the limit that may wait while reading continues."""
PAUSE_S = 0.1
"""Time without a new file after which reading is taken to pause."""
NICENESS = 10
FLUSH_S = 5.0
"""Longest wait of closing for what is not stored yet."""


class WriteBehind:
    """A `Cache` whose writes return at once and can be read through this object from then on."""

    def __init__(self, cache: Cache, max_bytes: int = BEHIND_BYTES) -> None:
        self._cache, self._max_bytes = cache, max_bytes
        self._queue: _Queue | None = None
        self._lock = threading.Lock()

    def read(self, name: str, size: int | None = None) -> Any:
        """The file's content, bytes or a buffer; None if it is not there."""
        content = self._waiting(name)
        return self._cache.read(name, size) if content is None else content

    def has(self, name: str) -> bool:
        """Whether the file is there now."""
        return self._waiting(name) is not None or self._cache.has(name)

    def write(self, name: str, content: Any) -> None:
        """Store a file (a buffer that must not change), whole or not at all, later."""
        if self._cache.is_storing and not self._running().put(name, content):
            self._cache.write(name, content)

    def remove(self, name: str) -> None:
        """Remove a file that is not what it should be."""
        if self._queue is not None:
            self._queue.forget(name)
        self._cache.remove(name)

    def close(self) -> None:
        """Store the rest, if that is quick, and end the thread. Safe to call twice."""
        with self._lock:
            queue, self._queue = self._queue, None
        if queue is not None:
            queue.end()

    def _waiting(self, name: str) -> Any:
        queue = self._queue
        return None if queue is None else queue.contents.get(name)

    def _running(self) -> "_Queue":
        """The queue, and a thread that works it off; new ones in a fork, which has no threads."""
        with self._lock:
            if self._queue is None or self._queue.pid != os.getpid():
                self._queue = _Queue(self._cache, self._max_bytes)
                weakref.finalize(self, self._queue.end)
            return self._queue


class _Queue:
    """What is still to be stored, shared by readers and the thread."""

    def __init__(self, cache: Cache, max_bytes: int) -> None:
        self.pid, self._max_bytes = os.getpid(), max_bytes
        self.contents: OrderedDict[str, Any] = OrderedDict()
        self._num_bytes = 0
        self._writing = ""
        self._changed = threading.Condition()
        self._last_put = 0.0
        self._hurrying = self._ended = False
        self._thread = threading.Thread(
            target=self.work, args=(cache,), name="isobatch-cache", daemon=True
        )
        self._thread.start()

    def put(self, name: str, content: Any) -> bool:
        """Whether there was room for it."""
        with self._changed:
            if name in self.contents:
                return True
            if self._ended or self._num_bytes + len(content) > self._max_bytes:
                return False
            self.contents[name] = content
            self._num_bytes += len(content)
            self._last_put = time.monotonic()
            if len(self.contents) == 1 or self._num_bytes > MUCH * self._max_bytes:
                self._changed.notify_all()
            return True

    def forget(self, name: str) -> None:
        """Never store it; wait for it if that is under way."""
        with self._changed:
            if self._writing != name and name in self.contents:
                self._num_bytes -= len(self.contents.pop(name))
            while self._writing == name:
                self._changed.wait()

    def end(self) -> None:
        """Store the rest; also at exit, and when nobody can read from the cache any more."""
        if os.getpid() != self.pid:
            return  # a fork, in which nobody would ever release the lock
        deadline = time.monotonic() + FLUSH_S
        with self._changed:
            self._hurrying = True
            self._changed.notify_all()
            if threading.current_thread() is self._thread:  # whose memory was just tidied up
                self._ended = True
                return
            while self.contents and (remaining_s := deadline - time.monotonic()) > 0:
                self._changed.wait(remaining_s)
            self._ended = True
            self._changed.notify_all()
        self._thread.join(FLUSH_S)

    def _wait_s(self) -> float | None:
        """How long nothing is to be stored; None: until something comes."""
        if self._ended or (
            self.contents and (self._hurrying or self._num_bytes > MUCH * self._max_bytes)
        ):
            return 0
        return max(0.0, self._last_put + PAUSE_S - time.monotonic()) if self.contents else None

    def work(self, cache: Cache) -> None:
        """What the thread does."""
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        while True:
            with self._changed:
                while (wait_s := self._wait_s()) != 0:
                    self._changed.wait(wait_s)
                if self._ended:
                    return
                self._writing, content = next(iter(self.contents.items()))
            cache.write(self._writing, content)
            with self._changed:
                self._num_bytes -= len(self.contents.pop(self._writing))
                self._writing = ""
                self._changed.notify_all()
            del content
