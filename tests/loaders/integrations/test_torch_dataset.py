"""Steps that carry their state: through torch's DataLoader and torchdata's, in this process and in
a worker.
"""

from itertools import islice
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader

from isobatch.common.errors import ConfigError
from isobatch.loaders import StreamingLoader
from isobatch.loaders.integrations import torch_dataset as trainers
from isobatch.loaders.integrations.torch_dataset import StepDataset
from support.builds.shard_fixture import group_samples, make_samples, write_build

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    return write_build(tmp_path_factory.mktemp("packed") / "build", group_samples(make_samples(60)))


def load(build, **options):
    return StreamingLoader(
        build, dp_rank=0, dp_world_size=1, **{"micro_batches_per_step": 2} | options
    )


def ids(steps):
    """Sample ids of each step's micro-batches, for steps with or without their state."""
    return [[batch.sample_ids for batch in getattr(step, "micro_batches", step)] for step in steps]


def two_epochs(build):
    loader = load(build)
    return ids([*loader, *loader])


@pytest.mark.parametrize("workers", [0, 1])
def test_a_data_loader_gives_epoch_after_epoch_and_every_state_goes_on_behind_its_step(
    build, workers
):
    expected = two_epochs(build)
    loader = load(build)
    steps = list(
        islice(DataLoader(StepDataset(loader), batch_size=None, num_workers=workers), len(expected))
    )
    assert ids(steps) == expected
    assert [step.state["epoch"] for step in steps[: len(loader)]] == [0] * len(loader)
    assert steps[len(loader)].state["epoch"] == 1
    for place in (0, 3, len(loader) - 1, len(loader)):
        resumed = load(build)
        resumed.load_state_dict(steps[place].state)
        left = len(expected) - place - 1
        again = DataLoader(StepDataset(resumed), batch_size=None, num_workers=workers)
        assert ids(islice(again, left)) == expected[place + 1 :]


def test_tensors_from_a_worker_are_those_of_this_process(build):
    here, there = (
        next(iter(DataLoader(StepDataset(load(build)), batch_size=None, num_workers=workers)))
        for workers in (0, 1)
    )
    for one, other in zip(here.micro_batches, there.micro_batches, strict=True):
        assert torch.equal(one.input_ids, other.input_ids)
        assert torch.equal(one.pixel_values, other.pixel_values)
        assert one.num_loss_tokens == other.num_loss_tokens
    assert here.state == there.state


def test_a_second_worker_is_refused(build, monkeypatch):
    monkeypatch.setattr(trainers, "get_worker_info", lambda: SimpleNamespace(num_workers=2))
    with pytest.raises(ConfigError, match="num_workers is 2"):
        next(iter(StepDataset(load(build))))


def test_what_a_worker_raises_arrives_as_it_is(build):
    loader = load(build, micro_batches_per_step=10_000, remainder="drop")
    with pytest.raises(ConfigError, match="less than one step"):
        next(iter(DataLoader(StepDataset(loader), batch_size=None, num_workers=1)))


def test_a_build_without_a_whole_step_is_refused(build):
    loader = load(build, micro_batches_per_step=10_000, remainder="drop")
    with pytest.raises(ConfigError, match="less than one step"):
        next(iter(StepDataset(loader)))


@pytest.mark.parametrize("workers", [0, 1])
def test_the_stateful_data_loader_of_torchdata_resumes_exactly(build, workers):
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    expected = two_epochs(build)

    def make():
        return stateful(StepDataset(load(build)), batch_size=None, num_workers=workers)

    first = make()
    steps = iter(first)
    before = ids(islice(steps, 5))
    state = first.state_dict()
    second = make()
    second.load_state_dict(state)
    assert before + ids(islice(second, len(expected) - 5)) == expected


def test_a_step_moves_all_its_tensors(build):
    step = next(iter(StepDataset(load(build))))
    step.micro_batches.encoders["vision"] = step.micro_batches[:1]
    moved = step.to("meta")
    assert len(moved.micro_batches) == len(step.micro_batches) == 2
    assert {batch.input_ids.device.type for batch in moved.micro_batches} == {"meta"}
    assert moved.micro_batches.encoders["vision"][0].pixel_values.device.type == "meta"
    assert step.micro_batches[0].input_ids.device.type == "cpu"
    assert step.state["epoch"] == 0
