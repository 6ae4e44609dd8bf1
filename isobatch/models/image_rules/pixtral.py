"""Native resolution below a longest side, in rows (Pixtral, Mistral 3)."""

import math
from dataclasses import dataclass
from typing import ClassVar

from isobatch.models.image_rules.base import (
    ImagePlan,
    ImageRejected,
    MarkupPart,
    NativeSizeRule,
    PicturePlan,
    ResizeTo,
    native_plan,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PixtralRule(NativeSizeRule):
    """Pixtral: longer images shrink to `longest_side`, then both sides up to whole tokens."""

    vit_patch_size: int
    merge_size: int
    """Side of the square of ViT patches that becomes one LLM token; 1 for Pixtral 12B."""
    longest_side: int

    part_names: ClassVar[tuple[str, ...]] = ("row", "last_row")

    def plan(self, width: int, height: int) -> ImagePlan:
        """Parts in the text: a `row` of tokens for each row, the last one called `last_row`."""
        ratio = max(height / self.longest_side, width / self.longest_side)
        across, down = width, height
        if ratio > 1:
            across, down = math.floor(width / ratio), math.floor(height / ratio)
        if not across * down:
            detail = f"image of {width} x {height} pixels: no pixel is left of the shorter side"
            raise ImageRejected("aspect_ratio", f"{detail} when it shrinks; crop it or remove it")
        unit = self.vit_patch_size * self.merge_size
        columns, rows = -(-across // unit), -(-down // unit)
        parts = (*[MarkupPart("row", columns)] * (rows - 1), MarkupPart("last_row", columns))
        resized = ResizeTo(columns * unit, rows * unit)
        return native_plan(self, PicturePlan((resized,)), tokens=columns * rows, parts=parts)
