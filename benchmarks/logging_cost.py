"""What logging costs a step, in CPU time of the thread that trains and of planning.

    python benchmarks/logging_cost.py BUILD [--dp 8 64] [--step-ms 100]

The log goes to TensorBoard. Planning is timed with and without the figures that the log needs, by
turns. Each figure is the least of several rounds, without the first steps. The last column is the
share of a step of `--step-ms`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.tables import console, new_table  # noqa: E402
from isobatch.loaders import StreamingLoader  # noqa: E402
from isobatch.loaders.metrics import MetricsLogger  # noqa: E402

ROUNDS = 5
FIRST_STEPS = 5
COLUMNS = ["ranks", "steps", "log us", "planning us", "with the log us", "share of a step"]


def timed(step: Callable[..., None], seconds: list[float]) -> Callable[..., None]:
    """The same function; each call's CPU time goes to `seconds`."""

    def call(self: MetricsLogger, number: int) -> None:
        begun = time.thread_time()
        step(self, number)
        seconds.append(time.thread_time() - begun)

    return call


def logged_us(build: str, dp: int) -> tuple[int, float]:
    """Steps that were timed, and the log's time of one."""
    seconds: list[float] = []
    options: dict[str, Any] = {"dp_rank": 0, "dp_world_size": dp, "workers": 0}
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(MetricsLogger, "step", timed(MetricsLogger.step, seconds)),
        StreamingLoader(build, log_to=f"tensorboard:{folder}", **options) as loader,
    ):
        for _ in loader:
            pass
    if len(seconds) <= FIRST_STEPS:
        raise SystemExit(f"{build}: {len(seconds)} steps of {dp} ranks; {FIRST_STEPS + 1} or more")
    steps = seconds[FIRST_STEPS:]
    return len(steps), 1e6 * sum(steps) / len(steps)


def planned_us(build: str, dp: int, *, watches: bool) -> float:
    """A step's planning."""
    loader = StreamingLoader(build, dp_rank=0, dp_world_size=dp)
    if watches:
        loader.metrics_window()
    steps, count = loader._steps.copy(), 0
    steps.plan(2)
    begun = time.thread_time()
    while steps.remaining:
        count += len(steps.plan(16))
    return 1e6 * (time.thread_time() - begun) / count


def main() -> int:
    """Print the table; -> exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("build")
    parser.add_argument("--dp", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--step-ms", type=float, default=100.0)
    options = parser.parse_args()
    table = new_table(f"a log to TensorBoard, steps of {options.step_ms:g} ms", COLUMNS)
    for dp in options.dp:
        logs = [logged_us(options.build, dp) for _ in range(ROUNDS)]
        plans = [
            [planned_us(options.build, dp, watches=watches) for watches in (False, True)]
            for _ in range(ROUNDS)
        ]
        log = min(us for _, us in logs)
        without, watched = (min(figures) for figures in zip(*plans, strict=True))
        share = (log + max(0.0, watched - without)) / (1e3 * options.step_ms)
        table.add_row(
            str(dp),
            str(logs[0][0]),
            f"{log:.0f}",
            f"{without:.0f}",
            f"{watched:.0f}",
            f"{100 * share:.3f} %",
        )
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
