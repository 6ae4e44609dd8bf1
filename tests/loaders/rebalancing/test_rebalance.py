"""Samples change ranks within a step: each once, gradients of one process, and only if it pays."""

import threading

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from isobatch import SampleCosts, rebalance
from isobatch.balance.dispatching.even_ranks import step_ms
from isobatch.common.errors import ConfigError, DataError
from isobatch.loaders.ranks.object_exchange import exchange_objects, object_bytes
from isobatch.models.folder.find_model import find_model
from support.costs.drawn_samples import (
    assert_gradients_equal,
    draw_sample,
    loss_of,
    num_labels,
    sum_gradients,
)
from support.models.tiny_models import make_model
from support.ranks import on_ranks

ROUNDS, FAST = 2, 1e6


def costs(sample):
    """Vision and LLM of a dict or of its number."""
    sample = draw_sample(sample) if isinstance(sample, int) else sample
    return 0.02 * len(sample["pixel_values"]), 0.05 * len(sample["input_ids"])


def sizes(sample):
    """ViT and LLM tokens of a dict or of its number."""
    sample = draw_sample(sample) if isinstance(sample, int) else sample
    return len(sample["pixel_values"]), len(sample["input_ids"])


def largest(batches):
    """Most ViT and LLM tokens of a micro-batch of any rank."""
    each = [np.sum([sizes(sample) for sample in batch] or [(0, 0)], axis=0) for batch in batches]
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, np.array(each))
    return np.concatenate(everyone).max(axis=0)


def drawn(rank, size=6):
    """Numbers of this rank's samples; the last rank has most images, and one more sample."""
    more = int(rank == dist.get_world_size() - 1)
    batches = np.arange(ROUNDS * (size + more)) * (3 if more else 4) + 1000 * rank
    return [batch.tolist() for batch in np.split(batches, ROUNDS)]


@pytest.mark.parametrize("world_size", [2, 4])
def test_gradients_equal_those_of_one_process_for_references_and_pixels(tmp_path, world_size):
    on_ranks(world_size, tmp_path, _gradients)


def _gradients():
    rank, size = dist.get_rank(), dist.get_world_size()
    numbers = drawn(rank)
    everyone = [None] * size
    dist.all_gather_object(everyone, numbers)
    flat = sorted(number for batches in everyone for batch in batches for number in batch)
    # one process
    alone = make_model("qwen2_vl")
    labels = sum(num_labels(draw_sample(number)) for number in flat)
    for number in flat:
        (loss_of(alone, draw_sample(number)) / labels).backward()
    brought = largest(numbers)
    for kind in ("references", "pixels", "in their batches", "sizes kept", "capped"):
        batches = numbers
        if kind == "pixels":
            batches = [[draw_sample(number) for number in batch] for batch in numbers]
        options = {"gb_per_s": FAST, "keep_sizes": kind == "sizes kept"}
        if kind == "in their batches":
            options["gb_per_s"] = 1e-12
        caps = brought
        if kind == "capped":
            caps = (brought * 0.95).astype(int)
            options |= {"max_vision": int(caps[0]), "max_tokens": int(caps[1])}
        moved = rebalance(batches, costs=costs, sizes=sizes, **options)
        assert len(moved) == ROUNDS
        assert (largest(moved) <= caps).all()
        is_moved = kind != "in their batches"
        assert moved.prediction.is_moved == is_moved
        assert not is_moved or moved.prediction.after_ms < moved.prediction.before_ms
        if kind == "sizes kept":
            assert [len(batch) for batch in moved] == [len(batch) for batch in numbers]
        model = make_model("qwen2_vl")
        for sample in (sample for batch in moved for sample in batch):
            whole = draw_sample(sample) if isinstance(sample, int) else sample
            (loss_of(model, whole) / labels).backward()
        seen = [[s if isinstance(s, int) else s["number"] for s in b] for b in moved]
        dist.all_gather_object(everyone, seen)
        assert sorted(n for batches in everyone for batch in batches for n in batch) == flat
        sum_gradients(model)
        assert_gradients_equal(model, alone)
        # what is computed of a sample goes back to where it came from
        back = moved.give_back([[(n, torch.full((2,), n)) for n in batch] for batch in seen])
        assert [[n for n, _ in batch] for batch in back] == numbers
        assert all(int(value[0]) == n for batch in back for n, value in batch)


def test_predictions_are_those_of_the_plan_and_equal_on_all_ranks(tmp_path):
    on_ranks(4, tmp_path, _predictions)


def _predictions():
    rank, size = dist.get_rank(), dist.get_world_size()
    batches = drawn(rank)
    moved = rebalance(batches, costs=costs, gb_per_s=FAST)
    gathered = [None] * size
    dist.all_gather_object(gathered, (str(moved.prediction), batches, moved.batches))
    assert len({text for text, _, _ in gathered}) == 1
    for place, expected in ((1, moved.prediction.before_ms), (2, moved.prediction.after_ms)):
        of_ranks = [one[place] for one in gathered]
        table = [
            (number * size + r, *costs(sample))
            for r, batches in enumerate(of_ranks)
            for number, batch in enumerate(batches)
            for sample in batch
        ]
        slots, *columns = np.array(table).T
        measured = step_ms(np.stack(columns, axis=1), slots.astype(int), size)
        assert abs(measured - expected) < 1e-6 * expected
    assert moved.prediction.bound_ms <= moved.prediction.after_ms
    # the price of moving: slower links move fewer bytes, and in the end none
    bytes_moved, gains = [], []
    for rate in (1e3, 1e-3, 1e-5, 1e-9):
        samples = [[draw_sample(number) for number in batch] for batch in batches]
        prediction = rebalance(samples, costs=costs, gb_per_s=rate).prediction
        bytes_moved.append(prediction.moved_bytes)
        gains.append(prediction.before_ms - prediction.after_ms - prediction.move_ms)
    assert bytes_moved[0] > bytes_moved[-1] == 0
    assert min(gains) >= 0
    # measured bandwidth
    assert rebalance(batches, costs=costs).prediction.is_moved


def test_no_rank_gets_more_than_the_fullest_brought(tmp_path):
    on_ranks(4, tmp_path, _caps)


def _caps():
    rank, size = dist.get_rank(), dist.get_world_size()
    # attention makes long texts dear, so by times alone many short ones would come together
    num_samples = 2 if rank == 0 else 25
    batches = [[1000 * rank + 100 * batch + n for n in range(num_samples)] for batch in (0, 1)]

    def lengths(number):
        return 4 * (number % 5), 3000 if number < 1000 else 200

    def counted(batches):
        of_rank = [np.sum([lengths(number) for number in batch], axis=0) for batch in batches]
        everyone = [None] * size
        dist.all_gather_object(everyone, of_rank)
        return np.array(everyone).max(axis=(0, 1))

    def times(number):
        patches, tokens = lengths(number)
        return patches, tokens + tokens**2 / 2000

    options, of_number = {"costs": times, "gb_per_s": FAST}, {"sizes": lengths}
    brought = counted(batches)
    free, kept = rebalance(batches, **options), rebalance(batches, **options, **of_number)
    assert counted(free)[1] > brought[1]
    assert (counted(kept) <= brought).all()
    assert kept.prediction.after_ms < kept.prediction.before_ms
    # less than was brought
    cap = int(0.9 * brought[1])
    smaller = rebalance(batches, **options, **of_number, max_tokens=cap)
    assert counted(smaller)[1] <= cap
    assert counted(smaller)[0] <= brought[0]
    # a rank may hold more than it brought, if it is said
    larger = rebalance(batches, **options, **of_number, max_tokens=10**9, max_vision=10**9)
    assert larger.prediction.after_ms <= kept.prediction.after_ms
    # a model's costs know their sizes
    model = SampleCosts("qwen2_vl")
    samples = [[draw_sample(n) for n in batch] for batch in drawn(rank)]
    before = largest(samples)
    assert (largest(rebalance(samples, costs=model, gb_per_s=FAST)) <= before).all()
    # what no plan keeps, and what is wrong: the same on all ranks
    with pytest.raises(ConfigError, match="no plan within max_tokens 2,999 was found, the best"):
        rebalance(batches, **options, **of_number, max_tokens=2999)
    with pytest.raises(ConfigError, match="max_vision needs sizes="):
        rebalance(batches, **options, max_vision=8)
    with pytest.raises(ConfigError, match="give more than 0"):
        rebalance(batches, **options, **of_number, max_tokens=-1)
    with pytest.raises(ConfigError, match="sizes or caps"):
        rebalance(batches, **options, **of_number, max_tokens=10**6 + rank)
    with pytest.raises(ConfigError, match="rank 3 could not" if rank != 3 else "give ViT and LLM"):
        rebalance(batches, **options, sizes=lambda _: (1, 2, 3) if rank == 3 else (1, 2))


def test_a_mesh_gives_its_data_parallel_ranks_and_peers_move_alike(tmp_path):
    on_ranks(4, tmp_path, _mesh)


def _mesh():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dp = mesh.get_local_rank("dp")
    batches = [[4 * n + 3 * dp for n in range(6)]]
    moved = rebalance(batches, mesh, costs=costs, gb_per_s=FAST)
    everyone = [None] * 4
    dist.all_gather_object(everyone, (mesh.get_local_rank("tp"), dp, moved.batches))
    assert moved.prediction.is_moved
    assert everyone[0][2] == everyone[1][2] != everyone[2][2] == everyone[3][2]
    several = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    with pytest.raises(ConfigError, match="dp_replicate, dp_shard"):
        rebalance(batches, several, costs=costs)


def test_what_is_wrong_on_one_rank_ends_all_in_one_line(tmp_path):
    on_ranks(2, tmp_path, _faults)


def _faults():
    rank = dist.get_rank()

    def fails(_):
        raise KeyError("length")

    with pytest.raises((KeyError, ConfigError), match="length" if rank else "rank 1 could not"):
        rebalance([[1]], costs=fails if rank else costs)
    with pytest.raises(ConfigError, match=r"ranks have \[1, 2\] micro-batches"):
        rebalance([[1]] * (rank + 1), costs=costs)
    with pytest.raises(ConfigError, match=r"ranks have \[1, 2\] columns of costs"):
        rebalance([[1]], costs=lambda _: [1.0] * (rank + 1))
    with pytest.raises(ConfigError, match="nan" if rank else "rank 1 could not"):
        rebalance([[1]], costs=lambda _: [float("nan") if rank else 1.0])
    with pytest.raises(ConfigError, match="different gb_per_s"):
        rebalance([[1]], costs=costs, gb_per_s=1 + rank)
    with pytest.raises(ConfigError, match="gb_per_s is 0"):
        rebalance([[1]], costs=costs, gb_per_s=0)
    moved = rebalance([[], []], costs=costs, sizes=sizes)
    assert moved.batches == [[], []]
    moved = rebalance([[], []], costs=costs)
    assert moved.batches == [[], []]
    moved = rebalance([[3, 7, 11, 15] if rank else []], costs=costs, gb_per_s=FAST)
    assert len(moved.batches[0]) == 2  # of a rank that had none
    # wrong on one rank, and the other is told
    with pytest.raises(ConfigError, match="give_back got" if rank else "rank 1 could not send"):
        moved.give_back([[1]] if rank else [[1, 2]])
    for value, why in (
        (lambda: 0, "pickle"),
        (threading.Lock(), "pickle '_thread.lock'"),
        (torch.zeros(2, device="meta"), "a tensor on meta"),
    ):
        # rank 0 has what came from rank 1
        with pytest.raises(ConfigError, match="rank 0 could not send" if rank else why):
            moved.give_back([[1, 2 if rank else value]])
        batches = [[value] * 4 if rank else []]
        with pytest.raises(ConfigError, match=why if rank else "rank 1 could not send"):
            rebalance(batches, costs=lambda _: (1.0, 1.0), gb_per_s=FAST, num_bytes=lambda _: 1)
    (back,) = moved.give_back([[rank, rank + 2]])
    assert sorted(back) == ([0, 1, 2, 3] if rank else [])


def test_objects_of_all_kinds_arrive_as_they_were(tmp_path):
    on_ranks(2, tmp_path, _objects)


def _objects():
    rank = dist.get_rank()
    values = [
        torch.arange(7, dtype=torch.bfloat16)[::2],
        torch.empty(0, 3),
        torch.tensor(2.5),
        torch.ones(2, 3, dtype=torch.bool),
        torch.tensor([1 + 2j]).conj(),
        np.arange(6).reshape(2, 3)[:, ::-1],
        {"path": "a.jpg", "bytes": b"\0\1", "nested": [(torch.arange(3), None)]},
    ]
    parts = [[], []]
    parts[1 - rank] = values
    received = exchange_objects(parts, None)
    assert received[rank] == []
    tensor, empty, scalar, flags, conjugate, array, record = received[1 - rank]
    assert tensor.dtype == torch.bfloat16
    assert tensor.tolist() == [0, 2, 4, 6]
    assert (empty.shape, float(scalar), flags.all().item()) == ((0, 3), 2.5, True)
    assert conjugate.tolist() == [1 - 2j]
    assert array.tolist() == values[5].tolist()
    assert record["nested"][0][0].tolist() == [0, 1, 2]
    tensor += 1  # it can be written to
    assert tensor.untyped_storage().nbytes() == 8  # and keeps nothing else that arrived
    assert record["nested"][0][0].untyped_storage().nbytes() == 24


def test_alone_samples_change_micro_batches_only():
    batches = [[0, 4, 8], [3, 7, 11, 15]]
    moved = rebalance(batches, costs=costs)
    assert moved.batches == batches  # on one rank every order takes equally long
    assert not moved.prediction.is_moved


def test_costs_of_a_model_follow_its_flops():
    model = SampleCosts("qwen2_vl")
    grid = torch.tensor([[1, 4, 8], [1, 2, 2]])
    sample = {"input_ids": torch.zeros(100), "image_grid_thw": grid}
    assert model(sample) == tuple(model.of_lengths([2], [36], [100])[0])
    vision, llm = model.of_lengths([0, 1, 1], [0, 400, 800], [500, 500, 1000]).T
    assert vision[0] == 0
    assert vision[2] > 2 * vision[1]
    assert llm[0] == llm[1] < llm[2] / 2
    with pytest.raises(DataError, match="no input_ids"):
        model({"text": "a"})


def test_crops_of_all_images_and_frames_of_videos_cost():
    model = SampleCosts("llava_next")
    per_crop = find_model("llava_next").vision.vit_tokens_per_patch
    for shape, crops in (((5, 3, 8, 8), 5), ((1, 5, 3, 8, 8), 5), ((2, 5, 3, 8, 8), 10)):
        for name in ("pixel_values", "pixel_values_videos"):
            sample = {"input_ids": torch.zeros(1, 100), name: torch.zeros(shape)}
            assert model(sample) == tuple(model.of_lengths([crops], [crops * per_crop], [100])[0])
    for name, shape in (("qwen2_vl", (16, 1176)), ("llava_next", (16, 1176))):
        with pytest.raises(DataError, match=r"shape \(16, 1176\) and no image_grid_thw"):
            SampleCosts(name)({"input_ids": torch.zeros(9), "pixel_values": torch.zeros(shape)})


def test_bytes_are_those_of_tensors_and_strings():
    sample = {"pixels": torch.zeros(3, 4), "ids": np.zeros(2, np.int64), "path": "abcd"}
    assert object_bytes(sample) == 48 + 16 + 4 + len("pixelsidspath")
