"""Plan, simulate and train pipelines of multimodal models.

Public names are imported when they are first used: planning needs no torch.
"""

from typing import TYPE_CHECKING

from isobatch.common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from isobatch.balance.dispatching.all_to_all import CommVolumes as CommVolumes
    from isobatch.balance.dispatching.all_to_all import Permutation as Permutation
    from isobatch.balance.dispatching.all_to_all import comm_volumes as comm_volumes
    from isobatch.balance.dispatching.all_to_all import from_assignment as from_assignment
    from isobatch.balance.dispatching.node_placement import place_batches as place_batches
    from isobatch.balance.dispatching.post_balancing import as_batches as as_batches
    from isobatch.balance.dispatching.post_balancing import balance_conv as balance_conv
    from isobatch.balance.dispatching.post_balancing import balance_padded as balance_padded
    from isobatch.balance.dispatching.post_balancing import (
        balance_padded_attention as balance_padded_attention,
    )
    from isobatch.balance.dispatching.post_balancing import balance_squares as balance_squares
    from isobatch.balance.dispatching.post_balancing import balance_sums as balance_sums
    from isobatch.engine.charts.trace import TraceStep as TraceStep
    from isobatch.engine.charts.trace import write_trace as write_trace
    from isobatch.engine.cost_model.costs import Costs as Costs
    from isobatch.engine.cost_model.loads import Loads as Loads
    from isobatch.engine.cost_model.loads import PhaseLoads as PhaseLoads
    from isobatch.engine.cost_model.loads import sample_loads as sample_loads
    from isobatch.engine.cost_model.parallel import Parallelism as Parallelism
    from isobatch.engine.cost_model.parallel import Training as Training
    from isobatch.engine.cost_model.profile_table import Profile as Profile
    from isobatch.engine.cost_model.profile_table import profiled_costs as profiled_costs
    from isobatch.engine.cost_model.profile_table import read_profile as read_profile
    from isobatch.engine.cost_model.profile_table import write_profile as write_profile
    from isobatch.engine.cost_model.training_mode import TrainingMode as TrainingMode
    from isobatch.engine.dispatching.dispatch import DispatchedSteps as DispatchedSteps
    from isobatch.engine.dispatching.dispatch import DispatchOptions as DispatchOptions
    from isobatch.engine.dispatching.dispatch import plan_dispatch as plan_dispatch
    from isobatch.engine.planning.plan import Plan as Plan
    from isobatch.engine.planning.plan import PlanRequest as PlanRequest
    from isobatch.engine.planning.plan import read_plan as read_plan
    from isobatch.engine.planning.plan import write_plan as write_plan
    from isobatch.engine.planning.planner import PlanResult as PlanResult
    from isobatch.engine.planning.planner import plan as plan
    from isobatch.engine.planning.recompute import InfeasiblePlan as InfeasiblePlan
    from isobatch.engine.runtime.batch_loads import batch_loads as batch_loads
    from isobatch.engine.runtime.checkpoints.training_state import Progress as Progress
    from isobatch.engine.runtime.checkpoints.training_state import load_state as load_state
    from isobatch.engine.runtime.checkpoints.training_state import save_state as save_state
    from isobatch.engine.runtime.communication.feature_all_to_all import (
        exchange_features as exchange_features,
    )
    from isobatch.engine.runtime.communication.process_groups import sum_gradients as sum_gradients
    from isobatch.engine.runtime.models.transformers_models import (
        from_transformers as from_transformers,
    )
    from isobatch.engine.runtime.pipeline import Pipeline as Pipeline
    from isobatch.engine.runtime.pipeline import PipelineOptions as PipelineOptions
    from isobatch.engine.runtime.profiling.measure_layers import measure_layers as measure_layers
    from isobatch.engine.runtime.profiling.recompute_trials import AdaptOptions as AdaptOptions
    from isobatch.engine.runtime.profiling.recompute_trials import adapt_running as adapt_running
    from isobatch.engine.runtime.stage_io import LayerStack as LayerStack
    from isobatch.engine.runtime.stage_io import TensorSpec as TensorSpec
    from isobatch.engine.simulator.evaluate import SimulatedStep as SimulatedStep
    from isobatch.engine.simulator.evaluate import evaluate as evaluate
    from isobatch.engine.simulator.schedule import Schedule as Schedule
    from isobatch.engine.simulator.schedule import make_schedule as make_schedule
    from isobatch.engine.train.models.open_model import open_model as open_model
    from isobatch.engine.tuning.pack import cluster_costs as cluster_costs
    from isobatch.engine.tuning.pack import cluster_orders as cluster_orders
    from isobatch.engine.tuning.pack import pack_balanced as pack_balanced
    from isobatch.engine.tuning.step_planner import TunedSteps as TunedSteps
    from isobatch.engine.tuning.tune import PartitionedModel as PartitionedModel
    from isobatch.engine.tuning.tune import TuneOptions as TuneOptions
    from isobatch.engine.tuning.tune import tune as tune
    from isobatch.models.clusters import Cluster as Cluster
    from isobatch.models.clusters import load_cluster as load_cluster
else:
    __all__, __getattr__, __dir__ = lazy_exports(__name__, __file__)
