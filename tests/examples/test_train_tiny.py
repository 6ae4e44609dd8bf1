"""The training example: packing changes no loss, ranks change no gradient, and the model learns."""

import dataclasses

import pytest
import torch
from tiny_vlm import accumulate, make_model, token_losses

from isobatch.loaders import StreamingLoader
from support import EXAMPLES
from support.builds.shard_fixture import FORMATS, group_samples, make_samples, write_build
from support.ranks import launch
from support.trainers.tiny_training import train

NUM_SAMPLES = 60
OPTIONS = ("--steps", "6", "--micro-batches-per-step", "1")

torch.set_num_threads(1)  # tensors are too small for two, and tests share the machine


@pytest.fixture(scope="module")
def samples():
    return make_samples(NUM_SAMPLES)


@pytest.fixture(scope="module")
def build(samples, tmp_path_factory):
    return write_build(tmp_path_factory.mktemp("packed") / "build", group_samples(samples))


@pytest.fixture(scope="module")
def alone(samples, tmp_path_factory):
    """The same samples without packing: one per group. Sample id -> its micro-batch."""
    root = write_build(tmp_path_factory.mktemp("alone") / "build", [[sample] for sample in samples])
    return {
        step[0].sample_ids[0]: step[0] for step in StreamingLoader(root, dp_rank=0, dp_world_size=1)
    }


def load(build, rank=0, world=1, **options):
    return StreamingLoader(build, dp_rank=rank, dp_world_size=world, **options)


def new_model(build):
    torch.manual_seed(0)
    return make_model(load(build))


@pytest.mark.parametrize("format", FORMATS)
def test_packed_loss_of_each_sample_equals_its_loss_alone(samples, alone, tmp_path, format):
    loader = load(write_build(tmp_path / "build", group_samples(samples), format))
    model = new_model(tmp_path / "build")
    compared, packed_together = 0, 0
    with torch.no_grad():
        for (batch,) in loader:
            losses = token_losses(model(batch), batch)
            parts = losses.split(batch.cu_seqlens.diff().tolist())
            for sample_id, packed in zip(batch.sample_ids, parts, strict=True):
                single = alone[sample_id]
                expected = token_losses(model(single), single)
                torch.testing.assert_close(packed, expected, rtol=0, atol=1e-5)
                assert packed.count_nonzero() == int((single.labels != -100).sum())
                compared += 1
            packed_together = max(packed_together, batch.num_samples)
    assert compared == NUM_SAMPLES
    assert packed_together > 1


def test_summed_gradients_of_ranks_equal_those_of_the_step_as_single_samples(build, alone):
    world = 3
    options = {"micro_batches_per_step": 2, "loss_normalizer": "step"}
    ranks = [load(build, rank, world, **options) for rank in range(world)]
    steps = list(zip(*ranks, strict=True))
    for step in (steps[0], steps[-1]):  # the last one is filled up with empty micro-batches
        ours, reference = new_model(build).double(), new_model(build).double()
        loss = sum(accumulate(ours, [as_double(batch) for batch in batches]) for batches in step)
        ids = [sample_id for batches in step for batch in batches for sample_id in batch.sample_ids]
        losses = [token_losses(reference(as_double(alone[i])), alone[i]).sum() for i in ids]
        num_labels = sum(int((alone[i].labels != -100).sum()) for i in ids)
        expected = torch.stack(losses).sum() / num_labels
        expected.backward()
        assert loss == pytest.approx(expected.item(), rel=1e-6)
        for (name, a), b in zip(ours.named_parameters(), reference.parameters(), strict=True):
            assert a.grad is not None, name
            torch.testing.assert_close(
                a.grad, b.grad if b.grad is not None else torch.zeros_like(b), rtol=1e-6, atol=1e-9
            )
    assert any(batch.num_samples == 0 for batches in steps[-1] for batch in batches)


def as_double(batch):
    return dataclasses.replace(batch, pixel_values=batch.pixel_values.double())


def test_loss_falls(build):
    losses = train(new_model(build), load(build), 40)
    assert sum(losses[-5:]) < 0.6 * sum(losses[:5])


def test_two_processes_train_as_one_would(build, tmp_path):
    result = launch(2, tmp_path, EXAMPLES / "train_tiny.py", build, *OPTIONS)
    lines = [line.split() for line in result.stdout.splitlines() if line.startswith("step")]
    model = new_model(build)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for line, step in zip(
        lines, zip(load(build, 0, 2), load(build, 1, 2), strict=True), strict=False
    ):
        optimizer.zero_grad()
        loss = sum(accumulate(model, batches) for batches in step)
        optimizer.step()
        # as the mean over the step's labels
        num_labels = sum(int((batch.labels != -100).sum()) for rank in step for batch in rank)
        loss *= step[0][0].loss_normalizer / num_labels
        assert float(line[3]) == pytest.approx(loss, abs=2e-3)
    assert len(lines) == 6


def test_a_build_that_cannot_be_used_is_an_error(tmp_path):
    result = launch(1, tmp_path / "printed", EXAMPLES / "train_tiny.py", tmp_path)
    assert result.returncode == 2
    assert "no finished build" in result.stderr.splitlines()[-1]
