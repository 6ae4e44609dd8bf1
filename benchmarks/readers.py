"""Our own readers of raw data against the libraries': `datasets` and `webdataset`.

    python benchmarks/readers.py [--records 20000] [--work FOLDER]

Conversations with one image of about 30 KB each are written as JSON, as Parquet and as tars. Then
each is read to the end in one process, by our reader and by the library's streaming one, with
images undecoded; the best of three times counts. What webdataset reads is also written to a
file, as a build would have to. `docs/design.md`, "Our own readers", has the
figures.
"""

from __future__ import annotations

import argparse
import io
import json
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tables import console, new_table

from isobatch.packer.sources.detect import locate, open_located

ROW_GROUP = 1000
TARS = 4
WORDS = 120
"""Words of a conversation, LLaVA-665K's mean."""


def main(arguments: list[str] | None = None) -> int:
    """Print the table; -> exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--records", type=int, default=20_000)
    parser.add_argument("--work", type=Path, default=None, help="folder for the data")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=options.work) as work:
        _compare(Path(work), options.records)
    return 0


def _compare(work: Path, num_records: int) -> None:
    places = _write(work, num_records)
    table = new_table("Readers", ["format", "reader", "records/s", "ours is faster by"])
    for name, read in (("json", _datasets), ("parquet", _datasets), ("tar", _webdataset)):
        ours = _seconds(lambda place=places[name]: _ours(place), num_records)
        theirs = _seconds(lambda name=name, read=read: read(name, places[name]), num_records)
        table.add_row(name, "ours", f"{num_records / ours:,.0f}", f"{theirs / ours:.1f}")
        table.add_row("", read.__name__.strip("_"), f"{num_records / theirs:,.0f}", "")
    console.print(table)


def _write(work: Path, num_records: int) -> dict[str, Path]:
    rng = np.random.default_rng(0)
    places = {name: work / name for name in ("json", "parquet", "tar")}
    for place in places.values():
        place.mkdir()
    texts = [" ".join(map(str, row)) for row in rng.integers(0, 9999, (num_records, WORDS))]
    turns = [[{"from": "human", "value": t}, {"from": "gpt", "value": t}] for t in texts]
    ids = [str(number) for number in range(num_records)]
    with (places["json"] / "data.jsonl").open("w") as file:
        for sample, turn in zip(ids, turns, strict=True):
            file.write(json.dumps({"id": sample, "image": "a.png", "conversations": turn}) + "\n")
    images = [rng.bytes(int(size)) for size in rng.integers(10_000, 50_000, 200)]
    pixels = [{"bytes": images[n % 200], "path": f"{n}.png"} for n in range(num_records)]
    rows = pa.table({"id": ids, "image": pixels, "conversations": turns})
    pq.write_table(rows, places["parquet"] / "train.parquet", row_group_size=ROW_GROUP)
    for shard in range(TARS):
        with tarfile.open(places["tar"] / f"{shard:05d}.tar", "w") as tar:
            for number in range(shard, num_records, TARS):
                record = json.dumps({"conversations": turns[number]}).encode()
                for suffix, data in (("jpg", images[number % 200]), ("json", record)):
                    info = tarfile.TarInfo(f"{number}.{suffix}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
    return places


def _seconds(read: Callable[[], int], expected: int) -> float:
    times = []
    for _ in range(3):
        start = time.perf_counter()
        found = read()
        times.append(time.perf_counter() - start)
        if found != expected:
            raise RuntimeError(f"read {found} of {expected} records")
    return min(times)


def _ours(place: Path) -> int:
    source = open_located(locate(str(place), known=[]), "set", str(place))
    chunks = source.chunks(1024, lambda _: None)
    return sum(1 for chunk in chunks for _ in chunk.records())


def _datasets(kind: str, place: Path) -> int:
    import datasets  # noqa: PLC0415 - takes a second

    files = sorted(map(str, place.iterdir()))
    rows = datasets.load_dataset(kind, data_files=files, split="train", streaming=True)
    for name, feature in (rows.features or {}).items():
        if isinstance(feature, datasets.Image):
            rows = rows.cast_column(name, datasets.Image(decode=False))
    return sum(1 for _ in rows)


def _webdataset(_: str, place: Path) -> int:
    """It gives contents, not their places in the tar; so a build would have to stage them."""
    import webdataset  # noqa: PLC0415 - imports torch

    tars = sorted(map(str, place.glob("*.tar")))
    count = 0
    with (place / "staged").open("wb") as staged:
        for sample in webdataset.WebDataset(tars, shardshuffle=0):
            json.loads(sample["json"])
            staged.write(sample["jpg"])
            count += 1
    (place / "staged").unlink()
    return count


if __name__ == "__main__":
    raise SystemExit(main())
