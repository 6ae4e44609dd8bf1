"""OrchMLLM's Table 2 and figures 10 to 13: what exchanges take, balancing every phase against less,
and what travels between nodes. Simulated.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from isobatch.engine.cost_model.analytical import layer_costs
from isobatch.engine.cost_model.loads import Loads
from isobatch.engine.cost_model.parallel import Parallelism, Training
from isobatch.engine.cost_model.training_mode import TrainingMode
from isobatch.engine.dispatching.dispatch import (
    PHASES,
    DispatchOptions,
    DispatchPlan,
    Examples,
    plan_dispatch,
)
from isobatch.models.clusters import load_cluster
from isobatch.models.presets import ModelPreset, load_model
from papers.datasets import orchmllm_samples
from papers.dispatch_times import Communicator, TokenBytes, phase_cost, phase_volumes, step_times
from papers.page import Section, percent, table

RANKS = 128
"""H100 of the ablations."""
STEPS = 4
ZERO_3 = Training(mode=TrainingMode(zero_stage=3), kernels="fused")
MINI_BATCHES = {"orchmllm_10b": 75, "orchmllm_18b": 50, "orchmllm_84b": 25}
"""Examples of each rank."""
ALL = DispatchOptions()
OPTIONS: dict[str, tuple[DispatchOptions, Communicator]] = {
    "every phase (OrchMLLM)": (ALL, "all_to_all"),
    "nothing": (replace(ALL, algorithms={}), "all_to_all"),
    "LLM only": (replace(ALL, algorithms={"llm": "sums"}), "all_to_all"),
    "all as if unpadded": (
        replace(ALL, algorithms={**ALL.algorithms, "audio": "sums"}),
        "all_to_all",
    ),
    "all as if padded": (
        replace(ALL, algorithms={**ALL.algorithms, "vision": "padded"}),
        "all_to_all",
    ),
    "All-Gather": (replace(ALL, node_wise=False), "all_gather"),
    "ours: inputs read where needed": (replace(ALL, reads_directly=True), "all_to_all"),
}


TABLE_2 = {
    64: (16.66, 3.79),
    128: (18.49, 3.81),
    256: (21.32, 3.85),
    512: (24.64, 3.92),
    1024: (31.37, 3.96),
    2560: (53.88, 4.05),
}
"""The paper's Table 2, by GPUs: overhead in the forward pass, ms, and the forward pass, s."""
TABLE_2_BATCH = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Means of steps."""

    mfu: float
    memory_gb: float
    """Of the rank that holds most, weights shared out over 256, everything recomputed."""
    exchange_share: float
    """Of the step."""


def balance() -> Section:
    """Figures 10, 11 and 12."""
    rows = []
    for preset, batch in MINI_BATCHES.items():
        results = {name: run(preset, batch, *chosen) for name, chosen in OPTIONS.items()}
        best = results["every phase (OrchMLLM)"].mfu
        rows += [
            [
                *(
                    preset.removeprefix("orchmllm_").upper(),
                    name,
                    percent(own.mfu),
                    f"{own.mfu / best:.2f}",
                ),
                *(f"{own.memory_gb:.1f}", percent(own.exchange_share, 2)),
            ]
            for name, own in results.items()
        ]
    points = []
    for name, size, paper in [
        ("LLM only", 18, "24.16 %, 62.7 GB"),
        ("All-Gather", 20, "25.51 %, 61.8 GB"),
    ]:
        own = run("orchmllm_84b", size, *OPTIONS[name])
        points.append(
            [
                "84B",
                f"{name}, mini-batch {size}",
                f"{percent(own.mfu)}, {own.memory_gb:.1f} GB",
                paper,
            ]
        )
    return Section(
        title="OrchMLLM, figures 10 to 12: balancing every phase",
        body=(
            f"{RANKS} H100, data-parallel with shared weights, mini-batches of 75, 50 and 25; "
            f"means of {STEPS} steps. Each phase lasts as long as its slowest rank. Padding counts "
            f"as time and not as work, as in the paper. Assumed: how long images, texts and "
            f"utterances are (benchmarks/papers/datasets.py), everything recomputed, the loss "
            f"computed in pieces, gathers of weights hidden. The paper prints its figures without "
            f"numbers, but for the points below.",
            table(("model", "balanced", "MFU", "relative", "memory, GB", "exchanges"), rows),
            table(("model", "point", "simulated", "paper"), points),
            "The order of balancing everything, the LLM only and nothing is the paper's, and grows "
            "with the model as in the paper. Its best MFU is 41.6 %: it does not say what it "
            "recomputes. To treat images as if they were padded costs less here than in the "
            "paper's figure 11, because our images are nearly of one size.",
        ),
    )


def run(preset: str, batch: int, options: DispatchOptions, communicator: Communicator) -> Result:
    """Steps of a model."""
    model, cluster = load_model(preset), load_cluster("h100")
    cost = partial(layer_costs, model, cluster, Parallelism(dp=RANKS), training=ZERO_3)
    mfu, memory, exchange = [], [], []
    for seed in range(STEPS):
        plan = plan_dispatch(_examples(model, batch, seed), options)
        times = step_times(
            plan, phase_cost(cost), cluster.network, _token_bytes(model), communicator=communicator
        )
        flops = _useful_flops(model, plan)
        # everything recomputed: forward passes twice, backward passes are twice as long
        step_s = (times.step_ns + sum(_slowest_ns(plan, cost, "recompute_ns").values())) / 1e9
        mfu.append(flops / (step_s * RANKS * cluster.peak_flops_per_s))
        memory.append(_memory_gb(plan, cost))
        exchange.append(times.exchange_ns / 1e9 / step_s)
    return Result(
        mfu=float(np.mean(mfu)), memory_gb=max(memory), exchange_share=float(np.mean(exchange))
    )


def overhead() -> Section:
    """Table 2: what the exchanges of the forward pass take."""
    model, cluster = load_model("orchmllm_10b"), load_cluster("h100")
    # the gradients of features are sent in the backward pass
    own = _token_bytes(model)
    forward_bytes = TokenBytes(inputs=own.inputs, feature=own.feature // 2)
    rows = []
    for ranks, (paper_ms, paper_s) in TABLE_2.items():
        cost = partial(layer_costs, model, cluster, Parallelism(dp=ranks))
        exchange_ms, forward_s = [], []
        for seed in range(STEPS):
            plan = plan_dispatch(_examples(model, TABLE_2_BATCH, seed, ranks), ALL)
            times = step_times(plan, phase_cost(cost), cluster.network, forward_bytes)
            exchange_ms.append(times.exchange_ns / 1e6)
            forward_s.append(sum(_slowest_ns(plan, cost, "forward_ns").values()) / 1e9)
        ours_ms, ours_s = float(np.mean(exchange_ms)), float(np.mean(forward_s))
        rows.append(
            [
                *(ranks, f"{ours_ms:.2f}", f"{ours_s:.2f}", percent(ours_ms / 1e3 / ours_s, 2)),
                *(paper_ms, paper_s, percent(paper_ms / 1e3 / paper_s, 2)),
            ]
        )
    heads = ("exchanges, ms", "forward, s", "share")
    return Section(
        title="OrchMLLM, Table 2: overhead in the forward pass",
        body=(
            f"10B, mini-batches of {TABLE_2_BATCH}, means of {STEPS} steps. Ours are the bytes of "
            f"the rank that sends most to other nodes, over its link, and a latency for each "
            f"exchange: a lower bound. The paper's is measured, with 'some extra durations', and "
            f"grows with the ranks, which bytes do not. So the exchanges simulated below are what "
            f"the network needs, not what a cluster would show.",
            table(("GPUs", *heads, *(f"paper: {head}" for head in heads)), rows),
        ),
    )


def volumes() -> Section:
    """Figure 13: what node-wise placement saves."""
    rows = []
    for preset, batch in MINI_BATCHES.items():
        model = load_model(preset)
        for phase in PHASES:
            own = {}
            for node_wise in (False, True):
                plan = plan_dispatch(_examples(model, batch, 0), replace(ALL, node_wise=node_wise))
                moved = phase_volumes(plan, phase).inputs
                own[node_wise] = moved.average_inter_node, moved.largest_inter_node
            (average, largest), (near_average, near_largest) = own[False], own[True]
            rows.append(
                [
                    *(
                        preset.removeprefix("orchmllm_").upper(),
                        phase,
                        f"{average:,.0f}",
                        f"{near_average:,.0f}",
                    ),
                    *(f"{1 - near_average / average:.3f}", f"{1 - near_largest / largest:.3f}"),
                ]
            )
    return Section(
        title="OrchMLLM, figure 13: node-wise placement",
        body=(
            f"Tokens that a rank sends to other nodes per step, {RANKS} ranks, 8 per node; the "
            f"LLM's phase moves texts. Paper: .436 to .722 less on average, by modality, which is "
            f"not told apart. Ours saves less, because with 25 to 75 examples of similar size from "
            f"16 nodes no node holds much of any batch; with 16 examples per rank of heavy-tailed "
            f"lengths the largest send falls by .54 to .69, the average by .22 to .25 "
            f"(docs/results/, post-balancing).",
            table(
                (
                    "model",
                    "phase",
                    "average, not placed",
                    "placed",
                    "less on average",
                    "less of the largest",
                ),
                rows,
            ),
        ),
    )


def _examples(model: ModelPreset, batch: int, seed: int, ranks: int = RANKS) -> Examples:
    counts = orchmllm_samples(model, ranks * batch, seed)
    assert model.audio is not None
    return Examples.of_counts(
        counts, np.arange(ranks + 1) * batch, audio_downsample=model.audio.downsample
    )


def _token_bytes(model: ModelPreset) -> TokenBytes:
    assert model.vit is not None
    assert model.llm is not None
    assert model.audio_encoder is not None
    # uint8 pixels; two frames of float16 per encoder token
    inputs = {
        "vision": model.vit.patch_values,
        "audio": 2 * 2 * model.audio_encoder.frame_values,
        "llm": 8,
    }
    return TokenBytes(inputs=inputs, feature=2 * model.llm.hidden_size)


def _loads(plan: DispatchPlan) -> Loads:
    """What each rank does, padding included."""
    return Loads(**{phase: plan.phases[phase].balanced for phase in PHASES})


def _slowest_ns(plan: DispatchPlan, cost, name: str) -> dict[str, int]:  # type: ignore[no-untyped-def]
    """By phase, the slowest rank's time of all layers; `name`: which time of `Costs`."""
    costs = cost(_loads(plan))
    phases = {"vision": "vision", "audio": "audio"}
    own = np.array(
        [
            next((name for prefix, name in phases.items() if kind.startswith(prefix)), "llm")
            for kind in costs.kinds
        ]
    )
    return {
        phase: int(getattr(costs, name)[own == phase].sum(axis=0).max(initial=0))
        for phase in PHASES
    }


def _memory_gb(plan: DispatchPlan, cost) -> float:  # type: ignore[no-untyped-def]
    costs = cost(_loads(plan))
    # the head's logits are taken to be made in pieces
    turns = (costs.saved_bytes - costs.kept_bytes + costs.working_bytes)[:-1]
    live = costs.kept_bytes.sum(axis=0) + turns.max(axis=0)
    # the paper shares weights out over 256 ranks
    state = int(costs.param_counts.sum()) * 18 / 256
    return float(live.max() + state) / 1e9


def _useful_flops(model: ModelPreset, plan: DispatchPlan) -> float:
    """Forward and backward, padding left out: what MFU counts."""
    examples, total = plan.examples, 0.0
    assert model.vit is not None
    assert model.llm is not None
    assert model.audio_encoder is not None
    for phase, shape in (("vision", model.vit), ("audio", model.audio_encoder), ("llm", model.llm)):
        tokens, squares = float(examples.lengths[phase].sum()), float(examples.squares[phase].sum())
        causal = 0.5 if phase == "llm" else 1.0
        total += shape.num_layers * (
            2 * shape.layer_weights * tokens + 4 * causal * shape.attention_size * squares
        )
    total += 2 * model.llm.vocab_size * model.llm.hidden_size * float(examples.lengths["llm"].sum())
    return 3 * total
