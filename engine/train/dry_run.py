"""`python -m engine train --dry-run`: memory and time of a step, as planned.

Of the build only its tables are read, of the model only its config: weights are on torch's meta
device. One process says it for all ranks.
"""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from isobatch.engine.cost_model.parallel import Parallelism, Training
from isobatch.engine.plan_report import print_plan, report_console
from isobatch.engine.planning.build_steps import read_build
from isobatch.engine.planning.plan import PlanRequest, read_plan
from isobatch.engine.planning.planner import make_plan, simulate_run
from isobatch.engine.runtime.optimizer.main_weights import MainWeights
from isobatch.engine.train.layout import (
    layout_text,
    make_layout,
    make_replicas,
    num_micro_batches,
)
from isobatch.engine.train.options import PARTS, TrainConfig
from isobatch.engine.train.step_source import OpenSource
from isobatch.engine.train.trainer import frozen_parts, open_trained
from isobatch.models.clusters import load_cluster

STEPS = 4
"""Steps of the epoch that are simulated, as many as `python -m engine plan` does."""
CLUSTER = "h100"
"""What is assumed without a plan."""


def dry_run(config: TrainConfig, open_source: OpenSource) -> None:
    """Print stages, memory of each rank and time of a step. Errors as those of training."""
    plan = None if config.plan == "auto" else read_plan(Path(config.plan))
    dp = (plan.parallel.dp if plan else 1) if config.dp is None else config.dp
    planned_ranks = dp * (plan.parallel.pp if plan else 1)
    pipelines = make_replicas(int(os.environ.get("WORLD_SIZE", planned_ranks)), dp, plan)
    source = open_source(config.build, dp_rank=0, dp_world_size=dp)
    file = config.config
    if file is not None and file.is_dir():
        file /= "config.json"
    with torch.device("meta"):
        model = open_trained(replace(config, config=file), plan, source, len(pipelines[0]))
    source.close()
    if config.eval is not None:
        open_source(config.eval, dp_rank=0, dp_world_size=dp).close()
    layout = make_layout(config, plan, len(model.stack.layers), pipelines)
    cluster = plan.cluster if plan else load_cluster(CLUSTER)
    frozen = frozen_parts(config, plan)
    trained: dict[str, Any] = {part: part not in frozen for part in PARTS}
    build = read_build(Path(config.build))
    count = num_micro_batches(config, plan)
    mode = config.training_mode(plan.training.mode if plan else None)
    MainWeights([], mode, None)  # for its errors
    request = PlanRequest(
        model=model.preset,
        cluster=cluster,
        parallel=Parallelism(pp=len(pipelines[0]), dp=dp),
        training=Training(mode=mode, **trained),
        schedule=layout.schedule,
        stages_per_rank=layout.stages_per_rank,
        num_micro_batches=count,
        deferred=layout.deferred,
        memory_bytes=plan.memory_bytes if plan else cluster.usable_memory_bytes,
        full=build.full_micro_batch(),
        loads=build.stream_steps(dp=dp, micro_batches=count, steps=STEPS, seed=config.seed),
    )
    run = simulate_run(
        request,
        "dry run",
        request.split(request.costs(request.loads)),
        request.loads,
        np.array(layout.borders),
        np.array(layout.recompute),
    )
    console = report_console()
    console.print(layout_text(layout, model.names))
    console.print(
        f"planned for {cluster.name}, not measured: a step takes {run.step_ns / 1e6:,.1f} ms"
    )
    if config.lora_rank is not None:
        console.print("adapters count as if their parts were trained: less memory will do")
    print_plan(make_plan(request, run, request.costs(request.full_step)), run, console)
