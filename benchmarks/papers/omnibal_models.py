"""What OmniBal's tables say of its models, and how its partitions read in our lists of layers."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from isobatch.common.types import IntArray
from isobatch.engine.cost_model.analytical import layer_costs
from isobatch.engine.cost_model.costs import Costs
from isobatch.engine.cost_model.loads import Loads
from isobatch.engine.cost_model.parallel import Parallelism, Training
from isobatch.engine.cost_model.training_mode import TrainingMode
from isobatch.models.clusters import Cluster, load_cluster
from isobatch.models.presets import load_model

MICRO_BATCHES = 32
"""Per step and replica; the paper does not say: 128 groups of 4.6 samples on 4 replicas."""
IMAGES, VIT_TOKENS, SEQ_LEN, SAMPLES = 9, 1025, 4096, 5
"""Of a micro-batch: Q_v and Q_t of InternVL-1.2M, and 4.6 samples on average."""
TRAINING = Training(mode=TrainingMode(gradients="bf16"), kernels="fused")
"""bf16 gradients explain OmniBal's Table 5 better than fp32 ones."""
ENCODER, LANGUAGE = "vision_layer", "llm_layer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A row of Table 9."""

    name: str
    preset: str
    tp: int
    pp: int
    dp: int
    layers: tuple[int, ...]
    """Transformer layers of each stage."""
    recomputed: tuple[int, ...]
    """Of them."""
    days: tuple[float, float]
    """GPU days before and after."""

    sequence_parallel: bool = True
    """The paper does not say whether it is used."""

    @property
    def parallel(self) -> Parallelism:
        return Parallelism(
            tp=self.tp, pp=self.pp, dp=self.dp, sequence_parallel=self.sequence_parallel
        )

    def costs(
        self, loads: Loads, cluster: Cluster | None = None, training: Training = TRAINING
    ) -> Costs:
        """What the layers cost."""
        return layer_costs(
            load_model(self.preset), cluster or a100(), self.parallel, loads, training
        )

    @property
    def constant_costs(self) -> Costs:
        """For equal micro-batches at the caps."""
        return self.costs(
            Loads.constant(
                MICRO_BATCHES,
                images=IMAGES,
                vit_tokens_per_image=VIT_TOKENS,
                seq_len=SEQ_LEN,
                samples=SAMPLES,
            )
        )


def a100() -> Cluster:
    """Eight A100-80G per node, four adapters of 200 Gbit/s."""
    return load_cluster("a100_80g")


PAIRS = tuple(
    Pair(
        name=name,
        preset=preset,
        tp=tp,
        pp=pp,
        dp=dp,
        layers=layers,
        recomputed=recomputed,
        days=days,
    )
    for name, preset, (tp, pp, dp), layers, recomputed, days in [
        (
            "6B + Llama3-8B",
            "internvit_6b_llama3_8b",
            (1, 4, 8),
            (16, 17, 20, 24),
            (8, 7, 10, 24),
            (27.7, 13.8),
        ),
        (
            "6B + InternLM2-20B",
            "internvl_1_5",
            (2, 4, 4),
            (22, 23, 24, 24),
            (0, 0, 0, 0),
            (61.8, 21.3),
        ),
        (
            "6B + Yi-34B",
            "internvit_6b_yi_34b",
            (4, 4, 2),
            (28, 29, 24, 24),
            (3, 2, 0, 0),
            (75.4, 30.5),
        ),
        (
            *("6B + Llama3-70B", "internvit_6b_llama3_70b", (4, 8, 2)),
            *((22, 23, 13, 14, 14, 14, 13, 12), (11, 12, 8, 5, 3, 2, 0, 0), (129, 52.5)),
        ),
        (
            *("6B + Qwen1.5-110B", "internvit_6b_qwen1_5_110b", (8, 8, 1)),
            *((21, 22, 13, 13, 14, 14, 14, 14), (6, 9, 1, 3, 0, 0, 0, 0), (243, 75.2)),
        ),
        (
            "EVA-1B + InternLM2-20B",
            "eva_clip_1b_internlm2_20b",
            (2, 4, 4),
            (43, 16, 15, 14),
            (0,) * 4,
            (23.6, 12.2),
        ),
        (
            "EVA-4B + InternLM2-20B",
            "eva_clip_4b_internlm2_20b",
            (2, 4, 4),
            (39, 22, 21, 20),
            (10, 8, 1, 3),
            (38.1, 17),
        ),
        (
            "EVA-8B + InternLM2-20B",
            "eva_clip_8b_internlm2_20b",
            (2, 4, 4),
            (17, 18, 23, 22),
            (5, 5, 8, 10),
            (41.8, 20.3),
        ),
        (
            "EVA-18B + InternLM2-20B",
            "eva_clip_18b_internlm2_20b",
            (4, 4, 4),
            (18, 19, 25, 34),
            (2, 2, 0, 0),
            (63.6, 33.8),
        ),
    ]
)
INTERNVL = PAIRS[1]
"""The model of all of OmniBal's ablations."""


def is_transformer(costs: Costs) -> NDArray[np.bool_]:
    """(layers,): the layers that the paper counts."""
    return np.isin(np.array(costs.kinds), (ENCODER, LANGUAGE))


def borders_of(costs: Costs, layers: tuple[int, ...]) -> IntArray:
    """Borders of stages with so many transformer layers: embeddings go with what follows, projector
    and head with what comes before.
    """
    counted = np.flatnonzero(is_transformer(costs))
    cuts = counted[np.cumsum(layers)[:-1]]
    while (
        before := np.isin(np.array(costs.kinds)[cuts - 1], ("token_embedding", "patch_embedding"))
    ).any():
        cuts = cuts - before
    return np.array([0, *cuts.tolist(), costs.num_layers])


def layers_of(costs: Costs, borders: IntArray) -> list[int]:
    """Transformer layers of each stage."""
    return np.add.reduceat(is_transformer(costs).astype(int), borders[:-1]).tolist()  # type: ignore[no-any-return]


def first_recomputed(costs: Costs, borders: IntArray, counts: tuple[int, ...]) -> NDArray[np.bool_]:
    """(layers,): the first so many transformer layers of each stage: the paper does not say
    which.
    """
    chosen = np.zeros(costs.num_layers, np.bool_)
    for start, end, count in zip(borders[:-1], borders[1:], counts, strict=True):
        own = np.flatnonzero(is_transformer(costs)[start:end]) + start
        chosen[own[:count]] = True
    return chosen


def replace_parallel(pair: Pair, sequence_parallel: bool) -> Pair:
    """The same pair with or without sequence parallelism."""
    return replace(pair, sequence_parallel=sequence_parallel)
