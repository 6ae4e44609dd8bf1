"""Ranks without a build: each measures its share, and loss and gradients are those of one rank."""

import os
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tiny_vlm import TinyVLM, accumulate

from isobatch.common.errors import Cancelled, ConfigError, DataError
from isobatch.counting.record_counter import RejectedSample
from isobatch.loaders import BalancedLoader
from isobatch.loaders.ranks.exchange import RankExchange
from isobatch.loaders.ranks.store import RankMissing
from isobatch.packer.verify import require_intact, verify_build
from support.builds.packed import quiet
from support.builds.raw_data import record, write_dataset, write_image
from support.loading.online_data import OPTIONS, built_samples, open_ranks, records
from support.ranks import run_ranks

STEPS = 2


def train(ranks, reduce=lambda tensor: tensor):
    """Samples, loss and gradients of each of some steps, summed over the ranks in this process."""
    loader = ranks[0]
    torch.manual_seed(0)
    model = TinyVLM(loader.vocab_size, loader.image_token_id, width=16, vit_width=16, depth=1)
    model = model.double()
    made = []
    for _, *step in zip(range(STEPS), *ranks, strict=False):
        model.zero_grad()
        batches = [batch for own in step for batch in own]
        loss = accumulate(model, batches)
        parts = [torch.tensor([loss], dtype=torch.float64)]
        parts += [parameter.grad.flatten() for parameter in model.parameters()]
        names = sorted(name for batch in batches for name in batch.sample_ids)
        made.append((names, reduce(torch.cat(parts))))
    for loader in ranks:
        loader.close()
    return made


def test_loss_and_gradients_do_not_depend_on_the_ranks(tmp_path):
    rows = records(tmp_path, 60)
    options = {"max_tokens": 400, "max_vision": 12, "pixel_dtype": torch.float64}
    alone = train(open_ranks(rows, 1, tmp_path, micro_batches_per_step=4, **options))
    assert len(alone) == STEPS
    for world in (2, 4):
        ranks = open_ranks(rows, world, tmp_path, micro_batches_per_step=4 // world, **options)
        for (names, expected), (own, found) in zip(alone, train(ranks), strict=True):
            assert own == names
            assert (found - expected).abs().max() < 1e-6 * expected.abs().max()


def measure_together(said, folder, rows):
    """On two ranks: what each measured itself, and the loss and gradients of their steps."""
    counted = []

    def count(row):
        counted.append(row["id"])
        return row

    loader = BalancedLoader(
        rows,
        **OPTIONS | {"max_tokens": 400, "max_vision": 12, "window": 60},
        data_root=str(folder),
        micro_batches_per_step=2,
        pixel_dtype=torch.float64,
        transform=count,
        workers=0,
        gradients="sum",
    )

    def reduce(tensor):
        dist.all_reduce(tensor)
        return tensor

    counted.clear()  # some are counted to tell the dataset from others
    loader.check_ranks()  # plans the first window
    said["measured"] = sorted(counted)
    made = train([loader], reduce)
    said["names"], said["sums"] = [names for names, _ in made], [t.tolist() for _, t in made]


def test_two_ranks_measure_half_each(tmp_path):
    rows = records(tmp_path, 60)
    options = {"max_tokens": 400, "max_vision": 12, "pixel_dtype": torch.float64, "window": 60}
    expected = train(open_ranks(rows, 1, tmp_path, micro_batches_per_step=4, **options))
    first, second = run_ranks(tmp_path, 2, measure_together, tmp_path, rows)
    assert sorted(first["measured"] + second["measured"]) == sorted(row["id"] for row in rows)
    assert abs(len(first["measured"]) - len(second["measured"])) <= 1
    assert first["sums"] == second["sums"]
    for step, (names, sums) in enumerate(expected):
        assert sorted(first["names"][step] + second["names"][step]) == names
        difference = (torch.tensor(first["sums"][step], dtype=torch.float64) - sums).abs().max()
        assert difference < 1e-6 * sums.abs().max()


def go_wrong(said, folder):
    """On two ranks: what one of them cannot do is said on both, and soon."""
    rank = dist.get_rank()
    rows = [record(number, answer="word " * 9) for number in range(60)]

    def fails(samples, admit):
        raise RuntimeError("the disk of rank 1 is gone")

    cases = {
        "option": {"window": 40 * rank},
        "option of a loader": {"balance": 2.0 * rank},
        "seed": {"seed": rank},
        "seed, after len": {"seed": rank},
        "dataset": {"window": 30 + rank},
        "state": {},
        "measuring": {},
        "rejected": {"transform": lambda row: row if row["id"] > "s3" else {}},
    }
    begun = time.monotonic()
    for name, options in cases.items():
        try:
            loader = BalancedLoader(rows, **OPTIONS | options, rank_timeout_s=120.0)
            if name == "measuring" and rank == 1:
                loader._lengths._measure = fails
            if name == "state" and rank == 1:
                loader.load_state_dict(loader.state_dict())
            if name.endswith("len"):
                len(loader)
            said[name] = sum(1 for _ in loader)
        except (ConfigError, DataError, RankMissing) as error:
            said[name] = f"{type(error).__name__}: {error}"
    said["seconds"] = time.monotonic() - begun


def test_what_one_rank_cannot_do_is_said_on_both(tmp_path):
    for said in run_ranks(tmp_path, 2, go_wrong, tmp_path):
        assert "window is 0; it must be at least 1" in said["option"]
        assert "balance is 2.0" in said["option of a loader"]
        for name in ("seed", "seed, after len"):
            assert said[name].startswith("ConfigError: ranks disagree: seed is 0 on rank 0, 1 on")
        assert said["dataset"].startswith(
            "ConfigError: ranks disagree: window is 30 on rank 0, 31 on"
        )
        assert said["state"].startswith("ConfigError: ranks disagree: epochs and states begun is 1")
        assert said["measuring"].startswith("DataError: one rank failed")
        assert "the disk of rank 1 is gone" in said["measuring"]
        assert "samples cannot be used, more than max_rejected" in said["rejected"]
        assert said["seconds"] < 60


def evaluate(said, folder):
    """On two ranks: passes in order, two of which are left early, with a file that breaks; a build.

    Both read the dataset at the same time, into one cache.
    """
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    given = {"shuffle": False, "rank_timeout_s": 20.0, "window": 500}
    loader = BalancedLoader(folder, **OPTIONS | given, workers=0, max_rejected=0.5)
    said["passes"], said["steps"] = [], []
    for number in range(5):
        batches = []
        for step in loader:
            assert len(step) == 1
            batches += [batch.sample_ids for batch in step]
            if number in (1, 2) and len(batches) == 2:
                break
        if number == 2:
            dist.barrier()
            (folder / "broken.jpg").write_bytes(b"no picture any more")
            loader._reader._places.clear()  # read again, as in a larger dataset
        said["steps"].append(len(batches))
        said["passes"].append([name for batch in batches for name in batch])
    said["rejected"] = [each.reason for each in loader.rejected]
    loader.save_build(folder / f"packed-{dist.get_rank()}")
    dist.barrier()


def test_evaluations_of_two_ranks_are_whole_passes(tmp_path):
    rows = records(tmp_path, 60)
    write_image(tmp_path / "broken.jpg", 50, 40, seed=0)
    rows[2] = record(2, ["broken.jpg"])
    names = sorted(row["id"] for row in rows)
    write_dataset(tmp_path, rows)
    first, second = run_ranks(tmp_path, 2, evaluate, tmp_path)
    assert len(list((tmp_path / "cache" / "isobatch" / "records").glob("*.arrow"))) == 1
    assert first["steps"] == second["steps"]
    assert first["steps"][1:3] == [2, 2]
    passes = [sorted(a + b) for a, b in zip(first["passes"], second["passes"], strict=True)]
    assert passes[0] == names
    # the pass that finds it broken loses it, and from then on all ranks know
    assert passes[3] == passes[4] == sorted(set(names) - {"s2"})
    assert first["rejected"] == second["rejected"]
    assert len(first["rejected"]) == 1
    # the first rank wrote a build of what both had measured
    assert not (tmp_path / "packed-1").exists()
    require_intact(verify_build(str(tmp_path / "packed-0"), quiet(), workers=1))
    assert sorted(built_samples(tmp_path / "packed-0")) == passes[4]


def lengths_of_ranks(rows, world, timeout_s=60.0, **changes):
    """The lengths of loaders of ranks that are threads here, with what joins them."""
    store, made = dist.HashStore(), []
    for rank in range(world):
        (loader,) = open_ranks(rows, 1, ".", max_rejected=1.0, **changes)
        with (
            mock.patch.object(dist, "get_rank", return_value=rank),
            mock.patch.object(dist.distributed_c10d, "_get_default_store", return_value=store),
        ):
            loader._lengths._exchange = RankExchange(range(world), timeout_s=timeout_s)
        loader._lengths._rank = rank
        made.append(loader._lengths)
    return made


def test_what_a_rank_rejects_is_told_after_an_iterator_that_was_given_up():
    rows = [record(n, answer="word " * 9) | {"source": f"kind {n}"} for n in range(90)]
    rows[4] = {}
    ranks, samples = lengths_of_ranks(rows, 3), np.arange(30)
    store = ranks[1]._exchange._store
    keys = store.num_keys()
    with pytest.raises(Cancelled):
        ranks[1].measure(samples, iter([False, True]).__next__)
    assert store.num_keys() == keys  # nor is a part that comes late taken for another's
    ranks[1].lose([RejectedSample(7, "s7", "kind 7", "record_changed", "other tokens")])
    for window in (samples, samples + 30):
        with ThreadPoolExecutor(3) as pool:
            usable = list(pool.map(lambda each, w=window: each.measure(w, bool).tolist(), ranks))
        assert usable[0] == usable[1] == usable[2]
    assert [sorted(each.rejected) for each in ranks] == [[4, 7]] * 3
    assert [each.num_measured for each in ranks] == [60] * 3
    assert ranks[0].source_shares() == ranks[2].source_shares()
    # from the same place again: what was told there before is not what is told now
    ranks[1].lose([RejectedSample(41, "s41", "kind 41", "record_changed", "other tokens")])
    with ThreadPoolExecutor(3) as pool:
        again = list(pool.map(lambda each: each.measure(samples + 30, bool, "1").tolist(), ranks))
    assert again[0] == again[1] == again[2]
    assert [sorted(each.rejected) for each in ranks] == [[4, 7, 41]] * 3
    # a part names its own sources, not all that are known
    assert len(ranks[1]._part(np.arange(3), bool).sources) == 3


def test_ranks_that_tell_nobody_plan_the_same_when_one_loses_a_sample(tmp_path):
    rows = records(tmp_path, 40)
    write_image(tmp_path / "breaks.jpg", 50, 40, seed=0)
    rows[3] = record(3, ["breaks.jpg"])
    ranks = open_ranks(rows, 2, tmp_path, workers=0, window=100, max_rejected=0.5, epochs=3)
    seen = Counter()
    for number, step in enumerate(zip(*ranks, strict=True)):
        if not number:
            (tmp_path / "breaks.jpg").write_bytes(b"no picture any more")
            for loader in ranks:
                loader._reader._places.clear()  # read again, as in a larger dataset
        seen.update(name for batches in step for batch in batches for name in batch.sample_ids)
    assert set(seen.values()) <= {3, 1}
    assert sum(seen.values()) >= 39 * 3
    found = [loader.rejected for loader in ranks]
    assert {each.sample_id for own in found for each in own} <= {"s3"}


def test_no_rank_is_late_while_no_trainer_waits_for_it(tmp_path):
    rows = [record(number, answer="word " * (1 + number % 90)) for number in range(300)]
    first, second = (each._exchange for each in lengths_of_ranks(rows, 2, timeout_s=0.0))
    with pytest.raises(RankMissing, match=r"waited 0 s for what the ranks \[1\] measure"):
        first.all_gather("a", 0, bool)
    waits, looks = threading.Event(), iter(range(10_000))

    def is_cancelled():
        if next(looks) > 20:  # which at once would have been too late
            waits.set()
        return False

    with ThreadPoolExecutor(1) as pool, first.being(awaited=False):
        told = pool.submit(first.all_gather, "b", 1, is_cancelled)
        assert waits.wait(60)
        with second.being(awaited=False):
            assert second.all_gather("b", 2, bool) == told.result(60) == [1, 2]
    assert first.is_awaited
    (loader,) = open_ranks(rows, 1, tmp_path)
    is_awaited = [loader._awaited.is_awaited for _ in loader]
    assert is_awaited
    assert not any(is_awaited)
    steps = iter(loader)
    next(steps)
    assert not loader._awaited.is_awaited
    assert next(iter(loader))
    assert loader._awaited.is_awaited
