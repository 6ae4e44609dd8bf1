"""Plan, simulate and train pipelines of multimodal models.

Public names are imported when they are first used: planning needs no torch.
"""

from balance.lazy_exports import lazy_exports

__all__, __getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "engine.charts.gantt": "GanttStep write_gantt",
        "engine.charts.trace": "write_trace",
        "engine.cost_model.clusters": "Cluster load_cluster",
        "engine.cost_model.costs": "Costs",
        "engine.cost_model.loads": "Loads PhaseLoads sample_loads",
        "engine.cost_model.parallel": "Parallelism Training",
        "engine.cost_model.profile_table": "Profile profiled_costs read_profile write_profile",
        "engine.cost_model.training_mode": "TrainingMode",
        "engine.dispatching.dispatch": "DispatchOptions DispatchedSteps plan_dispatch",
        "engine.planning.plan": "Plan PlanRequest read_plan write_plan",
        "engine.planning.planner": "PlanResult plan",
        "engine.planning.recompute": "InfeasiblePlan",
        "engine.simulator.evaluate": "SimulatedStep evaluate",
        "engine.simulator.schedule": "Schedule make_schedule",
        "engine.tuning.step_planner": "TunedSteps",
        "engine.tuning.tune": "PartitionedModel TuneOptions tune",
        # need torch
        "engine.runtime.batch_loads": "batch_loads",
        "engine.runtime.checkpoints.training_state": "Progress load_state save_state",
        "engine.runtime.communication.feature_all_to_all": "exchange_features",
        "engine.runtime.communication.process_groups": "sum_gradients",
        "engine.runtime.models.transformers_models": "from_transformers",
        "engine.runtime.pipeline": "Pipeline PipelineOptions",
        "engine.runtime.profiling.measure_layers": "measure_layers",
        "engine.runtime.profiling.recompute_trials": "AdaptOptions adapt_running",
        "engine.runtime.stage_io": "LayerStack TensorSpec",
        "engine.train.models.open_model": "open_model",
    },
)
