"""A model preset with the sizes of a transformers model: `preset_from_model`.

So costs, profiles and plans are of the model that trains. `layers_of` such a preset lists the
model's layers one by one: what planning calls each of them, and which part it belongs to.
"""

from dataclasses import replace
from typing import Any

from isobatch.engine.runtime.models.qwen_vl_layers import NativeVisionLayer
from isobatch.engine.runtime.models.vision_layers import VisionLayer, merge_side, patch_tokens
from isobatch.engine.runtime.stage_io import LayerStack
from isobatch.models.folder.files import ModelFiles
from isobatch.models.folder.native import qwen_vit
from isobatch.models.folder.shapes import llm_shape, part_of, vit_shape
from isobatch.models.image_rules.anyres import AnyresRule
from isobatch.models.image_rules.fixed import FixedRule
from isobatch.models.image_rules.tiles import TilesRule
from isobatch.models.presets import ModelPreset, VitShape


def preset_from_model(model: Any, stack: LayerStack, preset: ModelPreset) -> ModelPreset:
    """`preset`, the build's, with the sizes of a model whose layers are `stack`.

    Only vision layers whose output is used count: LLaVA-1.5 has 23, not 24.
    """
    config, vision = model.config, preset.vision
    num_layers = sum(isinstance(layer, VisionLayer | NativeVisionLayer) for layer in stack.layers)
    if isinstance(vision, FixedRule | TilesRule | AnyresRule):
        vision = replace(vision, vit_tokens_per_patch=patch_tokens(config.vision_config))
    files = ModelFiles(where=type(model).__name__, config=config.to_dict())
    return replace(
        preset,
        name=config.model_type,
        description=f"{type(model).__name__}, its own sizes",
        vision=vision,
        vit=replace(_vit(config, files), num_layers=num_layers),
        llm=llm_shape(part_of(files, "text_config")),
        audio_encoder=None,
    )


def _vit(config: Any, files: ModelFiles) -> VitShape:
    """Sizes of the encoder and its projector."""
    vision, text = part_of(files, "vision_config"), part_of(files, "text_config")
    if config.model_type in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl"):
        return qwen_vit(vision, text)
    features, width = vision.count("hidden_size"), text.count("hidden_size")
    if config.model_type == "gemma3":  # tokens are averaged before one matrix
        pooled = patch_tokens(config.vision_config) // config.mm_tokens_per_image
        return vit_shape(vision, (features, width), pooled=pooled)
    projector = features * merge_side(config) ** 2, width, width
    return vit_shape(vision, projector, layer_scale=config.model_type == "internvl")
