"""Stopped and resumed on any ranks, workers and micro-batches, epoch after epoch, every sample comes exactly once."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_tables import path_groups, text_samples, write_tabled
from step_planners import repack

from loaders import StreamingLoader

NUM_SAMPLES, EPOCHS = 260, 3


@pytest.fixture(scope="module")
def builds(tmp_path_factory):
    root = tmp_path_factory.mktemp("builds")
    groups = path_groups(text_samples(NUM_SAMPLES))
    return {format: write_tabled(root / format, groups, format) for format in ("arrow", "webdataset", "refs")}


runs = st.lists(
    st.fixed_dictionaries(
        {
            "dp_world_size": st.sampled_from([1, 2, 3, 5, 7, 16, 64]),
            "micro_batches_per_step": st.integers(1, 4),
            "workers": st.integers(0, 2),
            "num_steps": st.integers(0, 40),
        }
    ),
    min_size=1,
    max_size=3,
)
modes = st.sampled_from(
    [
        {},
        {"order": "random"},
        {"planner": repack},
        {"regroup": "epoch", "regroup_window": 16},
        {"regroup": "epoch", "regroup_window": 16, "planner": repack, "order": "random"},
    ]
)


@settings(deadline=None, max_examples=12)
@given(
    runs=runs, mode=modes, remainder=st.sampled_from(["pad", "drop"]), format=st.sampled_from(["arrow", "webdataset"])
)
def test_any_sequence_of_stops_and_resumes_gives_every_sample_once_per_epoch(builds, runs, mode, remainder, format):
    state, dropped = None, 0
    seen: Counter[tuple[int, str]] = Counter()
    last = {"dp_world_size": 2, "micro_batches_per_step": 1, "workers": 1, "num_steps": 10**6}
    for run in [*runs, last]:
        num_steps, states = run["num_steps"], []
        options = {name: value for name, value in run.items() if name != "num_steps"} | mode
        for rank in range(run["dp_world_size"]):
            loader = StreamingLoader(builds[format], dp_rank=rank, remainder=remainder, **options)
            if state is not None:
                loader.load_state_dict(json.loads(state))
            seen.update(consume(loader, num_steps))
            states.append(json.dumps(loader.state_dict()))
        assert len(set(states)) == 1
        state, dropped = states[0], dropped + loader.num_dropped_samples
    assert set(seen.values()) <= {1}
    assert len(seen) + dropped == EPOCHS * NUM_SAMPLES
    assert dropped == 0 or remainder == "drop"


def consume(loader, num_steps):
    """(epoch, sample id) of the next steps, epoch after epoch until a step is not of the first EPOCHS."""
    while loader.epoch < EPOCHS:
        for step in islice(loader, num_steps):
            if loader.epoch == EPOCHS:
                return
            num_steps -= 1
            yield from ((loader.epoch, sample_id) for batch in step for sample_id in batch.sample_ids)
        if num_steps == 0:
            return


@pytest.mark.parametrize("format", ["arrow", "webdataset", "refs"])
def test_killed_at_any_time_a_run_goes_on_from_its_last_state_on_other_ranks(builds, tmp_path, format):
    rng = random.Random(format)
    done: list[str] = []
    state = None
    for number, world in enumerate([3, 2]):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "start.json").write_text(json.dumps(state))
        script = Path(__file__).with_name("consume_steps.py")
        process = subprocess.Popen([sys.executable, script, builds[format], folder, str(world)])
        try:
            wanted = rng.randint(2, 5)
            deadline = time.monotonic() + 60
            while len(list(folder.glob("step-*.json"))) < wanted and process.poll() is None:
                assert time.monotonic() < deadline
                time.sleep(0.002)
            os.kill(process.pid, signal.SIGKILL)
        finally:
            process.kill()
            process.wait(10)
        steps = [json.loads(path.read_text()) for path in sorted(folder.glob("step-*.json"))]
        done += [sample_id for step in steps for sample_id in step["sample_ids"]]
        state = steps[-1]["state"]
    rest = StreamingLoader(builds[format], dp_rank=0, dp_world_size=1)
    rest.load_state_dict(state)
    left = [sample_id for step in rest for batch in step for sample_id in batch.sample_ids]
    assert done
    assert left
    assert Counter(done + left) == Counter(sample.sample_id for sample in text_samples(NUM_SAMPLES))
