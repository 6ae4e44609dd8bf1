"""What the tests of a whole loader's faults share: loaders, faults, a door that can be shut, and
who is left.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from isobatch.loaders import StreamingLoader
from support.builds.shard_fixture import group_samples, make_samples
from support.loading.contents import content

GROUPS = group_samples(make_samples(80))
MICRO_BATCHES = 2
NAMED = r"^shard-\d{5}\.(arrow|tar), group \d+: "
"""How an error names the shard."""
WAYS = [("arrow", 0), ("arrow", 2), ("webdataset", 2), ("refs", 2)]
"""Formats and workers."""
Fault = Callable[[str], str]


class Door:
    """A port that passes connections on to a server; while it is shut, connections are refused."""

    def __init__(self, endpoint: str) -> None:
        host, _, port = endpoint.removeprefix("http://").partition(":")
        self._server, self._port = (host, int(port)), 0
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        self.open()
        self.endpoint = f"http://127.0.0.1:{self._port}"

    def open(self) -> None:
        """Take connections."""
        listener = socket.create_server(("127.0.0.1", self._port))
        self._port = listener.getsockname()[1]
        with self._lock:
            self._open.append(listener)
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def shut(self) -> None:
        """Break all connections and refuse new ones."""
        with self._lock:
            sockets, self._open = self._open, []
        for each in sockets:
            with contextlib.suppress(OSError):  # its other side has gone already
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):  # shut
            while True:
                client = listener.accept()[0]
                server = socket.create_connection(self._server)
                with self._lock:
                    if listener not in self._open:  # shut since the client came
                        client.close()
                        server.close()
                        return
                    self._open += [client, server]
                for source, target in ((client, server), (server, client)):
                    threading.Thread(target=_pass_on, args=(source, target), daemon=True).start()


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):  # shut, or the other side has gone
        while data := source.recv(1 << 16):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


def of_shards(fault: str) -> Fault:
    """The fault in requests for shards only."""
    return lambda path: fault if "shard-" in path else ""


def first_times(fault: str, times: int) -> Fault:
    """The fault in the first requests for shards or images."""
    left = [times]

    def once(path: str) -> str:
        if "shard-" not in path and ".img" not in path:
            return ""
        left[0] -= 1
        return fault if left[0] >= 0 else ""

    return once


def at_random(fault: str, share: float) -> Fault:
    """The fault in a share of all requests."""
    rng = random.Random(0)
    return lambda path: fault if rng.random() < share else ""


def flipped(content: bytes, at: int | None = None) -> bytes:
    """One wrong bit, by default in the middle."""
    copy = bytearray(content)
    copy[len(copy) // 2 if at is None else at] ^= 1
    return bytes(copy)


def children() -> set[int]:
    """Processes that this one has started and that have not been waited for."""
    return {pid for pid, (parent, _) in _processes().items() if parent == os.getpid()}


def members(session: int) -> set[int]:
    """Processes of a session, whoever their parent is by now."""
    return {pid for pid, (_, own) in _processes().items() if own == session}


def loader_threads() -> list[str]:
    """Names of the threads that loaders have started and that have not ended."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("isobatch-")]


def _processes() -> dict[int, tuple[int, int]]:
    """Process -> its parent and its session."""
    found = {}
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # no process, or it has ended meanwhile
            # "pid (name) state parent group session": a name may hold spaces and brackets
            parts = (folder / "stat").read_text().rpartition(")")[2].split()
            if folder.name.isdigit():
                found[int(folder.name)] = int(parts[1]), int(parts[3])
    return found


def make(url: str | Path, **options: Any) -> StreamingLoader:
    """The only rank's loader."""
    return StreamingLoader(
        url,
        dp_rank=0,
        dp_world_size=1,
        micro_batches_per_step=MICRO_BATCHES,
        pixel_dtype=torch.uint8,
        **options,
    )


def gives(loader: StreamingLoader, expected: list[Any], start: int = 0) -> bool:
    """Whether the rest of the epoch is what a run without faults gives from step `start` on."""
    return [content(step) for step in loader] == expected[start:]


def fails(
    loader: StreamingLoader,
    steps: Iterable[Any],
    expected: list[Any],
    kind: type[Exception],
    message: str,
    within_s: float,
) -> tuple[dict[str, Any], int]:
    """Go on until the error, which comes in one line and in time; -> the state then, steps given
    before it.
    """
    given: list[Any] = []

    def go_on() -> None:
        for step in steps:
            given.append(content(step))
            begun[0] = time.monotonic()

    begun = [time.monotonic()]
    with pytest.raises(kind, match=message) as error:
        go_on()
    assert time.monotonic() - begun[0] < within_s
    assert "\n" not in str(error.value)
    assert given == expected[: len(given)]
    return json.loads(json.dumps(loader.state_dict())), len(given)
