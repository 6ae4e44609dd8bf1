"""Native resolution within limits of the area, ViT patches merged (Qwen2-VL)."""

import math
from dataclasses import dataclass

from balance.media.rules.base import ImagePlan, ImageRejected, PixelRule


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeRule(PixelRule):
    """Qwen2-VL: native resolution, ViT patches merged `merge_size` x `merge_size`."""

    vit_patch_size: int
    merge_size: int
    temporal_patch_size: int
    min_pixels: int
    max_pixels: int
    max_aspect_ratio: float

    def plan(self, width: int, height: int) -> ImagePlan:
        """The nearest size of whole merged patches; ImageRejected above the aspect ratio."""
        aspect = max(width, height) / min(width, height)
        if aspect > self.max_aspect_ratio:
            raise ImageRejected(
                "aspect_ratio",
                f"image of {width} x {height} pixels: aspect ratio {aspect:.1f} is above the"
                f" model's limit of {self.max_aspect_ratio:g}; crop it or remove it",
            )
        resized_width, resized_height = _native_size(self, width, height)
        columns, rows = resized_width // self.vit_patch_size, resized_height // self.vit_patch_size
        return ImagePlan(
            num_patches=1,
            num_vit_tokens=columns * rows,
            num_image_tokens=columns * rows // self.merge_size**2,
            resized_width=resized_width,
            resized_height=resized_height,
            columns=columns,
            rows=rows,
        )


def _native_size(rule: NativeRule, width: int, height: int) -> tuple[int, int]:
    """Both sides as multiples of a merged patch's, the area from `min_pixels` to `max_pixels`."""
    unit = rule.vit_patch_size * rule.merge_size
    # round() takes halves to the even multiple; a side below half a unit becomes 0, then enlarged
    near_width, near_height = round(width / unit) * unit, round(height / unit) * unit
    if near_width * near_height > rule.max_pixels:
        shrink = math.sqrt(height * width / rule.max_pixels)
        # at least one unit, which may bring a long image above max_pixels again
        return (
            max(unit, math.floor(width / shrink / unit) * unit),
            max(unit, math.floor(height / shrink / unit) * unit),
        )
    if near_width * near_height < rule.min_pixels:
        enlarge = math.sqrt(rule.min_pixels / (height * width))
        return math.ceil(width * enlarge / unit) * unit, math.ceil(height * enlarge / unit) * unit
    return near_width, near_height
