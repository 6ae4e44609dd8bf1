"""Bytes that a model's layers keep between forward and backward pass, per token.

The only source of them: `packer build --memory-gib` and `engine plan` both sum these. Pure. Not
weights, gradients, optimizer states, nor what recomputation saves.

What a transformer layer keeps, per token, with h the hidden size, a and k the width of all query
and all key heads, f that of the feed-forward part, and b the bytes of a number:

    attention       b (2a + 2k)    queries, keys, values, and its own output
                  + b 2a           where one product makes queries, keys and values and rotary
                                   positions copy the first two: the values hold all of it
                  + b a            there too: images attend apart, and are joined for a product
    feed-forward    b 2f           before and after the activation function
                  + b f            sigmoid of QuickGELU
                  + b 2f           gated: the other product, and the activation function's value
    two norms       b 4h           LayerNorm: input and output
                    8h + b 4h      RMSNorm: input in float32, normalized input, output
    norms of heads  (4 + b)(a + k) input in float32, and normalized
    layer scales    b 2h           their inputs

That is how modules of transformers run: one operation at a time, in the dtype of their weights. A
tensor that several operations keep counts once. Not counted: sums of the softmax (4 bytes per
head), means of norms, rotary tables and masks, which are under 1 % in layers of usual size. Gemma's
four norms compute in float32 throughout: 32h + b 2h, and 8(a + k) for heads. In bf16 a llama layer
keeps 16h + 4a + 4k + 8f, and tests count the tensors of real layers.

`fused` kernels (Megatron-LM's, apex's, Liger's) keep less. A norm keeps input and output, b 4h for
two, and b (a + k) more for heads; a gated activation function b 3f, any other b 2f. So a plain
layer keeps 32h in bf16: the 34h of Korthikanti et al. (arXiv 2205.05198, section 4.1) without masks
of dropout and, as with FlashAttention, without scores.

With frozen weights a layer that passes a gradient on keeps no inputs of products: outputs of norms,
normalized inputs, what enters the last product of the feed-forward part, inputs of layer scales.

Linear attention and mixtures of experts are taken as attention and one part of their width.
"""

from dataclasses import dataclass
from typing import Literal

from isobatch.balance.grouping.activation_budget import ActivationBudget
from isobatch.common.errors import ConfigError
from isobatch.models.presets import EncoderShape, LlmShape, ModelPreset, TransformerShape, VitShape

Kernels = Literal["transformers", "fused"]
FLOAT_BYTES = 4
"""Bytes of a float32 number, in which norms of transformers compute."""
LOGIT_BYTES: dict[Kernels, int] = {"transformers": 14, "fused": 2}
"""Bytes of one bf16 logit at the peak of the loss. Of transformers' (5.23, measured): the logit, a
copy in float32, the logarithm of the softmax, gradients. Of fused losses and the engine's own: the
logit, whose place the gradient takes."""

LOSS_CHUNK = 1 << 24
"""Logits of the engine's loss in float32 at a time, 64 MiB: enough work for a GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRun:
    """How a layer runs: on how many GPUs, in which dtype, with whose kernels."""

    gpus: int = 1
    """GPUs that share each layer by tensor parallelism."""
    sequence_parallel: bool = True
    """Whether they also split what lies between products (arXiv 2205.05198)."""
    number_bytes: int = 2
    """Bytes of a number of weights and activations."""
    kernels: Kernels = "transformers"

    def token_share(self, size: float) -> float:
        """`size` as one GPU holds it outside of tensor-parallel products."""
        return size / self.gpus if self.sequence_parallel else float(size)

    def split(self, size: int) -> int:
        """Columns of a product as one GPU holds them; rounded up."""
        return -(-size // self.gpus)

    def head_widths(self, shape: TransformerShape) -> tuple[int, int]:
        """Width of all query and of all key heads on one GPU, which holds whole heads."""
        query, key = self.split(shape.num_heads), self.split(shape.num_kv_heads)
        return query * shape.head_size, key * shape.head_size


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptBytes:
    """Bytes per token of one layer on one GPU."""

    trained: float
    frozen: float
    """Bytes with frozen weights, where a gradient passes through."""

    def __add__(self, other: "KeptBytes") -> "KeptBytes":
        """Both layers."""
        return KeptBytes(
            trained=self.trained + other.trained,
            frozen=self.frozen + other.frozen,
        )


NOTHING = KeptBytes(trained=0.0, frozen=0.0)
"""Bytes of a layer that keeps nothing, as a table of embeddings."""


def transformer_bytes(shape: TransformerShape, run: LayerRun) -> KeptBytes:
    """What one transformer layer keeps; the module's docstring has the sum."""
    return _attention(shape, run) + _feed_forward(shape, run) + _norms(shape, run)


def embedding_bytes(values: float, run: LayerRun) -> KeptBytes:
    """A product on raw input of so many values per token, as of pixels; no GPU splits it."""
    return KeptBytes(trained=run.number_bytes * values, frozen=0.0)


def projector_bytes(shape: EncoderShape, run: LayerRun) -> KeptBytes:
    """What an encoder's projectors keep, per token that enters them: LayerNorm and an MLP each."""
    size = run.number_bytes
    count = shape.num_projectors
    # products are split by their outputs and by their inputs in turn
    inner = [
        run.split(width) if place % 2 else width
        for place, width in enumerate(shape.projector[1:-1], start=1)
    ]
    first = run.token_share(shape.projector[0])
    return KeptBytes(
        trained=count * size * (2 * first + 2 * sum(inner)),
        frozen=count * size * (first + sum(inner)),
    )


def head_bytes(llm: LlmShape, run: LayerRun, logit_bytes: float) -> KeptBytes:
    """The final norm, and the logits until their loss has its gradient."""
    logits = logit_bytes * run.number_bytes / 2 * run.split(llm.vocab_size)
    return _norm(run.token_share(llm.hidden_size), run, is_rms=True) + KeptBytes(
        trained=logits, frozen=logits
    )


def activation_budget(
    preset: ModelPreset, num_bytes: float, *, gpus: int = 1, kernels: Kernels = "transformers"
) -> ActivationBudget:
    """The budget of a preset's model in bf16; `gpus` share a micro-batch by tensor parallelism.

    A token of the LLM is charged for all its layers, one of the encoder for the patch embedding and
    its share of the projector too. An audio encoder is not in it: no cap counts its tokens. Raises
    ConfigError when the preset does not give the model's dimensions.
    """
    vit, llm = preset.dimensions
    if gpus < 1:
        raise ConfigError(f"{gpus} GPUs share the activations; give 1 or more")
    run = LayerRun(gpus=gpus, kernels=kernels)
    per_token = transformer_bytes(llm, run).trained * llm.num_layers
    per_token += head_bytes(llm, run, LOGIT_BYTES[kernels]).trained
    embedded = preset.embedded_share
    per_patch = transformer_bytes(vit, run).trained * vit.num_layers
    per_patch += embedding_bytes(vit.patch_values, run).trained * embedded
    per_patch += projector_bytes(vit, run).trained * vit.merged_share(embedded)
    return ActivationBudget(
        num_bytes=num_bytes,
        bytes_per_token=per_token,
        bytes_per_vision=per_patch * preset.vit_tokens_per_unit,
    )


def _attention(shape: TransformerShape, run: LayerRun) -> KeptBytes:
    """Without the products' input, which is a norm's output."""
    query, key = run.head_widths(shape)
    numbers = 2 * query + 2 * key
    copies = 0
    if isinstance(shape, VitShape) and shape.joint_attention and run.kernels == "transformers":
        numbers, copies = numbers + 2 * query, query
    heads = NOTHING
    if shape.has_head_norms:
        inputs = run.number_bytes if run.kernels == "fused" else FLOAT_BYTES
        outputs = 0 if run.kernels == "fused" else run.number_bytes
        if shape.sandwich_norms and outputs:
            outputs = FLOAT_BYTES
        heads = KeptBytes(trained=(inputs + outputs) * (query + key), frozen=inputs * (query + key))
    size = run.number_bytes
    return heads + KeptBytes(trained=size * (numbers + copies), frozen=size * numbers)


def _feed_forward(shape: TransformerShape, run: LayerRun) -> KeptBytes:
    """Without the products' input, which is a norm's output."""
    width = run.number_bytes * run.split(shape.ffn_size)
    plain = run.kernels == "transformers"
    # what the activation function and the gate need, without their product
    numbers = 2 + plain if shape.gated else 1
    if shape.quick_gelu and plain:
        numbers += 1
    return KeptBytes(trained=float((numbers + 1) * width), frozen=float(numbers * width))


def _norms(shape: TransformerShape, run: LayerRun) -> KeptBytes:
    """Norms before attention and feed-forward part, those after them, and layer scales."""
    hidden = run.token_share(shape.hidden_size)
    two = _norm(hidden, run, is_rms=shape.has_rms_norms)
    if shape.sandwich_norms:
        two = _sandwich(hidden, run)
    scales = run.number_bytes * hidden * (isinstance(shape, VitShape) and shape.layer_scale)
    return two + two + KeptBytes(trained=2 * scales, frozen=0.0)


def _norm(hidden: float, run: LayerRun, *, is_rms: bool) -> KeptBytes:
    """A norm and its output, which the product after it reads."""
    size = run.number_bytes
    if run.kernels == "fused" or not is_rms:
        return KeptBytes(trained=2 * size * hidden, frozen=size * hidden)
    return KeptBytes(trained=(FLOAT_BYTES + 2 * size) * hidden, frozen=FLOAT_BYTES * hidden)


def _sandwich(hidden: float, run: LayerRun) -> KeptBytes:
    """Gemma's norms before and after a part: the second's output goes to a sum alone."""
    size = run.number_bytes
    if run.kernels == "fused":
        return KeptBytes(trained=3 * size * hidden, frozen=2 * size * hidden)
    return KeptBytes(trained=(4 * FLOAT_BYTES + size) * hidden, frozen=2 * FLOAT_BYTES * hidden)
