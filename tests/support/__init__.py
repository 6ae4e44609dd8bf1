"""What tests share: inputs, plain oracles, models, and the programs that ranks run."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS, EXAMPLES, BENCHMARKS = ROOT / "tests", ROOT / "examples", ROOT / "benchmarks"


def child_env(**more: str) -> dict[str, str]:
    """Environment of a process that can import what tests can; a Python's `-c` needs no more."""
    path = os.pathsep.join(map(str, (ROOT, TESTS, EXAMPLES, BENCHMARKS)))
    return {**os.environ, "PYTHONPATH": path, **more}
