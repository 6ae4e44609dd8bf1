"""Gradients of all ranks summed in several messages are those summed in one."""

import pytest
import torch
import torch.distributed as dist

from isobatch.engine.runtime.communication.process_groups import sum_gradients
from support.ranks import run_ranks

SHAPES = [(3,), (4, 5), (40, 2), (1,), (7,)]
BYTES = [(1, "each alone"), (100, "some together"), (1 << 20, "all of a dtype together")]


def gradients(rank):
    generator = torch.Generator().manual_seed(rank)
    plain = [torch.randn(shape, generator=generator) for shape in SHAPES]
    turned = torch.randn(6, 4, generator=generator).t()  # not contiguous
    return [*plain, turned, torch.randn(3, generator=generator, dtype=torch.float64)]


def sum_in_buckets(said):
    expected = [one + two for one, two in zip(gradients(0), gradients(1), strict=True)]
    for most, name in BYTES:
        own = gradients(dist.get_rank())
        sum_gradients(own, dist.group.WORLD, most)
        said[name] = [torch.equal(one, two) for one, two in zip(own, expected, strict=True)]
    dist.barrier()


@pytest.fixture(scope="module")
def summed(tmp_path_factory):
    return run_ranks(tmp_path_factory.mktemp("sums"), 2, sum_in_buckets)


@pytest.mark.parametrize("name", [name for _, name in BYTES])
def test_sums_are_the_same_however_gradients_are_put_together(summed, name):
    assert [said[name] for said in summed] == [[True] * (len(SHAPES) + 2)] * 2
