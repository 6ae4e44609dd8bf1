"""Balancing samples: pure functions on NumPy arrays, shared by all packages.

NumPy and numba, and nothing else: no file, no model, no shard.
Public names are imported when they are first used: numba's runtime takes .5 s and 100 MB.
"""

from typing import TYPE_CHECKING

from isobatch.common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from isobatch.balance.baseline_samplers import BASELINES as BASELINES
    from isobatch.balance.baseline_samplers import as_groups as as_groups
    from isobatch.balance.dispatching.even_ranks import MoveCosts as MoveCosts
    from isobatch.balance.dispatching.even_ranks import bound_ms as bound_ms
    from isobatch.balance.dispatching.even_ranks import even_ranks as even_ranks
    from isobatch.balance.dispatching.even_ranks import step_ms as step_ms
    from isobatch.balance.dispatching.rollouts import RolloutPlan as RolloutPlan
    from isobatch.balance.dispatching.rollouts import assign_rollouts as assign_rollouts
    from isobatch.balance.grouping.activation_budget import ActivationBudget as ActivationBudget
    from isobatch.balance.grouping.best_fit import group_best_fit as group_best_fit
    from isobatch.balance.grouping.caps import GroupOptions as GroupOptions
    from isobatch.balance.grouping.caps import choose_limits as choose_limits
    from isobatch.balance.grouping.caps import choose_limits_omnibal as choose_limits_omnibal
    from isobatch.balance.grouping.even_out import even_out as even_out
    from isobatch.balance.grouping.even_out import group_balanced as group_balanced
    from isobatch.balance.grouping.isf import group_isf as group_isf
    from isobatch.balance.grouping.resources import Resource as Resource
    from isobatch.balance.loss_weights import sample_weights as sample_weights
    from isobatch.balance.metrics import autocorrelation as autocorrelation
    from isobatch.balance.metrics import dist_ratio as dist_ratio
    from isobatch.balance.metrics import fill as fill
    from isobatch.balance.metrics import gradient_shares as gradient_shares
    from isobatch.balance.metrics import lower_bounds as lower_bounds
    from isobatch.balance.metrics import pad_ratio as pad_ratio
    from isobatch.balance.metrics import padded_loads as padded_loads
    from isobatch.balance.metrics import repeated_pairs as repeated_pairs
    from isobatch.balance.metrics import source_entropy as source_entropy
    from isobatch.balance.order.regroup import regroup as regroup
    from isobatch.balance.order.step_order import GlobalShuffle as GlobalShuffle
    from isobatch.balance.order.step_order import GroupOrder as GroupOrder
    from isobatch.balance.order.step_order import epoch_steps as epoch_steps
    from isobatch.balance.steps.step_planner import StepAssignment as StepAssignment
    from isobatch.balance.steps.step_planner import StepPlanner as StepPlanner
    from isobatch.balance.steps.step_planner import StepRequest as StepRequest
else:
    __all__, __getattr__, __dir__ = lazy_exports(__name__, __file__)
