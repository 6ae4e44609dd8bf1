"""A zero-bubble schedule computes what 1F1B computes, no product twice, on a pipeline of ranks."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from isobatch.engine.runtime.pipeline import Pipeline, PipelineOptions
from support.models.toy_model import freeze, make_batch, make_model
from support.ranks import run_ranks

RECOMPUTED = {
    "nothing": lambda place: False,
    "some": lambda place: place % 2,
    "all": lambda _: True,
}
FROZEN = ((), ("vision",), ("language",))
CASES = {
    2: [(frozen, name) for frozen in FROZEN for name in RECOMPUTED],
    4: [*(((), name) for name in RECOMPUTED), *((frozen, "some") for frozen in FROZEN[1:])],
}
"""What is frozen and what is recomputed, by the number of ranks."""
SCHEDULES = ("1f1b", "zero_bubble")


def count(said, num_ranks):
    """FLOPs of a step on this rank, by what is recomputed and frozen, and by schedule."""
    generator = torch.Generator().manual_seed(0)
    batches = [make_batch(generator, [20 + place, 30], 6) for place in range(num_ranks)]
    for frozen, name in CASES[num_ranks]:
        for schedule in SCHEDULES:
            model = make_model()
            for part in frozen:
                freeze(model, part)
            count = len(model.layers)
            borders = [count * rank // num_ranks for rank in range(num_ranks + 1)]
            recompute = [bool(RECOMPUTED[name](place)) for place in range(count)]
            pipeline = Pipeline(
                model,
                borders,
                recompute,
                [list(range(num_ranks))],
                PipelineOptions(schedule=schedule),
            )
            # products of attention are counted in this form on a CPU
            with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as flops:
                pipeline.step(batches, 10.0)
            said[f"{frozen} {name} {schedule}"] = flops.get_total_flops()


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_zero_bubble_has_the_flops_of_1f1b_with_recomputation_too(tmp_path, num_ranks):
    said = run_ranks(tmp_path, num_ranks, count, num_ranks)
    for rank in range(num_ranks):
        for frozen, name in CASES[num_ranks]:
            plain, split = (said[rank][f"{frozen} {name} {own}"] for own in SCHEDULES)
            assert plain > 0
            assert abs(split / plain - 1) < 0.02, (rank, frozen, name)
    more = [said[-1][f"() {name} 1f1b"] for name in RECOMPUTED]
    assert more == sorted(set(more)), "what is recomputed must show"
