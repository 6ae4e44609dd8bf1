"""Bytes that a model's layers keep for the backward pass, per token.

Pure. Counted per token and layer, in bytes of bf16: the inputs of both norms, of the query,
key and value matrices, of attention, of its output matrix, and of the feed-forward part's matrices
and activation; 32 times the hidden size where the feed-forward part is 4 times as wide and not
gated (34 with masks of dropout: Korthikanti et al., arXiv 2205.05198, section 4.1, without the
attention scores, which flash attention does not keep). Not weights, gradients, optimizer states and
what recomputation saves: give what is left of a GPU's memory, or prices that you measured.
"""

from isobatch.balance.grouping.activation_budget import ActivationBudget
from isobatch.common.errors import ConfigError
from isobatch.models.image_rules import NativeSizeRule
from isobatch.models.presets import ModelPreset, TransformerShape

BYTES = 2
"""Bytes of a bf16 number."""
LOGIT_BYTES = 14
"""Bytes of one logit at the peak of transformers' loss (5.23, measured): bf16, a copy in fp32, the
logarithm of the softmax, gradients. Fused losses, as the engine's, take 2."""


def activation_budget(preset: ModelPreset, num_bytes: float, *, gpus: int = 1) -> ActivationBudget:
    """The budget of a preset's model; `gpus` share a micro-batch by tensor parallelism.

    Raises ConfigError when the preset does not give the model's dimensions.
    """
    vit, llm = preset.dimensions
    if gpus < 1:
        raise ConfigError(f"{gpus} GPUs share the activations; give 1 or more")
    vision = preset.vision
    tokens_per_unit = 1 if isinstance(vision, NativeSizeRule) else vision.vit_tokens_per_patch
    token_bytes = _layer_bytes(llm) * llm.num_layers + LOGIT_BYTES * llm.vocab_size
    return ActivationBudget(
        num_bytes=num_bytes,
        bytes_per_token=token_bytes / gpus,
        bytes_per_vision=_layer_bytes(vit) * vit.num_layers * tokens_per_unit / gpus,
    )


def _layer_bytes(shape: TransformerShape) -> int:
    """Bytes that a layer keeps of one token."""
    query, key = shape.attention_size, shape.num_kv_heads * shape.head_size
    # hidden state for both norms, query-key-value and feed-forward; attention's q, k, v and output
    attention = 4 * shape.hidden_size + 2 * query + 2 * key
    # gated: gate, up, the gate's activation and the product; else before and after the activation
    return BYTES * (attention + (4 if shape.gated else 2) * shape.ffn_size)
