"""The benchmarks of partitions run on small cases and say what they found."""

import subprocess
import sys

import plans_for

from isobatch.engine.cost_model.parallel import Parallelism
from support import BENCHMARKS

BENCHMARK = BENCHMARKS / "partition_speed.py"


def test_a_small_model_is_planned_and_no_method_is_faster():
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
        assert cells[-1] == "%"
        assert 0 <= float(cells[-2]) < 100  # another partition may be faster by as much
        assert not any(cell.startswith("+-") for cell in cells)


def test_a_row_has_the_plan_for_a_trainer_beside_the_free_one(monkeypatch):
    monkeypatch.setattr(plans_for, "SHAPES", (("1f1b", 1),))
    monkeypatch.setattr(plans_for, "MICRO_BATCHES", 4)
    rows = plans_for.rows_of("one", "qwen3_5", Parallelism(tp=2, pp=4, dp=1))
    assert [row[3] for row in rows] == ["megatron", "torchtitan", "automodel"]
    for row in rows:
        assert float(row[4]) >= float(row[5]) > 0
        assert sum(map(int, row[8].partition(";")[0].split())) == 32
    assert len(plans_for.rows_of("one", "internvl_1_5", Parallelism(tp=2, pp=4, dp=1))) == 1
