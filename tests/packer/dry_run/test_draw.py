"""Records are drawn alike, wherever they are in a file; totals and intervals hold what they say."""

import gzip
import io
import json
import os
import tarfile
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from isobatch.packer.config import BuildConfig
from isobatch.packer.dry_run import draw as drawing
from isobatch.packer.dry_run.draw import draw
from isobatch.packer.dry_run.forecast import Drawn
from isobatch.packer.sources.dataset import Dataset, find_dataset
from isobatch.packer.sources.detect import Part
from support.builds.layouts import write_mds
from support.builds.raw_data import options
from support.cases import for_each

NUMBER, SEEDS = 1500, 25


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(drawing, "LEAST", 120)
    monkeypatch.setattr(drawing, "WINDOW_RECORDS", 4)
    monkeypatch.setattr(drawing, "MIN_BYTES", 64)


def records():
    """Short texts, then long ones: whoever looks at the beginning of a file sees one kind."""
    return [{"id": str(n), "text": "a " * (5 + n // 20 + n % 7 * 4)} for n in range(NUMBER)]


def as_tar(rows):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for row in rows:
            info = tarfile.TarInfo(f"{row['id']}.json")
            data = json.dumps(row).encode()
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def write(folder, layout):
    folder.mkdir()
    rows = records()
    lines = "\n".join(map(json.dumps, rows))
    # files of very different sizes, next to each other in the order of the records
    parts = [rows[a:b] for a, b in pairwise([0, 900, 930, 940, 1000, 1400, NUMBER])]
    alone = {
        "lines": ("a.jsonl", lines.encode()),
        "array": ("a.json", json.dumps(rows).encode()),
        "gz": ("a.jsonl.gz", gzip.compress(lines.encode())),
        "csv": ("a.csv", "\n".join(["text", *(row["text"] for row in rows)]).encode()),
    }
    if layout in alone:
        name, content = alone[layout]
        (folder / name).write_bytes(content)
    elif layout == "mds":
        write_mds(folder, {"id": "str", "text": "str"}, rows, per_shard=100)
    elif layout == "parquet":
        for number, part in enumerate(parts):
            # as if there were a picture: of files that small, footers are most
            table = pa.Table.from_pylist([row | {"vector": os.urandom(900)} for row in part])
            pq.write_table(table, folder / f"{number}.parquet", row_group_size=37 + 100 * number)
    elif layout == "files":
        for number, part in enumerate(parts):
            text = "\n".join(map(json.dumps, part))
            (folder / f"part-{number:05d}-of-00006.jsonl").write_text(text)
    else:
        for number, part in enumerate(parts):
            (folder / f"{number}.tar").write_bytes(as_tar(part))
    return str(folder)


def drawn_once(place, folder, seed, **changes):
    """(numbers of records, drawn records and the share that they stand for) of a draw."""
    config = BuildConfig(**options(place, folder / "out", seed=seed, **changes))
    rows, shares = [], []
    for job in draw(find_dataset(place, None), config, folder, 1):
        for window in job.windows:
            rows += drawing._records(window, job.chunk, shares)
    return rows, sum(shares)


@for_each("layout", ["lines", "array", "gz", "csv", "mds", "parquet", "files", "tar"])
def test_every_record_is_as_likely_as_any_other(layout, tmp_path):
    place = write(tmp_path / layout, layout)
    truth = np.array([len(row["text"]) for row in records()])
    totals, numbers, drawn = [], [], []
    for seed in range(SEEDS):
        rows, share = drawn_once(place, tmp_path, seed)
        lengths = [len(row.value["text"]) for row in rows]
        totals.append(sum(lengths) / share)
        numbers.append(len(rows) / share)
        drawn.append(len(rows))
    assert np.mean(drawn) < NUMBER / 3
    # the mean over draws is the truth: within what so many draws stray by chance
    for values, total in ((totals, truth.sum()), (numbers, NUMBER)):
        stray = np.std(values) / SEEDS**0.5
        assert abs(np.mean(values) - total) < max(4 * stray, 0.01 * total)
        assert np.std(values) < 0.25 * total


def test_of_some_records_no_more_are_drawn_than_there_are(tmp_path):
    place = write(tmp_path / "a", "lines")
    for limit in (1, 100, 700):
        rows, share = drawn_once(place, tmp_path, 0, limit=limit)
        assert {int(row.value["id"]) for row in rows} <= set(range(limit))
        assert len(rows) / share == pytest.approx(limit, rel=0.12)
    small = tmp_path / "small"
    small.mkdir()
    (small / "a.jsonl").write_text("\n".join(map(json.dumps, records()[:50])))
    rows, share = drawn_once(str(small), tmp_path, 0)
    assert [int(row.value["id"]) for row in rows] == list(range(50))
    assert share == 1


def test_intervals_hold_the_truth_as_often_as_they_say():
    """Samples of two parts, one with a weight: totals of drawn batches against all of them."""
    rng = np.random.default_rng(0)
    parts = (Part(name="a", located=None, data_root="", weight=1.0),) * 2
    dataset = Dataset(name="mix", parts=parts)
    lengths = [rng.pareto(3, (400, 20)) + 1, rng.pareto(3, (100, 20)) + 5]
    # the smaller part goes in whole, and as many of the larger
    truth = lengths[1].sum() + lengths[0].mean() * lengths[1].size
    inside = 0
    for _ in range(200):
        chosen = [of[rng.permutation(len(of))[:20]] for of in lengths]
        drawn = Drawn(
            dataset=dataset,
            parts=np.repeat([0, 1], 20),
            shares=np.repeat([20 / 400 / 20, 20 / 100 / 20], 20),
            usable=np.full(40, 20.0),
            costs={"num_rows": np.full(40, 20.0)},
            loads={"tokens": np.concatenate([of.sum(axis=1) for of in chosen])},
        )
        total, interval = drawn.totals()["tokens"], drawn.intervals()["tokens"]
        inside += abs(total - truth) <= interval * total
        assert drawn.totals()["num_rows"] == pytest.approx(10_000)
        assert drawn.intervals()["num_rows"] < 1e-9
        assert not drawn.is_whole
    assert 176 <= inside <= 199
