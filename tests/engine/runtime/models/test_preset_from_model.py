"""Presets of running models: their layers are the model's, with as many weights."""

import pytest

pytest.importorskip("transformers")

import torch
from transformers import LlavaConfig, LlavaForConditionalGeneration

from isobatch.engine.cost_model.layer_list import layers_of
from isobatch.engine.cost_model.parallel import Parallelism
from isobatch.engine.runtime.models.preset_from_model import preset_from_model
from isobatch.engine.runtime.models.transformers_models import from_transformers
from isobatch.models.presets import load_model
from support.models.family_models import make_family_model
from support.models.tiny_models import NAMES, make_model

PRESETS = {"llava": "llava_1_5", "internvl": "internvl_1_5", "qwen2_vl": "qwen2_vl"}
FAMILY_PRESETS = {
    "qwen2_5_vl": "qwen2_vl",
    "qwen3_vl": "qwen2_vl",
    "llava_next": "llava_next",
    "llava_onevision": "llava_next",
    "gemma3": "llava_1_5",
}
"""Whatever preset has images of that kind."""
KINDS = {
    "PatchEmbedding": "patch_embedding",
    "NativePatchEmbedding": "patch_embedding",
    "VisionLayer": "vision_layer",
    "NativeVisionLayer": "vision_layer",
    "Projector": "vision_projector",
    "AnyresProjector": "vision_projector",
    "Merger": "vision_projector",
    "TokenEmbedding": "token_embedding",
    "LanguageLayer": "llm_layer",
    "Head": "head",
}


def presets_of(name, **more):
    is_family = name in FAMILY_PRESETS
    model = make_family_model(name) if is_family else make_model(name, **more)
    layered = from_transformers(model)
    preset = load_model((FAMILY_PRESETS | PRESETS)[name])
    return layered, preset_from_model(model, layered, preset)


@pytest.mark.parametrize("name", NAMES)
def test_its_layers_are_the_models_one_by_one(name):
    layered, preset = presets_of(name)
    listed = layers_of(preset, Parallelism())
    assert [layer.kind for layer in listed] == [
        KINDS[type(layer).__name__] for layer in layered.layers
    ]
    assert preset.name == name
    if name in PRESETS:
        assert preset.image_markup == load_model(PRESETS[name]).image_markup


@pytest.mark.parametrize("name", NAMES)
def test_its_sizes_are_those_of_the_models_matrices(name):
    layered, preset = presets_of(name)
    expected = {
        "patch_embedding": preset.vit.patch_values * preset.vit.hidden_size,
        "vision_layer": preset.vit.layer_weights,
        "vision_projector": preset.vit.projector_weights,
        "token_embedding": preset.llm.vocab_size * preset.llm.hidden_size,
        "llm_layer": preset.llm.layer_weights,
        "head": preset.llm.vocab_size * preset.llm.hidden_size,
    }
    for layer in layered.layers:
        # what is learnt for a class token or for places is no matrix product
        matrices = [
            weight.numel()
            for key, weight in layer.named_parameters()
            if weight.ndim > 1
            and not any(part in key for part in ("position", "places", "cls_token"))
        ]
        kind = KINDS[type(layer).__name__]
        assert sum(matrices) == expected[kind], kind
    attends = preset.llm
    assert (attends.num_heads, attends.num_kv_heads) == (4, 2)
    assert preset.vit.num_heads * preset.vit.head_size == preset.vit.hidden_size


def test_families_have_the_layers_and_sizes_of_their_models():
    for name in FAMILY_PRESETS:
        test_its_layers_are_the_models_one_by_one(name)
        test_its_sizes_are_those_of_the_models_matrices(name)
    _, preset = presets_of("qwen2_5_vl")
    assert (preset.vit.num_full_layers, preset.vit.window) == (1, 16)
    _, preset = presets_of("gemma3")
    assert (preset.llm.num_full_layers, preset.llm.window, preset.vit.pooled) == (1, 6, 4)


def test_llava_1_5s_own_sizes_are_those_of_the_preset_that_ships():
    with torch.device("meta"):
        model = LlavaForConditionalGeneration(LlavaConfig())  # the 7B
    shipped = load_model("llava_1_5")
    own = preset_from_model(model, from_transformers(model), shipped)
    assert (own.vision, own.vit, own.llm) == (shipped.vision, shipped.vit, shipped.llm)


def test_vision_layers_that_nothing_looks_at_are_none():
    assert presets_of("llava")[1].vit.num_layers == 2
    assert presets_of("llava", vision_feature_layer=-1)[1].vit.num_layers == 3


@pytest.mark.parametrize(
    ("more", "tokens"),
    [({}, 17), ({"encoder": "siglip_vision_model", "vision_feature_select_strategy": "full"}, 16)],
)
def test_a_patch_has_as_many_tokens_as_the_encoder_sees(more, tokens):
    preset = presets_of("llava", **more)[1]
    assert preset.vision.vit_tokens_per_patch == tokens
