"""A step like a real one, for the tests of charts: equal layers, half of them recomputed, uneven
micro-batches.
"""

import numpy as np

from isobatch.engine.charts.trace import TraceStep
from isobatch.engine.cost_model.costs import Costs
from isobatch.engine.simulator.evaluate import evaluate
from isobatch.engine.simulator.schedule import make_schedule


def chart_costs(num_layers, num_micro_batches):
    """Layers of 4 ms and 512 MiB, micro-batches of .8 to 1.2 times that."""
    share = np.random.default_rng(0).uniform(0.8, 1.2, (1, num_micro_batches))
    rows = np.ones((num_layers, 1))

    def spread(value):
        return (value * share * rows).astype(np.int64)

    last = np.zeros((num_layers, num_micro_batches), np.int64)
    last[:-1] = spread(1e6)[:-1]
    return Costs(
        names=tuple(f"layer {number}" for number in range(num_layers)),
        kinds=("layer",) * num_layers,
        forward_ns=spread(4e6),
        input_grad_ns=spread(4e6),
        weight_grad_ns=spread(4e6),
        recompute_ns=spread(4e6),
        send_ns=last,
        saved_bytes=spread(2**29),
        kept_bytes=spread(2**24),
        working_bytes=spread(2**20),
        input_working_bytes=spread(2**20),
        weight_working_bytes=spread(2**20),
        deferred_bytes=spread(2**28),
        sent_bytes=spread(2**24),
        state_bytes=np.full(num_layers, 2**30),
        param_counts=np.full(num_layers, 2**26),
        sends_grad=np.ones(num_layers, bool),
    )


def chart_step(name, ranks, micro_batches, stages_per_rank=1, num_layers=64):
    """A `TraceStep` of a schedule."""
    costs = chart_costs(num_layers, micro_batches)
    borders = np.linspace(0, num_layers, ranks * stages_per_rank + 1).astype(int)
    recompute = np.arange(num_layers) < num_layers // 2
    outcome = evaluate(
        costs, borders, recompute, make_schedule(name, ranks, micro_batches, stages_per_rank)
    )
    again = np.add.reduceat(
        np.where(recompute[:, np.newaxis], costs.recompute_ns, 0), borders[:-1], axis=0
    )
    return TraceStep(title=f"Schedule {name}", simulated=outcome, recompute_ns=again)
