"""An encoder's inputs on other ranks: features, losses and gradients of one process."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers.modeling_outputs import BaseModelOutputWithPooling

from isobatch import dispatch
from isobatch.common.errors import ConfigError
from support.costs.drawn_samples import (
    assert_gradients_equal,
    draw_sample,
    loss_of,
    num_labels,
    sum_gradients,
)
from support.models.tiny_models import make_model
from support.ranks import on_ranks

ALGORITHMS = ("sums", "padded", "squares", "padded_attention", "conv")


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_model_trains_as_one_process_with_its_encoder_dispatched(tmp_path, world_size):
    on_ranks(world_size, tmp_path, _train)


def _train():
    rank, size = dist.get_rank(), dist.get_world_size()
    # images on the last rank, but for one; the first has text alone
    numbers = [4 * n for n in range(3)] if rank == 0 else [4 * n + rank for n in range(1, 4)]
    if rank == size - 1:
        numbers += [103, 203, 303, 403]
    samples = [draw_sample(number) for number in numbers]
    everyone = [None] * size
    dist.all_gather_object(everyone, numbers)
    every = [draw_sample(number) for numbers in everyone for number in numbers]
    labels = sum(map(num_labels, every))
    alone = make_model("qwen2_vl")
    for sample in every:
        (loss_of(alone, sample) / labels).backward()
    group = dist.new_group()
    for wrapped in (False, True):
        model = make_model("qwen2_vl")
        trained = DistributedDataParallel(model) if wrapped else model
        loss = Dispatched(trained, model, group)(samples) / labels
        (loss * (size if wrapped else 1)).backward()
        if not wrapped:
            sum_gradients(model)
        assert_gradients_equal(model, alone)


class Dispatched:
    """The loss of samples whose images all ranks encode together."""

    def __init__(self, trained, model, group):
        self.trained, self.model, self.group = trained, model, group
        self.encoded = 0
        if trained is not model:
            self.trained = DistributedDataParallel(_Whole(self))

    def __call__(self, samples):
        return self.trained(samples) if self.trained is not self.model else self.loss(samples)

    def encode(self, pixels, grids):
        self.encoded = len(pixels)
        return self.model.model.visual(pixels, grid_thw=grids).pooler_output

    def loss(self, samples):
        grids = torch.cat([sample["image_grid_thw"] for sample in samples])
        pixels = torch.cat([sample["pixel_values"] for sample in samples])
        sizes = grids.prod(dim=1)
        inputs = {"pixels": pixels, "grids": grids}
        features = dispatch(self.encode, inputs, sizes, self.group, merge=4)
        # equal shares: no rank has more than the mean and its largest image
        work = torch.tensor([self.encoded, len(pixels)])
        dist.all_reduce(work, dist.ReduceOp.MAX)
        total = torch.tensor(len(pixels))
        dist.all_reduce(total)
        assert int(work[0]) < int(work[1])
        assert int(work[0]) <= int(total) / dist.get_world_size() + 100
        parts = iter(features.split((sizes // 4).tolist()))
        loss = features.sum() * 0
        for sample in samples:
            images = tuple(next(parts) for _ in sample["image_grid_thw"])
            more = {"mm_encoder_outputs": {"image": None}}
            if images:
                output = BaseModelOutputWithPooling(pooler_output=images)
                more = {"mm_encoder_outputs": {"image": output}}
            loss = loss + loss_of(self.model, sample, **more)
        return loss


class _Whole(torch.nn.Module):
    """What DDP wraps."""

    def __init__(self, dispatched):
        super().__init__()
        self.model = dispatched.model
        self._loss = dispatched.loss

    def forward(self, samples):
        return self._loss(samples)


@pytest.mark.parametrize("world_size", [2, 4])
def test_rows_come_back_for_every_algorithm_and_kind_of_output(tmp_path, world_size):
    on_ranks(world_size, tmp_path, _rows)


def _rows():
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    # rank 0 has items of one token each: as many rows per token as per item
    sizes = torch.ones(3, dtype=torch.int64)
    if rank:
        sizes = 2 * torch.randint(1, 30, (4 * rank + 1,), generator=generator)
    weight = torch.ones((), requires_grad=True)
    rows = torch.randn(int(sizes.sum()), 3, generator=generator, requires_grad=True)
    names = torch.arange(len(sizes)) + 100 * rank

    def encode(rows, names):
        assert len(names)
        return rows * weight, rows.sum(dim=1) * 2

    for algorithm in ALGORITHMS:
        made, sums = dispatch(
            encode, {"rows": rows, "names": names}, sizes, algorithm=algorithm, weight=0.1
        )
        torch.testing.assert_close(made, rows)
        torch.testing.assert_close(sums, rows.sum(dim=1) * 2)
        factor = torch.arange(len(rows))[:, None] + 1.0
        rows.grad = None
        (made * factor).sum().backward()
        torch.testing.assert_close(rows.grad, factor.expand_as(rows))
    inputs = {"rows": rows, "names": names}
    back = dispatch(lambda rows, names: names * 2, inputs, sizes, outputs="items")
    assert back.tolist() == (names * 2).tolist()


def test_nothing_moves_where_it_would_not_pay(tmp_path):
    on_ranks(2, tmp_path, _nothing)


def _nothing():
    rank = dist.get_rank()
    given = {"rows": torch.zeros(8, 2) + rank}
    # equal already, and fewer items than ranks
    for sizes in ([4, 4], [8] if rank else []):
        inputs = given if len(sizes) else {"rows": torch.zeros(0, 2)}
        made = dispatch(lambda rows: rows, inputs, sizes)
        assert made is inputs["rows"] if len(sizes) else made.shape == (0, 2)


def test_an_encoder_that_cannot_do_without_images_gets_one(tmp_path):
    on_ranks(2, tmp_path, _without_images)


def _without_images():
    rank = dist.get_rank()
    visual = make_model("qwen2_vl").model.visual
    shapes = []

    def encode(pixels, grids):
        shapes.append(grids.tolist())
        return visual(pixels, grid_thw=grids).pooler_output

    def run(grids, **options):
        sizes = torch.tensor(grids, dtype=torch.int64).reshape(-1, 3)
        inputs = {"grids": sizes, "pixels": torch.ones(int(sizes.prod(dim=1).sum()), 1176)}
        return dispatch(encode, inputs, sizes.prod(dim=1), merge=4, **options)

    # one image, too few to move; the rank without any encodes it too
    features = run([[1, 2, 4]] if rank else [])
    assert shapes == [[[1, 2, 4]]]
    assert features.shape == (2 * rank, 32)
    features.sum().backward()
    gradients = [weight.grad for weight in visual.parameters()]
    assert all(bool(gradient.any()) <= rank for gradient in gradients)
    # no image at all
    with pytest.raises(ConfigError, match="no rank has an item, and encode"):
        run([])
    example = {"pixels": torch.zeros(4, 1176), "grids": torch.tensor([[1, 2, 2]])}
    assert run([], example=example).shape == (0, 32)
    with pytest.raises(ConfigError, match="example has" if rank else "inputs of rank 1"):
        run([], example={"grids": example["grids"]} if rank else example)


@pytest.mark.parametrize("algorithm", ["padded", "squares", "padded_attention", "conv"])
def test_items_move_where_the_algorithm_s_own_cost_falls(tmp_path, algorithm):
    on_ranks(2, tmp_path, _pays, algorithm)


def _pays(algorithm):
    # as many tokens on both ranks: short items padded to a long one, or all long ones on one rank
    sizes = [100, *[25] * 4]
    if algorithm == "squares":
        sizes = [25] * 8 if dist.get_rank() else [100] * 2
    weight = 0.1 if algorithm == "padded_attention" else 0.0
    names = torch.arange(len(sizes))
    encoded = []

    def encode(names):
        encoded.append(len(names))
        return names

    dispatch(encode, {"names": names}, sizes, outputs="items", algorithm=algorithm, weight=weight)
    # each has one long item and four short ones, or one rank both long ones
    assert encoded == [5 if algorithm == "squares" else 2 + 6 * dist.get_rank()]


def test_no_rank_gets_more_tokens_than_the_fullest_brought(tmp_path):
    on_ranks(2, tmp_path, _fullest)


def _fullest():
    # evenest in attention that is padded: 41 tokens on one rank, where 39 came
    sizes = [23] if dist.get_rank() else [10, 3, 5, 3, 18]
    encoded = []

    def encode(rows):
        encoded.append(len(rows))
        return rows

    rows = torch.randn(sum(sizes), 2)
    options = {"algorithm": "padded_attention", "weight": 0.1}
    torch.testing.assert_close(dispatch(encode, {"rows": rows}, sizes, **options), rows)
    most = torch.tensor(encoded[0])
    dist.all_reduce(most, dist.ReduceOp.MAX)
    assert int(most) == 31  # of 62: even tokens, and cheaper than nothing moved


def test_wrong_inputs_are_named(tmp_path):
    on_ranks(2, tmp_path, _wrong)


def _wrong():
    rank = dist.get_rank()
    rows = torch.zeros(12, 2)
    with pytest.raises(ConfigError, match="rows has 12 rows" if rank else "inputs of rank 1"):
        dispatch(torch.relu, {"rows": rows}, [5, 6] if rank else [6, 6])
    with pytest.raises(ConfigError, match="multiples of merge=4"):
        dispatch(torch.relu, {"rows": rows}, [6, 6], merge=4)
    with pytest.raises(ConfigError, match="different inputs or options"):
        dispatch(torch.relu, {"rows": rows}, [6, 6], weight=rank)
    for others in ({"more": rows}, {"rows": rows.double()}, {"rows": rows[:, :1]}):
        with pytest.raises(ConfigError, match="ranks give dispatch other tensors"):
            dispatch(torch.relu, others if rank else {"rows": rows}, [6, 6])
    with pytest.raises(ConfigError, match="merge is 0"):
        dispatch(torch.relu, {"rows": rows}, [6, 6], merge=0)
    with pytest.raises(ConfigError, match="use one of sums"):
        dispatch(torch.relu, {"rows": rows}, [6, 6], algorithm="none")
    sizes = [1] * 12 if rank else [6, 6]
    with pytest.raises(ConfigError, match="encode made"):
        dispatch(
            lambda rows: rows[1:],
            {"rows": torch.zeros(36 if rank else 12, 2)},
            [12, 12, 12] if rank else sizes,
        )


def test_alone_it_is_the_encoder():
    rows = torch.ones(4, 2)
    assert dispatch(lambda rows: rows * 2, {"rows": rows}, [4]).tolist() == (rows * 2).tolist()
