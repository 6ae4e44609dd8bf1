"""The names that `engine` exports, and that planning with them needs no torch."""

import subprocess
import sys

from isobatch import engine

NAMES = [
    "AdaptOptions",
    "LayerStack",
    "Progress",
    "TensorSpec",
    "adapt_running",
    "batch_loads",
    "exchange_features",
    "from_transformers",
    "measure_layers",
    "open_model",
    "sum_gradients",
    "Cluster",
    "Costs",
    "DispatchOptions",
    "DispatchedSteps",
    "TraceStep",
    "InfeasiblePlan",
    "Loads",
    "Parallelism",
    "PartitionedModel",
    "PhaseLoads",
    "Pipeline",
    "PipelineOptions",
    "Plan",
    "PlanRequest",
    "PlanResult",
    "Profile",
    "Schedule",
    "SimulatedStep",
    "TuneOptions",
    "TunedSteps",
    "evaluate",
    "load_cluster",
    "load_state",
    "make_schedule",
    "plan",
    "plan_dispatch",
    "profiled_costs",
    "read_plan",
    "read_profile",
    "sample_loads",
    "save_state",
    "Training",
    "TrainingMode",
    "tune",
    "write_plan",
    "write_profile",
    "write_trace",
    "CommVolumes",
    "Permutation",
    "as_batches",
    "balance_conv",
    "balance_padded",
    "balance_padded_attention",
    "balance_squares",
    "balance_sums",
    "cluster_costs",
    "cluster_orders",
    "comm_volumes",
    "from_assignment",
    "pack_balanced",
    "place_batches",
]
WITHOUT_TORCH = """
import sys
import isobatch.engine as engine
before = set(sys.modules)
from isobatch.engine import plan, read_plan, tune
assert "torch" not in sys.modules, "planning imports torch"
assert not any(name.startswith("engine.") for name in before), "engine imports its modules at once"
"""


def test_the_exported_names_are_these_and_exist():
    assert engine.__all__ == sorted(NAMES)
    assert all(getattr(engine, name).__name__ == name for name in NAMES)
    assert dir(engine) == engine.__all__


def test_planning_imports_no_torch_and_engine_alone_imports_nothing():
    subprocess.run([sys.executable, "-c", WITHOUT_TORCH], check=True)
