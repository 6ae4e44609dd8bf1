"""How the loss is divided: each label or sample has its weight, in whichever step it comes."""

import dataclasses
from collections import defaultdict
from itertools import product

import numpy as np
import pytest
import torch

from isobatch.common.errors import ConfigError, DataError
from isobatch.loaders import StreamingLoader, shift_labels
from isobatch.tensors.token_loss import labelled_loss
from support.builds.sample_tables import path_groups, text_samples, write_tabled
from support.builds.shard_fixture import Sample

WEIGHTS = {"token": 1.0, "sample": 0.0, "square": 0.5}
"""Power of a sample's number of labels that it weighs."""


@pytest.fixture(scope="module")
def builds(tmp_path_factory):
    """Two builds, the first with samples that have no label."""
    mute = [
        Sample(
            f"mute-{sample.sample_id}", sample.input_ids, [-100] * len(sample.labels), counts=own
        )
        for sample in text_samples(30)
        for own in [sample.counts | {"num_loss_tokens": 0}]
    ]
    root = tmp_path_factory.mktemp("division")
    data = {"first": [*text_samples(200), *mute], "second": text_samples(101, "other")}
    return {name: write_tabled(root / name, path_groups(samples)) for name, samples in data.items()}


def sources(builds):
    yield builds["first"], {}
    yield builds["first"], {"regroup": "epoch", "regroup_window": 16}
    yield builds["first"], {"balance": 0.9}
    yield [(builds["first"], 1.0), (builds["second"], 1.0)], {}


def epoch_of(source, options, world=4, micro_batches=2):
    """Micro-batches of all ranks, by step."""
    ranks = [
        list(
            StreamingLoader(
                source,
                dp_rank=rank,
                dp_world_size=world,
                micro_batches_per_step=micro_batches,
                workers=0,
                **options,
            )
        )
        for rank in range(world)
    ]
    return [[batch for rank in step for batch in rank] for step in zip(*ranks, strict=True)]


def shares(batch):
    """What `reduce_loss` makes of each label, by sample."""
    weights = torch.ones(len(batch.labels), dtype=torch.float64, requires_grad=True)
    batch.reduce_loss(weights).backward()
    for sample, start, stop in zip(
        batch.sample_ids, batch.cu_seqlens, batch.cu_seqlens[1:], strict=False
    ):
        yield sample, weights.grad[start:stop][batch.labels[start:stop] != -100].tolist()


def test_of_the_step_weights_sum_to_one_in_every_step_and_of_the_epoch_they_are_the_same(builds):
    for (source, options), (weights, power) in product(sources(builds), WEIGHTS.items()):
        both = options | {"loss_weights": weights, "loss_normalizer": "step"}
        for step in epoch_of(source, both):
            assert len({batch.loss_normalizer for batch in step}) == 1
            found = [share for batch in step for _, own in shares(batch) for share in own]
            assert sum(found) == pytest.approx(1, rel=1e-6)

        steps = epoch_of(source, both | {"loss_normalizer": "epoch"})
        assert len({batch.loss_normalizer for step in steps for batch in step}) == 1
        of_size = defaultdict(set)
        for sample, own in (pair for step in steps for batch in step for pair in shares(batch)):
            assert bool(own) == (not sample.startswith("mute")), sample
            of_size[len(own)].update(round(len(own) * share, 9) for share in own)
        del of_size[0]
        alone = min(of_size)
        for size, found in of_size.items():
            # all samples of a size weigh the same, and by the power of their size
            (weight,), (least,) = found, of_size[alone]
            assert weight / least == pytest.approx((size / alone) ** power, rel=1e-5)


def test_an_epoch_weighs_as_many_steps_as_its_groups_fill(builds):
    for (source, options), weights in product(sources(builds), WEIGHTS):
        both = options | {"loss_weights": weights}
        steps = epoch_of(source, both)
        total = sum(sum(own) for step in steps for batch in step for _, own in shares(batch))
        groups = sum(bool(batch.num_samples) for step in steps for batch in step)
        assert total == pytest.approx(groups / 8, rel=1e-6), (options, weights)


def test_micro_batches_that_move_keep_their_weights(builds):
    (batch,) = next(
        iter(StreamingLoader(builds["first"], loss_weights="sample", loss_normalizer="step"))
    )
    moved = batch.to("cpu")
    np.testing.assert_array_equal(moved.loss_weights, batch.loss_weights)
    num_labelled = sum(not name.startswith("mute") for name in batch.sample_ids)
    assert moved.loss_normalizer == batch.loss_normalizer == max(1, num_labelled)
    with pytest.raises(ValueError, match="a model's loss is divided already"):
        batch.reduce_loss(torch.tensor(1.0))


def test_a_step_without_labels_has_the_loss_0(tmp_path):
    mute = [
        dataclasses.replace(sample, labels=[-100] * len(sample.labels), counts=own)
        for sample in text_samples(9)
        for own in [sample.counts | {"num_loss_tokens": 0}]
    ]
    root = write_tabled(tmp_path / "mute", path_groups(mute))
    for weights, normalizer in product(WEIGHTS, ["step", "epoch"]):
        loader = StreamingLoader(root, loss_weights=weights, loss_normalizer=normalizer)
        for (batch,) in loader:
            assert batch.loss_normalizer == 1
            assert batch.reduce_loss(torch.zeros(len(batch.labels))).item() == 0


def test_unknown_choices_and_missing_counts_get_a_line(builds, tmp_path):
    with pytest.raises(
        ConfigError, match="loss_normalizer is 'batch'; it must be one of step, epoch"
    ):
        StreamingLoader(builds["first"], loss_normalizer="batch")
    with pytest.raises(
        ConfigError, match="loss_weights is 'mean'; it must be one of token, sample"
    ):
        StreamingLoader(builds["first"], loss_weights="mean")
    root = write_tabled(tmp_path / "build", path_groups(text_samples(9)))
    (root / "counts.parquet").unlink()
    assert len(StreamingLoader(root, loss_normalizer="epoch"))
    with pytest.raises(DataError, match=r"loss weights need counts\.parquet"):
        next(iter(StreamingLoader(root, loss_weights="square")))


def test_the_engines_layers_weigh_labels_too(builds):
    (batch,) = next(iter(StreamingLoader(builds["first"], loss_weights="square")))
    logits = torch.randn(len(batch.labels), 64)
    losses = torch.nn.functional.cross_entropy(
        logits, shift_labels(batch.labels, batch.cu_seqlens), reduction="none"
    )
    expected = batch.reduce_loss(losses) * batch.loss_normalizer
    torch.testing.assert_close(labelled_loss(logits, lambda rows: rows, batch), expected)
