"""Tiles of a fixed longer side, and the whole image (Idefics3, SmolVLM)."""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from isobatch.common.errors import ConfigError
from isobatch.models.image_rules.base import (
    MOST_CROPS,
    CropsRule,
    ImagePlan,
    ImageRejected,
    MarkupPart,
    PicturePlan,
    ResizeTo,
    Size,
)

LARGEST_SIDE = 4096
"""`MAX_IMAGE_SIZE` of the reference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitsRule(CropsRule):
    """Idefics3: the longer side to `longest_side`, tiles of `image_size`, then the whole image."""

    image_size: int
    vit_tokens_per_patch: int
    llm_tokens_per_patch: int
    longest_side: int
    split: bool = True
    """False: the whole image only."""

    def __post_init__(self) -> None:
        CropsRule.__post_init__(self)
        longest = min(self.longest_side, LARGEST_SIDE)
        most_tiles = math.isqrt(MOST_CROPS)
        if longest > most_tiles * self.image_size:
            too_large = f"{longest} pixels on a side are more than {most_tiles} tiles"
            raise ConfigError(f"image_size = {self.image_size}: {too_large}; give a larger one")

    part_names: ClassVar[tuple[str, ...]] = ("tile", "row", "whole", "single")

    def plan(self, width: int, height: int) -> ImagePlan:
        """Parts in the text: `tile`s, `row` after each row of them, `whole`; or just `single`.

        The tiles are of a picture resized twice, and the whole image is resized a third time.
        """
        side = self.image_size
        first = ResizeTo(*longest_side(width, height, self.longest_side))
        second = ResizeTo(*self._multiples(*first)) if self.split else ResizeTo(side, side)
        columns, rows = second.width // side, second.height // side
        tiles = PicturePlan((first, second))
        has_tiles = columns * rows > 1
        num_patches = columns * rows + has_tiles
        whole = PicturePlan((first, second, ResizeTo(side, side)))
        return ImagePlan(
            num_patches=num_patches,
            num_vit_tokens=num_patches * self.vit_tokens_per_patch,
            num_image_tokens=num_patches * self.llm_tokens_per_patch,
            pictures=(tiles, whole) if has_tiles else (tiles,),
            columns=columns,
            rows=rows,
            parts=_parts(columns, rows, self.llm_tokens_per_patch),
        )

    def _multiples(self, width: int, height: int) -> Size:
        """Both sides rounded up to tiles: the longer one, then the other in proportion to it."""
        side = self.image_size
        aspect = width / height
        if width >= height:
            width = math.ceil(width / side) * side
            height = math.ceil(int(width / aspect) / side) * side
        else:
            height = math.ceil(height / side) * side
            width = math.ceil(int(height * aspect) / side) * side
        if not width * height:
            detail = f"{width} x {height} pixels after resizing: a side has none; crop or remove it"
            raise ImageRejected("aspect_ratio", detail)
        return width, height


def longest_side(width: int, height: int, longest: int) -> Size:
    """The longer side is `longest`, the other cut off to a whole number, then even."""
    aspect = width / height
    if width >= height:
        width, height = longest, _even(int(longest / aspect))
    else:
        width, height = _even(int(longest * aspect)), longest
    width, height = max(width, 1), max(height, 1)
    aspect = width / height
    if width >= height and width > LARGEST_SIDE:
        width, height = LARGEST_SIDE, int(LARGEST_SIDE / aspect)
    elif height > LARGEST_SIDE:
        width, height = int(LARGEST_SIDE * aspect), LARGEST_SIDE
    return max(width, 1), max(height, 1)


def _even(side: int) -> int:
    return side + side % 2


@lru_cache(maxsize=256)  # of few grids, each of up to a hundred objects
def _parts(columns: int, rows: int, tokens: int) -> tuple[MarkupPart, ...]:
    if columns * rows == 1:
        return (MarkupPart("single", tokens),)
    parts: list[MarkupPart] = []
    for row in range(1, rows + 1):
        parts += [MarkupPart("tile", tokens, row, column) for column in range(1, columns + 1)]
        parts.append(MarkupPart("row"))
    return (*parts, MarkupPart("whole", tokens))
