"""torch's own schedules give the gradients of one process, micro-batches differing in length, as
ours do.
"""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from balance.errors import ConfigError
from engine.runtime.pipeline import Pipeline, PipelineOptions
from engine.runtime.torch_schedules import TESTED, TorchSchedules, check_version
from support.models.toy_model import make_batch, make_model
from support.rank_programs import rank_cases
from support.rank_programs.rank_cases import Case
from support.ranks import on_ranks

pytestmark = pytest.mark.skipif(
    ".".join(torch.__version__.split(".")[:2]) not in TESTED,
    reason="another version of torch's pipelining",
)
ZERO_BUBBLE = {"schedule": "zero_bubble", "stages_per_rank": 2}

TWO = [
    Case(name="1f1b", pp=2, counts=(5, 3, 7)),
    Case(name="gpipe", pp=2, schedule="gpipe"),
    Case(name="interleaved", pp=2, schedule="interleaved", stages_per_rank=2, counts=(6, 3, 4)),
    Case(
        name="interleaved, three stages each",
        pp=2,
        schedule="interleaved",
        stages_per_rank=3,
        counts=(4, 1, 6),
    ),
    Case(name="looped", pp=2, schedule="looped_bfs", stages_per_rank=2, counts=(5, 3)),
    Case(name="zero bubble", pp=2, **ZERO_BUBBLE, counts=(6, 3, 4)),
    Case(name="zero bubble, one stage each", pp=2, schedule="zero_bubble", counts=(6, 3, 4)),
    Case(name="some recomputed", pp=2, recompute="some"),
    Case(name="some recomputed, zero bubble", pp=2, recompute="some", **ZERO_BUBBLE, counts=(6, 3)),
    Case(name="frozen vision", pp=2, frozen=("vision",), borders=(0, 3, 11)),
    Case(
        name="frozen vision, zero bubble",
        pp=2,
        frozen=("vision",),
        borders=(0, 2, 4, 7, 11),
        **ZERO_BUBBLE,
        counts=(4,),
    ),
    Case(name="frozen language model", pp=2, frozen=("language",)),
    Case(name="not tied, clipped", pp=2, tied=False, clip=0.05),
    Case(name="text only", pp=2, text_only=tuple(range(10)), counts=(4, 2)),
]
FOUR = [
    Case(name="1f1b", pp=4, counts=(6, 4)),
    Case(name="zero bubble", pp=4, **ZERO_BUBBLE, counts=(8, 3)),
    Case(name="two by two", pp=2, dp=2, counts=(4, 3), clip=0.05),
]


@pytest.mark.parametrize(("world_size", "cases"), [(2, TWO), (4, FOUR)])
def test_gradients_and_losses_equal_one_process(tmp_path, world_size, cases):
    on_ranks(world_size, tmp_path, _run_all, cases)


def test_versions_that_were_not_tested_are_refused():
    with pytest.raises(ConfigError, match=r"torch 2\.99\.1.*tested with"):
        check_version("2.99.1")


class _ByTorch(Pipeline):
    """The pipeline of `rank_cases`, run in torch's order."""

    def step(self, batches, normalizer, schedule=None, order=None):
        assert schedule is None
        assert order is None
        return SimpleNamespace(
            loss=TorchSchedules(self, self._options.schedule).step(batches, normalizer)
        )


def _run_all(cases):
    rank_cases.Pipeline = _ByTorch
    for case in cases:
        try:
            rank_cases.run_case(case)
        except Exception as error:
            raise AssertionError(f"{case.name}, rank {dist.get_rank()}: {error}") from error
    if dist.get_world_size() == 2:
        _what_torch_cannot_do_is_said()


def _what_torch_cannot_do_is_said():
    model, options = make_model(), PipelineOptions(stages_per_rank=2)
    generator = torch.Generator().manual_seed(0)
    batches = [make_batch(generator, [4, 3], 1) for _ in range(5)]
    one = Pipeline(model, (0, 5, 11), [False] * 11, [[0, 1]])
    two = Pipeline(model, (0, 3, 5, 8, 11), [False] * 11, [[0, 1]], options)
    with pytest.raises(ConfigError, match="'dualpipev'; torch has 1f1b, gpipe"):
        TorchSchedules(one, "dualpipev")
    with pytest.raises(ConfigError, match="one stage per rank, not 4 on 2 ranks"):
        TorchSchedules(two, "1f1b")
    with pytest.raises(ConfigError, match="1f1b cannot run 1 micro-batches"):
        TorchSchedules(one, "1f1b").step(batches[:1], 1)
    with pytest.raises(ConfigError, match="interleaved cannot run 5 micro-batches"):
        TorchSchedules(two, "interleaved").step(batches, 1)
