"""The names that `balance` exports: users write them, so they change only on purpose."""

import subprocess
import sys

import balance

NAMES = """
ActivationBudget AudioPlan AudioRejected AudioRule BASELINES CommVolumes ComputeLoad
ConfigError Counts DamagedShard DataError DatasetPreset FlopsModel GlobalShuffle GpuSpeed
GroupOptions GroupOrder Groups ImagePlan ImageRejected IsobatchError Limits MediaRejected
ModelPreset Permutation Resource StepAssignment StepPlanner StepRequest
as_batches as_groups autocorrelation balance_conv balance_padded balance_padded_attention
balance_squares balance_sums choose_limits choose_limits_omnibal cluster_costs
cluster_orders comm_volumes dist_ratio epoch_steps even_out fill from_assignment gradient_shares
group_balanced group_best_fit group_isf load_dataset load_model lower_bounds pack_balanced pad_ratio
padded_loads place_batches plan_audio plan_image regroup repeated_pairs sample_weights
source_entropy
"""


def test_exported_names():
    assert balance.__all__ == NAMES.split()
    assert all(hasattr(balance, name) for name in NAMES.split())


def test_unknown_names_are_attribute_errors():
    assert not hasattr(balance, "NoSuchName")


def test_types_presets_and_plans_of_media_need_no_compiler():
    light = "Counts, load_model, plan_image, plan_audio, GlobalShuffle, StepPlanner"
    program = f"from balance import {light}; import sys; print('numba' in sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "False"
