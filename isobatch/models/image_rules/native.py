"""Native resolution within limits of the area (Qwen2-VL, GLM-4V)."""

import math
from dataclasses import dataclass

from isobatch.models.image_rules.base import (
    ImagePlan,
    ImageRejected,
    NativeSizeRule,
    PicturePlan,
    ResizeTo,
    Size,
    native_plan,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeRule(NativeSizeRule):
    """Qwen2-VL: native resolution, ViT patches merged `merge_size` x `merge_size`."""

    vit_patch_size: int
    merge_size: int
    temporal_patch_size: int
    min_pixels: int
    max_pixels: int
    max_aspect_ratio: float
    frames_in_area: int = 1
    """GLM-4V: 2, its limits are of the area times frames."""
    scales_up: bool = False
    """GLM-4V: an image with a side below a merged patch is first scaled up to it."""

    def plan(self, width: int, height: int) -> ImagePlan:
        """The nearest size of whole merged patches; ImageRejected above the aspect ratio."""
        unit = self.vit_patch_size * self.merge_size
        frames = self.frames_in_area
        size = scaled_up((width, height), unit) if self.scales_up else (width, height)
        aspect = max(size) / min(size)
        if aspect > self.max_aspect_ratio:
            raise ImageRejected(
                "aspect_ratio",
                f"image of {width} x {height} pixels: aspect ratio {aspect:.1f} is above the"
                f" model's limit of {self.max_aspect_ratio:g}; crop it or remove it",
            )
        limits = self.min_pixels, self.max_pixels
        resized = ResizeTo(*nearest_size(size, unit, limits, frames=(frames, frames)))
        tokens = resized.width * resized.height // unit**2
        return native_plan(self, PicturePlan((resized,)), tokens=tokens)

    @property
    def block_size(self) -> int:
        """The ViT patches of one LLM token are neighbours."""
        return self.merge_size

    @property
    def num_frames(self) -> int:
        """An image is a film of equal frames."""
        return self.temporal_patch_size


def scaled_up(size: Size, unit: int) -> Size:
    """A size with no side below a unit, sides in proportion and cut off."""
    width, height = size
    if min(size) >= unit:
        return size
    scale = max(unit / height, unit / width)
    return int(width * scale), int(height * scale)


def nearest_size(
    size: Size, unit: int, limits: tuple[int, int], *, frames: tuple[int, int] = (1, 1)
) -> Size:
    """Both sides as multiples of a unit, the area times frames within the limits (min, max).

    `frames`: their number, and that of whole temporal patches, with which limits are tested.
    """
    (width, height), (min_pixels, max_pixels), (number, whole) = size, limits, frames
    # round() takes halves to the even multiple; a side below half a unit becomes 0, is enlarged
    near_width, near_height = round(width / unit) * unit, round(height / unit) * unit
    if whole * near_width * near_height > max_pixels:
        shrink = math.sqrt((number * height * width) / max_pixels)
        # at least one unit, which may bring a long image above the limit again
        return (
            max(unit, math.floor(width / shrink / unit) * unit),
            max(unit, math.floor(height / shrink / unit) * unit),
        )
    if whole * near_width * near_height < min_pixels:
        enlarge = math.sqrt(min_pixels / (number * height * width))
        near_width = math.ceil(width * enlarge / unit) * unit
        near_height = math.ceil(height * enlarge / unit) * unit
    return near_width, near_height
