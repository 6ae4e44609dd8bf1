"""The measured ablations: their data, their model's operations, and rows that really ran."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import prediction
import pytest
import torch
from ablation import data, model, pipetune_stand_in, ranks, real, real_pipetune, variants
from papers import datasets
from torch.utils.flop_counter import FlopCounterMode

from balance.presets import load_model
from engine.cost_model.loads import sample_loads
from engine.tuning.pack import pack_in_order


@pytest.fixture(scope="module")
def counts() -> Any:
    return data.shrunk(datasets.internvl_samples(400))


@pytest.mark.parametrize("replicas", [1, 2])
def test_no_sample_comes_twice_and_steps_are_full(counts: Any, replicas: int) -> None:
    for steps in (
        data.random_steps(counts, replicas, 4, 3),
        data.balanced_steps(counts, data.SHRUNK, replicas, 4, 3),
    ):
        assert [[len(own) for own in step] for step in steps] == [[4] * replicas] * 3
        drawn = np.concatenate([own.samples for own in data.every(steps)])
        assert len(np.unique(drawn)) == len(drawn)


@pytest.mark.parametrize("padded", [True, False])
def test_loads_are_those_of_the_micro_batches_that_are_run(counts: Any, padded: bool) -> None:
    (groups,) = data.random_steps(counts, 1, 6, 1)[0]
    loads = data.loads_of(groups, counts, data.SHRUNK, padded=padded)
    batches = [
        model.make_batch(samples, counts, padded=padded) for samples in data.samples_of(groups)
    ]
    assert loads.llm.tokens.tolist() == [len(batch.input_ids) for batch in batches]
    assert loads.llm.squares.tolist() == [
        sum(length**2 for length in batch.lengths) for batch in batches
    ]
    assert loads.vision.tokens.tolist() == [
        batch.tiles.shape[0] * batch.tiles.shape[1] for batch in batches
    ]
    assert (
        sum(batch.num_labels for batch in batches) == counts.num_loss_tokens[groups.samples].sum()
    )


def test_padding_changes_no_loss(counts: Any) -> None:
    samples = np.arange(4)
    layers = model.make_model().layers
    losses = []
    for padded in (True, False):
        carry: dict[str, torch.Tensor] = {}
        for layer in layers:
            carry = layer(carry, model.make_batch(samples, counts, padded=padded))
        losses.append(float(carry["loss"].detach()))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_operations_are_those_that_torch_counts(counts: Any) -> None:
    samples = np.flatnonzero(counts.num_image_patches > 0)[:3]
    batch = model.make_batch(samples, counts, padded=False)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        carry: dict[str, torch.Tensor] = {}
        for layer in model.make_model().layers:
            carry = layer(carry, batch)
    # torch counts all of a causal product, and not what a CPU's own attention kernel does
    lengths = counts.seq_len[samples].astype(float)
    attention = 2 * model.LLM_DEPTH * (lengths**2).sum() * model.LLM_WIDTH
    vit = float(counts.num_image_patches[samples].sum()) * data.SHRUNK.vit_tokens
    attention += 4 * model.VIT_DEPTH * vit * data.SHRUNK.vit_tokens * model.VIT_WIDTH
    ours = model.train_flops(samples, counts) / model.TRAIN_FACTOR
    total = counter.get_total_flops()
    assert ours - attention <= total * 1.001
    assert total <= ours * 1.05


def test_other_losses_of_the_same_samples_end_the_run(counts: Any) -> None:
    steps = data.random_steps(counts, 1, 2, 2)
    nothing = np.zeros(23, np.bool_)
    first = variants.Variant(
        name="one", steps=steps, padded=True, borders=np.array([0, 23]), recompute=nothing
    )
    measured = ranks.Measured(seconds=np.ones(2), waiting=0.0, losses=np.array([3.0, 2.0]))
    real.check_losses([first, first], [measured, measured])
    with pytest.raises(SystemExit, match="losses"):
        real.check_losses(
            [first, first], [measured, replace(measured, losses=np.array([3.0, 2.1]))]
        )


@pytest.fixture(scope="module")
def compiled() -> None:
    """Kernels of the tuner, which else each rank compiles for itself, all of them at once."""
    pipeline = pipetune_stand_in.make_pipeline()
    drawn = datasets.pipetune_samples("DataMix2", 8, pipetune_stand_in.MAX_SEQ_LEN, 0)
    samples = sample_loads(drawn, load_model(pipetune_stand_in.PRESET))
    given = pack_in_order(samples.llm.tokens, pipetune_stand_in.MAX_SEQ_LEN)
    for options in pipetune_stand_in.INGREDIENTS.values():
        pipetune_stand_in.plan_step(samples, given, pipeline, options)


@pytest.mark.usefixtures("compiled", "forked")
def test_every_ingredient_of_pipetune_runs_with_real_compute_and_the_same_losses() -> None:
    rows = ranks.on_ranks(2, real_pipetune.run, 1, 1, 8, 2)
    assert [row.name for row in rows] == ["packed in order", *real_pipetune.INGREDIENTS]
    predicted = [row.predicted_s for row in rows]
    assert predicted == sorted(predicted, reverse=True)
    for row in rows:
        assert row.tokens == rows[0].tokens
        assert row.measured_s > 0
        assert row.mfu > 0
        assert 0 < row.waiting < 1
        assert row.peak_gib > 0


@pytest.mark.usefixtures("compiled", "forked")
def test_stand_ins_take_no_less_than_they_are_modelled_to() -> None:
    rows = ranks.on_ranks(4, pipetune_stand_in.run, 1, "DataMix2", 16)
    assert [row.name for row in rows] == list(pipetune_stand_in.INGREDIENTS)
    for row in rows:
        assert row.measured_s >= 0.98 * row.predicted_s
    assert rows[-1].predicted_s < rows[0].predicted_s


def test_the_share_of_pairs_in_order_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    times = [(1.0, 1.0), (1.2, 1.3), (1.1, 1.5), (1.01, 1.01)]
    prediction.show(
        "x", [prediction.Row(name="p", predicted_s=said, measured_s=was) for said, was in times]
    )
    assert "order: 4 of 5 pairs" in capsys.readouterr().out
