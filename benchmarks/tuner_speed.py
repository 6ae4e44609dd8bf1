"""The tuner's time per step by global batch, and what each ingredient saves; its CPU time per rank
by replicas; orders simulated per second.

    python benchmarks/tuner_speed.py [--batches 128 256 512 1024] [--mix DataMix3] [--steps 8]
    [--rounds 3] [--replicas 8 64]

PipeTune's 13B model, TP 4, PP 4 on nodes of four A100s, and its mixtures (`papers/`). Searches:
PipeTune's (sizes in multiples of max_seq_len, 120 orders of clusters, pre-computation on the first
stage's rank), the same without pre-computation, and ours (sizes between, exchanges, every rank's
idle time). Times are of one core: of each step the least of several rounds, after one that
compiles; shown are the median and the longest step. Savings are of the sum of all steps, simulated.
By replicas: eight micro-batches each, of full groups in random order, or of groups of equal cost
as `packer build` makes them. "before": each rank tuned all replicas, as given and with samples
assigned by cost, and took the better; now all agree which it is, and each tunes its own.
"to bound": how far the best of the random orders is above `tune_order.lower_bound`. Exit status 1
when a step takes longer than PipeTune's search (0.2 s at 128 samples, 1.5 s at 1,024; figure 8), or
a rank of many more than .2 s of CPU time.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)]

from papers.datasets import PIPETUNE_MIXES, pipetune_samples  # noqa: E402
from papers.pipetune_tables import (  # noqa: E402
    MAX_SEQ_LEN,
    OURS,
    PIPETUNES,
    ingredients,
    make_pipeline,
    most_that_fits,
    savings,
)

from isobatch.balance.baseline_samplers import pack_in_order  # noqa: E402
from isobatch.balance.grouping.even_out import group_balanced  # noqa: E402
from isobatch.balance.steps.step_planner import StepRequest  # noqa: E402
from isobatch.common.types import Limits  # noqa: E402
from isobatch.engine.cost_model.loads import (  # noqa: E402
    Loads,
    packed_loads,
    sample_loads,
)
from isobatch.engine.simulator.program import make_program  # noqa: E402
from isobatch.engine.simulator.simulate import simulate  # noqa: E402
from isobatch.engine.simulator.stages import stage_costs  # noqa: E402
from isobatch.engine.tuning._order_search import lower_bound  # noqa: E402
from isobatch.engine.tuning.order_times import EncodeAhead, order_problem, times_of_orders  # noqa: E402
from isobatch.engine.tuning.precompute import frozen_encoder, where_to_encode  # noqa: E402
from isobatch.engine.tuning.step_planner import TunedSteps  # noqa: E402
from isobatch.engine.tuning.tune import PartitionedModel, TuneOptions, TuneResult, tune  # noqa: E402
from isobatch.models.presets import load_model  # noqa: E402

PAPER_S = {128: 0.2, 1024: 1.5}
"""PipeTune's search time at most (section 5.2)."""
SEARCHES = {
    "PipeTune's, nothing ahead": TuneOptions(
        max_seq_len=MAX_SEQ_LEN, sizes="multiples", search="clusters", encode="never"
    ),
    "PipeTune's": PIPETUNES,
    "ours": OURS,
}
MANY_ORDERS = 2_000
MOST_CPU_S, MICRO_BATCHES, EFFORT = 0.2, 8, 20_000
"""Of a rank and step; of a replica; `--effort` of training."""


def main() -> int:
    """Print the tables; -> exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", type=int, nargs="*", default=[128, 256, 512, 1024])
    parser.add_argument("--mix", choices=list(PIPETUNE_MIXES), default="DataMix3")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--replicas", type=int, nargs="*", default=[8, 64])
    options = parser.parse_args()
    pipeline = make_pipeline()
    limit = most_that_fits(pipeline) * MAX_SEQ_LEN
    model = load_model("pipetune_13b")
    steps = {
        batch: [
            sample_loads(
                pipetune_samples(options.mix, batch, MAX_SEQ_LEN, seed), model
            ).all_labelled()
            for seed in range(options.steps)
        ]
        for batch in options.batches
    }
    fast = show_tuner(steps, limit, pipeline, options)
    fast &= show_replicas(limit, pipeline, options)
    show_orders(steps, limit, pipeline)
    return 0 if fast else 1


def show_tuner(
    steps: dict[int, list[Loads]],
    limit: int,
    pipeline: PartitionedModel,
    options: argparse.Namespace,
) -> bool:
    """A row per batch and search; -> whether all are faster than the paper's."""
    heads = (
        "samples",
        "search",
        "ms",
        "longest",
        "paper",
        "balance",
        "+ order, ahead",
        "+ size",
        "orders",
        "m. of step",
    )
    table = new_table(f"{options.mix}, {options.steps} steps each; less time than untuned", heads)
    fast = True
    for batch, own in steps.items():
        for name, search in SEARCHES.items():
            tuned, times = timed(own, limit, pipeline, search, options.rounds)
            parts = [
                ingredients(step, pack_in_order(step.llm.tokens, limit), pipeline, search)
                for step in own
            ]
            fast &= max(times) <= PAPER_S.get(batch, float("inf"))
            paper = f"< {1e3 * PAPER_S[batch]:,.0f}" if batch in PAPER_S else "-"
            table.add_row(
                str(batch),
                name,
                f"{1e3 * np.median(times):.1f}",
                f"{1e3 * max(times):.1f}",
                paper,
                *(f"{share:.1%}" for share in savings(parts)),
                f"{np.mean([each.num_simulated for each in tuned]):,.0f}",
                f"{np.mean([len(each.groups) for each in tuned]):.0f}",
            )
        table.add_section()
    Console(width=150).print(table)
    return fast


def timed(
    steps: list[Loads], limit: int, pipeline: PartitionedModel, search: TuneOptions, rounds: int
) -> tuple[list[TuneResult], list[float]]:
    """The tuned steps and the least time that each took, s; a round goes through all steps, as
    training does.
    """
    given = [pack_in_order(samples.llm.tokens, limit) for samples in steps]
    tuned = [
        tune(samples, own, pipeline, search) for samples, own in zip(steps, given, strict=True)
    ]
    best = [float("inf")] * len(steps)
    for _ in range(rounds):
        for place, (samples, own) in enumerate(zip(steps, given, strict=True)):
            started = time.perf_counter()
            tune(samples, own, pipeline, search)
            best[place] = min(best[place], time.perf_counter() - started)
    return tuned, best


def show_replicas(limit: int, pipeline: PartitionedModel, options: argparse.Namespace) -> bool:
    """A row per number of replicas and kind of groups; -> whether a rank is fast enough."""
    heads = ("replicas", "groups", "CPU s of a rank", "before", "less time", "before")
    title = f"{options.mix}, {options.steps} steps each; less time than untuned"
    table, fast, model = new_table(title, heads), True, load_model("pipetune_13b")
    tuning = replace(OURS, encode="own", effort=EFFORT)
    planner = TunedSteps(
        pipeline=pipeline,
        options=tuning,
        loads=lambda counts: sample_loads(counts, model).all_labelled(),
    )
    for replicas in options.replicas:
        for kind in ("full", "of equal cost"):
            times, untuned_ns = [], 0
            tuned_ns = np.zeros(2, np.int64)  # as planned, and before
            for seed in range(options.steps):
                step = drawn_step(options.mix, replicas, limit, seed, even=kind != "full")
                planner(replace(step, rank=0))  # compiles
                begun = time.process_time()
                planner(replace(step, rank=seed % replicas))
                planned = time.process_time()
                before_ns = tuned_by_all(planner, step)
                times.append((planned - begun, time.process_time() - planned))
                plan = planner.plan(step)  # what all ranks together plan
                untuned_ns += plan.untuned_ns
                tuned_ns += plan.step_ns, before_ns
            own_s, before_s = np.median(times, axis=0).tolist()
            fast &= own_s <= MOST_CPU_S
            saved = (f"{share:.2%}" for share in 1 - tuned_ns / untuned_ns)
            table.add_row(str(replicas), kind, f"{own_s:.3f}", f"{before_s:.2f}", *saved)
    Console(width=150).print(table)
    return fast


def drawn_step(mix: str, replicas: int, limit: int, seed: int, *, even: bool) -> StepRequest:
    """A step of many replicas."""
    wanted = replicas * MICRO_BATCHES
    count = 32 * wanted
    while True:
        counts = pipetune_samples(mix, count, MAX_SEQ_LEN, seed)
        groups = pack_in_order(counts.seq_len, limit)
        if even:
            vision = counts.num_vit_tokens
            caps = Limits(
                max_seq_len=limit, max_vision=int(vision.sum()), min_seq_len=0, min_vision=0
            )
            groups = group_balanced(vision, counts.seq_len, caps, seed=seed)
        if len(groups) > wanted:
            break
        count *= 2
    chosen = groups.take(np.random.default_rng(seed).permutation(len(groups) - 1)[:wanted])
    return StepRequest(
        counts=counts.take(chosen.samples),
        offsets=chosen.offsets,
        dp=replicas,
        micro_batches=MICRO_BATCHES,
    )


def tuned_by_all(planner: TunedSteps, step: StepRequest) -> int:
    """Time of the slowest rank, ns, by the better of both assignments after tuning."""
    loads = planner.loads(step.counts)
    given = [planner._rank_groups(step, rank) for rank in range(step.dp)]
    both = (given, planner._assign(loads, given))
    return min(max(planner._tune(loads, own).step_ns for own in ranks) for ranks in both)


def show_orders(steps: dict[int, list[Loads]], limit: int, pipeline: PartitionedModel) -> None:
    """Orders simulated per second, beside the general simulator on the same step."""
    heads = (
        "samples",
        "micro-batches",
        "k orders/s",
        "memory too",
        "own ahead",
        "any ahead",
        "simulate()",
        "to bound",
    )
    table = new_table(f"{MANY_ORDERS:,} random orders of a step, thousand per second", heads)
    for batch, own in steps.items():
        groups = pack_in_order(own[0].llm.tokens, limit)
        costs = pipeline.cost(packed_loads(own[0], groups))
        stages = stage_costs(costs, pipeline.borders, pipeline.recompute)
        schedule = pipeline.make_schedule(len(groups))
        encoder = frozen_encoder(costs, pipeline.borders)
        rng = np.random.default_rng(0)
        orders = np.array([rng.permutation(len(groups)) for _ in range(MANY_ORDERS)])

        def rate(
            ahead: EncodeAhead | None = None,
            memory: int | None = None,
            stages=stages,
            schedule=schedule,
            orders=orders,
        ):  # type: ignore[no-untyped-def]
            problem = order_problem(schedule, stages, memory, ahead)
            return len(orders) / seconds(lambda: times_of_orders(problem, orders)) / 1e3

        ahead = {
            where: where_to_encode(encoder, schedule, stages, where=where)
            for where in ("own", "any")
        }
        problem = order_problem(schedule, stages)
        best = int(times_of_orders(problem, orders).min())
        program = make_program(schedule, stages)
        table.add_row(
            str(batch),
            str(len(groups)),
            f"{rate():,.0f}",
            f"{rate(memory=1 << 60):,.0f}",
            f"{rate(ahead['own']):,.0f}",
            f"{rate(ahead['any']):,.0f}",
            f"{1 / seconds(lambda program=program: simulate(program)) / 1e3:,.1f}",
            f"{best / lower_bound(problem) - 1:.2%}",
        )
    Console(width=150).print(table)


def seconds(run) -> float:  # type: ignore[no-untyped-def]
    """Least of five runs, after one that compiles."""
    run()
    best = float("inf")
    for _ in range(5):
        started = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - started)
    return best


def new_table(title: str, heads: tuple[str, ...]) -> Table:
    """Numbers to the right."""
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False)
    for head in heads:
        left = head in ("search", "groups")
        table.add_column(head, justify="left" if left else "right", no_wrap=True)
    return table


if __name__ == "__main__":
    sys.exit(main())
