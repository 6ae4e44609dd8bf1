"""Shapes to measure: presets', one GPU's part of them, a model of 2 B, and tiny ones."""

from __future__ import annotations

from dataclasses import replace
from math import isqrt

import numpy as np
from ablation.data import Sizes

from isobatch.common.types import Counts
from isobatch.models.image_rules import TilesRule
from isobatch.models.presets import LlmShape, ModelPreset, VitShape, load_model

INTERNVL = "internvl_1_5"
TEXT_OF_TINY = 16
"""Texts of the tiny model are shorter by this factor."""


def rule_of(preset: ModelPreset) -> TilesRule:
    """How a model that cuts images into equal tiles does it. TypeError for one that does
    otherwise.
    """
    if not isinstance(preset.vision, TilesRule):
        raise TypeError(
            f"{preset.name} cuts no tiles of one size; measure one that does, as {INTERNVL}"
        )
    return preset.vision


def shapes_of(preset: ModelPreset) -> tuple[VitShape, LlmShape]:
    """The dimensions of a preset's two stacks. TypeError if it has none."""
    if preset.vit is None or preset.llm is None:
        raise TypeError(f"{preset.name} has no [vit] and [llm] tables")
    return preset.vit, preset.llm


def gpu_part(preset: ModelPreset, tp: int) -> ModelPreset:
    """What one of `tp` tensor-parallel GPUs computes: whole heads, and its part of what lies
    between two products.

    >>> vit, llm = shapes_of(gpu_part(load_model("internvl_1_5"), 2))
    >>> vit.num_heads, vit.ffn_size, vit.projector, llm.num_kv_heads, llm.vocab_size
    (13, 6400, (12800, 3072, 6144), 4, 46272)
    """
    vit, llm = (
        replace(
            shape,
            num_heads=-(-shape.num_heads // tp),
            num_kv_heads=-(-shape.num_kv_heads // tp),
            ffn_size=-(-shape.ffn_size // tp),
        )
        for shape in shapes_of(preset)
    )
    widths = tuple(
        -(-width // tp) if place % 2 else width for place, width in enumerate(vit.projector)
    )
    return replace(
        preset,
        vit=replace(vit, projector=widths),
        llm=replace(llm, vocab_size=-(-llm.vocab_size // tp)),
    )


def one_of_each(preset: ModelPreset) -> ModelPreset:
    """The model with one encoder layer and one LLM layer: all kinds of layers that it has."""
    vit, llm = shapes_of(preset)
    return replace(preset, vit=replace(vit, num_layers=1), llm=replace(llm, num_layers=1))


def two_billion() -> ModelPreset:
    """InternVL 1.5 made smaller: a fifth of 2 B parameters see, the others read; heads as large,
    tiles the same.

    Its LLM is as wide as InternLM2-1.8B (2,048), its encoder .62 of that; InternViT-6B is .52 as
    wide as its LLM.
    """
    preset = load_model(INTERNVL)
    vit, llm = shapes_of(preset)
    vit = replace(
        vit,
        num_layers=20,
        hidden_size=1280,
        num_heads=10,
        num_kv_heads=10,
        ffn_size=5120,
        projector=(5120, 2048, 2048),
    )
    llm = replace(llm, num_layers=20, hidden_size=2048, num_heads=16, num_kv_heads=8, ffn_size=8192)
    return replace(
        preset,
        name="internvl_2b",
        description="InternVL 1.5 scaled to 2 B parameters",
        vit=vit,
        llm=llm,
    )


def tiny_of(
    preset: ModelPreset, *, num_layers: int | None = None, tile_side: int = 2
) -> ModelPreset:
    """The same heads, and layers if no number is given, but of a few numbers each: for tests on a
    CPU.

    `tile_side`: a tile's squares are so many by so many, and four of them one token of the LLM.
    """
    vit, llm = shapes_of(preset)
    width, wide = 4 * vit.num_heads, 4 * llm.num_heads
    vit = replace(
        vit,
        num_layers=num_layers or vit.num_layers,
        hidden_size=width,
        head_size=4,
        ffn_size=2 * width,
        patch_values=12,
        projector=(4 * width, wide, wide),
    )
    llm = replace(
        llm,
        num_layers=num_layers or llm.num_layers,
        hidden_size=wide,
        head_size=4,
        ffn_size=2 * wide,
        vocab_size=256,
    )
    squares = tile_side**2
    rule = replace(
        rule_of(preset), vit_tokens_per_patch=squares + 1, llm_tokens_per_patch=squares // 4
    )
    return replace(preset, vision=rule, vit=vit, llm=llm)


def squares_of(preset: ModelPreset) -> int:
    """Tokens of a tile that are embedded from pixels; the one besides, if there is one, is the
    class token.
    """
    return isqrt(rule_of(preset).vit_tokens_per_patch) ** 2


def sizes_of(preset: ModelPreset, seq_len: int, tiles: int) -> Sizes:
    """What a tile is in the model, and the caps of a micro-batch."""
    rule = rule_of(preset)
    return Sizes(
        vit_tokens=rule.vit_tokens_per_patch,
        image_tokens=rule.llm_tokens_per_patch,
        seq_len=seq_len,
        tiles=tiles,
    )


def counts_for(counts: Counts, preset: ModelPreset, *, tiny: bool) -> Counts:
    """The same samples as this model counts them; tiny ones have shorter texts."""
    rule, tiles = rule_of(preset), counts.num_image_patches
    text = np.maximum(counts.num_text_tokens // (TEXT_OF_TINY if tiny else 1), 3)
    return replace(
        counts,
        num_vit_tokens=rule.vit_tokens_per_patch * tiles,
        num_image_tokens=rule.llm_tokens_per_patch * tiles,
        num_text_tokens=text,
        num_loss_tokens=text,
    )
