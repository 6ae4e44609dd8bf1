"""Memory budget of a group's activations, per token and unit of vision.

For `balance.grouping.caps`, which shares the budget between both caps. Pure. Counted per token and
layer, in bytes of bf16, what is kept for the backward pass: the inputs of both norms, of the query,
key and value matrices, of attention, of its output matrix, and of the feed-forward part's matrices
and activation; 32 times the hidden size where the feed-forward part is 4 times as wide and not
gated (34 with masks of dropout: Korthikanti et al., arXiv 2205.05198, section 4.1, without the
attention scores, which flash attention does not keep). Not weights, gradients, optimizer states and
what recomputation saves: give what is left of a GPU's memory, or prices that you measured.
"""

from dataclasses import dataclass

from balance.errors import ConfigError
from balance.media.rules import NativeSizeRule
from balance.presets import ModelPreset, TransformerShape

BYTES = 2
"""Bytes of a bf16 number."""
LOGIT_BYTES = 14
"""Bytes of one logit at the peak of transformers' loss (5.23, measured): bf16, a copy in fp32, the
logarithm of the softmax, gradients. Fused losses, as the engine's, take 2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationBudget:
    """Bound of a group: `bytes_per_token * tokens + bytes_per_vision * vision <= num_bytes`.

    To give it in tokens instead: a price of 1 per token, and per unit of vision its ViT tokens.
    """

    num_bytes: float
    bytes_per_token: float
    bytes_per_vision: float
    """Price of a unit of the vision cap: an image patch, or a ViT token."""

    def __post_init__(self) -> None:
        if self.num_bytes <= 0 or self.bytes_per_token <= 0 or self.bytes_per_vision < 0:
            prices = "a budget and a price per token above 0, and a price of vision of 0 or more"
            raise ConfigError(f"{self}: give {prices}")

    @classmethod
    def of(cls, preset: ModelPreset, num_bytes: float, *, gpus: int = 1) -> "ActivationBudget":
        """Prices from a preset's dimensions; `gpus` share a micro-batch by tensor parallelism.

        Raises ConfigError when the preset does not give the model's dimensions.
        """
        vit, llm = preset.dimensions
        if gpus < 1:
            raise ConfigError(f"{gpus} GPUs share the activations; give 1 or more")
        vision = preset.vision
        tokens_per_unit = 1 if isinstance(vision, NativeSizeRule) else vision.vit_tokens_per_patch
        token_bytes = _layer_bytes(llm) * llm.num_layers + LOGIT_BYTES * llm.vocab_size
        return cls(
            num_bytes=num_bytes,
            bytes_per_token=token_bytes / gpus,
            bytes_per_vision=_layer_bytes(vit) * vit.num_layers * tokens_per_unit / gpus,
        )

    def most_tokens(self, vision: int) -> int:
        """LLM tokens that fit next to so much vision; below 0 where even that is too much.

        >>> ActivationBudget(num_bytes=100, bytes_per_token=2, bytes_per_vision=5).most_tokens(10)
        25
        """
        return int((self.num_bytes - self.bytes_per_vision * vision) // self.bytes_per_token)

    def most_vision(self, tokens: int) -> int | None:
        """Units of vision that fit next to so many LLM tokens; None where vision is free."""
        if self.bytes_per_vision == 0:
            return None
        return int((self.num_bytes - self.bytes_per_token * tokens) // self.bytes_per_vision)


def _layer_bytes(shape: TransformerShape) -> int:
    """Bytes that a layer keeps of one token."""
    query, key = shape.attention_size, shape.num_kv_heads * shape.head_size
    # hidden state for both norms, query-key-value and feed-forward; attention's q, k, v and output
    attention = 4 * shape.hidden_size + 2 * query + 2 * key
    # gated: gate, up, the gate's activation and the product; else before and after the activation
    return BYTES * (attention + (4 if shape.gated else 2) * shape.ffn_size)
