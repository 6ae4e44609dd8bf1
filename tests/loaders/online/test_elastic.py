"""Runs without a build that stop anywhere and continue on other ranks, by the loader itself."""

import json
import os

import numpy as np
import pytest

from support.loading.online_data import open_ranks, records

DRAWS = int(os.environ.get("ISOBATCH_TEST_DRAWS", "3"))
EPOCHS, ROWS = 2, 48


def test_every_sample_comes_once_per_epoch_whatever_the_ranks_and_stops(tmp_path):
    rows = records(tmp_path, ROWS)
    expected = sorted(row["id"] for row in rows)
    for draw in range(DRAWS):
        rng = np.random.default_rng(draw)
        options = {
            "window": int(rng.choice([7, 20, 500])),
            "seed": draw,
            "max_tokens": int(rng.choice([300, 1024])),
            "epochs": EPOCHS,
            "images": str(rng.choice(["encoded", "patches"])),
            "packing": bool(rng.random() < 0.6),
        }
        given, per_group = elastic_run(rows, tmp_path, options, rng)
        for epoch in range(EPOCHS):
            assert sorted(given[epoch]) == expected, (draw, epoch)
        assert len(per_group) == 1, draw  # a label counts the same in all steps, on any ranks
    (loader,) = open_ranks(rows, 1, tmp_path, epochs=1)
    (last,) = [loader.state_dict() for _ in loader][-1:]
    assert not list(open_ranks(rows, 1, tmp_path, epochs=1, state=last)[0])


def elastic_run(rows, folder, options, rng):
    """Sample ids of each epoch, and the divisors of a micro-batch, of runs that are cut short."""
    given, per_group, state = [[] for _ in range(EPOCHS)], set(), None
    while state is None or state["epoch"] < EPOCHS:
        world, micro_batches = int(rng.integers(1, 5)), int(rng.integers(1, 4))
        changes = {"micro_batches_per_step": micro_batches, "workers": int(rng.integers(0, 3))}
        ranks = open_ranks(rows, world, folder, state=state, **options, **changes)
        iterators = [iter(loader) for loader in ranks]
        for _ in range(int(rng.integers(1, 12))):
            step = [next(iterator, None) for iterator in iterators]
            if step[0] is None:
                assert step == [None] * world
                break
            batches = [batch for own in step for batch in own]
            assert len(batches) == world * micro_batches
            names = [name for batch in batches for name in batch.sample_ids]
            given[ranks[0].state_dict()["epoch"]] += names
            (divisor,) = {batch.loss_normalizer for batch in batches}
            per_group.add(divisor / len(batches))
            (labels,) = {batch.num_loss_tokens for batch in batches}
            assert labels == sum(int((batch.labels >= 0).sum()) for batch in batches)
        (after,) = {json.dumps(loader.state_dict(), sort_keys=True) for loader in ranks}
        state = json.loads(after)
        for loader in ranks:
            loader.close()
    return given, per_group


def test_a_resumed_runs_first_step_is_divided_by_its_own_weights(tmp_path):
    """Its groups come from the state, and are measured again."""
    rows = records(tmp_path, 30)
    options = {"loss_normalizer": "step", "loss_weights": "sample", "window": 100}
    for kind in ({"measure": "own", "max_tokens": 300}, {"shuffle": False, "max_tokens": 300}):
        (loader,) = open_ranks(rows, 1, tmp_path, **options, **kind)
        next(iter(loader))
        (resumed,) = open_ranks(rows, 1, tmp_path, state=loader.state_dict(), **options, **kind)
        for step in resumed:
            weights = sum(float(b.loss_weights[b.labels >= 0].sum()) for b in step)
            assert step[0].loss_normalizer == pytest.approx(weights, rel=1e-3), kind
        loader.close()
