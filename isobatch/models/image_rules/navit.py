"""Native resolution that never grows, padded to whole merged patches (Kimi-VL)."""

import math
from dataclasses import dataclass

from isobatch.models.image_rules.base import (
    ImagePlan,
    NativeSizeRule,
    PicturePlan,
    PlaceOn,
    ResizeTo,
    native_plan,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NavitRule(NativeSizeRule):
    """Kimi-VL: at most `max_patches`, and `max_side` per side; black below and to the right."""

    vit_patch_size: int
    merge_size: int
    max_patches: int
    max_side: int
    """ViT patches."""

    def plan(self, width: int, height: int) -> ImagePlan:
        """The image shrunk to the limits, on a canvas of whole merged patches."""
        patch = self.vit_patch_size
        unit = self.vit_patch_size * self.merge_size
        longest = self.max_side * patch
        num_patches = max(1.0, height // patch) * max(1.0, width // patch)
        max_scales = math.sqrt(self.max_patches / num_patches), longest / height, longest / width
        scale = min(1.0, *max_scales)
        resized = ResizeTo(
            min(max(1, int(width * scale)), longest), min(max(1, int(height * scale)), longest)
        )
        columns, rows = -(-resized.width // unit), -(-resized.height // unit)
        canvas = PlaceOn(columns * unit, rows * unit)
        steps = (resized,) if canvas[:2] == resized else (resized, canvas)
        return native_plan(self, PicturePlan(steps), tokens=columns * rows)
