"""Dimensions from a folder are those of the model, and cost what torch counts."""

from __future__ import annotations

import re
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from isobatch.common.types import Counts
from isobatch.models.flops import FlopsModel
from isobatch.models.folder.files import ModelFiles
from isobatch.models.folder.find_model import find_model, model_from_files
from isobatch.models.presets import LlmShape, ModelPreset, VitShape
from support.cases import for_each
from support.models.saved_folders import FAMILIES, make_config, save_folder

NO_PRODUCT = (
    r"embed_tokens|pos_embed|position_embedding|cls_token|conv1d|mlp\.gate\.|expert_gate|router"
)
"""Tables, and what the cost model leaves out: routers, and the convolution of linear attention."""


def matrices(module: Any, *parts: str) -> int:
    """Entries of the matrices of some parts of a model."""
    return sum(
        prod(weight.shape)
        for name, weight in module.named_parameters()
        if weight.ndim > 1 and name.startswith(parts) and not re.search(NO_PRODUCT, name)
    )


def make_model(config: Any) -> Any:
    """Encoder, projector and language model."""
    if hasattr(config, "thinker_config"):
        thinker = f"{type(config).__name__.removesuffix('Config')}ThinkerForConditionalGeneration"
        return getattr(transformers, thinker)(config.thinker_config).model
    return transformers.AutoModelForImageTextToText.from_config(config).model


WITHOUT = ("minicpmv4_6",)
"""Families whose dimensions are not read."""


@pytest.mark.thorough
@for_each("name", [name for name in FAMILIES if name not in WITHOUT])
def test_the_weights_are_those_of_the_model(name: str, tmp_path: Path) -> None:
    save_folder(name, tmp_path / name)
    vit, llm = find_model(str(tmp_path / name)).dimensions
    with torch.device("meta"):
        model = make_model(make_config(name))
    held = llm.num_layers * llm.held_weights
    assert held == pytest.approx(matrices(model, "language_model", "text_model"), rel=1e-5)
    encoder = vit.num_layers * vit.layer_weights + vit.patch_values * vit.hidden_size
    parts = (
        "embed_vision",
        "visual",
        "vision_tower",
        "vision_model",
        "multi_modal_projector",
        "connector",
    )
    assert encoder + vit.projector_weights == matrices(model, *parts)


GEMMA4 = {
    "E2B": {"num_kv_shared_layers": 12, "use_double_wide_mlp": True, "num_key_value_heads": 1},
    "26B": {
        **{"enable_moe_block": True, "num_experts": 16, "top_k_experts": 4},
        **{"moe_intermediate_size": 704, "attention_k_eq_v": True, "intermediate_size": 2112},
        **{"hidden_size_per_layer_input": 0, "num_global_key_value_heads": 2},
    },
    "other": {"global_head_dim": 128, "sliding_window": 64, "num_hidden_layers": 9},
}
"""Texts of Gemma 4 with layers that differ."""


def test_gemma_4s_layers_differ_and_are_their_mean(tmp_path: Path) -> None:
    for name, changes in GEMMA4.items():
        config = transformers.AutoConfig.for_model("gemma4_text", **changes)
        with torch.device("meta"):
            model = transformers.AutoModel.from_config(config)
        family = replace(FAMILIES["gemma4"], config={"text_config": changes, "vision_config": {}})
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(FAMILIES, "gemma4", family)
            save_folder("gemma4", tmp_path / name)
        _, llm = find_model(str(tmp_path / name)).dimensions
        held = llm.num_layers * llm.held_weights
        # a mean layer has whole numbers
        assert held == pytest.approx(matrices(model, "layers", "per_layer_model"), rel=1e-4), name
        tables = model.embed_tokens.weight.numel()
        if config.hidden_size_per_layer_input:
            tables += model.embed_tokens_per_layer.weight.numel()
        assert llm.vocab_size * (llm.embedding_size or 0) == tables, name


TEXT = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "vocab_size": 64},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
    "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4},
}
ENCODER = {"depth": 3, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 32, "patch_size": 4}
TINY = {
    "gemma4": {
        "text_config": {
            **{key: TEXT[key] for key in TEXT if key != "rope_parameters"},
            **{"num_hidden_layers": 4, "global_head_dim": 16, "sliding_window": 64},
            **{"hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2, "head_dim": 8},
            **{"layer_types": ["sliding_attention", "full_attention"] * 2},
            **{"use_double_wide_mlp": True, "vocab_size_per_layer_input": 64},
        },
        "vision_config": {
            **{"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "head_dim": 16},
            **{"num_attention_heads": 2, "num_key_value_heads": 2, "patch_size": 4},
        },
    },
    "qwen2_5_vl": {
        "text_config": TEXT,
        "vision_config": {
            **ENCODER,
            **{"intermediate_size": 40, "window_size": 32, "fullatt_block_indexes": [1]},
        },
    },
    "qwen3_vl": {
        "text_config": TEXT,
        "vision_config": {
            **ENCODER,
            **{"intermediate_size": 40, "deepstack_visual_indexes": [0, 1]},
        },
    },
    "qwen3_vl_moe": {
        "text_config": {
            **TEXT,
            **{"moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2},
        },
        "vision_config": {
            **ENCODER,
            **{"intermediate_size": 40, "deepstack_visual_indexes": [0]},
        },
    },
}


def tiny(name: str) -> tuple[Any, ModelPreset]:
    config = transformers.AutoConfig.for_model(name, **TINY[name])
    kind = "Gemma4" if name == "gemma4" else "Qwen2VL"
    images = {"patch_size": 4, "image_processor_type": f"{kind}ImageProcessor"}
    tokens = FAMILIES[name].tokens
    files = ModelFiles(
        where=name, config=config.to_dict(), image_processor=images, tokenizer=tokens
    )
    torch.manual_seed(0)
    # experts one by one: torch does not count grouped products
    kind = transformers.AutoModelForImageTextToText
    model = kind.from_config(config, experts_implementation="eager").eval()
    return model, model_from_files(files)


def counted(run: Any) -> int:
    with (
        torch.no_grad(),
        FlopCounterMode(display=False) as counter,
        sdpa_kernel(SDPBackend.MATH),
    ):  # torch counts no other on CPUs
        run()
    return counter.get_total_flops()


@for_each("name", list(TINY))
def test_an_image_costs_what_torch_counts(name: str) -> None:
    """16 x 16 ViT patches: four whole windows of Qwen2.5-VL's. 15 x 15 of Gemma 4's."""
    model, preset = tiny(name)
    side = 15 if name == "gemma4" else 16
    if name == "gemma4":
        places = torch.cartesian_prod(torch.arange(side), torch.arange(side))[None]
        pixels = torch.zeros(1, side**2, 3 * 4 * 4)
        flops = counted(lambda: model.model.get_image_features(pixels, places))
        flops -= 2 * 25 * side**2 * 32  # transformers averages by a product with zeros and ninths
    else:
        grid = torch.tensor([[1, side, side]])
        pixels = torch.zeros(side**2, 3 * 2 * 4 * 4)
        flops = counted(lambda: model.model.visual(pixels, grid_thw=grid))
    counts = counts_of(vit_tokens=side**2, seq_len=64)
    cost = FlopsModel.of(preset)
    assert cost.vit_flops(cost.loads(counts)).tolist() == [flops]


@for_each("name", list(TINY))
def test_text_costs_what_torch_counts(name: str) -> None:
    model, preset = tiny(name)
    ids = torch.ones(1, 40, dtype=torch.long)
    flops = counted(lambda: model(input_ids=ids))
    cost = FlopsModel.of(preset)
    # torch counts causal attention as if it were not: twice ours
    dense = replace(cost, llm_flops_per_square=2 * cost.llm_flops_per_square)
    ours = dense.llm_flops(cost.loads(counts_of(vit_tokens=0, seq_len=40)))[0]
    routers = 2 * 40 * 3 * 32 * 8 if name == "qwen3_vl_moe" else 0
    assert ours + routers == flops


def counts_of(*, vit_tokens: int, seq_len: int) -> Any:
    values = {"num_image_patches": min(vit_tokens, 1), "num_vit_tokens": vit_tokens}
    values |= {"num_text_tokens": seq_len, "num_image_tokens": 0}
    values |= {"num_audio_tokens": 0, "num_loss_tokens": 0}
    return Counts(**{name: np.array([value]) for name, value in values.items()})


def test_windows_cost_at_most_what_all_layers_over_everything_cost() -> None:
    vit = VitShape(
        num_layers=4,
        hidden_size=8,
        num_heads=2,
        num_kv_heads=2,
        head_size=4,
        ffn_size=8,
        gated=False,
        projector=(8, 8),
        patch_values=12,
        num_full_layers=1,
        window=10,
    )
    tokens = np.array([5, 10, 100, 0])
    # three of four layers: each token attends to the ten of its window
    assert vit.mean_squares(tokens, tokens**2).tolist() == [25, 100, (10_000 + 3 * 1_000) // 4, 0]
    llm = LlmShape(
        num_layers=4,
        hidden_size=8,
        num_heads=2,
        num_kv_heads=2,
        head_size=4,
        ffn_size=8,
        gated=False,
        vocab_size=9,
        num_full_layers=1,
        window=10,
    )
    # causal: the square without that of the first 90 tokens, which the last ones do not see
    squares = llm.mean_squares(tokens, tokens**2)
    assert squares.tolist() == [25, 100, (10_000 + 3 * (10_000 - 90**2)) // 4, 0]
    seen = sum(min(token, 10) for token in range(1, 101))
    assert pytest.approx(2 * seen, rel=0.01) == 10_000 - 90**2


def test_linear_attention_costs_no_squares() -> None:
    model = model_from_files(
        ModelFiles(
            where="x",
            config={"model_type": "qwen3_5"},
            image_processor={"image_processor_type": "Qwen2VLImageProcessor"},
        )
    )
    cost = FlopsModel.of(model)
    short, long = (cost.loads(counts_of(vit_tokens=0, seq_len=n)).llm_squares[0] for n in (1, 100))
    assert (short, long) == (0, 100**2 * 8 // 32)
