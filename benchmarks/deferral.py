"""A zero-bubble step's time against the memory of a rank. Simulated.

    python benchmarks/deferral.py

Rows of OmniBal's Table 9 on its A100 clusters, for memory from what 1F1B needs with nothing
recomputed downwards: 1F1B; zero bubble that defers as many weight gradients as the schedule does,
whatever must be recomputed for them; and as it is planned, where deferral is bounded.
"""

import argparse

from papers.omnibal_models import PAIRS
from papers.page import table
from plans_for import request

from isobatch.common.types import IntArray
from isobatch.engine.cost_model.costs import Costs
from isobatch.engine.planning import planner
from isobatch.engine.planning.plan import PlanRequest
from isobatch.engine.planning.recompute import InfeasiblePlan
from isobatch.engine.planning.search.partition_search import search_partition
from isobatch.engine.simulator.evaluate import evaluate

GIB = 1 << 30
SCHEDULES = (("zero_bubble", 1), ("interleaved_zero_bubble", 2))
SHARES = (1.2, 1.0, 0.9, 0.8, 0.7, 0.6, 0.5)
"""Memory, as a share of 1F1B's peak."""


def unbounded(asked: PlanRequest, costs: Costs) -> tuple[int, int] | None:
    """Step and recomputed layers of an asked schedule as it is; None if nothing fits."""
    try:
        found = search_partition(costs, asked.make_schedule(), asked.memory_bytes)
    except InfeasiblePlan:
        return None
    return found.step_ns, int(found.recompute.sum())


def bounded(asked: PlanRequest) -> tuple[int, int, IntArray] | None:
    """The same as it is planned, and the limits of deferral."""
    try:
        result = planner.plan(asked)
    except InfeasiblePlan:
        return None
    return result.best.step_ns, int(result.best.recompute.sum()), result.plan.deferred


def text(found: tuple[int, ...] | None) -> str:
    """A step in s, and recomputed layers."""
    return "does not fit" if found is None else f"{found[0] / 1e9:.2f} ({found[1]})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=2, help="Rows of Table 9. Default: 2.")
    args = parser.parse_args()
    rows = []
    for pair in PAIRS[: args.pairs]:
        for name, per_rank in SCHEDULES:
            plain = request(
                pair.preset,
                pair.parallel,
                name.removesuffix("zero_bubble").strip("_") or "1f1b",
                per_rank,
            )
            costs = plain.costs(plain.full_step)
            free = search_partition(costs, plain.make_schedule(), 1 << 60)
            peak = evaluate(costs, free.borders, free.recompute, plain.make_schedule())
            for share in SHARES:
                memory = int(share * peak.memory.peak_bytes.max())
                joint = unbounded(plain.changed(memory_bytes=memory), costs)
                split = plain.changed(memory_bytes=memory, schedule=name)
                whole, limited = unbounded(split, costs), bounded(split)
                limits = "all" if limited and limited[2] is None else ""
                if limited and limited[2] is not None:
                    limits = " ".join(map(str, limited[2]))
                row = f"{memory / GIB:.1f}", text(joint), text(whole), text(limited), limits
                rows.append([pair.name, name, *row])
    headings = "model", "schedule", "GiB", "joint, s", "all deferred, s", "planned, s", "may wait"
    print(table(headings, rows))


if __name__ == "__main__":
    main()
