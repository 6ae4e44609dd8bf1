"""Real processes: the gradients that four ranks sum up are those of one process, sample by
sample.
"""

import dataclasses

import pytest
import torch
from tiny_vlm import make_model, token_losses

from isobatch.loaders import StreamingLoader
from support.builds.shard_fixture import group_samples, make_samples, write_build
from support.ranks import on_ranks
from support.trainers.dump_gradients import WORLD_SIZE, dump

torch.set_num_threads(1)


def test_summed_gradients_of_four_ranks_equal_those_of_one_process(tmp_path):
    samples = make_samples(80)
    build = write_build(tmp_path / "build", group_samples(samples))
    on_ranks(WORLD_SIZE, tmp_path, dump, build, tmp_path / "dumped")
    step = torch.load(tmp_path / "dumped")
    # the same samples, one per group: nothing is packed
    by_id = {sample.sample_id: sample for sample in samples}
    single = write_build(tmp_path / "single", [[by_id[sample_id]] for sample_id in step["ids"]])
    batches = [batch for (batch,) in StreamingLoader(single, dp_rank=0, dp_world_size=1)]
    assert len(batches) > 8  # the four ranks' micro-batches
    torch.manual_seed(0)
    model = make_model(StreamingLoader(build, dp_rank=0, dp_world_size=1)).double()
    num_labels = sum(int((batch.labels != -100).sum()) for batch in batches)
    doubled = [
        dataclasses.replace(batch, pixel_values=batch.pixel_values.double()) for batch in batches
    ]
    loss = (
        torch.stack([token_losses(model(batch), batch).sum() for batch in doubled]).sum()
        / num_labels
    )
    loss.backward()
    assert step["loss"] == pytest.approx(loss.item(), rel=1e-9)
    for name, weight in model.named_parameters():
        torch.testing.assert_close(step["gradients"][name], weight.grad, rtol=1e-6, atol=1e-12)
