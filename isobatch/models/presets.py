"""Presets of models and datasets: all that decides what a sample costs.

Frozen dataclasses, read from `configs/` or from a user's TOML file by `common.config`. Presets of
clusters are `models.clusters`.
"""

from collections import Counter
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from itertools import pairwise
from math import isqrt
from typing import Any

import numpy as np

from isobatch.common.config import build_config, check_positive, read_preset
from isobatch.common.errors import ConfigError
from isobatch.common.types import IntArray
from isobatch.common.visible_text import shown
from isobatch.models.audio_tokens import AudioRule
from isobatch.models.image_rules import VISION_RULES, NativeSizeRule, VisionRule
from isobatch.models.image_rules.base import ImagePlan, MarkupPart
from isobatch.models.video_rules import VIDEO_RULES, VideoRule

MOST_SIZE = 2**40
"""Largest size of a layer; FLOPs of all layers then fit a float."""
MOST_CONTEXT = 2**31 - 1
"""Counts of tokens are int32 in every artefact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerShape:
    """Dimensions of equal transformer layers that decide their FLOPs; all are positive."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    """Fewer than `num_heads` with grouped-query attention."""
    head_size: int
    ffn_size: int
    gated: bool
    """Three matrices in the feed-forward part (SwiGLU) instead of two."""
    num_full_layers: int | None = None
    """Layers that attend over a whole image or sample; None: all of them."""
    window: int | None = None
    """Tokens that the other layers attend to; None: their attention is linear."""
    quick_gelu: bool = False
    """Activation function x * sigmoid(1.702 x) (CLIP, Qwen2-VL): activations, no FLOPs."""
    sandwich_norms: bool = False
    """Norms before and after attention and feed-forward part, in float32 (Gemma 2 to 4)."""

    def __post_init__(self) -> None:
        check_positive(self, max_integer=MOST_SIZE)
        if (self.num_full_layers or 0) > self.num_layers:
            actual = f"num_full_layers = {self.num_full_layers}"
            raise ConfigError(f"{actual}: there are {self.num_layers} layers")

    @property
    def has_rms_norms(self) -> bool:
        """Whether layers have RMSNorm and not LayerNorm; Whisper's encoder does not."""
        return False

    @property
    def has_head_norms(self) -> bool:
        """Whether queries and keys are normalised."""
        return False

    @property
    def attention_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_size

    @property
    def attention_weights(self) -> int:
        """Entries of the matrices of one layer's attention."""
        return self.hidden_size * self.head_size * 2 * (self.num_heads + self.num_kv_heads)

    @property
    def ffn_weights(self) -> int:
        """Entries of the matrices of one layer's feed-forward part that a token goes through."""
        return (3 if self.gated else 2) * self.hidden_size * self.ffn_size

    @property
    def layer_weights(self) -> int:
        """Entries of one layer's matrices; biases and norms need no matrix product."""
        return self.attention_weights + self.ffn_weights

    def mean_squares(self, lengths: IntArray, squares: IntArray) -> IntArray:
        """Squared lengths that attention costs, int64, mean over layers.

        `squares`: as if all layers attended over everything; `lengths`: tokens. For an encoder
        several images, for a language model one sample per entry; its window is causal.
        """
        if self.num_full_layers is None:
            return squares
        windowed = np.zeros_like(squares)
        if self.window is not None:
            windowed = self._windowed(lengths, squares, self.window)
        others = self.num_layers - self.num_full_layers
        return (self.num_full_layers * squares + others * windowed) // self.num_layers

    def _windowed(self, lengths: IntArray, squares: IntArray, window: int) -> IntArray:
        """Squared lengths in layers with windows: an image's windows do not overlap."""
        return np.minimum(squares, window * lengths)


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderShape(TransformerShape):
    """An encoder and the projector after it."""

    projector: tuple[int, ...]
    """Widths of the MLP that makes every token for the LLM, first input to last output."""
    num_projectors: int = 1
    """Projectors of these widths: deepstack (Qwen3-VL) has one per level that the LLM gets."""
    pooled: int = 1
    """Tokens that are averaged to one before the projector (Gemma 3: 16)."""

    def __post_init__(self) -> None:
        TransformerShape.__post_init__(self)
        if len(self.projector) < 2 or not all(0 < width <= MOST_SIZE for width in self.projector):
            allowed = f"give two widths at least, each from 1 to {MOST_SIZE:,}"
            raise ConfigError(f"projector is {shown(list(self.projector))}: {allowed}")

    @property
    def projector_weights(self) -> int:
        """Entries of the matrices of all projectors."""
        one = sum(first * second for first, second in pairwise(self.projector))
        return self.num_projectors * one

    def merged_share(self, embedded: float) -> float:
        """Tokens that enter a projector per token of the encoder.

        Merging concatenates: the projector's input is as many widths wide as tokens were merged.
        `embedded`: share of the encoder's tokens that come from pixels, and are passed on.
        """
        return embedded * self.hidden_size / self.projector[0] / self.pooled


@dataclass(frozen=True, slots=True, kw_only=True)
class VitShape(EncoderShape):
    """A vision encoder with its patch embedding, and the projector after it."""

    patch_values: int
    """Pixel values that the embedding reads per ViT patch: 3 x 14 x 14, twice that for video."""
    query_key_norm: bool = False
    """Queries and keys are normalised, as in InternViT-6B: activations, hardly any FLOPs."""
    layer_scale: bool = False
    """Outputs of attention and feed-forward part are scaled by learnt factors: activations too."""
    joint_attention: bool = False
    """One product makes queries, keys and values (Qwen-VL, GLM-4V): activations, no FLOPs."""

    @property
    def has_rms_norms(self) -> bool:
        """Whether layers have RMSNorm: of families with gates or normalised queries."""
        return self.gated or self.query_key_norm

    @property
    def has_head_norms(self) -> bool:
        """`query_key_norm`."""
        return self.query_key_norm


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioEncoderShape(EncoderShape):
    """An audio encoder with its convolutions, and the projector after it."""

    frame_values: int
    """Mel bins that the first convolution reads per frame of the spectrogram."""
    conv_channels: int | None = None
    """Channels of three convolutions over frames and mel bins (Qwen3-Omni); None: Whisper's two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LlmShape(TransformerShape):
    """A language model with its output head.

    Of a mixture of experts, `ffn_size` is the width of the experts that a token goes to, together.
    """

    vocab_size: int
    all_experts_size: int | None = None
    """Width of all experts together: what is held in memory."""
    gated_attention: bool = False
    """Attention's output is multiplied by a gate as wide as the queries (Qwen3.5)."""
    linear_weights: int | None = None
    """Entries of the matrices of attention in a layer where it is linear (no `window`)."""
    full_head_size: int | None = None
    """Size of heads in layers that attend over a whole sample, if it is another (Gemma 4)."""
    mean_attention_weights: int | None = None
    """Entries of the matrices of one layer's attention, where layers differ in them (Gemma 4)."""
    embedding_size: int | None = None
    """Values per token in all tables of embeddings; None: `hidden_size` (Gemma 4 has more)."""
    head_norms: bool = False
    """Queries and keys are normalised (Qwen3, Gemma 3): activations, hardly any FLOPs."""

    @property
    def has_rms_norms(self) -> bool:
        """Whether layers have RMSNorm: in all families that we know."""
        return True

    @property
    def has_head_norms(self) -> bool:
        """`head_norms`."""
        return self.head_norms

    @property
    def attention_weights(self) -> int:
        """Entries of the matrices of one layer's attention, mean over layers."""
        if self.mean_attention_weights is not None:
            return self.mean_attention_weights
        gate = self.hidden_size * self.attention_size * self.gated_attention
        full = super(LlmShape, self).attention_weights + gate
        if self.num_full_layers is None or self.linear_weights is None:
            return full
        others = self.num_layers - self.num_full_layers
        total = self.num_full_layers * full + others * self.linear_weights
        return total // self.num_layers

    @property
    def held_weights(self) -> int:
        """Entries of one layer's matrices, those of all experts."""
        experts = 3 if self.gated else 2
        width = self.ffn_size if self.all_experts_size is None else self.all_experts_size
        return self.attention_weights + experts * self.hidden_size * width

    def mean_squares(self, lengths: IntArray, squares: IntArray) -> IntArray:
        """Squared lengths as of other shapes; those of larger heads count for more."""
        mean = super(LlmShape, self).mean_squares(lengths, squares)
        more = (self.num_full_layers or 0) * ((self.full_head_size or 0) - self.head_size)
        return (
            mean
            if self.full_head_size is None
            else mean + more * squares // (self.num_layers * self.head_size)
        )

    def _windowed(self, lengths: IntArray, squares: IntArray, window: int) -> IntArray:
        """A causal window: the first tokens attend to fewer."""
        return squares - np.square(np.maximum(lengths - window, 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaMarkup:
    """What an image or a clip becomes in the text: `prefix`, `token` once per LLM token, `suffix`.

    Unknown tokens are added to the tokenizer's vocabulary: prefix, suffix, token; images' first.
    """

    token: str
    prefix: str = ""
    suffix: str = ""
    placeholder: str = ""
    """What the chat template writes for one, if the processor then puts the markup, as text, in its
    place; empty if the template writes the markup itself."""
    parts: tuple[tuple[str, str], ...] = ()
    """Texts of a rule's `part_names`, for an image that has several. `token` in them stands for all
    of the part; {row} and {column}, from 1, are numbers, as in `prefix` {number}, from 0, is.
    {label} is a frame's time or number."""
    template_first: bool = False
    """Whether the chat template writes an image wherever it can, if it takes strings too: what it
    writes around one is known to nobody else."""

    def __post_init__(self) -> None:
        if self.parts and not self.placeholder:
            raise ConfigError("parts are put in place of a placeholder; give that too")
        for name, text in self.parts:
            if text.count(self.token) > 1:
                raise ConfigError(f"part {name!r} has the token {self.token!r} more than once")

    @property
    def text(self) -> str:
        """The markup with one token, as it is tokenised before tokens are repeated."""
        return self.prefix + self.token + self.suffix

    @property
    def template_text(self) -> str:
        """What a chat template writes, or is given, for one."""
        return self.placeholder or self.text

    def written(self, plan: ImagePlan, number: int) -> str:
        """The markup of a sample's image `number`, from 0, with one token for each of its runs."""
        return _written(self, plan.parts, number if "{number}" in self.prefix else 0)


@lru_cache(maxsize=1 << 12)
def _written(markup: MediaMarkup, parts: tuple[MarkupPart, ...], number: int) -> str:
    texts = dict(markup.parts)
    pieces = []
    for part in parts:
        text = texts[part.name].replace("{row}", str(part.row)).replace("{label}", part.label)
        pieces.append(text.replace("{column}", str(part.column)))
    body = "".join(pieces) if parts else markup.token
    return markup.prefix.replace("{number}", str(number)) + body + markup.suffix


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPreset:
    """Everything about a model that decides what a sample costs."""

    name: str
    description: str
    context_len: int
    """LLM positions at most; the longest group that `choose_limits` may propose."""
    image_markup: MediaMarkup
    vision: VisionRule
    vit: VitShape | None = None
    """Dimensions for FLOPs; a preset without them counts and groups, but predicts no time."""
    llm: LlmShape | None = None
    audio: AudioRule | None = None
    """Rule of audio clips; None for a model without an audio encoder: no `audio_markup` either."""
    audio_markup: MediaMarkup | None = None
    audio_encoder: AudioEncoderShape | None = None
    video: VideoRule | None = None
    """Rule of videos; None for a model that takes none, which has no `video_markup` either."""
    video_markup: MediaMarkup | None = None
    """Its token may be that of images, where frames are images."""

    def __post_init__(self) -> None:
        if not 1 <= self.context_len <= MOST_CONTEXT:
            raise ConfigError(f"context_len is {self.context_len}; give 1 to {MOST_CONTEXT:,}")
        for kind in ("audio", "video"):
            names = kind, f"{kind}_markup"
            present = [name for name in names if getattr(self, name) is not None]
            if len(present) == 1:
                lacks = names[present == [kind]]
                advice = f"give both for a model with {kind}, else neither"
                raise ConfigError(f"has [{present[0]}] but no [{lacks}]; {advice}")
        video = self.video_markup
        if video is not None and video.token == self.image_markup.token:
            video = None
        markups = [value for value in (self.image_markup, self.audio_markup, video) if value]
        strings = Counter(string for one in markups for string in {one.prefix, one.suffix})
        strings.update(one.token for one in markups)
        for markup in markups:
            if strings[markup.token] > 1:
                again = f"the token {markup.token!r} has a second place in the markup"
                raise ConfigError(f"{again}; give each its own")
        _check_parts("image_markup", self.image_markup, self.vision)
        if self.video_markup is not None:
            _check_parts("video_markup", self.video_markup, self.video)

    @property
    def has_dimensions(self) -> bool:
        """Whether `models.flops.FlopsModel.of` can predict times for this model."""
        return self.vit is not None and self.llm is not None

    @property
    def dimensions(self) -> tuple[VitShape, LlmShape]:
        """Shapes of encoder and LLM; ConfigError if the preset does not give them."""
        if self.vit is None or self.llm is None:
            where = f"model preset {self.name}"
            raise ConfigError(f"{where} has no [vit] and [llm] tables: add the model's dimensions")
        return self.vit, self.llm

    @property
    def embedded_share(self) -> float:
        """Share of the encoder's tokens that are embedded from pixels: not a class token."""
        if isinstance(self.vision, NativeSizeRule):
            return 1.0
        tokens = self.vision.vit_tokens_per_patch
        return isqrt(tokens) ** 2 / tokens

    @property
    def vit_tokens_per_unit(self) -> int:
        """ViT tokens of a unit of the vision cap."""
        if isinstance(self.vision, NativeSizeRule):
            return 1
        return self.vision.vit_tokens_per_patch

    @property
    def vision_unit(self) -> str:
        """What the vision cap counts: ViT tokens at native resolution, else image patches."""
        return "vit_tokens" if isinstance(self.vision, NativeSizeRule) else "image_patches"


def _check_parts(name: str, markup: MediaMarkup, rule: Any) -> None:
    texts = dict(markup.parts)
    if set(texts) != set(rule.part_names):
        wanted = ", ".join(rule.part_names) or "none"
        raise ConfigError(f"{name}.parts are {', '.join(texts) or 'none'}; give {wanted}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetPreset:
    """A dataset known by name: where its annotations and images are under the data root."""

    name: str
    description: str
    annotations: str
    """Path of the annotation file under the data root."""
    image_folders: tuple[str, ...] = ()
    """Folders that must exist before a build starts; image paths begin with them."""
    model: str = ""
    """The model that a build is for, unless `--model` names one."""
    tokenizer: str = ""
    """Its tokenizer, as a Hub id, where `model` is a preset."""
    hub_repo: str = ""
    """Hugging Face dataset repository that holds the annotation file, empty if there is none."""
    hub_file: str = ""
    downloads: dict[str, str] = field(default_factory=dict)
    """Image folder -> where to get it, for the message that says what is missing."""


_TABLES: dict[str, type[TransformerShape | AudioRule | MediaMarkup]] = {
    "image_markup": MediaMarkup,
    "vit": VitShape,
    "llm": LlmShape,
    "audio": AudioRule,
    "audio_markup": MediaMarkup,
    "audio_encoder": AudioEncoderShape,
    "video_markup": MediaMarkup,
}
_RULES: dict[str, dict[str, Any]] = {"vision": VISION_RULES, "video": VIDEO_RULES}


def load_model(name: str) -> ModelPreset:
    """Model preset by name, or from a TOML file of the user's (anything that ends in `.toml`)."""
    return model_from_dict(read_preset("models", name))


def load_dataset(name: str) -> DatasetPreset:
    """Dataset preset by name, or from a TOML file of the user's."""
    values = read_preset("datasets", name)
    return build_config(DatasetPreset, values, where=f"dataset preset {name}")


def model_from_dict(values: dict[str, Any]) -> ModelPreset:
    """Model preset from plain values, as a TOML file or a manifest holds them; checks every key."""
    if not isinstance(values, dict):
        raise ConfigError(f"model preset: is {shown(values)}; give a table of keys and values")
    values, where = dict(values), f"model preset {values.get('name', '?')}"
    for name, known in _RULES.items():
        if name == "vision" or values.get(name) is not None:
            table = values.get(name, {})
            if not isinstance(table, dict):
                raise ConfigError(f"{where}: {name} is {shown(table)}; give the table of a rule")
            rule = table.get("rule")
            if not isinstance(rule, str) or rule not in known:
                use = f"use one of {', '.join(known)}"
                raise ConfigError(f"{where}: {name}.rule is {shown(rule)}; {use}")
            options = {key: value for key, value in table.items() if key != "rule"}
            values[name] = build_config(known[rule], options, where=f"{where}, [{name}]")
    values.setdefault("image_markup", {})
    for name, kind in _TABLES.items():
        if values.get(name) is not None:
            values[name] = build_config(kind, values[name], where=f"{where}, [{name}]")
    return build_config(ModelPreset, values, where=where)


def model_to_dict(preset: ModelPreset) -> dict[str, Any]:
    """The inverse of `model_from_dict`; leaves out what a model without audio lacks.

    Options newer than version 0.1 are left out where they have their defaults, so that manifests
    of models that do not need them stay what they were.
    """
    values = {k: v for k, v in asdict(preset).items() if v is not None or k in ("vit", "llm")}
    for name in ("vision", "video", *_TABLES):
        if (part := getattr(preset, name)) is not None:
            values[name] = given_options(part)
    for name, known in _RULES.items():
        if name in values:
            rule = next(
                rule_name
                for rule_name, rule_type in known.items()
                if rule_type is type(getattr(preset, name))
            )
            values[name] = {"rule": rule, **values[name]}
    return values


_ALWAYS_WRITTEN = {
    *("min_patches", "thumbnail", "prefix", "suffix", "query_key_norm", "layer_scale"),
    *("sampling_rate", "hop_length", "conv_stride", "downsample", "window_frames"),
}
"""Options with a default that version 0.1 wrote."""


def given_options(part: Any) -> dict[str, Any]:
    """Options of a rule, a markup or a shape, without newer ones that have their defaults."""
    values = asdict(part)
    return {
        option.name: values[option.name]
        for option in fields(part)
        if option.name in _ALWAYS_WRITTEN or values[option.name] != option.default
    }
