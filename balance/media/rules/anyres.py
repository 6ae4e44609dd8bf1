"""Tiles of the best canvas and the whole image, padding removed (LLaVA-NeXT)."""

import math
from dataclasses import dataclass

from balance.media.rules.base import ImagePlan, PixelRule


@dataclass(frozen=True, slots=True, kw_only=True)
class AnyresRule(PixelRule):
    """LLaVA-NeXT: tiles of the best of `grid_pinpoints` and the whole image; padding removed."""

    image_size: int
    vit_patch_size: int
    vit_tokens_per_patch: int
    grid_pinpoints: tuple[tuple[int, int], ...]
    """(height, width) in pixels, as the reference lists them."""

    def plan(self, width: int, height: int) -> ImagePlan:
        """The canvas that keeps most pixels, its tiles, and the features that are no padding."""
        canvas_height, canvas_width = _best_pinpoint(self.grid_pinpoints, width, height)
        columns, rows = canvas_width // self.image_size, canvas_height // self.image_size
        fit_width, fit_height = canvas_width / width, canvas_height / height
        if fit_width < fit_height:
            resized = canvas_width, min(math.ceil(height * fit_width), canvas_height)
        else:
            resized = min(math.ceil(width * fit_height), canvas_width), canvas_height
        side = self.image_size // self.vit_patch_size
        unpadded = _unpadded_features(columns * side, rows * side, width, height)
        num_patches = columns * rows + 1
        return ImagePlan(
            num_patches=num_patches,
            num_vit_tokens=num_patches * self.vit_tokens_per_patch,
            num_image_tokens=side * side + unpadded,
            resized_width=resized[0],
            resized_height=resized[1],
            columns=columns,
            rows=rows,
            whole_image=True,
        )


def _best_pinpoint(
    pinpoints: tuple[tuple[int, int], ...], width: int, height: int
) -> tuple[int, int]:
    """The (height, width) that keeps most pixels, of such the smallest; the first in a tie."""
    best, most_kept, least_wasted = pinpoints[0], -1, math.inf
    for canvas_height, canvas_width in pinpoints:
        scale = min(canvas_width / width, canvas_height / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        wasted = canvas_width * canvas_height - kept
        if kept > most_kept or (kept == most_kept and wasted < least_wasted):
            best, most_kept, least_wasted = (canvas_height, canvas_width), kept, wasted
    return best


def _unpadded_features(columns: int, rows: int, width: int, height: int) -> int:
    """Features of a `columns` x `rows` map without padding, with one newline after each row.

    Whole rows or columns are removed, as many on either side; a very long image may keep none.
    """
    if width / height > columns / rows:
        kept = int(round(height * (columns / width), 7))  # 7 digits: against 23.999999999999996
        rows -= (rows - kept) // 2 * 2
    else:
        kept = int(round(width * (rows / height), 7))
        columns -= (columns - kept) // 2 * 2
    return rows * (columns + 1)
