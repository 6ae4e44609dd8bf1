"""Dimensions of encoders and language models from a `config.json`. Pure.

For the readers of the families. A language model of a type that is not known here gives no
dimensions: its data can be counted and grouped, but no time is predicted.
"""

from isobatch.models.folder.files import ModelFiles, config_defaults
from isobatch.models.folder.json_table import Json, JsonTable
from isobatch.models.image_rules import VisionRule
from isobatch.models.presets import LlmShape, MediaMarkup, ModelPreset, VitShape

_GATED = (
    *("llama", "mistral", "ministral3", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text"),
    *("qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_5_text", "glm4v_text"),
    "qwen2_5_omni_text",
)
_EXPERTS = (
    *("qwen3_moe", "qwen3_vl_moe_text", "qwen3_5_moe_text", "glm4v_moe_text"),
    "qwen3_omni_moe_text",
)
_SLIDING_PATTERN = {"gemma2": 2, "gemma3_text": 6}
"""One layer of so many attends over the whole sample, where `layer_types` does not say."""
_SANDWICHED = ("gemma2", "gemma3_text")
_HEAD_NORMED = ("qwen3", "gemma3_text")
"""Types begin so that normalise queries and keys."""
_LINEAR_PATTERN = {"qwen3_5_text": 4, "qwen3_5_moe_text": 4}


def part_of(files: ModelFiles, name: str, *, flat: bool = False) -> JsonTable:
    """`text_config` or `vision_config`, with what transformers assumes for its type.

    `flat`: old files have the text's keys in the config itself (Qwen2-VL's).
    """
    config = files.config_table()
    of_family = config_defaults(files.model_type).get(name, {})
    values: Json = {}
    if files.config.get(name) is not None:
        values = JsonTable(files.config, config.where).table(name).file_values
        # some early checkpoints name the family here
        if values.get("model_type") == files.model_type:
            del values["model_type"]
        of_family = {"model_type": of_family.get("model_type", "")}
    elif flat:
        values = {key: value for key, value in files.config.items() if key != "model_type"}
        of_family = {"model_type": of_family.get("model_type", "")}
    kind = str(values.get("model_type") or of_family.get("model_type", ""))
    defaults = {**config_defaults(kind), **of_family, "model_type": kind}
    return JsonTable(values, f"{config.where}, {name}", defaults)


def preset_of(
    files: ModelFiles, images: str, markup: MediaMarkup, rule: VisionRule, vit: VitShape
) -> ModelPreset:
    """The preset of a model's own files; `images`: what becomes of one, for people."""
    text = part_of(files, "text_config")
    return ModelPreset(
        name=files.model_type,
        description=f"{files.model_type}: {images}, from the model's own files",
        context_len=text.count("max_position_embeddings"),
        image_markup=markup,
        vision=rule,
        vit=vit,
        llm=llm_shape(text),
    )


def llm_shape(text: JsonTable) -> LlmShape | None:
    """Dimensions of the language model; None for a type that is not known."""
    kind = text.text("model_type")
    if kind not in (*_GATED, *_EXPERTS):
        return None
    heads = text.count("num_attention_heads")
    active, held = _ffn_sizes(text) if kind in _EXPERTS else (text.count("intermediate_size"), None)
    full, window = _full_layers(text, kind)
    return LlmShape(
        num_layers=text.count("num_hidden_layers"),
        hidden_size=text.count("hidden_size"),
        num_heads=heads,
        num_kv_heads=text.count_or("num_key_value_heads", heads),
        head_size=_head_size(text, heads),
        ffn_size=active,
        gated=True,
        vocab_size=text.count("vocab_size"),
        num_full_layers=full,
        window=window,
        all_experts_size=held,
        gated_attention=kind in _LINEAR_PATTERN,
        linear_weights=_linear_weights(text) if kind in _LINEAR_PATTERN else None,
        sandwich_norms=kind in _SANDWICHED,
        head_norms=kind.startswith(_HEAD_NORMED),
    )


def _head_size(table: JsonTable, heads: int) -> int:
    return table.count("head_dim") if "head_dim" in table else table.count("hidden_size") // heads


def _ffn_sizes(text: JsonTable) -> tuple[int, int]:
    """Width of the experts that a token goes to, and of all experts; shared ones in both."""
    width = text.count("moe_intermediate_size")
    shared = 0
    if "shared_expert_intermediate_size" in text:
        shared = text.count("shared_expert_intermediate_size")
    elif "n_shared_experts" in text:
        shared = width * text.count("n_shared_experts")
    experts = text.count("num_experts", "num_local_experts", "n_routed_experts")
    active, held = width * text.count("num_experts_per_tok") + shared, width * experts + shared
    dense = text.whole("first_k_dense_replace")
    if not dense:
        return active, held
    # the first layers have no experts (GLM-4.5V): a mean layer
    layers = text.count("num_hidden_layers")
    first = dense * text.count("intermediate_size")
    others = layers - dense
    return (first + others * active) // layers, (first + others * held) // layers


def _full_layers(text: JsonTable, kind: str) -> tuple[int | None, int | None]:
    """Layers that attend over whole samples, and the window of the others; None: all do."""
    num_layers = text.count("num_hidden_layers")
    kinds = text.value("layer_types")
    if isinstance(kinds, list):
        full = sum(layer == "full_attention" for layer in kinds)
    else:
        every = (_SLIDING_PATTERN | _LINEAR_PATTERN).get(kind, 1)
        for key in ("sliding_window_pattern", "full_attention_interval"):
            every = text.count_or(key, every)
        full = num_layers // every
    if full in (0, num_layers):
        return None, None
    return full, None if kind in _LINEAR_PATTERN else text.count("sliding_window")


def _linear_weights(text: JsonTable) -> int:
    """Matrices of a gated delta net: queries and keys, values, gate and output; two per head."""
    keys = text.count("linear_num_key_heads") * text.count("linear_key_head_dim")
    heads = text.count("linear_num_value_heads")
    values = heads * text.count("linear_value_head_dim")
    return text.count("hidden_size") * (2 * keys + 3 * values + 2 * heads)


def vit_shape(
    vision: JsonTable,
    projector: tuple[int, ...],
    *,
    frames: int = 1,
    layer_scale: bool = False,
    pooled: int = 1,
) -> VitShape:
    """Dimensions of an encoder whose config has CLIP's names (SigLIP's, InternViT's, Pixtral's)."""
    heads = vision.count("num_attention_heads")
    channels = vision.count_or("num_channels", 3)
    return VitShape(
        num_layers=vision.count("num_hidden_layers"),
        hidden_size=vision.count("hidden_size"),
        num_heads=heads,
        num_kv_heads=heads,
        head_size=_head_size(vision, heads),
        ffn_size=vision.count("intermediate_size"),
        gated=vision.text("model_type") in ("pixtral", "gemma4_vision"),
        projector=projector,
        patch_values=channels * frames * vision.count("patch_size") ** 2,
        query_key_norm=bool(vision.value("use_qk_norm")),
        layer_scale=layer_scale,
        pooled=pooled,
        quick_gelu=vision.value("hidden_act") == "quick_gelu",
    )
