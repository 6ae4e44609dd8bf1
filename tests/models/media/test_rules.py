"""Rules of families against transformers' processors: counts of random sizes.

`ISOBATCH_TEST_DRAWS=5000` asks for 5,000 sizes of each family.
"""

from __future__ import annotations

import os

import numpy as np
import pytest

from isobatch.models.image_rules import NativeSizeRule
from isobatch.models.image_tokens import ImageRejected, plan_image
from support.cases import for_each
from support.oracles.family_processors import Size, families

DRAWS = int(os.environ.get("ISOBATCH_TEST_DRAWS", "250"))
FAMILIES = families()


def random_sizes(seed: int, count: int = DRAWS) -> list[Size]:
    """(width, height): ordinary, tiny, very long, and multiples of patches and tiles."""
    rng = np.random.default_rng(seed)
    quarter = -(-count // 4)
    ordinary = np.exp(rng.uniform(0, np.log(9_000), (quarter, 2)))
    tiny = rng.integers(1, 65, (quarter, 2))
    long = np.stack([rng.integers(1, 12, quarter), rng.integers(1, 30_000, quarter)], axis=1)
    units = rng.choice([14, 16, 28, 48, 56, 182, 364, 384, 448, 512], (quarter, 1))
    whole = units * rng.integers(1, 12, (quarter, 2)) + rng.integers(-1, 2, (quarter, 2))
    sizes = np.concatenate([ordinary, tiny, rng.permuted(long, axis=1), whole])
    return [(int(width), int(height)) for width, height in sizes.astype(int).clip(1)]


@for_each("name", FAMILIES)
def test_counts_equal_the_processors(name: str) -> None:
    family = FAMILIES[name]
    accepted = 0
    for size in random_sizes(seed=len(name)):
        try:
            expected = family.tokens(size)
        except ValueError:
            with pytest.raises(ImageRejected):
                plan_image(family.rule, *size)
            continue
        plan = plan_image(family.rule, *size)
        assert plan.num_image_tokens == expected, size
        assert sum(part.tokens for part in plan.parts) in {0, expected}, size
        accepted += 1
    assert accepted > DRAWS // 2


@for_each("name", FAMILIES)
def test_pictures_have_the_patches_that_are_counted(name: str) -> None:
    rule = FAMILIES[name].rule
    for size in random_sizes(seed=50, count=60):
        try:
            plan = plan_image(rule, *size)
        except ImageRejected:
            continue
        if isinstance(rule, NativeSizeRule):
            grids = rule.grids(plan)
            assert sum(rows * columns for _, rows, columns in grids) == plan.num_vit_tokens
            assert len(grids) == plan.num_patches
        else:
            sides = [side for each in plan.pictures for side in each.size]
            assert not any(side % rule.image_size for side in sides)
            areas = [width * height for width, height in (each.size for each in plan.pictures)]
            assert sum(areas) == plan.num_patches * rule.image_size**2
            assert plan.num_vit_tokens == plan.num_patches * rule.vit_tokens_per_patch


def test_several_images_of_a_sample_have_one_crop_each_where_the_processor_has() -> None:
    family = FAMILIES["llava_onevision"]
    for size in random_sizes(seed=51, count=40):
        for images in (2, 3, 9):
            plan = plan_image(family.rule, *size, images)
            assert (plan.num_image_tokens, plan.num_patches) == (family.tokens_of_several, 1)
    assert plan_image(FAMILIES["smolvlm2"].rule, 640, 480, 5).num_patches == 13
