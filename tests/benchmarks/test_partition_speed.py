"""The benchmark of partition searches runs on a small model and says what it found."""

import subprocess
import sys

from support import BENCHMARKS

BENCHMARK = BENCHMARKS / "partition_speed.py"


def test_a_small_model_is_solved_and_no_method_is_faster():
    options = [
        "--sizes",
        "16x3",
        "--micro-batches",
        "6",
        "--spread",
        "0.1",
        "--schedules",
        "1f1b",
        "--rounds",
        "1",
    ]
    done = subprocess.run(
        [sys.executable, BENCHMARK, *options], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.split()[:3] == ["16", "x", "3"]]
    assert len(rows) == 2
    for row in rows:
        cells = row.split()
        assert cells[3:5] == ["0.10", "1f1b"]
        assert cells[-1] == "0"  # proved
        assert not any(cell.startswith("+-") for cell in cells)
