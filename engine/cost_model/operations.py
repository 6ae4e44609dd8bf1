"""Layers and their operations as data, timed by `analytical`. Pure.

Sizes are those of one tensor-parallel GPU; bytes are those of bf16, but for `Layer.saved`.
"""

from dataclasses import dataclass

from isobatch.engine.cost_model.parallel import Part
from isobatch.models.layer_bytes import NOTHING, KeptBytes

BYTES = 2
"""Bytes of a bf16 number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenStream:
    """Tokens that a layer processes: a phase's tokens in `Loads`, times a factor."""

    phase: str
    """`audio`, `vision`, `llm` or `labels`."""
    per_token: float = 1.0
    """Factor: images have fewer tokens in the language model than in the encoder."""


Sent = tuple[tuple[TokenStream, float], ...]
"""Bytes per token of each stream that crosses a cut after a layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MatMul:
    """A matrix product of every token with weights of `inputs` rows and `outputs` columns."""

    inputs: int
    outputs: int
    stream: TokenStream


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Softmax attention inside each image, clip or sample."""

    width: int
    """Width of all query heads."""
    kv_width: int
    causal: bool
    stream: TokenStream


@dataclass(frozen=True, slots=True, kw_only=True)
class Elementwise:
    """Elementwise kernels and the bytes per token that they read and write."""

    bytes_per_token: float
    kernels: int
    stream: TokenStream


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """`count` all-gathers or reduce-scatters among tensor-parallel GPUs; bytes of all parts."""

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
    """Parameters of the whole layer."""
    gpu_params: int
    """Parameters on one tensor-parallel GPU."""
    saved: KeptBytes = NOTHING
    """Activations for the backward pass, in the dtype of the run."""
    deferred_bytes: float = 0.0
    """Products' inputs and gradients of their outputs, for weight gradients that come later."""
    input_bytes: float = 0.0
    """The input, which is kept if the layer is recomputed."""
    working_bytes: float
    """Bytes live only while it runs: gathered inputs, gradients of its widest activations."""
    chunk_bytes: float = 0.0
    """Bytes of what is computed in chunks; live only while it runs, `max_chunk_bytes` of them."""
    max_chunk_bytes: float = 0.0
    inputs: TokenStream | None = None
    """Tokens of the input and of `working_bytes`, if they are others than those of `stream`."""
    sent: Sent
