"""Shards for context parallelism: together the row, and those of the trainers' own formulas."""

import itertools
import json
import subprocess

import numpy as np
import pytest
import torch

from isobatch.common.errors import ConfigError
from isobatch.loaders.batch.context_shards import (
    PER_TOKEN,
    context_shard,
    join_shards,
    shard_indices,
)
from isobatch.loaders.batch.packed import packed_batch
from support.cases import for_each
from support.frameworks.environments import python_of

balancers = pytest.importorskip(
    "torch.distributed.tensor.experimental._context_parallel._load_balancer"
)
SCHEMES = ("zigzag", "head_tail", "ulysses")
SIZES = (1, 2, 4)
MEGATRON = """
import json, sys
import torch
import torch.distributed as dist
from megatron.core.utils import get_batch_on_this_cp_rank
from torch.testing._internal.distributed.fake_pg import FakeStore

results = []
for borders, size, rank in json.loads(sys.argv[1]):
    # no other rank is asked for anything: the backend sends nothing
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    parts = []
    for start, end in zip(borders, borders[1:]):
        row = {"tokens": torch.arange(start, end)[None]}
        shard = get_batch_on_this_cp_rank(row, dist.group.WORLD)
        parts += shard["tokens"][0].tolist()
    dist.destroy_process_group()
    results.append(parts)
print(json.dumps(results))
"""
"""Megatron's cut of a sample, sample after sample: what THD rows are cut into."""


def drawn_borders(multiple, seed):
    rng = np.random.default_rng(seed)
    sizes = multiple * rng.integers(1, 9, int(rng.integers(1, 7)))
    return torch.from_numpy(np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32))


def loop_indices(borders, rank, size, scheme):
    """Token by token: those of the row whose piece is the rank's."""
    spans = list(itertools.pairwise(borders.tolist()))
    if scheme != "zigzag":
        spans = [(spans[0][0], spans[-1][1])]
    places = []
    for start, end in spans:
        if scheme == "ulysses":
            numbers, piece = [rank], (end - start) // size
        else:
            numbers, piece = [rank, 2 * size - 1 - rank], (end - start) // (2 * size)
        for number in numbers:
            places += range(start + number * piece, start + (number + 1) * piece)
    return places


@for_each(("scheme", "size"), list(itertools.product(SCHEMES, SIZES)))
def test_indices_are_those_of_a_loop_and_every_token_is_on_one_rank(scheme, size):
    for seed in range(20):
        borders = drawn_borders(2 * size, seed)
        parts = [shard_indices(borders, rank, size, scheme) for rank in range(size)]
        for rank, part in enumerate(parts):
            assert part.dtype == torch.int64
            assert part.tolist() == loop_indices(borders, rank, size, scheme)
        assert len({len(part) for part in parts}) == 1
        assert sorted(torch.cat(parts).tolist()) == list(range(int(borders[-1])))


@for_each("size", [2, 4])
def test_head_tail_is_what_torch_cuts(size):
    for pieces in (1, 3, 8):
        total = 2 * size * pieces
        balancer = balancers._HeadTailLoadBalancer(total, size, torch.device("cpu"))
        order = balancer._generate_indices().flatten()
        borders = torch.tensor([0, total // 2, total])
        parts = [shard_indices(borders, rank, size, "head_tail") for rank in range(size)]
        assert torch.equal(torch.cat(parts), order)


@for_each("size", [2, 4])
def test_zigzag_is_what_torch_cuts_by_document(size):
    for seed in range(5):
        borders = drawn_borders(2 * size, seed)
        documents = borders.diff().tolist()
        balancer = balancers._PerDocumentHeadTailLoadBalancer(
            [documents], size, torch.device("cpu")
        )
        order = balancer._generate_indices().flatten().tolist()
        parts = [[] for _ in range(size)]
        for length in documents:  # it lists documents, in each all ranks
            for part in parts:
                part.extend(order[: length // size])
                order = order[length // size :]
        for rank, part in enumerate(parts):
            assert shard_indices(borders, rank, size, "zigzag").tolist() == part


@pytest.mark.other_trainers
def test_zigzag_is_what_megatron_core_cuts(pytestconfig):
    cases = [
        (drawn_borders(2 * size, seed).tolist(), size, rank)
        for seed, size in itertools.product(range(5), (2, 4))
        for rank in range(size)
    ]
    python = python_of("megatron_core", pytestconfig.cache.mkdir("frameworks"))
    done = subprocess.run(
        [python, "-c", MEGATRON, json.dumps(cases)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for (borders, size, rank), expected in zip(
        cases, json.loads(done.stdout.splitlines()[-1]), strict=True
    ):
        places = shard_indices(torch.tensor(borders), rank, size, "zigzag")
        assert places.tolist() == expected


def test_shards_of_all_ranks_are_the_batch_again():
    pytest.importorskip("transformers")
    from support.models.tiny_models import make_batch, make_config  # noqa: PLC0415

    config = make_config("qwen2_vl")
    for scheme, size, counts in itertools.product(SCHEMES, SIZES, ([1, 0, 2], [0, 0], [])):
        batch = packed_batch(
            make_batch("qwen2_vl", counts, seed=size), config, pad_each_to=2 * size
        )
        shards = [context_shard(batch, rank, size, scheme) for rank in range(size)]
        borders = batch.cu_seqlens_padded
        for name in PER_TOKEN:
            parts = [getattr(shard, name) for shard in shards]
            assert {part.shape[-1] for part in parts} == {batch.num_tokens // size}
            assert torch.equal(join_shards(parts, borders, scheme), getattr(batch, name))
        for shard in shards:
            assert shard.cu_seqlens is batch.cu_seqlens
            assert shard.media is batch.media
        # labels were shifted before the cut: each token still has that of the next one
        labels = sum(int((shard.labels != -100).sum()) for shard in shards)
        assert labels == int((batch.labels != -100).sum())


def test_rows_that_cannot_be_cut_are_refused():
    borders = torch.tensor([0, 8, 14])
    for scheme, message in (
        ("zigzag", "sample 1 has 6 tokens.* pad_each_to must be a multiple of 4"),
        ("head_tail", "the row has 14 tokens.* pad_total_to must be a multiple of 4"),
        ("ring", "use one of zigzag, head_tail, ulysses"),
    ):
        with pytest.raises(ConfigError, match=message):
            shard_indices(borders, 0, 2, scheme)
    assert len(shard_indices(borders, 0, 2, "ulysses")) == 7
    with pytest.raises(ConfigError, match=r"rank is 2; it must be in 0\.\.1"):
        shard_indices(borders, 2, 2, "ulysses")
