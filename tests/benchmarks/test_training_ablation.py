"""The measured ablations: their data, both baselines, and rows that really ran."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import prediction
import pytest
import torch
import training_ablation
from ablation import (
    data,
    model,
    pipetune_stand_in,
    plans,
    ranks,
    real,
    real_omnibal,
    real_pipetune,
    variants,
)
from ablation.shapes import SHAPES
from papers import datasets

from isobatch.balance.baseline_samplers import pack_in_order
from isobatch.engine.cost_model.loads import sample_loads
from isobatch.engine.simulator.evaluate import evaluate
from isobatch.engine.simulator.schedule import make_schedule
from isobatch.models.presets import load_model

SHAPE = SHAPES["internvl"]


@pytest.fixture(scope="module")
def counts() -> Any:
    return SHAPE.samples(400)


@pytest.mark.parametrize("replicas", [1, 2])
def test_no_sample_comes_twice_and_steps_are_full(counts: Any, replicas: int) -> None:
    for steps in (
        data.random_steps(counts, replicas, 4, 3),
        data.packed_steps(counts, 512, replicas, 4, 3),
        data.balanced_steps(counts, SHAPE.sizes, replicas, 4, 3),
    ):
        assert [[len(own) for own in step] for step in steps] == [[4] * replicas] * 3
        drawn = np.concatenate([own.samples for own in data.every(steps)])
        assert len(np.unique(drawn)) == len(drawn)


@pytest.mark.parametrize("padded", [True, False])
def test_loads_are_those_of_the_micro_batches_that_are_run(counts: Any, padded: bool) -> None:
    (groups,) = data.random_steps(counts, 1, 6, 1)[0]
    loads = data.loads_of(groups, counts, SHAPE.sizes, padded=padded)
    batches = [
        model.make_batch(samples, counts, SHAPE, padded=padded)
        for samples in data.samples_of(groups)
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
    layers = model.make_model(SHAPE).layers
    losses = []
    for padded in (True, False):
        carry: dict[str, torch.Tensor] = {}
        for layer in layers:
            carry = layer(carry, model.make_batch(samples, counts, SHAPE, padded=padded))
        losses.append(float(carry["loss"].detach()))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_random_packed_micro_batches_are_full_but_for_the_next_sample(counts: Any) -> None:
    (step,) = data.packed_steps(counts, 512, 1, 8, 1)
    lengths = step[0].sum(counts.seq_len)
    assert lengths.max() <= 512
    first = [counts.seq_len[samples[0]] for samples in data.samples_of(step[0])]
    assert all(lengths[:-1] + first[1:] > 512)


@pytest.fixture(scope="module")
def setting() -> plans.Setting:
    """The real Qwen2.5-VL by the cost model, which needs no measurement."""
    shape = SHAPES["qwen"]
    return replace(real_omnibal.real_setting(shape, 2), counts=shape.real_samples(400), num_steps=1)


def test_every_way_to_train_fits_and_none_after_the_careful_one_is_slower(
    setting: plans.Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans, "SCHEDULES", plans.SCHEDULES[:2])
    limit = plans.memory_limit(setting, 0.8)
    rows = plans.ways_to_train(setting, limit)
    assert rows[0].recompute.all()
    assert rows[1].name.startswith(plans.CAREFUL)
    # even layers
    assert np.ptp(np.diff(rows[1].borders)) <= 1
    for row in rows[1:]:
        for step in row.simulated(setting.costs_of):
            assert all(one.fits(limit) for one in step)
    speeds = [setting.speed(row) for row in rows[2:]]
    assert speeds == sorted(speeds)
    assert speeds[-1] > setting.speed(rows[1])


def test_the_careful_user_recomputes_no_layer_in_vain(setting: plans.Setting) -> None:
    limit = plans.memory_limit(setting, 0.5)
    careful = plans.careful_way(setting, limit)
    assert 0 < careful.recompute.sum() < len(careful.recompute)
    count = len(careful.steps[0][0])
    longest = int(careful.steps[0][0].sum(setting.counts.seq_len).max())
    sizes = [size * setting.sizes.seq_len for size in plans.SIZES]
    limit_tokens = min(size for size in sizes if size >= longest)
    costs = [
        setting.costs_of(own, padded=False)
        for own in data.every(setting.packed(round(limit_tokens), count, plans.EPOCH))
    ]
    largest = plans._with_most_memory(costs[0], costs)
    schedule = make_schedule("1f1b", 2, count)
    for layer in np.flatnonzero(careful.recompute):
        less = careful.recompute.copy()
        less[layer] = False
        assert not evaluate(largest, careful.borders, less, schedule).fits(limit)


def test_memory_holds_the_share_of_the_careful_users_activations(setting: plans.Setting) -> None:
    for share in (0.5, 1.0):
        limit = plans.memory_limit(setting, share)
        assert plans.memory_share(setting, limit) == pytest.approx(share)


def test_speeds_are_relative_to_both_baselines_and_to_the_bound(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def rows(*seconds: float) -> list[ranks.Row]:
        return [
            ranks.Row(
                name=f"row {number}",
                tokens=1_000,
                predicted_s=1.0,
                measured_s=took,
                waiting=0.1,
                peak_gib=1.0,
                work_s=2.0,
            )
            for number, took in enumerate(seconds)
        ]

    training_ablation.show("x", [rows(4, 2, 1.25), rows(4, 2, 1.0), rows(4, 2, 1.6)], 2)
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if "row" in line]
    # relative to papers' and careful with their ranges, share of what two ranks reach in 1 s
    assert lines[2][2:7] == ["800", "3.20", "1.60", "1.25-2.00", "80%"]


def test_other_losses_of_the_same_samples_end_the_run(counts: Any) -> None:
    steps = data.random_steps(counts, 1, 2, 2)
    nothing = np.zeros(SHAPE.num_layers, np.bool_)
    first = variants.Variant(
        name="one",
        steps=steps,
        padded=True,
        borders=np.array([0, SHAPE.num_layers]),
        recompute=nothing,
    )
    measured = ranks.Measured(
        wall_s=np.ones(2), replayed_s=np.ones(2), busy_s=1.0, losses=np.array([3.0, 2.0])
    )
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


@pytest.mark.slow
@pytest.mark.usefixtures("compiled", "forked")
def test_every_ingredient_of_pipetune_runs_with_real_compute_and_the_same_losses() -> None:
    machine = ranks.Machine(cpu_clock=True)
    # each layer is measured and trained in the same way, so a few narrow ones do
    shape = replace(
        real_pipetune.SHAPE, vit_depth=4, llm_depth=4, llm_width=96, vocabulary=864, vit_width=36
    )
    rows = ranks.on_ranks(2, real_pipetune.run, 1, 8, 2, (1.0, 2.0), shape, machine=machine)
    first, careful, *tuned = rows
    assert [row.name for row in tuned] == list(real_pipetune.INGREDIENTS)
    predicted = [row.predicted_s for row in (first, *tuned)]
    assert predicted == sorted(predicted, reverse=True)
    assert careful.measured_s <= first.measured_s
    for row in rows:
        assert row.tokens == rows[0].tokens
        assert row.measured_s > 0
        assert row.work_s > 0
        assert 0 < row.waiting < 1
        assert row.peak_gib > 0


@pytest.mark.usefixtures("compiled", "forked")
def test_stand_ins_take_no_less_than_they_are_modelled_to() -> None:
    rows = ranks.on_ranks(4, pipetune_stand_in.run, 1, "DataMix2", 16)
    names = [*pipetune_stand_in.BASELINES, *pipetune_stand_in.INGREDIENTS]
    assert [row.name for row in rows] == names
    assert rows[1].predicted_s <= rows[0].predicted_s
    for row in rows:
        assert row.measured_s >= 0.98 * row.predicted_s
    assert rows[-1].predicted_s < rows[0].predicted_s


def test_the_share_of_pairs_in_order_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    times = [(1.0, 1.0), (1.2, 1.3), (1.1, 1.5), (1.01, 1.01)]
    prediction.show(
        "x", [prediction.Row(name="p", predicted_s=said, measured_s=was) for said, was in times]
    )
    assert "order: 4 of 5 pairs" in capsys.readouterr().out
