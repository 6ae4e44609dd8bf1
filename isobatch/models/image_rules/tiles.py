"""The grid of tiles closest in aspect ratio, and a thumbnail (InternVL)."""

import math
from dataclasses import dataclass
from functools import lru_cache

from isobatch.common.errors import ConfigError
from isobatch.models.image_rules.base import MOST_CROPS, CropsRule, ImagePlan, PicturePlan, ResizeTo


@dataclass(frozen=True, slots=True, kw_only=True)
class TilesRule(CropsRule):
    """InternVL: the grid of tiles closest in aspect ratio, and a thumbnail if several."""

    image_size: int
    vit_tokens_per_patch: int
    llm_tokens_per_patch: int
    min_patches: int = 1
    max_patches: int
    thumbnail: bool = True

    def __post_init__(self) -> None:
        CropsRule.__post_init__(self)
        if not self.min_patches <= self.max_patches <= MOST_CROPS:
            actual = f"min_patches = {self.min_patches}, max_patches = {self.max_patches}"
            allowed = f"at most {MOST_CROPS:,}, the first not above the other"
            raise ConfigError(f"{actual}: give {allowed}")

    def plan(self, width: int, height: int) -> ImagePlan:
        """The closest grid of tiles, and a thumbnail if it has several."""
        columns, rows = _closest_grid(self, width, height)
        thumbnail = self.thumbnail and columns * rows > 1
        num_patches = columns * rows + thumbnail
        side = self.image_size
        tiles = PicturePlan((ResizeTo(columns * side, rows * side),))
        return ImagePlan(
            num_patches=num_patches,
            num_vit_tokens=num_patches * self.vit_tokens_per_patch,
            num_image_tokens=num_patches * self.llm_tokens_per_patch,
            pictures=(tiles, PicturePlan((ResizeTo(side, side),))) if thumbnail else (tiles,),
            columns=columns,
            rows=rows,
        )


def _closest_grid(rule: TilesRule, width: int, height: int) -> tuple[int, int]:
    """Columns and rows of the grid whose aspect ratio is the closest to the image's.

    Of equally close grids (2 x 1 and 4 x 2, or one above and one below) a larger one wins while the
    image has more than half of its pixels.
    """
    aspect = width / height
    num_pixels = width * height
    half_tile = 0.5 * rule.image_size * rule.image_size
    closest, grid = math.inf, (1, 1)
    for ratio, num_tiles, candidate in _grids(rule.min_patches, rule.max_patches):
        distance = abs(aspect - ratio)
        if distance < closest:
            closest, grid = distance, candidate
        elif distance == closest and num_pixels > half_tile * num_tiles:
            grid = candidate
    return grid


@lru_cache(maxsize=64)
def _grids(min_patches: int, max_patches: int) -> tuple[tuple[float, int, tuple[int, int]], ...]:
    """(aspect ratio, tiles, (columns, rows)) of every grid; the order breaks ties."""
    grids = [
        (columns / rows, columns * rows, (columns, rows))
        for columns in range(1, max_patches + 1)
        for rows in range(1, max_patches // columns + 1)
        if columns * rows >= min_patches
    ]
    return tuple(sorted(grids, key=lambda grid: (grid[1], grid[2])))
