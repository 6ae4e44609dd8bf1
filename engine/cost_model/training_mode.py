"""`TrainingMode`: dtypes and sharding of plans and runs alike. Pure."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from isobatch.common.errors import ConfigError
from isobatch.common.types import IntArray

Precision = Literal["bf16", "fp32"]
BYTES_OF: dict[Precision, int] = {"bf16": 2, "fp32": 4}
MOMENTS = 2
"""Tensors of AdamW per parameter, always float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingMode:
    """Dtypes of a run with AdamW, and what its replicas share out; no autocast.

    With bf16 weights the optimizer updates float32 copies of them (masters). Its moments are
    float32. Gradients have their dtype from the first micro-batch to the optimizer: as they are
    added up, summed over replicas and read.
    """

    precision: Precision = "bf16"
    """Dtype of weights in passes, of activations, and of messages between stages."""
    gradients: Precision = "fp32"
    """fp32 as in Megatron-LM; bf16, which only plans know, fits OmniBal's Table 5 better."""
    zero_stage: int = 1
    """Shared out over replicas: 0 nothing, 1 the optimizer's state. Only plans know 2, gradients
    too, and 3, weights too (ZeRO)."""

    def __post_init__(self) -> None:
        if self.precision not in BYTES_OF or self.gradients not in BYTES_OF:
            raise ConfigError(
                f"precision is {self.precision!r}, gradients {self.gradients!r}: use bf16 or fp32"
            )
        if BYTES_OF[self.gradients] < BYTES_OF[self.precision]:
            raise ConfigError("gradients of fp32 weights are fp32: give bf16 weights, or neither")
        if not 0 <= self.zero_stage <= 3:
            raise ConfigError(f"zero_stage = {self.zero_stage}: use 0, 1, 2 or 3")

    @property
    def weight_bytes(self) -> int:
        """Size of a weight, an activation, or a number that is sent to another stage."""
        return BYTES_OF[self.precision]

    @property
    def gradient_bytes(self) -> int:
        """Size of a gradient."""
        return BYTES_OF[self.gradients]

    @property
    def has_masters(self) -> bool:
        """Whether the optimizer keeps float32 copies of the weights."""
        return self.precision != "fp32"

    @property
    def optimizer_bytes(self) -> int:
        """Optimizer state per trained parameter before it is shared out."""
        return BYTES_OF["fp32"] * (MOMENTS + self.has_masters)

    def state_terms(self, num_params: int, dp: int, *, trained: bool) -> tuple[float, ...]:
        """Bytes of weights, of gradients and of optimizer state for one GPU's parameters.

        >>> TrainingMode().state_terms(1_000, 4, trained=True)
        (2000.0, 4000.0, 3000.0)
        """
        sizes = self.weight_bytes, self.gradient_bytes * trained, self.optimizer_bytes * trained
        shards = [dp if self.zero_stage >= stage else 1 for stage in (3, 2, 1)]
        return tuple(num_params * size / count for size, count in zip(sizes, shards, strict=True))

    def state_bytes(self, num_params: int, dp: int, *, trained: bool) -> int:
        """The sum of `state_terms`."""
        return round(sum(self.state_terms(num_params, dp, trained=trained)))

    def shared_out(self, state_bytes: IntArray, num_params: IntArray, dp: int) -> IntArray:
        """State of one of `dp` replicas, from that of a single one; int64, (layers,).

        >>> TrainingMode().shared_out(np.array([18_000]), np.array([1_000]), 4).tolist()
        [9000]
        """
        weights = num_params * self.weight_bytes
        trained = (state_bytes - weights) / (self.gradient_bytes + self.optimizer_bytes)
        frozen = num_params - trained
        sizes = self.state_terms(1, dp, trained=True)
        return np.asarray(np.rint(trained * sum(sizes) + frozen * sizes[0]), np.int64)

    def __str__(self) -> str:
        masters = "masters and moments" if self.has_masters else "moments"
        shared = ("nothing", "optimizer state", "gradients too", "weights too")[self.zero_stage]
        return (
            f"{self.precision} weights and messages, {self.gradients} gradients, AdamW with fp32"
            f" {masters}; shared out over replicas: {shared}"
        )
