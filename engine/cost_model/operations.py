"""Layers and the operations that they are made of, as data: what `layer_list` makes of a model
preset. Pure.

Sizes are those of one tensor-parallel GPU; what an operation takes, `engine.cost_model.analytical`
says.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.cost_model.parallel import Part

BYTES = 2
"""Of a bf16 number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenStream:
    """Tokens that some layers process: a phase's tokens in `engine.cost_model.loads.Loads`, times a
    factor.
    """

    phase: str
    """`audio`, `vision` or `llm`."""
    per_token: float = 1.0
    """Images have fewer tokens for the language model than for the encoder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MatMul:
    """A matrix product: weights of `inputs` rows and `outputs` columns, applied to every token of a
    stream.
    """

    inputs: int
    outputs: int
    stream: TokenStream


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Softmax attention inside each image, clip or sample."""

    width: int
    """Of all query heads."""
    kv_width: int
    causal: bool
    stream: TokenStream


@dataclass(frozen=True, slots=True, kw_only=True)
class Elementwise:
    """Elementwise operations: bytes per token that they read and write, and how many kernels they
    are.
    """

    bytes_per_token: float
    kernels: int
    stream: TokenStream


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """`count` all-gathers or reduce-scatters among tensor-parallel GPUs; bytes per token of all
    GPUs' parts.
    """

    bytes_per_token: int
    count: int
    stream: TokenStream


Operation = MatMul | Attention | Elementwise | Collective


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A layer; equal ones are equal objects. Bytes are per token of `stream` and of one GPU."""

    kind: str
    part: Part
    stream: TokenStream
    operations: tuple[Operation, ...]
    num_params: int
    """Of the whole layer."""
    gpu_params: int
    """That one tensor-parallel GPU holds."""
    saved_bytes: float
    """For the gradients of input and weights."""
    saved_for_input_bytes: float
    """For the gradient of the input alone."""
    input_bytes: float
    """What is kept if the layer is recomputed."""
    working_bytes: float
    """Live only while it runs, besides: inputs gathered, gradients of its widest activations,
    logits.
    """
    sent: tuple[tuple[TokenStream, float], ...]
    """What the next stage needs if the partition cuts behind the layer: bytes per token of each
    stream.
    """
