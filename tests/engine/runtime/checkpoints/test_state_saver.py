"""`StateSaver`: states are written while training goes on, one after the other, and a failure is
raised by the next call.
"""

import threading
from unittest import mock

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from isobatch.common.errors import ConfigError, DataError
from isobatch.engine.runtime.checkpoints.training_state import (
    Progress,
    StateSaver,
    load_state,
    newest_state,
)
from support.models.toy_model import make_model

WAIT_S = 30


class Model:
    """Layers and an optimizer with a state, in one process."""

    def __init__(self, seed=0):
        self.layers = dict(enumerate(make_model(seed=seed).layers))
        weights = {weight for layer in self.layers.values() for weight in layer.parameters()}
        self.optimizer = torch.optim.AdamW(sorted(weights, key=id), lr=0.1)
        self.train()

    def train(self):
        for group in self.optimizer.param_groups:
            for weight in group["params"]:
                weight.grad = torch.ones_like(weight)
        self.optimizer.step()

    def values(self):
        return [weight.clone() for layer in self.layers.values() for weight in layer.parameters()]


@pytest.fixture
def slow():
    """Writing waits until the event is set."""
    event = threading.Event()
    write = FileSystemWriter.write_data

    def wait(*args, **kwargs):
        assert event.wait(WAIT_S)
        return write(*args, **kwargs)

    with mock.patch.object(FileSystemWriter, "write_data", wait):
        yield event
        event.set()


def test_what_is_saved_is_the_state_at_the_call_and_has_its_name_when_written(tmp_path, slow):
    model = Model()
    saver = StateSaver(tmp_path, model.layers, model.optimizer)
    expected = model.values()
    saver.begin(Progress(step=1, loader={"at": 1}))
    model.train()
    saver.poll()
    assert newest_state(tmp_path) is None
    slow.set()
    assert saver.finish().name == "step-1"
    assert saver.finish() is None
    other = Model(seed=1)
    progress = load_state(tmp_path, other.layers, other.optimizer)
    assert progress == Progress(step=1, loader={"at": 1})
    for value, wanted in zip(other.values(), expected, strict=True):
        assert torch.equal(value, wanted)


def test_a_second_save_waits_for_the_first(tmp_path, slow):
    model = Model()
    saver = StateSaver(tmp_path, model.layers, model.optimizer)
    saver.begin(Progress(step=1, loader={}))
    timer = threading.Timer(0.2, slow.set)
    timer.start()
    saver.begin(Progress(step=2, loader={}))
    assert slow.is_set()
    assert newest_state(tmp_path).name == "step-1"
    saver.finish()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1", "step-2"]


def repeat(work):
    """Until it fails, as `poll` does when the thread has ended."""
    while True:
        work()


@pytest.mark.parametrize("call", ["poll", "begin", "finish"])
def test_a_failure_is_raised_by_the_next_call_and_the_state_before_stays(tmp_path, call):
    model = Model()
    saver = StateSaver(tmp_path, model.layers, model.optimizer)
    saver.begin(Progress(step=1, loader={}))
    saver.finish()
    failed = threading.Event()

    def fail(*_, **__):
        failed.set()
        raise OSError(28, "No space left on device")

    with mock.patch.object(FileSystemWriter, "write_data", fail):
        saver.begin(Progress(step=2, loader={}))
        assert failed.wait(WAIT_S)
        work = {
            "poll": saver.poll,
            "begin": lambda: saver.begin(Progress(step=3, loader={})),
            "finish": saver.finish,
        }[call]
        with pytest.raises(DataError, match=r"step-2.new cannot be written: No space left"):
            repeat(work)
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
    saver.begin(Progress(step=3, loader={}))
    assert saver.finish().name == "step-3"


def test_of_frozen_weights_nothing_is_saved_where_only_trained_ones_are(tmp_path):
    model = Model()
    for layer in list(model.layers.values())[:-1]:
        layer.requires_grad_(False)
    saver = StateSaver(tmp_path, model.layers, None, basis={"base": "a"})
    saver.begin(Progress(step=1, loader={}))
    saver.finish()
    other = Model(seed=1)
    for layer in list(other.layers.values())[:-1]:
        layer.requires_grad_(False)
    before = other.values()
    with pytest.raises(ConfigError, match=r"step-1 was trained with base a, this run has b"):
        load_state(tmp_path, other.layers, None, basis={"base": "b"})
    assert all(map(torch.equal, other.values(), before))
    load_state(tmp_path, other.layers, None, basis={"base": "a"})
    for layer in model.layers.values():
        layer.requires_grad_(True)
    same = [torch.equal(one, two) for one, two in zip(other.values(), model.values(), strict=True)]
    kept = [torch.equal(one, two) for one, two in zip(other.values(), before, strict=True)]
    assert any(same)
    assert any(kept)
    assert all(a or b for a, b in zip(same, kept, strict=True))
