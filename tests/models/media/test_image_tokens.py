"""Counts and sizes against transformers' own processors, models and image processors."""

from __future__ import annotations

import pickle
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import (
    CLIPVisionConfig,
    CLIPVisionModel,
    InternVLVisionConfig,
    InternVLVisionModel,
)
from transformers.image_processing_utils import get_patch_output_size
from transformers.image_transforms import get_resize_output_image_size
from transformers.image_utils import ChannelDimension
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import get_optimal_tiled_canvas
from transformers.models.llava_next.modeling_llava_next import (
    LlavaNextModel,
    image_size_to_num_patches,
    select_best_resolution,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from isobatch.common.config import preset_names
from isobatch.common.errors import DataError
from isobatch.models.image_rules import AnyresRule, FixedRule, NativeRule, TilesRule
from isobatch.models.image_tokens import ImagePlan, ImageRejected, plan_image
from isobatch.models.presets import load_model
from support.cases import for_each
from support.oracles.reference_processors import random_image, reference_processor

PRESETS = sorted({load_model(name).vision: name for name in preset_names("models")}.values())
"""A preset of each rule."""
NUM_SIZES = 6000
Size = tuple[int, int]


def _sizes(seed: int, count: int = NUM_SIZES) -> list[Size]:
    """(width, height): ordinary, tiny, very long, half-way between roundings, half-way between
    aspect ratios.
    """
    rng = np.random.default_rng(seed)
    sixth = count // 6
    ordinary = np.exp(rng.uniform(0, np.log(20_000), (sixth, 2)))
    tiny = rng.integers(1, 65, (sixth, 2))
    long = rng.permuted(
        np.stack([rng.integers(1, 12, sixth), rng.integers(1, 100_000, sixth)], axis=1), axis=1
    )
    # multiples of 14 are halves of Qwen2-VL's 28, and fall on tile edges of the others
    halves = rng.integers(1, 150, (sixth, 2)) * 14
    # exactly between c / d and e / f: ties of two grids
    c, d, e, f, scale = np.exp(
        rng.uniform(0, np.log([[13], [13], [13], [13], [500]]), (5, sixth))
    ).astype(int)
    ties = np.stack([(c * f + e * d) * scale, 2 * d * f * scale], axis=1)
    # a whole number of LLaVA-NeXT's 24, 48 or 72 features, which float division may miss by a hair
    # (1 / 49 * 49 < 1)
    whole = rng.permuted(np.stack([np.full(sixth, 72), rng.integers(1, 25, sixth)], axis=1), axis=1)
    whole *= 49 * rng.integers(1, 8, (sixth, 1))
    sizes = np.concatenate([ordinary, tiny, long, halves, ties, whole]).astype(int).clip(1)
    return [(int(width), int(height)) for width, height in sizes]


def _shape_only(size: Size) -> np.ndarray:
    """An image of that size that takes no memory, for reference functions that want an array."""
    return np.broadcast_to(np.uint8(0), (3, size[1], size[0]))


# those of other presets: test_rules.py
@for_each("name", ["llava_1_5", "llava_next", *(each for each in PRESETS if "internvl" in each)])
def test_counts_equal_the_processors_on_random_sizes(name: str) -> None:
    preset = load_model(name)
    sizes = _sizes(seed=1)
    plans = [plan_image(preset.vision, *size) for size in sizes]
    wrappers = sum(bool(text) for text in (preset.image_markup.prefix, preset.image_markup.suffix))
    reference = reference_processor(preset)._get_num_multimodal_tokens([(h, w) for w, h in sizes])
    assert len(sizes) >= 5000
    assert [plan.num_image_tokens + wrappers for plan in plans] == reference.num_image_tokens
    if not isinstance(preset.vision, AnyresRule):  # LLaVA-NeXT's processor says 1 and pads instead
        assert [plan.num_patches for plan in plans] == reference.num_image_patches
    assert all(
        plan.num_vit_tokens == plan.num_patches * preset.vision.vit_tokens_per_patch
        for plan in plans
    )


# the preset's, Qwen's advice for less memory, and a cap that long images break
@pytest.mark.parametrize(
    ("min_pixels", "max_pixels"), [(3136, 12845056), (200_704, 1_003_520), (3136, 12_544)]
)
def test_native_counts_and_refusals_equal_the_processors_on_random_sizes(
    min_pixels: int, max_pixels: int
) -> None:
    preset = load_model("qwen2_vl")
    assert isinstance(preset.vision, NativeRule)
    assert (preset.vision.min_pixels, preset.vision.max_pixels) == (3136, 12845056)
    preset = replace(
        preset, vision=replace(preset.vision, min_pixels=min_pixels, max_pixels=max_pixels)
    )
    accepted: dict[Size, ImagePlan] = {}
    for width, height in _sizes(seed=1, count=3 * NUM_SIZES):
        try:
            smart_resize(height, width)
        except ValueError:
            with pytest.raises(ImageRejected, match="aspect ratio"):
                plan_image(preset.vision, width, height)
        else:
            accepted[width, height] = plan_image(preset.vision, width, height)
    reference = reference_processor(preset)._get_num_multimodal_tokens(
        [(h, w) for w, h in accepted]
    )
    assert len(accepted) >= 5000
    assert [plan.num_vit_tokens for plan in accepted.values()] == reference.num_image_patches
    assert [plan.num_image_tokens for plan in accepted.values()] == reference.num_image_tokens
    for (width, height), plan in accepted.items():
        expected = smart_resize(height, width, min_pixels=min_pixels, max_pixels=max_pixels)
        assert (plan.resized_height, plan.resized_width) == expected
        assert plan.rows * plan.columns == plan.num_vit_tokens


def test_fixed_resize_equals_the_image_processors() -> None:
    rule = load_model("llava_1_5").vision
    assert isinstance(rule, FixedRule)
    for size in _sizes(seed=2):
        plan = plan_image(rule, *size)
        expected = get_resize_output_image_size(
            _shape_only(size), 336, False, input_data_format=ChannelDimension.FIRST
        )
        assert (plan.resized_height, plan.resized_width) == expected, size


@pytest.mark.parametrize(
    ("image_size", "min_patches", "max_patches"),
    [(448, 1, 12), (56, 1, 4), (448, 2, 3), (448, 3, 40)],
)
def test_tile_grid_equals_the_image_processors(
    image_size: int, min_patches: int, max_patches: int
) -> None:
    base = load_model("internvl_1_5").vision
    rule = replace(base, image_size=image_size, min_patches=min_patches, max_patches=max_patches)
    assert isinstance(rule, TilesRule)
    for width, height in _sizes(seed=3):
        plan = plan_image(rule, width, height)
        tile = (rule.image_size, rule.image_size)
        assert (plan.columns, plan.rows) == get_optimal_tiled_canvas(
            (height, width), tile, min_patches, max_patches
        )
        assert plan.num_patches == plan.columns * plan.rows + (plan.columns * plan.rows > 1)


def test_ties_between_grids_occur_in_the_random_sizes() -> None:
    """Else the tests above would not test how they are broken."""
    ratios = sorted(
        {columns / rows for columns in range(1, 13) for rows in range(1, 12 // columns + 1)}
    )
    ties = 0
    for width, height in set(_sizes(seed=3)):
        distances = sorted(abs(width / height - ratio) for ratio in ratios)
        ties += distances[0] == distances[1]
    assert ties > 20


def test_anyres_grid_and_resize_equal_the_image_processors() -> None:
    rule = load_model("llava_next").vision
    assert isinstance(rule, AnyresRule)
    pinpoints = [list(pinpoint) for pinpoint in rule.grid_pinpoints]
    for size in _sizes(seed=4):
        plan = plan_image(rule, *size)
        best = select_best_resolution((size[1], size[0]), pinpoints)
        assert (plan.rows * 336, plan.columns * 336) == best, size
        assert plan.num_patches == image_size_to_num_patches((size[1], size[0]), pinpoints, 336)
        expected = get_patch_output_size(_shape_only(size), best, ChannelDimension.FIRST)
        assert (plan.resized_height, plan.resized_width) == expected, size


def test_anyres_tokens_equal_the_features_that_the_model_packs() -> None:
    rule = load_model("llava_next").vision
    assert isinstance(rule, AnyresRule)
    pinpoints = [list(pinpoint) for pinpoint in rule.grid_pinpoints]
    model = SimpleNamespace(
        config=SimpleNamespace(
            vision_config=SimpleNamespace(image_size=336, patch_size=14),
            image_grid_pinpoints=pinpoints,
        )
    )
    sizes = _sizes(seed=5, count=1200)
    plans = [plan_image(rule, *size) for size in sizes]
    _, packed = LlavaNextModel.pack_image_features(
        model,
        [torch.zeros(plan.num_patches, 576, 1) for plan in plans],
        torch.tensor([(height, width) for width, height in sizes]),
        "default",
        torch.zeros(1),
    )
    assert [plan.num_image_tokens for plan in plans] == packed.tolist()


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", ["llava_1_5", "llava_next", "internvl_1_5", "internvl_1_5_max4", "qwen2_vl"]
)
def test_counts_equal_what_the_processor_writes_for_real_images(name: str) -> None:
    preset = load_model(name)
    processor = reference_processor(preset)
    rng = np.random.default_rng(6)
    sizes = [
        (1, 1),
        (1, 150),
        (700, 5),
        (448, 448),
        *((int(w), int(h)) for w, h in rng.integers(20, 900, (20, 2))),
    ]
    for width, height in sizes:
        plan = plan_image(preset.vision, width, height)
        image = random_image(rng, width, height)
        out = processor(images=[image], text=[preset.image_markup.token], return_tensors="np")
        assert (out["input_ids"] == processor.image_token_id).sum() == plan.num_image_tokens, (
            width,
            height,
        )
        pixels = out["pixel_values"][0] if name == "llava_next" else out["pixel_values"]
        assert len(pixels) == (
            plan.num_vit_tokens if isinstance(preset.vision, NativeRule) else plan.num_patches
        )
        if isinstance(preset.vision, NativeRule):
            assert out["image_grid_thw"].tolist() == [[1, plan.rows, plan.columns]]


def test_vit_tokens_equal_the_sequence_length_of_the_vision_towers() -> None:
    small = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
    }
    clip = CLIPVisionModel(CLIPVisionConfig(**small, image_size=336, patch_size=14))
    intern = InternVLVisionModel(
        InternVLVisionConfig(**small, image_size=[448, 448], patch_size=[14, 14])
    )
    with torch.no_grad():
        clip_tokens = clip(torch.zeros(1, 3, 336, 336)).last_hidden_state.shape[1]
        intern_tokens = intern(torch.zeros(1, 3, 448, 448)).last_hidden_state.shape[1]
    assert plan_image(load_model("llava_1_5").vision, 640, 480).num_vit_tokens == clip_tokens
    assert (
        plan_image(load_model("internvl_1_5_max1").vision, 640, 480).num_vit_tokens == intern_tokens
    )


def test_an_image_without_pixels_is_rejected_by_every_rule() -> None:
    for name in PRESETS:
        for size in ((0, 5), (5, 0)):
            with pytest.raises(ImageRejected) as caught:
                plan_image(load_model(name).vision, *size)
            assert caught.value.reason == "empty_image"


def test_a_rejection_is_a_data_error_that_survives_pickling() -> None:
    with pytest.raises(DataError) as caught:
        plan_image(load_model("qwen2_vl").vision, 4020, 20)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(copy, ImageRejected)
    assert (copy.reason, str(copy)) == ("aspect_ratio", str(caught.value))
    assert "4020 x 20" in str(copy)
    assert "201.0" in str(copy)
    assert plan_image(load_model("qwen2_vl").vision, 4000, 20).num_patches == 1
