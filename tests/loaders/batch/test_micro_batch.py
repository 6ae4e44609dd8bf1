"""MicroBatch and its labels, and what the package promises to export."""

from itertools import chain
from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st

import loaders
from isobatch.loaders import StreamingLoader, shift_labels
from support.builds.shard_fixture import group_samples, make_samples, write_build

ROOT = Path(loaders.__file__).parent.parent


@given(st.lists(st.lists(st.integers(0, 9), max_size=6), max_size=6))
def test_labels_shift_inside_each_sample_and_never_across(samples):
    labels = torch.tensor([*chain(*samples)], dtype=torch.int64)
    borders = torch.tensor([0, *(len(sample) for sample in samples)], dtype=torch.int32).cumsum(
        0, dtype=torch.int32
    )
    expected = [*chain(*([*sample[1:], -100] for sample in samples if sample))]
    assert shift_labels(labels, borders).tolist() == expected


def test_to_moves_every_tensor_and_keeps_the_rest(tmp_path):
    build = write_build(tmp_path / "build", group_samples(make_samples(6)))
    (batch,) = next(iter(StreamingLoader(build, dp_rank=0, dp_world_size=1)))
    moved = batch.to("meta", non_blocking=True)
    assert (
        moved.input_ids.device.type
        == moved.pixel_values.device.type
        == moved.cu_seqlens.device.type
        == "meta"
    )
    assert (moved.sample_ids, moved.num_loss_tokens) == (batch.sample_ids, batch.num_loss_tokens)
    assert batch.input_ids.device.type == "cpu"


def test_exported_names():
    assert loaders.__all__ == sorted(loaders.__all__)
    assert {"MicroBatch", "StreamingLoader", "normalize", "shift_labels"} < set(loaders.__all__)
    assert all(hasattr(loaders, name) for name in loaders.__all__)
