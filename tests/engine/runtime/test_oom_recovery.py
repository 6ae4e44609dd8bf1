"""A rank that runs out of memory ends the step, on all ranks alike; no rank ends, and the next step
is right.
"""

import re

import pytest

from support.rank_programs.rank_cases import TOLERANCE
from support.rank_programs.rank_out_of_memory import Shortage, run_short
from support.ranks import run_ranks, what_they_said

SCHEDULES = [("1f1b", 1), ("gpipe", 1), ("zero_bubble", 1), ("interleaved", 2)]
TWO = [
    Shortage(
        name=f"{schedule}, {'backward' if backward else 'forward'}, rank {victim}",
        pp=2,
        victims=(victim,),
        share=1.0 if backward else 0.1,
        schedule=schedule,
        stages_per_rank=chunks,
        recompute=backward,  # forward passes leave little then
    )
    for place, (schedule, chunks) in enumerate(SCHEDULES)
    for backward in (False, True)
    for victim in [(place + backward) % 2]
]
TWO += [
    Shortage(name="both", pp=2, victims=(0, 1), share=0.1),
    Shortage(name="nothing at all", pp=2, victims=(1,), share=0.0),
    Shortage(name="a micro-batch", pp=2, victims=(0,), share=0.5, count=1),
]
FOUR = [
    Shortage(name="a replica", pp=2, dp=2, victims=(3,), share=0.1),
    Shortage(
        name="two replicas, zero bubble",
        pp=2,
        dp=2,
        victims=(0, 3),
        share=1.0,
        schedule="zero_bubble",
    ),
    Shortage(name="four stages", pp=4, victims=(2,), share=1.0, recompute=True),
    Shortage(
        name="interleaved", pp=4, victims=(1,), share=0.1, schedule="interleaved", stages_per_rank=2
    ),
    Shortage(name="encoding ahead", pp=4, victims=(2,), share=0.0, encode_on=2),
]
BACKWARD = re.compile(": (backward|input_grad|weight_grad) of micro-batch")


@pytest.fixture(scope="module", params=[(2, TWO), (4, FOUR)], ids=["two ranks", "four ranks"])
def told(request, shared):
    num_ranks, cases = request.param
    folder = shared(
        f"out-of-memory-{num_ranks}", lambda folder: run_ranks(folder, num_ranks, run_short, cases)
    )
    return cases, what_they_said(folder, num_ranks)


def test_all_ranks_are_told_alike_and_soon(told):
    cases, said = told
    for case in cases:
        errors = {own[case.name]["error"] for own in said}
        assert len(errors) == 1, case.name
        (error,) = errors
        ranks = sorted({rank % case.pp for rank in case.victims})
        assert [stage % case.pp for stage in said[0][case.name]["stages"]] == ranks
        assert error.startswith(f"out of memory in stages {said[0][case.name]['stages']}: ")
        assert error.endswith("; the gradients of this step are void")
        assert "\n" not in error
        assert all(own[case.name]["seconds"] < 20 for own in said)


def test_the_pass_and_its_samples_are_named(told):
    cases, said = told
    for case in cases:
        error = said[0][case.name]["error"]
        assert error.count(" of micro-batch ") == len(case.victims)
        assert all(f"of replica {victim // case.pp}, samples a" in error for victim in case.victims)
        if case.encode_on is not None:
            assert ": encode of micro-batch 0 in stage 0 of replica 0, samples a0, b0;" in error
        elif case.recompute:
            assert BACKWARD.search(error), case.name
        elif case.share < 0.5:
            assert ": forward of micro-batch" in error, case.name


def test_nothing_of_the_step_is_left_over_and_the_next_one_is_right(told):
    cases, said = told
    for case in cases:
        for own in said:
            assert own[case.name]["left over"] == 0, case.name
            assert own[case.name]["loss off"] <= TOLERANCE
            assert own[case.name]["gradients off"] <= TOLERANCE, case.name
