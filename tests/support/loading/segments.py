"""Runs in segments: each on its own number of ranks, from the state that the one before has left,
to its own end.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from isobatch.loaders import StreamingLoader
from support.builds.sample_tables import write_tabled
from support.builds.shard_fixture import Sample, _describe
from support.loading.consume_steps import Given, open_ranks, serve, steps_of

PATIENCE_S = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A part of a run that one set of ranks does."""

    world: int
    micro_batches: int
    workers: int
    num_steps: int
    """Steps until the end; the ends of epochs count too."""
    end: str
    """How: "stop" closes the loaders; "go on" leaves the next segment's steps to the same loaders
    and new iterators; "kill" is SIGKILL for the process that the ranks run in.
    """
    save_every: int = 1
    """Steps from one saved state to the next; what comes after the last one was for nothing."""
    delay_s: float = 0.0
    """Between the last step and the kill."""


LAST = Segment(world=2, micro_batches=1, workers=1, num_steps=10**6, end="stop")


def write_listed(root: Path, groups: list[list[Sample]], format: str) -> Path:
    """A build whose manifest lists its tables, as a reader of a bucket needs it."""
    write_tabled(root, groups, format)
    manifest = json.loads((root / "manifest.json").read_text())
    manifest["files"] += [_describe(root, name) for name in ("counts.parquet", "groups.parquet")]
    (root / "manifest.json").write_text(json.dumps(manifest))
    return root


@contextlib.contextmanager
def killable_runs(build: Path) -> Iterator[Connection]:
    """A process for `run_segments`; `build` is any, on disk."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, build), daemon=True)
    process.start()
    try:
        yield ours
    finally:
        process.kill()
        process.join(PATIENCE_S)


def run_segments(
    segments: Sequence[Segment], server: Connection, options: dict[str, Any]
) -> Iterator[Given]:
    """What a run gives that counts, with the loaders' `options`; after the segments LAST brings it
    to its end.

    `server` leads to a process that runs `consume_steps.serve`.
    """
    state: dict[str, Any] | None = None
    ranks: list[StreamingLoader] = []
    for segment in [*segments, LAST]:
        arguments = {
            "world": segment.world,
            "state": state,
            "micro_batches_per_step": segment.micro_batches,
            "workers": segment.workers,
            **options,
        }
        if segment.end == "kill":
            given = _killed(segment, server, arguments)
        else:
            if state is not None and not options.get("shuffle", True):
                for loader in ranks:  # else a new iterator would begin again
                    loader.load_state_dict(state)
            ranks = ranks or open_ranks(**arguments)
            given = list(islice(steps_of(ranks), segment.num_steps))
        if segment.end == "stop":
            del given[len(given) // segment.save_every * segment.save_every :]
        if segment.end != "go on":
            for loader in ranks:
                loader.close()
            ranks = []
        yield from given
        state = given[-1].state if given else state


def _killed(segment: Segment, server: Connection, arguments: dict[str, Any]) -> list[Given]:
    """What a process had saved when it was killed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "told").touch()
        server.send((arguments, dict(os.environ), folder, segment.save_every))
        pid = server.recv()
        deadline = time.monotonic() + PATIENCE_S
        # the server speaks when the run has come to the end of the last epoch before
        while (folder / "told").stat().st_size < segment.num_steps and not server.poll(0.002):
            assert time.monotonic() < deadline
        time.sleep(segment.delay_s)  # to hit it at any moment of its work
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        assert server.recv() in {-signal.SIGKILL, 0}
        saved = [json.loads(path.read_text()) for path in sorted(folder.glob("saved-*"))]
    return [Given(**values) for part in saved for values in part]
