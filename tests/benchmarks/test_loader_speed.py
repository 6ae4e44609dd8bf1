"""What the loader benchmark says of its figures: tables, verdict, and that a loader gave what is
stored.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import loader_data as data
import loader_runs as runs
import loader_table as table
import measure
import numpy as np
import pytest
import torch
from PIL import Image

RAW = table.Work(remote=False, decoded=False, workers=0).column
DECODED = table.Work(remote=False, decoded=True, workers=2).column
SHARES = [table.Share("limit", RAW, 0.5)]


def results(**figures: list[tuple[Any, float]]) -> Any:
    found = table.Results()
    for row, values in figures.items():
        for column, value in values:
            found.add(row, column, value)
    return found


def test_the_best_of_all_runs_is_kept_by_what_better_means() -> None:
    found = results(
        ours=[(RAW, 5.0), (RAW, 9.0), (RAW, 7.0), (table.MEMORY, 300.0), (table.MEMORY, 200.0)]
    )
    assert found.get("ours", RAW) == 9.0
    assert found.get("ours", table.MEMORY) == 200.0
    assert found.get("peer", RAW) is None


def test_the_verdict_is_silent_when_we_lead_everywhere() -> None:
    found = results(
        limit=[(RAW, 15.0)],
        ours=[(RAW, 9.0), (table.MEMORY, 200.0), (DECODED, 3.0)],
        peer=[(RAW, 8.9), (table.MEMORY, 201.0)],
    )
    assert table.verdict(found, ["peer"], "ours", SHARES) == []


@pytest.mark.parametrize(
    ("column", "ours", "peer"),
    [
        (RAW, 8.0, 9.0),
        (DECODED, 8.0, 8.0),
        (table.MEMORY, 9.0, 8.0),
        (table.FIRST_BATCH[True], 2, 1),
    ],
)
def test_each_column_in_which_a_peer_is_no_worse_is_named(
    column: Any, ours: float, peer: float
) -> None:
    (line,) = table.verdict(
        results(ours=[(column, ours)], peer=[(column, peer)]), ["peer"], "ours", []
    )
    assert "peer" in line
    assert str(column) in line


def test_too_small_a_share_of_a_limit_and_what_was_not_measured_are_named() -> None:
    found = results(limit=[(RAW, 10.0)], ours=[(RAW, 4.9)])
    found.failed["peer", DECODED] = "it broke"
    lines = table.verdict(found, ["peer"], "ours", SHARES)
    assert all(str(column) in line for column, line in zip((DECODED, RAW), lines, strict=True))
    assert "peer" in lines[0]
    assert "0.49" in lines[1]


def test_the_tables_show_every_figure_and_why_one_is_missing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    remote = table.Work(remote=True, decoded=False, workers=2).column
    found = results(
        limit=[(RAW, 40_000.0)], ours=[(RAW, 30_000.0), (remote, 1234.0)], peer=[(RAW, 20_000.0)]
    )
    found.failed["peer", remote] = "no [endpoint]"
    table.print_tables(found, ["ours", "peer"], "ours", SHARES)
    printed = capsys.readouterr().out
    for text in ("40,000", "30,000", "20,000", "0.75", "1,234", str(remote), "no [endpoint]"):
        assert text in printed


def test_a_loader_that_gives_too_little_has_failed() -> None:
    given = {"images": 7, "image_bytes": 70, "tokens": 8}
    runs.Run("", 0.0, [given]).check(7, 70, 8)
    with pytest.raises(runs.RunFailed, match=r"pass 1 gave .*\(6, 70, 8\), not \(7, 70, 8\)"):
        runs.Run("", 0.0, [given, {**given, "images": 6}]).check(7, 70, 8)


def test_a_process_that_fails_says_why_in_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    script = "import sys; open(sys.argv[1] + '/kept', 'w'); raise ValueError('no such bucket')"
    with pytest.raises(runs.RunFailed, match="status 1: ValueError: no such bucket"):
        runs.run([sys.executable, "-c", script, "CACHE"], {}, folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_pass_counts_all_that_arrives_and_is_repeated_as_told() -> None:
    batches = [
        [(b"x" * 100, np.zeros((2, 5), np.int32))] * 3,
        [(b"y" * 50, np.zeros((2, 4), np.int32))],
    ]
    found = measure.one_pass(map(measure.pack, batches), measure.parts_of)
    assert (found.images, found.image_bytes, found.tokens) == (4, 350, 38)
    assert 0 < found.first_seconds <= found.seconds
    assert len(measure.repeat(lambda: found, 3, 0.0)) == 4
    assert len(measure.repeat(lambda: found, 0, 60.0)) == measure.MAX_PASSES


def test_batches_of_peers_are_packed_as_ours_are() -> None:
    tokens = [np.array([[1, 2, 3], [-100, 2, 3]], np.int32), np.array([[4], [4]], np.int32)]
    packed = measure.pack([(b"x", tokens[0]), (b"y", tokens[1])])
    assert packed.images == [b"x", b"y"]
    assert packed.input_ids.tolist() == [1, 2, 3, 4]
    assert packed.labels.tolist() == [-100, 2, 3, 4]
    assert packed.position_ids.tolist() == [0, 1, 2, 0]
    assert packed.cu_seqlens.tolist() == [0, 3, 4]
    assert {values.dtype for values in packed[1:4]} == {torch.int64}


@pytest.mark.parametrize("count", [8, 48, 200])
def test_the_files_of_a_dataset_hold_all_samples_in_order(count: int) -> None:
    samples = list(range(count))
    parts = measure.shards(samples)
    assert [sample for part in parts for sample in part] == samples
    assert len(parts) == measure.SHARDS


def test_pictures_are_of_the_size_that_is_told_and_never_the_same() -> None:
    jpegs = [data.make_jpeg(seed) for seed in range(3)]
    assert len(set(jpegs)) == 3
    assert jpegs[0] == data.make_jpeg(0)
    for jpeg in jpegs:
        assert Image.open(io.BytesIO(jpeg)).size == (data.SIDE, data.SIDE)
        assert 47_000 < len(jpeg) < 57_000
