"""Parallelism, trained parts, and the reduction of gradients. Pure."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from balance.errors import ConfigError
from balance.types import IntArray
from engine.cost_model.clusters import NS_PER_S, Cluster, Link

Part = Literal["audio", "vision", "projector", "llm"]

WEIGHT_BYTES = 2
"""bf16."""
OPTIMIZER_BYTES = 12
"""Adam, per trained parameter: weight, first and second moment in fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallelism:
    """GPUs per tensor-parallel group, stages of the pipeline, replicas of it."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    sequence_parallel: bool = True
    """Whether tensor-parallel GPUs split norms and residuals by tokens (arXiv 2205.05198)."""
    zero_stage: int = 1
    """Sharded over replicas: 0 nothing, 1 optimizer, 2 also gradients, 3 also weights (ZeRO)."""
    innermost: Literal["replicas", "stages"] = "replicas"
    """Neighbours of a tensor-parallel group: a stage's replicas, as in Megatron-LM, or stages."""

    def __post_init__(self) -> None:
        sizes = {"tp": self.tp, "pp": self.pp, "dp": self.dp}
        wrong = [f"{name} = {size}" for name, size in sizes.items() if size < 1]
        if wrong:
            raise ConfigError(f"{', '.join(wrong)}: must be at least 1")
        if not 0 <= self.zero_stage <= 3:
            raise ConfigError(f"zero_stage = {self.zero_stage}: use 0, 1, 2 or 3")
        if self.innermost not in ("replicas", "stages"):
            raise ConfigError(f"innermost = {self.innermost!r}: use 'replicas' or 'stages'")

    @property
    def num_gpus(self) -> int:
        """GPUs of all replicas."""
        return self.tp * self.pp * self.dp

    def token_share(self, size: int) -> float:
        """`size` as one GPU holds it outside of tensor-parallel products."""
        return size / self.tp if self.sequence_parallel else float(size)

    def tensor_link(self, cluster: Cluster) -> Link:
        """The link between tensor-parallel GPUs."""
        return cluster.nvlink if self.tp <= cluster.gpus_per_node else cluster.network

    def stage_link(self, cluster: Cluster) -> Link:
        """The link between neighbouring stages; the slower one if only some share a node.

        >>> from engine.cost_model.clusters import load_cluster
        >>> parallel = Parallelism(tp=2, pp=4, innermost="stages")
        >>> parallel.stage_link(load_cluster("a100_80g")).bytes_per_s / 1e9
        240.0
        """
        # from a stage's first GPU to the next stage's last one
        reach = self.tp * (self.pp if self.innermost == "stages" else self.dp * self.pp)
        return cluster.nvlink if reach <= cluster.gpus_per_node else cluster.network

    def replica_link(self, cluster: Cluster) -> Link:
        """The link between replicas of a stage."""
        reach = self.tp * self.dp * (self.pp if self.innermost == "stages" else 1)
        return cluster.nvlink if reach <= cluster.gpus_per_node else cluster.network


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Which parts are trained (OmniBal, Table 11: all; vision and projector; projector only)."""

    audio: bool = True
    vision: bool = True
    projector: bool = True
    llm: bool = True
    gradient_bytes: int = 4
    """Per trained parameter: fp32 as in Megatron-LM; 2 (bf16) fits OmniBal's Table 5 better."""

    def trains(self, part: Part) -> bool:
        """Whether a part is trained."""
        return bool(getattr(self, part))

    def state_bytes(self, num_params: int, parallel: Parallelism, *, trained: bool) -> int:
        """Weights, gradients and optimizer state of the parameters that one GPU holds.

        >>> Training().state_bytes(1_000, Parallelism(dp=4), trained=True)
        9000
        """
        # weights, gradients, optimizer state
        each = WEIGHT_BYTES, self.gradient_bytes * trained, OPTIMIZER_BYTES * trained
        shards = [parallel.dp if parallel.zero_stage >= stage else 1 for stage in (3, 2, 1)]
        return round(sum(num_params * size / n for size, n in zip(each, shards, strict=True)))


def reduction_ns(
    gpu_params: IntArray, cluster: Cluster, parallel: Parallelism, training: Training
) -> IntArray:
    """Time to sum gradients over replicas and to distribute the new weights; int64 ns.

    `gpu_params`: trained parameters of one GPU, an entry per stage. With a sharded optimizer (ZeRO)
    gradients are reduce-scattered and weights all-gathered; without, gradients are all-reduced.
    Nothing is taken to overlap with computing, though a part does where stages end apart.
    """
    if parallel.dp == 1:
        return np.zeros_like(gpu_params)
    gathered = training.gradient_bytes if parallel.zero_stage == 0 else WEIGHT_BYTES
    link = parallel.replica_link(cluster)
    # a ring crosses between nodes once per node, over the adapters of all its GPUs there
    stride = parallel.tp * (parallel.pp if parallel.innermost == "stages" else 1)
    per_node = min(max(cluster.gpus_per_node // stride, 1), parallel.dp)
    rate = link.bytes_per_s * (per_node if link == cluster.network else 1)
    rate = min(rate, cluster.nvlink.bytes_per_s)
    # every GPU passes on all parts but one
    sent = gpu_params * (training.gradient_bytes + gathered) * ((parallel.dp - 1) / parallel.dp)
    taken = sent / rate * NS_PER_S + link.latency_ns * (parallel.dp - 1)
    return np.asarray(np.rint(taken), dtype=np.int64)
