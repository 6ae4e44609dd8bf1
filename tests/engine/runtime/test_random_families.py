"""Random pipelines of families' models have the losses and gradients of one process.

Families, 2 to 4 ranks, pipelines and replicas, ZeRO 0 and 1, schedules, deferral, recomputation,
frozen parts, micro-batches without images or without anything; float32.
"""

import os

import pytest

pytest.importorskip("transformers")

from support.rank_programs.family_cases import random_case, run_cases

DRAWS = int(os.environ.get("ISOBATCH_TEST_DRAWS", "12"))
"""Random cases: set 200 for a longer test."""
FIRST = int(os.environ.get("ISOBATCH_TEST_FIRST", "0"))
WORLDS = (4, 2, 3)
"""Numbers of ranks: the first twelve cases are of one launch."""


@pytest.mark.parametrize("world", WORLDS)
def test_random_families_have_the_gradients_and_losses_of_one_process(tmp_path, world):
    seeds = [seed for seed in range(FIRST, FIRST + DRAWS) if WORLDS[seed // 12 % 3] == world]
    cases = [random_case(seed, world) for seed in seeds]
    if cases:
        run_cases(str(tmp_path), world, cases)
