"""The simulator's benchmark runs on tiny steps, and compares with the plain simulation."""

import subprocess
import sys

from support import BENCHMARKS

BENCHMARK = BENCHMARKS / "simulator_speed.py"


def test_every_schedule_is_measured():
    done = subprocess.run(
        [sys.executable, BENCHMARK, "--operations", "48", "--ranks", "2", "--rounds", "1"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for name in ("1f1b", "gpipe", "interleaved", "zero_bubble"):
        row = next(line for line in done.stdout.splitlines() if line.split()[:1] == [name])
        operations, *times, plain, factor = row.split()[1:]
        assert operations == "48"
        assert all(float(time) >= 0 for time in times)
        assert float(factor.replace(",", "")) >= 0
        assert float(plain) >= 0
