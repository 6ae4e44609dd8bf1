"""How a model is spread over GPUs and which of its parts are trained: `Parallelism` and `Training`.
Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from balance.errors import ConfigError
from engine.cost_model.clusters import Cluster, Link

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
    """Whether tensor-parallel GPUs share norms and residuals by tokens (arXiv 2205.05198); each has
    all without.
    """
    zero_stage: int = 1
    """What replicas share out among them: 0 nothing, 1 the optimizer, 2 gradients too, 3 weights
    too (1910.02054).
    """
    innermost: Literal["replicas", "stages"] = "replicas"
    """Which groups of tensor-parallel GPUs stand beside each other: replicas of one stage, as in
    Megatron-LM, or the stages of one pipeline.
    """

    def __post_init__(self) -> None:
        wrong = [
            f"{name} = {getattr(self, name)}"
            for name in ("tp", "pp", "dp")
            if getattr(self, name) < 1
        ]
        if wrong:
            raise ConfigError(f"{', '.join(wrong)}: must be at least 1")
        if not 0 <= self.zero_stage <= 3:
            raise ConfigError(f"zero_stage = {self.zero_stage}: use 0, 1, 2 or 3")
        if self.innermost not in ("replicas", "stages"):
            raise ConfigError(f"innermost = {self.innermost!r}: use 'replicas' or 'stages'")

    @property
    def num_gpus(self) -> int:
        """Of all replicas."""
        return self.tp * self.pp * self.dp

    def token_share(self, size: int) -> float:
        """`size` as one GPU holds it outside of tensor-parallel products."""
        return size / self.tp if self.sequence_parallel else float(size)

    def tensor_link(self, cluster: Cluster) -> Link:
        """What tensor-parallel GPUs are connected by."""
        return cluster.nvlink if self.tp <= cluster.gpus_per_node else cluster.network

    def stage_link(self, cluster: Cluster) -> Link:
        """What neighbouring stages are connected by; the slower one where some of them share a node
        and others do not.

        >>> from engine.cost_model.clusters import load_cluster
        >>> Parallelism(tp=2, pp=4, innermost="stages").stage_link(load_cluster("a100_80g")).bytes_per_s / 1e9
        240.0
        """
        # from a stage's first GPU to the next stage's last one
        reach = self.tp * (self.pp if self.innermost == "stages" else self.dp * self.pp)
        return cluster.nvlink if reach <= cluster.gpus_per_node else cluster.network

    def replica_link(self, cluster: Cluster) -> Link:
        """What the replicas of a stage are connected by."""
        reach = self.tp * self.dp * (self.pp if self.innermost == "stages" else 1)
        return cluster.nvlink if reach <= cluster.gpus_per_node else cluster.network


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Which parts are trained (OmniBal, Table 11: all; the vision encoder and the projector; the
    projector only).
    """

    audio: bool = True
    vision: bool = True
    projector: bool = True
    llm: bool = True
    gradient_bytes: int = 4
    """Per trained parameter: fp32 as in Megatron-LM; 2 for bf16, which explains OmniBal's Table 5
    better.
    """

    def trains(self, part: Part) -> bool:
        """Whether a part is trained."""
        return bool(getattr(self, part))

    def state_bytes(self, num_params: int, parallel: Parallelism, *, trained: bool) -> int:
        """Weights, gradients and optimizer state of the parameters that one GPU holds.

        >>> Training().state_bytes(1_000, Parallelism(dp=4), trained=True)
        9000
        """
        weights: float = num_params * WEIGHT_BYTES
        gradients, optimizer = (
            num_params * self.gradient_bytes * trained,
            num_params * OPTIMIZER_BYTES * trained,
        )
        shares = [parallel.dp if parallel.zero_stage >= stage else 1 for stage in (3, 2, 1)]
        return round(
            sum(
                size / share
                for size, share in zip((weights, gradients, optimizer), shares, strict=True)
            )
        )
