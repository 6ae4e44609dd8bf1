"""The most ViT patches that a budget of LLM tokens allows (Gemma 4)."""

import math
from dataclasses import dataclass

from isobatch.models.image_rules.base import (
    ImagePlan,
    ImageRejected,
    NativeSizeRule,
    PicturePlan,
    ResizeTo,
    native_plan,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetRule(NativeSizeRule):
    """Gemma 4: the largest size of at most `max_tokens` pooled patches; small images grow to it."""

    vit_patch_size: int
    pool_size: int
    """Side of the square of ViT patches that becomes one LLM token."""
    max_tokens: int

    def plan(self, width: int, height: int) -> ImagePlan:
        """Sides cut off to whole pooled patches. ImageRejected where the reference raises."""
        unit = self.vit_patch_size * self.pool_size
        budget = self.max_tokens * self.pool_size**2 * self.vit_patch_size**2
        factor = math.sqrt(budget / (height * width))
        columns = math.floor(factor * width / unit)
        rows = math.floor(factor * height / unit)
        if rows == 0:
            rows, columns = 1, min(math.floor(width / height), self.max_tokens)
        elif columns == 0:
            rows, columns = min(math.floor(height / width), self.max_tokens), 1
        if columns * rows * unit**2 > budget:
            detail = f"image of {width} x {height} pixels: too long for {self.max_tokens} tokens"
            raise ImageRejected("aspect_ratio", f"{detail}; crop it or remove it")
        resized = ResizeTo(columns * unit, rows * unit)
        return native_plan(self, PicturePlan((resized,)), tokens=columns * rows)
