"""Encoder pre-computation, other orders of micro-batches, and dropout change no gradient and no
loss.
"""

import pytest

from support.rank_programs.rank_cases import Case, run_cases

AHEAD = {"frozen": ("vision",), "counts": (5, 1, 6)}
TWO = [
    Case(name="encoded on the first rank", pp=2, encode_on=(0,), borders=(0, 5, 11), **AHEAD),
    Case(
        name="encoded on both",
        pp=2,
        encode_on=(0, 1),
        borders=(0, 4, 11),
        recompute="some",
        **AHEAD,
    ),
    Case(
        name="encoded, reordered and dropped out",
        pp=2,
        encode_on=(0, 1),
        borders=(0, 6, 11),
        dropout=0.3,
        reorder=True,
        recompute="some",
        **AHEAD,
    ),
    Case(
        name="encoded and ordered by the planner",
        pp=2,
        encode_on=(0, 1),
        borders=(0, 5, 11),
        planned=True,
        reorder=True,
        **AHEAD,
    ),
    Case(name="reordered", pp=2, reorder=True, counts=(5, 3)),
    Case(name="dropout", pp=2, dropout=0.3, counts=(4, 3)),
    Case(
        name="dropout, all recomputed, zero bubble",
        pp=2,
        dropout=0.3,
        recompute="all",
        schedule="zero_bubble",
    ),
    Case(
        name="dropout in replicas, some recomputed",
        pp=1,
        dp=2,
        dropout=0.3,
        recompute="some",
        counts=(3, 2),
    ),
]
FOUR = [
    Case(
        name="encoded on ranks that are no neighbours",
        pp=4,
        encode_on=(0, 2, 3),
        borders=(0, 5, 7, 9, 11),
        **AHEAD,
    ),
    Case(
        name="dropout, interleaved, reordered",
        pp=2,
        dp=2,
        schedule="interleaved",
        stages_per_rank=2,
        dropout=0.3,
        reorder=True,
        recompute="some",
        counts=(4, 3),
    ),
]


@pytest.mark.parametrize(("world_size", "cases"), [(2, TWO), (4, FOUR)])
def test_gradients_and_losses_still_equal_one_process(tmp_path, world_size, cases):
    run_cases(str(tmp_path), world_size, cases)
