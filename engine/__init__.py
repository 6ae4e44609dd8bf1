"""Plan, simulate and train pipelines of multimodal models; planning needs no torch."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_EXPORTS = {
    "engine.charts.gantt": ("GanttStep", "write_gantt"),
    "engine.charts.trace": ("write_trace",),
    "engine.cost_model.clusters": ("Cluster", "load_cluster"),
    "engine.cost_model.costs": ("Costs",),
    "engine.cost_model.loads": ("Loads", "PhaseLoads", "sample_loads"),
    "engine.cost_model.parallel": ("Parallelism", "Training"),
    "engine.cost_model.profile_table": (
        "Profile",
        "profiled_costs",
        "read_profile",
        "write_profile",
    ),
    "engine.dispatching.dispatch": ("DispatchOptions", "plan_dispatch"),
    "engine.dispatching.step_planner": ("DispatchedSteps",),
    "engine.planning.plan": ("Plan", "read_plan", "write_plan"),
    "engine.planning.planner": ("PlanRequest", "PlanResult", "plan"),
    "engine.planning.recompute": ("InfeasiblePlan",),
    "engine.simulator.evaluate": ("SimulatedStep", "evaluate"),
    "engine.simulator.schedule": ("Schedule", "make_schedule"),
    "engine.tuning.step_planner": ("TunedSteps",),
    "engine.tuning.tune": ("PartitionedModel", "TuneOptions", "tune"),
    # need torch
    "engine.runtime.batch_loads": ("batch_loads",),
    "engine.runtime.checkpoints.training_state": ("Progress", "load_state", "save_state"),
    "engine.runtime.communication.feature_all_to_all": ("exchange_features",),
    "engine.runtime.communication.process_groups": ("sum_gradients",),
    "engine.runtime.models.transformers_models": ("from_transformers",),
    "engine.runtime.pipeline": ("Pipeline", "PipelineOptions"),
    "engine.runtime.profiling.measure_layers": ("measure_layers",),
    "engine.runtime.profiling.recompute_trials": ("AdaptOptions", "adapt_running"),
    "engine.runtime.stage_io": ("LayerStack", "TensorSpec"),
    "engine.train.models.open_model": ("open_model",),
}
_MODULES = {name: module for module, names in _EXPORTS.items() for name in names}

__all__ = sorted(_MODULES)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that planning does not import torch."""
    if name not in _MODULES:
        raise AttributeError(f"module 'engine' has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
