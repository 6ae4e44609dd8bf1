"""Memory of running pipelines, every byte counted, next to that of their plans in each mode.

Each run is in two of the four modes: with each precision, and with each of the ways to share.
"""

import numpy as np
import pytest

from isobatch.engine.cost_model.profile_table import profile_from_dict
from isobatch.engine.cost_model.training_mode import TrainingMode
from isobatch.engine.planning.planner import plan_from_profile
from support.rank_programs.rank_memory import (
    PP,
    RUNS,
    profile_mode,
    request_for,
    train_counted,
)
from support.ranks import run_ranks

DP, CLOSE = 2, 0.05
MODES = [
    TrainingMode(precision=precision, zero_stage=stage)
    for precision in ("fp32", "bf16")
    for stage in (0, 1)
]


def runs_in(mode):
    """Every second run: the others are in the two modes that differ from this one in one choice."""
    is_odd = (mode.precision == "bf16") ^ (mode.zero_stage == 1)
    return dict(list(RUNS.items())[is_odd::2])


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_what_is_live_at_most_is_what_was_planned(mode, tmp_path_factory):
    said = run_ranks(tmp_path_factory.mktemp("profile"), PP, profile_mode, mode)
    profile = profile_from_dict(said[0]["profile"])
    runs = runs_in(mode)
    counted = run_ranks(tmp_path_factory.mktemp("trained"), PP * DP, train_counted, mode, DP, runs)
    for name, run in runs.items():
        borders = np.array(run.borders)
        plan = plan_from_profile(request_for(mode, DP, run), profile, borders, run.recompute)
        for rank, said in enumerate(counted):
            own, where = said[name], f"{name}, rank {rank}"
            peak = plan.predicted.full_peak_bytes[rank % PP]
            # plans have gradients from the beginning; in a step they come with backward passes
            assert own["planned"] == pytest.approx(peak, rel=CLOSE), where
            assert own["peak"] <= (1 + CLOSE) * peak, where
            assert own["peak"] >= (1 - CLOSE) * (peak - own["gradients"]), where
            # between steps, when there are no gradients
            kept = plan.predicted.state_bytes[rank % PP] - own["gradients"]
            assert own["kept"] == pytest.approx(kept, rel=0.01), where
