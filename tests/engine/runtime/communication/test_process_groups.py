"""Groups are few, and gradients summed in several messages are those summed in one."""

import pytest
import torch
import torch.distributed as dist

from isobatch.engine.runtime.communication.process_groups import group_ranks, sum_gradients
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


def count_groups(stages, replicas):
    """Groups of a run with tied embeddings, checked against what each rank needs."""
    pipelines = [range(first, stages * replicas, replicas) for first in range(replicas)]
    ends = (0, stages - 1)
    groups = list(group_ranks(pipelines, [stages - 2], [ends]))
    assert len(dict(groups)) == len(groups)
    for replica, pipeline in enumerate(pipelines):
        for (kind, ranks, of_replica), members in groups:
            if kind == "link":
                assert {pipeline[rank] for rank in ranks} <= set(members)
            elif kind != "replicas" and of_replica == replica:
                whole = ranks if kind == "tie" else range(stages)
                assert members == [pipeline[rank] for rank in whole]
        # an encoder's link to the first rank is another than the ring's
        reached = {ranks for (kind, ranks, _), members in groups if pipeline[0] in members}
        assert {(0, 1), (1, 0), ends, ends[::-1], (stages - 2, 0)} <= reached
    return len(groups)


def test_groups_grow_with_stages_and_replicas_and_not_with_both():
    counts = {shape: count_groups(*shape) for shape in [(8, 64), (8, 128), (16, 64)]}
    # links of one pipeline, replicas' groups per stage, pipelines and ties per replica
    assert counts == {(8, 64): 17 + 8 + 128, (8, 128): 17 + 8 + 256, (16, 64): 33 + 16 + 128}
