"""`RangeReader`: byte ranges of objects in a bucket, with time limits and retries.

Requests run in a thread of its own, several at a time. Each is retried with growing pauses, and a
body that breaks off is continued, until its time limit is over.
"""

import asyncio
import os
import random
import threading
import time
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from concurrent.futures import wait as wait_for
from itertools import count
from typing import Any, TypeVar

from isobatch.common.errors import ConfigError, DamagedShard, DataError
from isobatch.shards.object_store import open_store, refuse_fork, split_uri
from isobatch.shards.store_errors import Refusal, explain

MAX_REQUESTS = 16
"""Requests under way at a time; from SeaweedFS, 8 are 6 % slower and 32 no faster by 4 MB."""
SIGNAL_S = 1.0
"""Longest wait: a signal that comes just before a wait begins is heard when it ends."""
SLOWEST_BYTES_PER_S = 1 << 20
"""A request gets its time limit plus the time that its bytes take at this rate."""
FIRST_TRIES = 5
"""Tries of the first request, 1.5 s: a mistyped endpoint must not take a minute to come out."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
"""Pauses between the tries of a request."""
_RETRIES = 3
"""obstore's own retries, inside a body too; few, because it says why only when it gives up."""
_READ_TIMEOUT_S = 15.0
"""A connection that sends nothing for so long is given up, at most a third of the time limit."""
_REQUEST_S = 3600.0
"""obstore's limit of a whole request; ours is lower."""
_CLOSING_S = 5.0
_RELEASE_S = 0.05
COPY_AGAIN = "copy or build it again"
Result = TypeVar("Result")
Check = Callable[[Any], str]
"""Says what is wrong with the bytes of an answer; empty if nothing is."""


class RangeReader:
    """The objects under a URI, read only."""

    def __init__(self, uri: str, time_limit_s: float = 60.0) -> None:
        self.uri = uri.rstrip("/")
        self.time_limit_s = time_limit_s
        _, self._prefix = split_uri(self.uri)
        self._stores: dict[int, Any] = {}
        self._has_answered = False
        self._slots = asyncio.Semaphore(MAX_REQUESTS)
        self._worker: _Worker | None = None
        self._lock = threading.Lock()
        self._is_closed = False

    def read(self, name: str, *, patient: bool = True) -> bytes:
        """A whole object. FileNotFoundError if it is missing, else DataError.

        Without `patient`, a store that cannot be reached is given up after a few tries.
        """
        work = self._fetch(name, tries=None if patient else FIRST_TRIES)
        return bytes(self.wait(self._submit(work), 0))

    def start(
        self, name: str, start: int, end: int, size: int | None = None, check: Check | None = None
    ) -> Future[Any]:
        """Ask for bytes `[start, end)` of an object of `size` bytes; the result is a buffer.

        Bytes that `check` finds damaged are asked for again. Fails with DamagedShard if they stay
        so, or if the object is missing or of another size, else with DataError.
        """
        return self._submit(self._fetch(name, (start, end), size, check=check))

    def start_file(self, name: str) -> Future[Any]:
        """Ask for a whole object; like `start`, but FileNotFoundError if it is missing."""
        return self._submit(self._fetch(name))

    def wait(self, future: Future[Result], number_of_bytes: int) -> Result:
        """The result of a request for so many bytes; DataError when its time is over."""
        limit_s = self._limit(number_of_bytes) + 1  # the request gives up first, and says more
        end = time.monotonic() + limit_s
        while not future.done() and time.monotonic() < end:
            wait_for([future], SIGNAL_S)
        try:
            return future.result(0)
        except TimeoutError:
            raise self._time_over(limit_s, None) from None
        except CancelledError:
            raise DataError(f"{self.uri}: closed while a request was under way") from None

    def cancel(self) -> None:
        """Cancel what is under way: whoever waits gets DataError. New requests work."""
        with self._lock:
            if self._worker is not None:
                self._worker.cancel()

    def close(self) -> None:
        """Cancel what is under way, without waiting for it. Nothing can be read afterwards."""
        with self._lock:
            self._is_closed = True
            worker, self._worker = self._worker, None
        if worker is not None:
            worker.stop()

    def _submit(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        try:
            with self._lock:
                if self._is_closed:
                    raise ConfigError(f"{self.uri}: is closed; open the build again")
                if self._worker is None:
                    refuse_fork(self.uri)
                    self._worker = _Worker()
                return self._worker.submit(work)
        except BaseException:
            work.close()
            raise

    async def _fetch(
        self,
        name: str,
        window: tuple[int, int] | None = None,
        size: int | None = None,
        tries: int | None = None,
        check: Check | None = None,
    ) -> Any:
        """The bytes of one request, however often it must be made."""
        limit_s = self._limit(window[1] - window[0] if window else 0)
        refusal: Refusal | None = None
        async with self._slots:
            try:
                async with asyncio.timeout(limit_s):
                    pause_s = _FIRST_PAUSE_S
                    for number in count(1):
                        retries = _RETRIES if tries is None else 0
                        content, refusal = await self._try(name, window, size, retries)
                        problem = check(content) if check and refusal is None else ""
                        if problem:
                            refusal = Refusal(problem, is_passing=True, is_damage=True)
                        if refusal is None:
                            return content
                        if number == tries:
                            raise DataError(f"{self.uri}: {refusal.text}")
                        await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
                        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            except TimeoutError:
                raise self._time_over(limit_s, refusal, name) from None

    async def _try(
        self, name: str, window: tuple[int, int] | None, size: int | None, retries: int
    ) -> tuple[Any, Refusal | None]:
        """(content, None), or (None, why it may succeed later)."""
        store = self._store(retries)
        try:
            content = await self._get(store, name, window, size)
        except (DataError, ConfigError):
            raise
        except Exception as error:  # obstore's own, FileNotFoundError, ValueError, ...
            refusal = explain(self.uri, error)
        else:
            self._has_answered = True
            return content, None
        if refusal.is_of_credentials and self._has_answered:
            # those that it took have expired: another client reads or asks for new ones
            if self._stores.get(retries) is store:
                del self._stores[retries]
            return None, refusal
        if refusal.is_missing and window is None:
            raise FileNotFoundError(f"{self.uri}/{name}") from None
        if refusal.is_missing or refusal.is_past_end:
            raise DamagedShard(f"{self.uri}/{name}: {refusal.text}; copy or build it again")
        if not refusal.is_passing:
            raise DataError(f"{self.uri}/{name}: {refusal.text}")
        return None, refusal

    async def _get(
        self, store: Any, name: str, window: tuple[int, int] | None, size: int | None
    ) -> Any:
        """The content of one answer. DamagedShard if it is not as long as it should be."""
        key = f"{self._prefix}/{name}" if self._prefix else name
        options = {"range": window} if window else None
        response = await store.get_async(key, options=options)
        if size is not None and response.meta["size"] != size:
            problem = f"has {response.meta['size']} bytes, the manifest says {size} bytes"
            raise DamagedShard(f"{self.uri}/{name}: {problem}; copy or build it again")
        content = await response.bytes_async()
        if window is not None and len(content) != window[1] - window[0]:
            problem = f"{len(content)} bytes came of {window[1] - window[0]}"
            raise DamagedShard(f"{self.uri}/{name}: {problem}; run `packer verify`")
        return content

    def _store(self, retries: int) -> Any:
        """The client that makes so many retries of its own."""
        if retries not in self._stores:
            self._stores[retries] = open_store(
                self.uri,
                retries=retries,
                retry_s=self.time_limit_s / 4,
                read_timeout_s=min(_READ_TIMEOUT_S, self.time_limit_s / 3),
                request_s=_REQUEST_S,
            )
        return self._stores[retries]

    def _limit(self, number_of_bytes: int) -> float:
        return self.time_limit_s + number_of_bytes / SLOWEST_BYTES_PER_S

    def _time_over(self, limit_s: float, refusal: Refusal | None, name: str = "") -> DataError:
        last = f" (last: {refusal.text})" if refusal else ""
        place = f"{self.uri}/{name}".rstrip("/")
        if refusal and refusal.is_damage:
            return DamagedShard(f"{place}: {refusal.text}; run `packer verify`, and {COPY_AGAIN}")
        failed = f"{place}: not read within {limit_s:.0f} s{last}"
        return DataError(f"{failed}; check the network, or give a longer timeout")


class _Worker:
    """A thread with an event loop, which ends with its reader, or before the interpreter does."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._pid = os.getpid()
        run = self._loop.run_forever
        thread = threading.Thread(target=run, name="isobatch-store", daemon=True)
        thread.start()
        # obstore must not call back into an interpreter that is being taken down
        self.stop = weakref.finalize(self, _stop, self._loop, thread, self._pid)

    def submit(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def cancel(self) -> None:
        if os.getpid() == self._pid:
            self._loop.call_soon_threadsafe(_cancel_all, self._loop)


def _stop(loop: asyncio.AbstractEventLoop, thread: threading.Thread, owner: int) -> None:
    if os.getpid() != owner or not thread.is_alive():
        return
    asyncio.run_coroutine_threadsafe(_end(loop), loop)
    if thread is not threading.current_thread():
        thread.join(_CLOSING_S)


def _cancel_all(loop: asyncio.AbstractEventLoop) -> set[asyncio.Task[Any]]:
    tasks = asyncio.all_tasks(loop) - {asyncio.current_task(loop)}
    for task in tasks:
        task.cancel()
    return tasks


async def _end(loop: asyncio.AbstractEventLoop) -> None:
    """End the loop when obstore has released all that was under way."""
    tasks = _cancel_all(loop)
    if tasks:
        await asyncio.wait(tasks, timeout=_CLOSING_S / 2)
        # obstore's threads notice a moment later, and panic if the interpreter has ended
        await asyncio.sleep(_RELEASE_S)
    loop.stop()
