"""Tiles of the best canvas and the whole image, without padding (LLaVA-NeXT)."""

import math
from dataclasses import dataclass

from isobatch.common.errors import ConfigError
from isobatch.common.visible_text import shown
from isobatch.models.image_rules.base import (
    MOST_VALUE,
    CropsRule,
    ImagePlan,
    PicturePlan,
    PlaceOn,
    ResizeTo,
    Size,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnyresRule(CropsRule):
    """LLaVA-NeXT: tiles of the best of `grid_pinpoints` and the whole image; padding removed."""

    image_size: int
    vit_patch_size: int
    vit_tokens_per_patch: int
    grid_pinpoints: tuple[tuple[int, int], ...]
    """(height, width) in pixels, as the reference lists them."""
    anyres_max: int | None = None
    """LLaVA-OneVision, `anyres_max_9`: features above those of so many crops are made fewer. It
    also takes several images of a sample without tiles."""

    def __post_init__(self) -> None:
        CropsRule.__post_init__(self)
        sides = [side for pinpoint in self.grid_pinpoints for side in pinpoint]
        if not sides or min(sides) < self.image_size or max(sides) > MOST_VALUE:
            actual = f"grid_pinpoints are {shown(self.grid_pinpoints)}"
            raise ConfigError(f"{actual}; give pairs of pixels, none below image_size")

    @property
    def looks_at_sample(self) -> bool:
        """Several images have no tiles."""
        return self.anyres_max is not None

    def plan(self, width: int, height: int) -> ImagePlan:
        """The canvas that keeps most pixels, its tiles, and the features that are no padding."""
        canvas_height, canvas_width = _best_pinpoint(self.grid_pinpoints, width, height)
        columns, rows = canvas_width // self.image_size, canvas_height // self.image_size
        side = self.image_size // self.vit_patch_size
        unpadded = _unpadded(columns * side, rows * side, width, height)
        num_patches = columns * rows + 1
        return ImagePlan(
            num_patches=num_patches,
            num_vit_tokens=num_patches * self.vit_tokens_per_patch,
            num_image_tokens=side * side + _features(*unpadded, side, self.anyres_max),
            pictures=(
                PicturePlan((ResizeTo(self.image_size, self.image_size),)),
                _on_canvas(width, height, (canvas_width, canvas_height)),
            ),
            columns=columns,
            rows=rows,
        )

    def plan_one_of(self, images: int, width: int, height: int) -> ImagePlan:
        """One crop, padded to a square, for each of LLaVA-OneVision's several images; a newline."""
        if images < 2 or self.anyres_max is None:
            return self.plan(width, height)
        side = self.image_size
        longer = max(width, height)
        red, green, blue = (int(255 * value) for value in self.mean)
        x, y = (longer - width) // 2, (longer - height) // 2
        square = PlaceOn(longer, longer, x, y, (red, green, blue))
        whole = ResizeTo(side, side)
        return ImagePlan(
            num_patches=1,
            num_vit_tokens=self.vit_tokens_per_patch,
            num_image_tokens=(side // self.vit_patch_size) ** 2 + 1,
            pictures=(PicturePlan((whole,) if width == height else (square, whole)),),
            columns=1,
            rows=1,
        )


def _best_pinpoint(pinpoints: tuple[tuple[int, int], ...], width: int, height: int) -> Size:
    """The (height, width) that keeps most pixels, of such the smallest; the first in a tie."""
    best, max_pixels, min_wasted = pinpoints[0], -1, math.inf
    for canvas_height, canvas_width in pinpoints:
        scale = min(canvas_width / width, canvas_height / height)
        num_pixels = min(int(width * scale) * int(height * scale), width * height)
        wasted = canvas_width * canvas_height - num_pixels
        if num_pixels > max_pixels or (num_pixels == max_pixels and wasted < min_wasted):
            best, max_pixels, min_wasted = (canvas_height, canvas_width), num_pixels, wasted
    return best


def _on_canvas(width: int, height: int, canvas: Size) -> PicturePlan:
    """The image as large as fits, in the centre of a black canvas."""
    fit_width, fit_height = canvas[0] / width, canvas[1] / height
    if fit_width < fit_height:
        resized = ResizeTo(canvas[0], min(math.ceil(height * fit_width), canvas[1]))
    else:
        resized = ResizeTo(min(math.ceil(width * fit_height), canvas[0]), canvas[1])
    x, y = (canvas[0] - resized.width) // 2, (canvas[1] - resized.height) // 2
    return PicturePlan((resized, PlaceOn(*canvas, x, y)))


def _unpadded(columns: int, rows: int, width: int, height: int) -> Size:
    """Columns and rows that a `columns` x `rows` map of features keeps without padding.

    Whole rows or columns are removed, as many on either side; a very long image may keep none.
    """
    if width / height > columns / rows:
        inner = int(round(height * (columns / width), 7))  # 7 digits: against 23.999999999999996
        rows -= (rows - inner) // 2 * 2
    else:
        inner = int(round(width * (rows / height), 7))
        columns -= (columns - inner) // 2 * 2
    return columns, rows


def _features(columns: int, rows: int, side: int, max_crops: int | None) -> int:
    """Features of a map, with a newline after each row; a map above `max_crops` is made smaller.

    Only from a tenth above in either direction, as LLaVA-OneVision does.
    """
    if max_crops is not None:
        ratio = math.sqrt(rows * columns / (max_crops * side**2))
        if ratio > 1.1:
            columns, rows = int(columns // ratio), int(rows // ratio)
    return rows * (columns + 1)
