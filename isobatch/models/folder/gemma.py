"""Gemma 3 and PaliGemma (one square), Gemma 4 (a budget of tokens). Pure."""

from dataclasses import replace

from isobatch.models.folder.files import ModelFiles
from isobatch.models.folder.json_table import JsonTable
from isobatch.models.folder.pixels import HARMLESS, pixels_of, square_side
from isobatch.models.folder.shapes import part_of, preset_of, vit_shape
from isobatch.models.image_rules.budget import BudgetRule
from isobatch.models.image_rules.fixed import FixedRule
from isobatch.models.presets import LlmShape, MediaMarkup, ModelPreset

_PAN_AND_SCAN = (
    *("do_pan_and_scan", "pan_and_scan_min_crop_size", "pan_and_scan_max_num_crops"),
    "pan_and_scan_min_ratio_to_activate",
)
"""Gemma3Processor's own settings, off, win over those of the image processor's file."""
_PROCESSOR_HARMLESS = (
    *("processor_class", "auto_map", "audio_seq_length", "audio_ms_per_token"),
    "image_seq_length",
)
_FULL_HEAD_SIZE = 512
"""`global_head_dim` of Gemma 4, where a config says nothing."""
_GEMMA3_TOKENS = 256
"""`image_seq_length` of Gemma3Processor."""


def read_gemma3(files: ModelFiles) -> ModelPreset:
    """Gemma 3: every image squashed to one square; markup between empty lines."""
    images = files.image_table("Gemma3ImageProcessor")
    processor = files.processor_table()
    tokens = processor.count_or("image_seq_length", _GEMMA3_TOKENS)
    processor.require_read(_PROCESSOR_HARMLESS)
    start = files.named_token("boi_token", "<start_of_image>")
    markup = MediaMarkup(
        token=files.named_token("image_token", "<image_soft_token>"),
        placeholder=start,
        prefix=f"\n\n{start}",
        suffix=f"{files.named_token('eoi_token', '<end_of_image>')}\n\n",
    )
    return _one_square(files, images, tokens, markup)


def read_paligemma(files: ModelFiles) -> ModelPreset:
    """PaliGemma and PaliGemma 2: every image squashed to one square.

    The processor also puts the begin token after the images and ends the prompt with a line break;
    the chat template that is given (there is none of its own) must write these.
    """
    images = files.image_table("SiglipImageProcessor")
    tokens = images.count("image_seq_length")
    files.processor_table().require_read(_PROCESSOR_HARMLESS)
    markup = MediaMarkup(token=files.named_token("image_token", "<image>"))
    return _one_square(files, images, tokens, markup)


def read_gemma4(files: ModelFiles) -> ModelPreset:
    """Gemma 4: the largest size within a budget of tokens."""
    images = files.image_table("Gemma4ImageProcessor")
    rule = BudgetRule(
        **pixels_of(images),
        vit_patch_size=images.count("patch_size"),
        pool_size=images.count("pooling_kernel_size"),
        max_tokens=images.count("max_soft_tokens"),
    )
    images.require_read((*HARMLESS, "default_to_square", "image_seq_length", "size"))
    files.processor_table().require_read(_PROCESSOR_HARMLESS)
    token = files.named_token("image_token")
    vision, text = part_of(files, "vision_config"), part_of(files, "text_config")
    projector = vision.count("hidden_size"), text.count("hidden_size")
    vit = vit_shape(vision, projector, pooled=rule.pool_size**2)
    vit = replace(vit, query_key_norm=True, sandwich_norms=True)
    markup = MediaMarkup(
        token=token,
        placeholder=token,
        prefix=files.named_token("boi_token"),
        suffix=files.named_token("eoi_token"),
    )
    preset = preset_of(files, "a budget of tokens", markup, rule, vit)
    return replace(preset, llm=_gemma4_llm(text))


def _gemma4_llm(text: JsonTable) -> LlmShape:
    """A mean layer: those over whole samples have larger heads, the last ones keys of others."""
    layers, hidden = text.count("num_hidden_layers"), text.count("hidden_size")
    heads, kv_heads = text.count("num_attention_heads"), text.count("num_key_value_heads")
    head = text.count("head_dim")
    kinds = text.value("layer_types") or [
        "sliding_attention" if number % 6 else "full_attention" for number in range(1, layers + 1)
    ]
    kinds = [*kinds[:-1], "full_attention"]
    full = kinds.count("full_attention")
    first_shared = layers - text.whole("num_kv_shared_layers")
    same = bool(text.value("attention_k_eq_v"))
    full_head, full_kv_heads = _full_heads(text, kinds, kv_heads if not same else None)
    attention = ffn = 0
    for number, kind in enumerate(kinds):
        is_full = kind == "full_attention"
        size, count = (full_head, full_kv_heads) if is_full else (head, kv_heads)
        projections = 0 if number >= first_shared else 1 if same and is_full else 2
        attention += hidden * size * (2 * heads + projections * count)
        wide = bool(text.value("use_double_wide_mlp")) and number >= first_shared
        ffn += text.count("intermediate_size") * (1 + wide)
    # a layer's own embedding: two matrices in it, and its part of one before all layers
    layer_embedding = text.whole("hidden_size_per_layer_input")
    active = held = ffn // layers + layer_embedding
    if text.value("enable_moe_block"):
        expert = text.count("moe_intermediate_size")
        active += expert * text.count("top_k_experts")
        held += expert * text.count("num_experts")
    return LlmShape(
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=head,
        ffn_size=active,
        gated=True,
        vocab_size=text.count("vocab_size"),
        num_full_layers=full if full < layers else None,
        window=text.count("sliding_window") if full < layers else None,
        all_experts_size=held if held > active else None,
        full_head_size=full_head,
        mean_attention_weights=attention // layers,
        embedding_size=hidden + layers * layer_embedding,
        sandwich_norms=True,
        head_norms=True,
    )


def _full_heads(text: JsonTable, kinds: list[str], kv_heads: int | None) -> tuple[int, int]:
    """Size of the heads of layers over whole samples, and their key heads, if not `kv_heads`."""
    layers = text.table("per_layer_config")
    number = kinds.index("full_attention")
    layer = layers.table(str(number) if str(number) in layers else f"{number:02d}")
    head = layer.count_or("head_dim", text.count_or("global_head_dim", _FULL_HEAD_SIZE))
    keys = kv_heads or text.count("num_key_value_heads")
    if kv_heads is None:
        for table, key in ((text, "num_global_key_value_heads"), (layer, "num_key_value_heads")):
            keys = table.count_or(key, keys)
    return head, keys


def _one_square(
    files: ModelFiles, images: JsonTable, tokens: int, markup: MediaMarkup
) -> ModelPreset:
    side = square_side(images)
    pixels = pixels_of(images)
    images.require_read((*HARMLESS, *_PAN_AND_SCAN, "default_to_square", "image_seq_length"))
    vision, text = part_of(files, "vision_config"), part_of(files, "text_config")
    vit_tokens = (side // vision.count("patch_size")) ** 2
    rule = FixedRule(
        **pixels,
        image_size=side,
        vit_tokens_per_patch=vit_tokens,
        llm_tokens_per_patch=tokens,
        crop=False,
    )
    projector = vision.count("hidden_size"), text.count("hidden_size")
    vit = vit_shape(vision, projector, pooled=vit_tokens // tokens)
    return preset_of(files, "one square per image", markup, rule, vit)
