"""The learning benchmark starts, and its steps, times and losses are what it says."""

from __future__ import annotations

from importlib.util import find_spec
from itertools import islice
from pathlib import Path

import learning
import learning_data
import learning_orders
import numpy as np
import pytest
import torch
from tiny_vlm import token_losses

from isobatch.loaders import StreamingLoader


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> learning_data.Data:
    folder = tmp_path_factory.mktemp("learning")
    return learning_data.prepare(folder, None, max_seq_len=256, limit=24, mixed_by="loader")


def test_it_trains_prints_and_keeps_its_runs(
    data: learning_data.Data,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(learning, "prepare", lambda *_, **__: data)
    runs, plot = tmp_path / "runs.json", tmp_path / "plot.svg"
    options = ["--seeds", "2", "--steps", "3", "--dp", "2", "--runs", str(runs)]
    drawn = ["--plot", str(plot)] if find_spec("matplotlib") else []  # of the extra `docs`
    assert learning.main([*options, *drawn, "--divisors", "step,sample"]) == 0
    printed = capsys.readouterr().out
    assert (
        printed.count("±")
        == 5 * (2 * len(learning_orders.METHODS) - 1) + 2 * len(learning_orders.METHODS) - 3
    )
    assert "nan" not in printed
    assert not drawn or plot.stat().st_size > 1000
    monkeypatch.setattr(learning, "train", None)  # all runs are in the file
    assert learning.main([*options, "--divisors", "step,sample"]) == 0
    assert capsys.readouterr().out == printed


def test_every_method_gives_each_sample_once_per_epoch(data: learning_data.Data) -> None:
    for method in learning_orders.METHODS:
        for steps in islice(learning_orders.epochs_of(data, method, 3, 2), 2):
            ids = [name for step in steps for rank in step for name in rank]
            assert len(ids) == len(set(ids))
            assert sorted(ids) == sorted(data.samples)
            if method == learning_orders.PADDED:
                sizes = {len(rank) for step in steps for rank in step}
                assert max(sizes) - min(sizes) <= 1
            if method in learning_orders.LOADER:
                groups = {tuple(group) for group in data.stored}
                assert {tuple(rank) for step in steps for rank in step if rank} == groups


def test_samples_and_losses_are_those_of_the_loader(data: learning_data.Data) -> None:
    model = learning.TinyListener(data)
    for weights in ("token", "sample"):
        loader = StreamingLoader(
            [(build, 1.0) for build in data.builds],
            dp_rank=0,
            dp_world_size=1,
            micro_batches_per_step=3,
            audio="features",
            loss_normalizer="epoch",
            loss_weights=weights,
        )
        own = [data.samples[name] for batch in next(iter(loader)) for name in batch.sample_ids]
        divisor = learning.divisor_of(data, weights, 3)
        for batch in next(iter(loader)):
            samples = [data.samples[name] for name in batch.sample_ids]
            joined = learning_data.join(samples, divisor)
            for name in ("input_ids", "labels", "position_ids", "cu_seqlens", "pixel_values"):
                assert torch.equal(getattr(joined, name), getattr(batch, name)), name
            assert joined.loss_normalizer == pytest.approx(batch.loss_normalizer)
            if weights == "sample":
                joined = learning.weigh(joined, samples)
            losses = token_losses(model(batch), batch)
            mine = token_losses(model(joined), joined)
            assert joined.reduce_loss(mine).item() == pytest.approx(
                batch.reduce_loss(losses).item(), rel=1e-5
            )
        assert own


def test_a_step_takes_as_long_as_its_slowest_rank_and_padding_costs(
    data: learning_data.Data,
) -> None:
    names = sorted(data.samples, key=lambda name: len(data.samples[name].input_ids))
    short, long = names[0], names[-1]
    alone = [learning_orders.step_time(data, [[name]], padded=True) for name in (short, long)]
    assert learning_orders.step_time(data, [[short], [long]], padded=False) == max(alone)
    packed, padded = (
        learning_orders.step_time(data, [[short, long]], padded=each) for each in (False, True)
    )
    assert packed == pytest.approx(sum(alone))
    assert padded > packed
    ideal = learning_orders.average_time(data, 2) * len(data.stored) / 2
    every = [learning_orders.step_time(data, [[name]], padded=False) for name in names]
    assert ideal == pytest.approx(sum(every) / 2)


def test_intervals_are_students() -> None:
    assert learning.interval(np.array([1.0, 2.0, 3.0])) == "2.000 ± 2.484"
    assert learning.interval(np.array([1.0]), "+") == "+1.000"
