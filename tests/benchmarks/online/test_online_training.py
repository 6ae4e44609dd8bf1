"""`benchmarks/online_training.py`: what its methods share, and its predictions."""

import numpy as np
import online
import online_training
import pytest
import torch
import torch.distributed as dist
from online_runs import many_ranks, padded
from order import with_caps

from support.ranks import run_ranks


def test_packed_and_padded_rows_have_the_logits_of_each_sample_alone(tmp_path):
    from online_runs import model  # noqa: PLC0415  imports transformers

    model.save_model(tmp_path)
    vlm = model.open_model(tmp_path)
    samples = [torch.randint(5, 500, (length,)) for length in (9, 4, 6)]

    def logits_of(rows, spans, positions=None):
        found = vlm(input_ids=rows, position_ids=positions, spans=spans, use_cache=False)
        return found.logits.double()

    alone = [logits_of(each[None], [[len(each)]])[0] for each in samples]
    positions = torch.cat([torch.arange(len(each)) for each in samples])[None]
    packed = logits_of(torch.cat(samples)[None], [[9, 4, 6]], positions)[0]
    assert torch.allclose(packed, torch.cat(alone), atol=1e-5)
    rows = torch.zeros((3, 9), dtype=torch.long)
    for row, each in zip(rows, samples, strict=True):
        row[: len(each)] = each
    for found, expected in zip(logits_of(rows, [[9], [4], [6]]), alone, strict=True):
        assert torch.allclose(found[: len(expected)], expected, atol=1e-5)


def test_padded_batches_are_as_large_as_the_caps_allow():
    rng = np.random.default_rng(0)
    loads = rng.integers(1, 6, 200), rng.integers(20, 200, 200)
    for method in ("random", "grouped"):
        size, accumulation = padded.best_size(method, loads, (100, 1_000))
        sizes = []
        for each in (size, size + 1):
            batches = padded.padded_batches(method, loads, each, 1)
            assert sorted(sample for batch in batches for sample in batch) == list(range(200))
            sizes.append(max(len(batch) * loads[1][batch].max() for batch in batches))
        assert sizes[0] <= 1_000 < sizes[1], method
        # a step has as many samples as a packed one, about
        assert abs(size * accumulation - 200 * 1_000 / loads[1].sum()) <= size


def test_more_ranks_are_predicted_by_a_line_through_what_was_measured():
    line = np.array([0.01, 0.001, 0.02])
    rng = np.random.default_rng(0)
    loads = np.stack([np.ones(50), rng.integers(100, 1_000, 50), rng.integers(0, 9, 50)], axis=1)
    found, error = many_ranks.fit([(*row, float(row @ line)) for row in loads])
    assert found == pytest.approx(line)
    assert error < 1e-9
    tiles = np.ones(64, np.int64)
    data = with_caps("equal", tiles, tiles * 400, tiles * 9, np.zeros(64, np.int64), 800)
    steps, _ = online.our_steps(data, 2, 64)
    assert {len(batch) for step in steps for batch in step} == {2}
    # 16 steps of two samples of 100 tokens and one tile on each rank
    expected = 64 / 16 / (line @ (1, 200, 2))
    whole = many_ranks._predicted(steps, data, line, is_padded=False)
    assert whole.rate == pytest.approx(expected)
    # the same, for nothing is lost in it
    assert many_ranks.limit_rate((tiles, tiles * 100), (8, 200), 2, line) == pytest.approx(expected)
    assert whole.most == pytest.approx(1)
    # one rank works on half of it alone: 32 steps, each as long as before
    halves = [[step[0], []] for step in steps] + [[step[1], []] for step in steps]
    assert many_ranks._predicted(halves, data, line, is_padded=False).most == pytest.approx(2)


def test_no_loader_is_faster_than_what_is_possible_on_any_machine():
    rng = np.random.default_rng(0)
    tiles, tokens = rng.integers(0, 6, 120), rng.integers(50, 800, 120)
    data = with_caps("any", tiles, tokens, tokens // 9, np.zeros(120, np.int64), 1_600)
    caps = data.limits.max_vision, data.limits.max_seq_len
    small = (tiles, tokens / many_ranks.FACTOR), (caps[0], caps[1] // many_ranks.FACTOR)
    batches = np.array_split(rng.permutation(120), 60)
    steps = [[batch.tolist() for batch in batches[each : each + 3]] for each in range(0, 60, 3)]
    for accumulation in (1, 4):
        for line in (*np.eye(3), *rng.exponential(size=(50, 3)) ** 3):
            options = {"is_padded": True, "accumulation": accumulation}
            found = many_ranks._predicted(steps, data, line, **options)
            assert many_ranks.limit_rate(*small, 3, line) <= found.rate * found.most * (1 + 1e-9)
    goals = {
        "ours": many_ranks.Predicted(rate=10.0, most=1.0),
        "ODB, 256": many_ranks.Predicted(rate=5.0, most=2.2),
        "random, 1 x 2": many_ranks.Predicted(rate=8.0, most=1.6),
        "grouped, 1 x 2": many_ranks.Predicted(rate=8.0, most=1.4),
    }
    missed = online_training.judge_many(data, 8, "whole", goals)
    assert [line.rpartition("; ")[2] for line in missed] == [
        "any, 1,600 tokens, whole weights, 8 ranks: 1.25 times random, 1 x 2, wanted 1.5",
        "no loader gets above 1.40",
    ]


SAMPLES = [(9, 2), (6, 0), (7, 1), (5, 0), (4, 0)]
"""Tokens and tiles; the last ones are text alone, and one rank has one batch less."""


def gradients(said, folder):
    """What a step of each mode gives for the same micro-batches, of which one rank has three."""
    from online_runs import methods, model, modes  # noqa: PLC0415  imports transformers

    for name, mode_of in (("whole", modes.Replicated), ("sharded", modes.Sharded)):
        vlm = model.open_model(folder)
        mode = mode_of(vlm)
        own = SAMPLES[dist.get_rank() :: 2]
        for number in range(3):
            batch = None
            if number < len(own):
                torch.manual_seed(sum(own[number]))
                ids = torch.randint(5, 400, (1, own[number][0] + 64 * own[number][1]))
                ids[0, : 64 * own[number][1]] = vlm.config.image_token_id
                inputs = {"input_ids": ids, "labels": ids, "spans": [[ids.shape[1]]]}
                if own[number][1]:
                    inputs["pixel_values"] = torch.randn(own[number][1], 3, 224, 224)
                batch = methods.Batch(inputs | {"use_cache": False}, 0.25, [number], 1)
            if mode.must_run(batch is not None):
                mode.run(batch)
        assert mode.finish(has_batch=True)
        found = [
            getattr(each.grad, "full_tensor", lambda own=each: own.grad)() for each in weights(vlm)
        ]
        said[name] = [float(each.norm()) for each in found]
        said[f"{name} of a part"] = [float(each.flatten()[:50].sum()) for each in found]
        assert not mode.finish(has_batch=False)


def weights(vlm):
    return [each for _, each in sorted(vlm.named_parameters())]


def test_sharded_weights_get_the_gradients_of_whole_ones(tmp_path):
    from online_runs import model  # noqa: PLC0415  imports transformers

    model.save_model(tmp_path / "model")
    for said in run_ranks(tmp_path, 2, gradients, tmp_path / "model"):
        for part in ("", " of a part"):
            assert said["sharded" + part] == pytest.approx(said["whole" + part], rel=1e-4, abs=1e-6)
        assert min(said["whole"]) > 0
