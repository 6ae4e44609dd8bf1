"""The names that `balance` exports: users write them, so they change only on purpose."""

import subprocess
import sys

from isobatch import balance

NAMES = """
ActivationBudget BASELINES GlobalShuffle GroupOptions GroupOrder MoveCosts Resource RolloutPlan
StepAssignment StepPlanner StepRequest as_groups assign_rollouts autocorrelation bound_ms
choose_limits choose_limits_omnibal dist_ratio epoch_steps even_out even_ranks fill
gradient_shares group_balanced group_best_fit group_isf lower_bounds pad_ratio padded_loads
regroup repeated_pairs sample_weights source_entropy step_ms
"""


def test_exported_names():
    assert balance.__all__ == NAMES.split()
    assert all(hasattr(balance, name) for name in NAMES.split())


def test_unknown_names_are_attribute_errors():
    assert not hasattr(balance, "NoSuchName")


def test_types_presets_and_plans_of_media_need_no_compiler():
    program = (
        "from isobatch.balance import GlobalShuffle, StepPlanner\n"
        "from isobatch.models import audio_tokens, image_tokens, presets\n"
        "import sys; print('numba' in sys.modules)"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "False"
