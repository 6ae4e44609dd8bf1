"""MicroBatch and its labels, and what the package promises to export."""

import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import loaders
from loaders import StreamingLoader, shift_labels
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


@pytest.mark.parametrize("shadow", ["balance.py", "balance/__init__.py"])
def test_a_balance_module_of_the_users_own_gives_a_clear_error(tmp_path, shadow):
    path = tmp_path / shadow
    path.parent.mkdir(exist_ok=True)
    path.write_text("")
    code = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]; import loaders"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: `import balance` finds")
    assert shadow in last
    assert "rename yours" in last
