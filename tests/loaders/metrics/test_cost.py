"""What logging costs a step, in CPU time of the thread that trains, and of planning."""

import time

import pytest

from isobatch.loaders import StreamingLoader
from isobatch.loaders.metrics import MetricsLogger
from support.builds.sample_tables import path_groups, text_samples, write_tabled

STEP_MS, SHARE = 100, 0.001


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    groups = path_groups(text_samples(16_000), max_tokens=30)
    return write_tabled(tmp_path_factory.mktemp("cost") / "build", groups)


def logged_us(build, folder, dp, monkeypatch):
    """Of a step, after the first ones."""
    spent, step = [0.0], MetricsLogger.step

    def timed(self, number):
        begun = time.thread_time()
        step(self, number)
        spent[0] += time.thread_time() - begun

    with monkeypatch.context() as patch:
        patch.setattr(MetricsLogger, "step", timed)
        options = {"dp_rank": 0, "dp_world_size": dp, "workers": 0}
        with StreamingLoader(build, log_to=f"tensorboard:{folder}", **options) as loader:
            for number, _ in enumerate(loader):
                if number == 20:
                    spent[0] = 0.0
    return 1e6 * spent[0] / (number - 20)


def planned_us(build, dp, *, watches):
    loader = StreamingLoader(build, dp_rank=0, dp_world_size=dp)
    if watches:
        loader.metrics_window()
    steps, count = loader._steps.copy(), 0
    steps.plan(2)
    begun = time.thread_time()
    while steps.remaining:
        count += len(steps.plan(16))
    return 1e6 * (time.thread_time() - begun) / count


@pytest.mark.slow
@pytest.mark.parametrize("dp", [8, 64])
def test_logging_costs_less_than_a_thousandth_of_a_step(build, tmp_path, dp, monkeypatch):
    pytest.importorskip("tensorboard")
    log = min(logged_us(build, tmp_path / f"{number}", dp, monkeypatch) for number in range(4))
    plans = [(planned_us(build, dp, watches=of), of) for of in (False, True) * 5]
    without, watched = (min(us for us, watches in plans if watches is of) for of in (False, True))
    print(f"dp {dp}: {log:.0f} us of the log, {watched - without:.0f} us of planning")
    assert log + max(0, watched - without) < 1e3 * STEP_MS * SHARE
