"""Random pipelines of two to four ranks have the gradients and losses of one process, in each step:
schedules, partitions, replicas, training modes, recomputation, frozen layers, dropout, orders.

Cases of bf16 weights compare with one process of the same mode.
"""

import os
from dataclasses import replace

import numpy as np
import pytest

from isobatch.engine.cost_model.training_mode import TrainingMode
from isobatch.engine.simulator.schedule import SCHEDULES
from support.rank_programs.rank_cases import Case, run_cases

DRAWS = int(os.environ.get("ISOBATCH_TEST_DRAWS", "10"))
"""Random cases of all numbers of ranks together: set 200 for a longer test."""
WORLDS = (2, 3, 4)
LAYERS, VISION = 11, 4
"""Of the toy model; the vision encoder's are in front."""
MODES = (
    None,
    TrainingMode(precision="fp32"),
    TrainingMode(zero_stage=0),
    TrainingMode(),
)


def random_case(seed):
    """(number of ranks, a case on them)."""
    rng = np.random.default_rng(seed)
    world = WORLDS[seed % len(WORLDS)]
    pp = int(rng.choice([count for count in (world, world, world // 2, 1) if world % count == 0]))
    schedule = SCHEDULES[seed % len(SCHEDULES)]  # any with any number of ranks: 3 and 5 of them
    chunks = int(rng.integers(1, LAYERS // pp + 1)) if "interleaved" in schedule else 1
    chunks = min(chunks, 3)
    cuts = np.sort(rng.choice(np.arange(1, LAYERS), pp * chunks - 1, replace=False)).tolist()
    case = Case(
        name=f"seed {seed}",
        seed=1 + seed,
        pp=pp,
        dp=world // pp,
        schedule=schedule,
        stages_per_rank=chunks,
        borders=(0, *cuts, LAYERS),
        mode=MODES[int(rng.integers(len(MODES)))],
        recompute=str(rng.choice(["none", "some", "all"])),
        tied=bool(rng.random() < 0.7),
        clip=0.05 if rng.random() < 0.3 else None,
        counts=tuple(rng.integers(1, 6, 2).tolist()),
        text_only=tuple(np.flatnonzero(rng.random(12) < 0.3).tolist()),
        dropout=0.2 if rng.random() < 0.3 else 0.0,
        reorder=bool(rng.random() < 0.4),
    )
    return world, replace(case, **_frozen(rng, case))


def _frozen(rng, case):
    """Nothing, layers anywhere, a part, or an encoder that runs ahead."""
    kind = rng.choice(["nothing", "layers", "part", "ahead"])
    if kind == "layers":
        return {"frozen": tuple(np.flatnonzero(rng.random(LAYERS) < 0.4).tolist())}
    if kind == "part":
        return {"frozen": (str(rng.choice(["vision", "language"])),)}
    if kind == "ahead" and case.borders[1] >= VISION:
        ranks = np.flatnonzero(rng.random(case.pp) < 0.6).tolist()
        return {"frozen": ("vision",), "encode_on": tuple(ranks)}
    return {}


@pytest.mark.parametrize("world_size", WORLDS)
def test_random_pipelines_have_the_gradients_and_losses_of_one_process(tmp_path, world_size):
    drawn = [random_case(seed) for seed in range(DRAWS)]
    run_cases(str(tmp_path), world_size, [case for world, case in drawn if world == world_size])
