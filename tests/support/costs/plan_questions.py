"""Small questions to plan for, for several tests."""

import numpy as np

from isobatch.engine.cost_model.loads import Loads, PhaseLoads
from isobatch.engine.cost_model.parallel import Parallelism, Training
from isobatch.engine.planning.planner import PlanRequest
from isobatch.models.clusters import load_cluster
from isobatch.models.presets import load_model


def uneven_loads(count, seed=0, *, model="tiny"):
    """Micro-batches of 0 to 9 images and 500 to 4,000 tokens, of one to eight samples."""
    rng = np.random.default_rng(seed)
    per_image = load_model(model).vision.vit_tokens_per_patch
    images, samples = rng.integers(0, 10, count), rng.integers(1, 9, count)
    tokens = rng.integers(500, 4_000, count)
    vision = PhaseLoads(tokens=images * per_image, squares=images * per_image**2, items=images)
    llm = PhaseLoads(tokens=tokens, squares=tokens**2 // samples, items=samples)
    return Loads(vision=vision, audio=PhaseLoads.nothing(count), llm=llm)


def plan_request(**changes):
    """InternVL 1.5 on eight A100, two steps of eight micro-batches on two replicas."""
    model, cluster = load_model("internvl_1_5"), load_cluster("a100_80g")
    parallel = changes.pop("parallel", Parallelism(tp=4, pp=4, dp=2))
    count = changes.pop("num_micro_batches", 8)
    loads = changes.pop("loads", uneven_loads(2 * parallel.dp * count, model="internvl_1_5"))
    full = Loads.constant(1, images=9, vit_tokens_per_image=1025, seq_len=4_096)
    values = {
        "schedule": "1f1b",
        "stages_per_rank": 1,
        "memory_bytes": cluster.usable_memory_bytes,
    } | changes
    return PlanRequest(
        model=model,
        cluster=cluster,
        parallel=parallel,
        training=values.pop("training", Training()),
        num_micro_batches=count,
        loads=loads,
        full=full,
        **values,
    )
