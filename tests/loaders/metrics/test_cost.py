"""What logging does in a step, in calls of functions: it grows neither with ranks nor with steps.

`benchmarks/logging_cost.py` has the time.
"""

import sys
from collections.abc import Callable
from typing import Any

import pytest

from isobatch.loaders import StreamingLoader
from isobatch.loaders.metrics import MetricsLogger
from support.builds.sample_tables import path_groups, text_samples, write_tabled

FIRST_STEPS = 20
CALLS_OF_A_STEP, CALLS_OF_A_PLAN = 80, 2
"""Most of them. A call takes .1 us or so; a thousandth of a step of 100 ms is 100 us."""


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    groups = path_groups(text_samples(16_000), max_tokens=30)
    return write_tabled(tmp_path_factory.mktemp("cost") / "build", groups)


def calls(function: Callable[[], Any]) -> int:
    """Of Python's and of C's functions, in this thread, until it returns."""
    counts = [0]

    def watch(frame: Any, event: str, argument: Any) -> None:
        counts[0] += event in ("call", "c_call")

    sys.setprofile(watch)
    try:
        function()
    finally:
        sys.setprofile(None)
    return counts[0]


def logged(build, folder, dp, monkeypatch):
    """Calls of a step, on average, after the first ones."""
    counts, step = [], MetricsLogger.step

    def counted(self, number):
        counts.append(calls(lambda: step(self, number)))

    with monkeypatch.context() as patch:
        patch.setattr(MetricsLogger, "step", counted)
        options = {"dp_rank": 0, "dp_world_size": dp, "workers": 0}
        with StreamingLoader(build, log_to=f"tensorboard:{folder}", **options) as loader:
            for _ in loader:
                pass
    return sum(counts[FIRST_STEPS:]) / len(counts[FIRST_STEPS:])


def planned(build, dp, *, watches):
    """Calls of a planned step, on average."""
    loader = StreamingLoader(build, dp_rank=0, dp_world_size=dp)
    if watches:
        loader.metrics_window()
    steps, count = loader._steps.copy(), 0
    steps.plan(2)

    def plan():
        nonlocal count
        while steps.remaining:
            count += len(steps.plan(16))

    return calls(plan) / count


def test_logging_does_little_and_no_more_with_more_ranks(build, tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    few, many = (logged(build, tmp_path / f"{dp}", dp, monkeypatch) for dp in (8, 64))
    of_plans = [
        planned(build, dp, watches=True) - planned(build, dp, watches=False) for dp in (8, 64)
    ]
    print(f"calls of a step at dp 8 and 64: {few:.0f}, {many:.0f}; of planning: {of_plans}")
    assert 0 < few < CALLS_OF_A_STEP
    assert many < 1.5 * few
    assert max(of_plans) < CALLS_OF_A_PLAN
