"""FLOPs of samples and groups from a model's dimensions, and their time.

For `balance.grouping.caps`, the engine's loads and benchmarks. Pure. Matrix products only: norms,
activations and softmax are under 1 % of the FLOPs. For one forward pass:

- a linear layer: 2 FLOPs per weight and token. Per layer Q, K, V (K and V narrower with grouped
  queries), output, and two feed-forward matrices or three (gated); also patch embedding, projector,
  and the LLM's head for all tokens;
- attention of the encoder, inside each tile, image or frame of a video's grid: 4 x tokens^2 x
  width of all heads, per layer;
- attention of the LLM, inside each packed sample: half of that, because it is causal. Two-way
  attention inside images (Gemma 3, PaliGemma) is not counted twice;
- layers with a window (Qwen2.5-VL's encoder, Gemma 3's LLM) attend to that much only, and linear
  attention (Qwen3.5) costs its matrices alone; its recurrence is under 3 % of them.

So the FLOPs are linear in four sums (`ComputeLoad`). Training takes three forward passes: each
product again for the gradient of its input and of its weight.

Sources: PipeTune A.4 (attention from each sample's length, the rest from the packed length, the
encoder from the number of images), OrchMLLM eq. 2 (linear and quadratic terms), OmniBal 1 (6B +
20B: at 9 images and 4K tokens "almost 40 %" of the time is the ViT's; here 39.1 %, of the layers'
matrices alone 39.9 %). Factor 3, nothing recomputed: PaLM (arXiv 2204.02311), appendix B.
"""

from dataclasses import dataclass, fields

import numpy as np

from isobatch.common.errors import ConfigError
from isobatch.common.plain_values import MOST_INTEGER
from isobatch.common.types import Counts, FloatArray, Groups, IntArray
from isobatch.models.image_rules import NativeSizeRule, VisionRule
from isobatch.models.presets import LlmShape, ModelPreset, VitShape

TRAIN_FACTOR = 3
"""FLOPs of forward and backward pass over those of the forward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSpeed:
    """How fast one GPU really computes; predicted times scale with it.

    The defaults are an A100's 312 TFLOP/s at 37 % MFU, which OmniBal's GPU days for InternVL 6B +
    20B amount to, and an assumed 10 ms per micro-batch for launches and waiting.
    """

    vit_flops_per_s: float = 115e12
    llm_flops_per_s: float = 115e12
    micro_batch_overhead_ms: float = 10.0

    def __post_init__(self) -> None:
        if min(self.vit_flops_per_s, self.llm_flops_per_s) <= 0 or self.micro_batch_overhead_ms < 0:
            raise ConfigError(f"{self}: speeds must be greater than 0, the overhead 0 or more")

    def __str__(self) -> str:
        vit, llm = round(self.vit_flops_per_s / 1e12), round(self.llm_flops_per_s / 1e12)
        return f"ViT {vit}, LLM {llm} TFLOP/s, {self.micro_batch_overhead_ms:g} ms per micro-batch"


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeLoad:
    """What encoder and LLM process; int64 arrays of one shape, an entry per sample or per group."""

    vit_tokens: IntArray
    vit_squares: IntArray
    """Sum over tiles (images, at native resolution) of their ViT tokens squared.

    With windows less, mean over layers (`TransformerShape.mean_squares`); so the LLM's.
    """
    llm_tokens: IntArray
    llm_squares: IntArray
    """Sum over samples of `seq_len` squared."""

    def sum(self, groups: Groups) -> "ComputeLoad":
        """Load of each group, from the load of each sample."""
        return ComputeLoad(**{f.name: groups.sum(getattr(self, f.name)) for f in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True)
class FlopsModel:
    """FLOPs and time of a `ComputeLoad`: per token and per squared length, for encoder and LLM."""

    name: str
    vision: VisionRule
    vit: VitShape
    llm: LlmShape
    vit_flops_per_token: float
    """Forward, patch embedding and projector included, spread over all ViT tokens."""
    vit_flops_per_square: int
    llm_flops_per_token: int
    llm_flops_per_square: int
    speed: GpuSpeed

    @classmethod
    def of(cls, preset: ModelPreset, speed: GpuSpeed | None = None) -> "FlopsModel":
        """The FLOPs of a preset's model; ConfigError if it does not give the model's dimensions."""
        vit, llm = preset.dimensions
        embedded = preset.embedded_share
        vit_weights: float = vit.num_layers * vit.layer_weights
        vit_weights += embedded * vit.patch_values * vit.hidden_size
        vit_weights += vit.merged_share(embedded) * vit.projector_weights
        llm_weights = llm.num_layers * llm.layer_weights + llm.vocab_size * llm.hidden_size
        return cls(
            name=preset.name,
            vision=preset.vision,
            vit=vit,
            llm=llm,
            vit_flops_per_token=2 * vit_weights,
            vit_flops_per_square=4 * vit.num_layers * vit.attention_size,
            llm_flops_per_token=2 * llm_weights,
            llm_flops_per_square=2 * llm.num_layers * llm.attention_size,
            speed=speed or GpuSpeed(),
        )

    def loads(self, counts: Counts) -> ComputeLoad:
        """Load of each sample.

        At native resolution counts do not tell images and frames of a sample apart: they are taken
        as equally large, the least that their squares can sum to. Tiles and one video are exact.
        """
        if isinstance(self.vision, NativeSizeRule):
            # at native resolution an image is one patch, a video one per frame of its grid
            squares = np.square(counts.num_vit_tokens) // np.maximum(counts.num_image_patches, 1)
        else:
            squares = counts.num_image_patches * self.vision.vit_tokens_per_patch**2
        return ComputeLoad(
            vit_tokens=counts.num_vit_tokens,
            vit_squares=self.vit.mean_squares(counts.num_vit_tokens, squares),
            llm_tokens=counts.seq_len,
            llm_squares=self.attention(counts.seq_len),
        )

    def attention(self, lengths: IntArray) -> IntArray:
        """`llm_squares` of samples of such lengths, int64, same shape."""
        return self.llm.mean_squares(lengths, np.square(lengths))

    def attention_tokens(self, lengths: IntArray) -> IntArray:
        """Attention of the LLM in samples of such lengths, as tokens that cost as much without it.

        int64, same shape.
        """
        equal = self.llm_flops_per_token // max(1, self.llm_flops_per_square)
        return self.attention(lengths) // min(max(1, equal), MOST_INTEGER)

    def vit_flops(self, load: ComputeLoad) -> FloatArray:
        """Forward FLOPs of encoder and projector, float64, an entry per entry of `load`."""
        linear = self.vit_flops_per_token * load.vit_tokens
        squares = float(self.vit_flops_per_square) * load.vit_squares
        return np.asarray(linear + squares, dtype=np.float64)

    def llm_flops(self, load: ComputeLoad) -> FloatArray:
        """Forward FLOPs of the LLM, float64, an entry per entry of `load`."""
        linear = float(self.llm_flops_per_token) * load.llm_tokens
        squares = float(self.llm_flops_per_square) * load.llm_squares
        return np.asarray(linear + squares, dtype=np.float64)

    def phase_ms(self, counts: Counts) -> FloatArray:
        """Predicted time of both passes of each sample, float64, (samples, 3).

        Columns: encoder and projector, the LLM without attention, its attention.
        """
        load = self.loads(counts)
        attention = float(self.llm_flops_per_square) * load.llm_squares
        llm = self.llm_flops(load) - attention
        seconds = self.vit_flops(load) / self.speed.vit_flops_per_s
        columns = [seconds, *(part / self.speed.llm_flops_per_s for part in (llm, attention))]
        return 1e3 * TRAIN_FACTOR * np.stack(columns, axis=1)

    def train_flops(self, load: ComputeLoad) -> FloatArray:
        """FLOPs of both passes with everything trained, without recomputation (the M of MFU)."""
        return TRAIN_FACTOR * (self.vit_flops(load) + self.llm_flops(load))

    def compute_ms(self, load: ComputeLoad) -> FloatArray:
        """Predicted time of forward and backward pass on one GPU, without overhead."""
        vit_s = self.vit_flops(load) / self.speed.vit_flops_per_s
        return 1e3 * TRAIN_FACTOR * (vit_s + self.llm_flops(load) / self.speed.llm_flops_per_s)

    def micro_batch_ms(self, load: ComputeLoad) -> FloatArray:
        """Predicted time of each entry as one micro-batch on one GPU, overhead included."""
        return self.compute_ms(load) + self.speed.micro_batch_overhead_ms

    def groups_ms(self, counts: Counts, groups: Groups) -> FloatArray:
        """Predicted time of each group of these samples, float64, shape (groups,)."""
        return self.micro_batch_ms(self.loads(counts).sum(groups))

    def __str__(self) -> str:
        return f"{self.name} ({self.speed})"
