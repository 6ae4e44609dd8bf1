"""Image size and the model's rule -> patches, ViT tokens and LLM tokens.

The packer counts with `plan_image` from image headers; the loaders cut pixels by the same plan.
Every rounding and every tie follows the reference (transformers' processors), quirks included: a
cleaner formula would be wrong. 3 to 9 us for a new size, .3 us for one seen before. Pure.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

from balance.errors import MediaRejected
from balance.presets import AnyresRule, FixedRule, NativeRule, TilesRule, VisionRule


class ImageRejected(MediaRejected):
    """The model's processor would refuse an image of this size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePlan:
    """What one image becomes: its counts, and how to cut it."""

    num_patches: int
    """Crops that go through the vision encoder as batch items; 1 at native resolution."""
    num_vit_tokens: int
    num_image_tokens: int
    """Positions of the LLM sequence that vision features fill, newlines included, wrappers not."""
    resized_width: int
    resized_height: int
    """Size in pixels that the image is resized to, before padding (anyres) or cropping (fixed)."""
    columns: int
    rows: int
    """The grid: tiles, or at native resolution ViT patches (rows * columns = num_vit_tokens)."""
    whole_image: bool = False
    """Another patch has the whole image: the last (tiles: thumbnail) or the first (anyres)."""


def plan_image(rule: VisionRule, width: int, height: int) -> ImagePlan:
    """What an image of `width` x `height` pixels (upright, after EXIF rotation) becomes.

    Raises ImageRejected where the model's processor would refuse the image: a side without pixels
    (`empty_image`), or an aspect ratio above the rule's (`aspect_ratio`, native resolution only).

    >>> from balance.presets import load_model
    >>> plan = plan_image(load_model("internvl_1_5").vision, 1280, 720)
    >>> plan.columns, plan.rows, plan.num_patches, plan.num_image_tokens
    (4, 2, 9, 2304)
    """
    return _plan(rule, width, height)


# Sizes repeat (COCO: mostly 640 x 480), so most images need one lookup; 16,384 plans are 10 MB.
@lru_cache(maxsize=1 << 14)
def _plan(rule: VisionRule, width: int, height: int) -> ImagePlan:
    if width < 1 or height < 1:
        detail = f"image of {width} x {height} pixels: a side has no pixels; remove it"
        raise ImageRejected("empty_image", detail)
    match rule:
        case FixedRule():
            return _plan_fixed(rule, width, height)
        case TilesRule():
            return _plan_tiles(rule, width, height)
        case AnyresRule():
            return _plan_anyres(rule, width, height)
        case NativeRule():
            return _plan_native(rule, width, height)


def _plan_fixed(rule: FixedRule, width: int, height: int) -> ImagePlan:
    # the longer edge is cut off to a whole pixel, not rounded
    longer = int(rule.image_size * max(width, height) / min(width, height))
    return ImagePlan(
        num_patches=1,
        num_vit_tokens=rule.vit_tokens_per_patch,
        num_image_tokens=rule.llm_tokens_per_patch,
        resized_width=rule.image_size if width <= height else longer,
        resized_height=longer if width <= height else rule.image_size,
        columns=1,
        rows=1,
    )


def _plan_tiles(rule: TilesRule, width: int, height: int) -> ImagePlan:
    columns, rows = _closest_grid(rule, width, height)
    thumbnail = rule.thumbnail and columns * rows > 1
    num_patches = columns * rows + thumbnail
    return ImagePlan(
        num_patches=num_patches,
        num_vit_tokens=num_patches * rule.vit_tokens_per_patch,
        num_image_tokens=num_patches * rule.llm_tokens_per_patch,
        resized_width=columns * rule.image_size,
        resized_height=rows * rule.image_size,
        columns=columns,
        rows=rows,
        whole_image=thumbnail,
    )


def _closest_grid(rule: TilesRule, width: int, height: int) -> tuple[int, int]:
    """Columns and rows of the grid whose aspect ratio is the closest to the image's.

    Of equally close grids (2 x 1 and 4 x 2, or one above and one below) a larger one wins while the
    image has more than half of its pixels.
    """
    aspect, num_pixels = width / height, width * height
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


def _plan_anyres(rule: AnyresRule, width: int, height: int) -> ImagePlan:
    canvas_height, canvas_width = _best_pinpoint(rule.grid_pinpoints, width, height)
    columns, rows = canvas_width // rule.image_size, canvas_height // rule.image_size
    fit_width, fit_height = canvas_width / width, canvas_height / height
    if fit_width < fit_height:
        resized = canvas_width, min(math.ceil(height * fit_width), canvas_height)
    else:
        resized = min(math.ceil(width * fit_height), canvas_width), canvas_height
    side = rule.image_size // rule.vit_patch_size
    unpadded = _unpadded_features(columns * side, rows * side, width, height)
    num_patches = columns * rows + 1
    return ImagePlan(
        num_patches=num_patches,
        num_vit_tokens=num_patches * rule.vit_tokens_per_patch,
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


def _plan_native(rule: NativeRule, width: int, height: int) -> ImagePlan:
    aspect = max(width, height) / min(width, height)
    if aspect > rule.max_aspect_ratio:
        raise ImageRejected(
            "aspect_ratio",
            f"image of {width} x {height} pixels: aspect ratio {aspect:.1f} is above the model's"
            f" limit of {rule.max_aspect_ratio:g}; crop it or remove it",
        )
    resized_width, resized_height = _native_size(rule, width, height)
    columns, rows = resized_width // rule.vit_patch_size, resized_height // rule.vit_patch_size
    return ImagePlan(
        num_patches=1,
        num_vit_tokens=columns * rows,
        num_image_tokens=columns * rows // rule.merge_size**2,
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
