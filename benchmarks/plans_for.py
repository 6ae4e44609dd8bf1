"""What it costs to train by a plan that another trainer can follow. Simulated.

    python benchmarks/plans_for.py

Five rows of OmniBal's Table 9, on its A100 clusters, for Megatron-LM; and Qwen3.5-9B, for
TorchTitan and NeMo Automodel too, whose pipelines take none of those models. Beside the free plan
of the same schedule: equal micro-batches of 9 images of 1,025 encoder tokens, and 4,096 tokens, 32
per step and replica. Each is planned with 1F1B, and with two stages per rank.
"""

import argparse
import time

from papers.omnibal_models import (
    IMAGES,
    MICRO_BATCHES,
    PAIRS,
    SAMPLES,
    SEQ_LEN,
    TRAINING,
    VIT_TOKENS,
    a100,
)
from papers.page import table

from isobatch.common.errors import ConfigError
from isobatch.engine.cost_model.loads import Loads
from isobatch.engine.cost_model.parallel import Parallelism
from isobatch.engine.planning import planner
from isobatch.engine.planning.plan import PlanRequest
from isobatch.engine.planning.recompute import InfeasiblePlan
from isobatch.engine.planning.search.limits import SearchLimits
from isobatch.engine.planning.trainers.expressible import TRAINERS
from isobatch.engine.planning.trainers.plan_for import plan_for
from isobatch.engine.planning.trainers.settings import llm_layers
from isobatch.models.presets import load_model

GIB = 1 << 30
SHAPES = (("1f1b", 1), ("interleaved", 2))
MOST_S = 20.0
"""Of the free search."""
OTHERS = (("Qwen3.5 9B", "qwen3_5", Parallelism(tp=2, pp=4, dp=4)),)


def request(preset: str, parallel: Parallelism, schedule: str, per_rank: int) -> PlanRequest:
    """One step of equal micro-batches."""
    load = {"images": IMAGES, "vit_tokens_per_image": VIT_TOKENS, "seq_len": SEQ_LEN}
    count = MICRO_BATCHES * parallel.dp
    return PlanRequest(
        model=load_model(preset),
        cluster=a100(),
        parallel=parallel,
        training=TRAINING,
        schedule=schedule,
        stages_per_rank=per_rank,
        num_micro_batches=MICRO_BATCHES,
        memory_bytes=a100().usable_memory_bytes,
        loads=Loads.constant(count, samples=SAMPLES, **load),
        full=Loads.constant(1, samples=SAMPLES, **load),
    )


def rows_of(name: str, preset: str, parallel: Parallelism) -> list[list[str]]:
    """A row per schedule and trainer."""
    rows = []
    for schedule, per_rank in SHAPES:
        asked = request(preset, parallel, schedule, per_rank)
        limits = SearchLimits(deadline_s=time.monotonic() + MOST_S)
        free = planner.plan(asked, limits=limits)
        for trainer in TRAINERS:
            where = [name, f"{parallel.tp} {parallel.pp} {parallel.dp}", schedule, trainer]
            try:
                started = time.monotonic()
                planned = plan_for(trainer, asked, free)
                taken_s = time.monotonic() - started
            except ConfigError:
                continue
            except InfeasiblePlan:
                rows.append([*where, "does not fit", *[""] * 5])
                continue
            rule, best = planned.rule, planned.result.best
            parts = ["encoder"] * rule.encoder
            parts += [f"{rule.num_layers} per stage"] * (rule.num_layers > 0)
            again = " and ".join(parts) or "nothing"
            rows.append(
                [
                    *where,
                    f"{best.step_ns / 1e9:.2f}",
                    f"{free.best.step_ns / 1e9:.2f}",
                    f"{best.step_ns / free.best.step_ns:.2f}",
                    f"{best.peak_bytes.max() / GIB:.1f}, {free.best.peak_bytes.max() / GIB:.1f}",
                    f"{' '.join(map(str, llm_layers(planned.result.plan)))}; {again}",
                    f"{taken_s:.1f}",
                ]
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=5, help="Rows of Table 9. Default: 5.")
    args = parser.parse_args()
    pairs = [(pair.name, pair.preset, pair.parallel) for pair in PAIRS[: args.pairs]]
    headings = "model", "TP PP DP", "schedule", "trainer", "step, s", "free, s", "ratio"
    headings += "GiB, free GiB", "LLM layers; recomputed", "search, s"
    rows = [row for pair in (*pairs, *OTHERS) for row in rows_of(*pair)]
    print(table(headings, rows))
    for trainer, knows in TRAINERS.items():
        print(f"{trainer}: {knows.title} has a pipeline for {knows.models}")


if __name__ == "__main__":
    main()
