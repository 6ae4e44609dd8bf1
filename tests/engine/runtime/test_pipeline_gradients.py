"""Gradients and losses of a pipeline equal those of one process, over steps that differ in number
and length.
"""

import pytest

from isobatch.engine.cost_model.training_mode import TrainingMode
from support.rank_programs.rank_cases import Case, run_cases

BF16, BF16_SHARDED = TrainingMode(zero_stage=0), TrainingMode()
FP32_SHARDED = TrainingMode(precision="fp32")
TWO = [
    Case(name="1f1b", pp=2, counts=(4, 1, 2)),
    Case(name="gpipe", pp=2, schedule="gpipe", counts=(4, 1, 2)),
    Case(name="zero bubble", pp=2, schedule="zero_bubble", counts=(4, 1, 2)),
    Case(name="interleaved", pp=2, schedule="interleaved", stages_per_rank=2, counts=(4, 1, 2)),
    Case(
        name="interleaved, three stages each",
        pp=2,
        schedule="interleaved",
        stages_per_rank=3,
        counts=(4, 1, 5),
    ),
    Case(
        name="interleaved zero bubble, some recomputed",
        pp=2,
        schedule="interleaved_zero_bubble",
        stages_per_rank=2,
        recompute="some",
        counts=(3, 5),
    ),
    Case(name="everything recomputed", pp=2, recompute="all"),
    Case(name="some recomputed", pp=2, recompute="some"),
    Case(name="some recomputed, zero bubble", pp=2, recompute="some", schedule="zero_bubble"),
    Case(name="frozen vision", pp=2, frozen=("vision",), borders=(0, 3, 11)),
    Case(
        name="frozen vision, cut inside the language model",
        pp=2,
        frozen=("vision",),
        borders=(0, 7, 11),
    ),
    Case(name="frozen language model", pp=2, frozen=("language",)),
    Case(name="not tied", pp=2, tied=False),
    Case(name="clipped", pp=2, clip=0.05),
    Case(name="text only", pp=2, text_only=tuple(range(10)), counts=(4, 2)),
    Case(name="fewer micro-batches than stages", pp=2, counts=(1, 2, 1)),
    Case(name="replicas", pp=1, dp=2, counts=(4, 1, 2)),
    Case(name="sharded optimizer", pp=1, dp=2, mode=FP32_SHARDED, clip=0.05),
    Case(name="bf16 weights, masters", pp=2, mode=BF16, clip=0.05),
    Case(name="bf16, zero bubble", pp=2, mode=BF16, schedule="zero_bubble", recompute="some"),
    Case(name="bf16, sharded masters", pp=1, dp=2, mode=BF16_SHARDED, clip=0.05),
    Case(name="bf16, sharded masters, frozen", pp=1, dp=2, mode=BF16_SHARDED, frozen=("vision",)),
]
FOUR = [
    Case(name="1f1b", pp=4, counts=(5, 1, 2)),
    Case(name="gpipe, some recomputed", pp=4, schedule="gpipe", recompute="some"),
    Case(name="zero bubble", pp=4, schedule="zero_bubble", counts=(6, 2, 9)),
    Case(name="interleaved", pp=4, schedule="interleaved", stages_per_rank=2, counts=(5, 3, 8)),
    Case(name="two by two", pp=2, dp=2, counts=(4, 3), clip=0.05),
    Case(name="two by two, sharded", pp=2, dp=2, clip=0.05, mode=FP32_SHARDED),
    Case(name="two by two, bf16", pp=2, dp=2, clip=0.05, mode=BF16, recompute="some"),
    Case(
        name="two by two, bf16, sharded, interleaved zero bubble",
        pp=2,
        dp=2,
        schedule="interleaved_zero_bubble",
        stages_per_rank=2,
        mode=BF16_SHARDED,
    ),
    Case(
        name="two by two, interleaved, frozen",
        pp=2,
        dp=2,
        schedule="interleaved",
        stages_per_rank=2,
        frozen=("vision",),
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "cases"), [(2, TWO), (4, FOUR)])
def test_gradients_and_losses_equal_one_process(tmp_path, world_size, cases):
    run_cases(str(tmp_path), world_size, cases)
