"""Parallelism, trained parts, and the reduction of gradients. Pure."""

import math
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from isobatch.common.errors import ConfigError
from isobatch.common.types import IntArray
from isobatch.engine.cost_model.training_mode import TrainingMode
from isobatch.models.clusters import NS_PER_S, Cluster, Link
from isobatch.models.layer_bytes import Kernels
from isobatch.models.presets import ModelPreset

Part = Literal["audio", "vision", "projector", "llm"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallelism:
    """GPUs per tensor-parallel group, stages of the pipeline, replicas of it."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    sequence_parallel: bool = True
    """Whether tensor-parallel GPUs split norms and residuals by tokens (arXiv 2205.05198)."""
    innermost: Literal["replicas", "stages"] = "replicas"
    """Neighbours of a tensor-parallel group: a stage's replicas, as in Megatron-LM, or stages."""

    def __post_init__(self) -> None:
        sizes = {"tp": self.tp, "pp": self.pp, "dp": self.dp}
        wrong = [f"{name} = {size}" for name, size in sizes.items() if size < 1]
        if wrong:
            raise ConfigError(f"{', '.join(wrong)}: must be at least 1")
        if self.innermost not in ("replicas", "stages"):
            raise ConfigError(f"innermost = {self.innermost!r}: use 'replicas' or 'stages'")

    @property
    def num_gpus(self) -> int:
        """GPUs of all replicas."""
        return self.tp * self.pp * self.dp

    def tensor_link(self, cluster: Cluster) -> Link:
        """The link between tensor-parallel GPUs."""
        return cluster.nvlink if self.tp <= cluster.gpus_per_node else cluster.network

    def stage_link(self, cluster: Cluster) -> Link:
        """The link between neighbouring stages; the slower one if only some share a node.

        >>> from isobatch.models.clusters import load_cluster
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
    mode: TrainingMode = field(default_factory=TrainingMode)
    kernels: Kernels = "transformers"
    """Modules as transformers has them, or with norms and activation functions fused."""

    def trains(self, part: Part) -> bool:
        """Whether a part is trained."""
        return bool(getattr(self, part))


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
    mode = training.mode
    gathered = mode.gradient_bytes if mode.zero_stage == 0 else mode.weight_bytes
    link = parallel.replica_link(cluster)
    # a ring crosses between nodes once per node, over the adapters of all its GPUs there
    stride = parallel.tp * (parallel.pp if parallel.innermost == "stages" else 1)
    per_node = min(max(cluster.gpus_per_node // stride, 1), parallel.dp)
    rate = link.bytes_per_s * (per_node if link == cluster.network else 1)
    rate = min(rate, cluster.nvlink.bytes_per_s)
    # every GPU passes on all parts but one
    sent = gpu_params * (mode.gradient_bytes + gathered) * ((parallel.dp - 1) / parallel.dp)
    taken = sent / rate * NS_PER_S + link.latency_ns * (parallel.dp - 1)
    return np.asarray(np.rint(taken), dtype=np.int64)


def head_notes(model: ModelPreset, tp: int) -> list[str]:
    """What a tensor-parallel split does to attention heads that it does not divide.

    ConfigError for a split of the LLM that no trainer runs: its query heads must be divisible, and
    its key heads too, or each copied to equally many GPUs.
    """
    notes = []
    for name, encoder in (("vision", model.vit), ("audio", model.audio_encoder)):
        if encoder is not None and encoder.num_heads % tp:
            max_heads = -(-encoder.num_heads // tp)
            notes.append(
                f"tp {tp} does not divide the {encoder.num_heads} heads of the {name} encoder: "
                f"planned with {max_heads} on each GPU, for trainers that pad or split unevenly"
            )
    heads, kv_heads = (0, 0) if model.llm is None else (model.llm.num_heads, model.llm.num_kv_heads)
    if heads % tp or (kv_heads % tp and tp % kv_heads):
        raise ConfigError(
            f"tp is {tp}, but the LLM of {model.name} has {heads} query and {kv_heads} key heads, "
            f"and no trainer splits a head: give a divisor of {math.gcd(heads, kv_heads)}"
        )
    if kv_heads % tp:
        copies = tp // kv_heads
        notes.append(f"tp {tp} holds each of the LLM's {kv_heads} key heads on {copies} GPUs")
    return notes
