"""`processes=`: the steps, states and rejected samples of threads, whatever their number."""

import json

import pytest
import torch

from isobatch.loaders import BalancedLoader
from support.builds.raw_data import write_dataset
from support.loading.contents import content
from support.loading.online_data import OPTIONS, records
from support.workers.worker_records import (
    ARRAYS,
    Numbers,
    Pictures,
    Stream,
    add_noise,
    darken,
    encode,
)

KINDS = {
    "pictures": (Pictures(), {**OPTIONS, "image_transform": darken, "batch_transform": add_noise}),
    "arrays": (Numbers(), {**ARRAYS, "encode": encode}),
    "own": (Numbers(), {**ARRAYS, "encode": encode, "measure": "own"}),
    "stream": (Stream(), {**ARRAYS, "encode": encode, "measure": "own"}),
}


def run(dataset, options, processes, resumed_after=None):
    """What each step of two epochs holds, the state after it, and what was rejected.

    `resumed_after`: a state, from which the loader then goes on; all records are read again.
    """
    with_processes = {**options, "processes": processes, "epochs": 2, "max_rejected": 0.2}
    loader = BalancedLoader(dataset, **with_processes)
    steps = [(content(step), json.dumps(loader.state_dict())) for step in loader]
    rejected, resumed = loader.rejected, []
    if resumed_after is not None:
        loader.load_state_dict(json.loads(resumed_after))
        if options.get("measure") != "own":
            loader._reader.close()
            loader._reader._kept_bytes = 0
        resumed = [content(step) for step in loader]
    loader.close()
    return steps, rejected, resumed


def check(dataset, options, size):
    """Threads and processes: two epochs, and the rest of them after a state of threads."""
    expected, rejected, _ = run(dataset, options, 0)
    half = len(expected) // 4
    found = run(dataset, options, size, expected[half][1])
    assert found == (expected, rejected, [step for step, _ in expected[half + 1 :]])
    return rejected


@pytest.mark.parametrize("kind", KINDS)
def test_steps_and_states_are_those_of_threads(kind):
    rejected = check(*KINDS[kind], 2 if kind == "pictures" else 1)
    assert [sample.index for sample in rejected] == [11] * (kind == "pictures")
    if rejected:
        assert rejected[0].detail == "OSError: no record 11 today"


def test_a_dataset_by_its_place(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rows = records(tmp_path, 40)
    place = str(write_dataset(tmp_path, rows))
    check(place, {**OPTIONS, "pixel_dtype": torch.uint8}, 1)
