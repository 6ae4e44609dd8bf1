"""Decoded images -> patch tensors, equal to those of transformers' processors.

For the loader; `balance.media.image_tokens` says how an image is cut. Pixels stay uint8 from the
decoder to the device: a quarter of float32's bytes through collation and transfer. The channels of
a pixel stay side by side in memory (torch's `channels_last`): a line of a patch is then copied at
once, and GPUs' convolutions are fastest so. With `exact=True` pixels are the processors' bit for
bit, else near Pillow's bicubic filter (`loaders.decode.resize` says how near).
"""

import numpy as np
import torch
from PIL import Image

from balance.media.image_tokens import ImagePlan
from balance.media.rules import AnyresRule, FixedRule, NativeRule, TilesRule, VisionRule
from loaders.decode._buffer_pool import pixel_pool
from loaders.decode.resize import Pixels, Resizer, patchify, resizer

_LONGEST_STRIP = 200
"""Ratio of sides above which only the centre is resized: 1 x 100,000 px would take 45 GB."""


def patch_shape(rule: VisionRule) -> tuple[int, int, int]:
    """(channels, height, width) of a row of pixels: an image patch, or a ViT patch if native."""
    side = rule.vit_patch_size if isinstance(rule, NativeRule) else rule.image_size
    return 3, side, side


def num_rows(rule: VisionRule, plan: ImagePlan) -> int:
    """Rows of an image: its patches, or its ViT patches at native resolution."""
    return plan.num_vit_tokens if isinstance(rule, NativeRule) else plan.num_patches


def empty_patches(rule: VisionRule, rows: int) -> torch.Tensor:
    """Memory for rows of patches: uint8; `channels_last` except at native resolution."""
    channels, height, width = patch_shape(rule)
    block = pixel_pool.empty(rows * channels * height * width)
    if isinstance(rule, NativeRule):
        return block.view(rows, channels, height, width)
    return block.view(rows, height, width, channels).permute(0, 3, 1, 2)


def patch_memory(rule: VisionRule, patches: torch.Tensor) -> Pixels:
    """Contiguous view: (rows, side, side, 3), or (rows, 3, side, side) at native resolution."""
    array: Pixels = patches.numpy()
    return array if isinstance(rule, NativeRule) else array.transpose(0, 2, 3, 1)


def write_patches(
    memory: Pixels,
    rule: VisionRule,
    image: Image.Image | Pixels,
    plan: ImagePlan,
    *,
    exact: bool = False,
) -> None:
    """Write the patches of an upright RGB image into `memory`: `num_rows` rows of `patch_memory`.

    Tiles row by row, then the thumbnail; with anyres the whole image, then the tiles. At native
    resolution the ViT patches of one LLM token are neighbours, as the merger takes them. `plan` is
    that of the image in full size; the image itself may be reduced. `exact` resizes as Pillow does.
    """
    if isinstance(image, Image.Image) and image.mode != "RGB":
        raise ValueError(f"image of mode {image.mode}; give an RGB image, as `decode` returns it")
    # every function below fills all rows or fails, so counts and pixels cannot disagree
    match rule:
        case FixedRule():
            patchify(_centre(image, plan, rule.image_size, exact=exact), memory)
        case TilesRule():
            _write_tiles(memory, resizer(image, exact=exact), plan, rule.image_size)
        case AnyresRule():
            _write_anyres(memory, resizer(image, exact=exact), plan, rule.image_size)
        case NativeRule():
            from loaders.decode._patchify import patchify_planes  # noqa: PLC0415  (see there)

            resized = resizer(image, exact=exact)(plan.resized_width, plan.resized_height)
            patchify_planes(resized, memory, rule.merge_size)


def resized_image(
    rule: VisionRule, image: Image.Image | Pixels, plan: ImagePlan, *, exact: bool = False
) -> torch.Tensor:
    """What `write_patches` cuts patches from, whole: uint8 (3, height, width), `channels_last`.

    With tiles the grid of all tiles, with anyres also its black borders; without the whole image in
    the size of one patch that both have too.
    """
    match rule:
        case FixedRule():
            resized = _centre(image, plan, rule.image_size, exact=exact)
        case AnyresRule():
            resized = _on_black(resizer(image, exact=exact), plan, rule.image_size)
        case _:
            resized = resizer(image, exact=exact)(plan.resized_width, plan.resized_height)
    # copied: it may be the memory that the thread decodes into
    copy = pixel_pool.empty(resized.size).view(resized.shape)
    np.copyto(copy.numpy(), resized)
    return copy.permute(2, 0, 1)


def decode_target(
    memory: Pixels, rule: VisionRule, plan: ImagePlan, size: tuple[int, int]
) -> Pixels | None:
    """Where to decode an image of (width, height) to, if its only patch is the image; else None."""
    side = 0 if isinstance(rule, NativeRule) else rule.image_size
    is_patch = size == (side, side) == (plan.resized_width, plan.resized_height)
    return memory[0] if is_patch and len(memory) == 1 else None


def normalize(rule: VisionRule, pixels: torch.Tensor) -> torch.Tensor:
    """What the vision encoder takes: float32 of raw pixels, within 1e-6 of the reference.

    Of patches, or of one image (3, height, width). Same shape and device; of patches at native
    resolution (rows, 3 * temporal_patch_size * side * side), each repeated for every frame. The
    scale 1/255, mean and std are one multiply and add.
    """
    if pixels.dtype != torch.uint8:
        raise ValueError(f"pixels are {pixels.dtype}; give raw pixels (torch.uint8)")
    mean, std = (torch.tensor(values, dtype=torch.float64) for values in (rule.mean, rule.std))
    scale, shift = (values.to(torch.float32) for values in (1 / (255 * std), -mean / std))
    if pixels.device.type != "cpu":
        return _normalize_on_device(rule, pixels, scale.to(pixels.device), shift.to(pixels.device))
    if pixels.ndim == 3:
        return _normalize_lines(pixels[None], scale, shift)[0]
    if not isinstance(rule, NativeRule):
        return _normalize_lines(pixels, scale, shift)
    frames = rule.temporal_patch_size
    # (rows, 3, frames, pixels)
    normalized = torch.empty(
        (len(pixels), 3, frames, pixels.shape[-2] * pixels.shape[-1]), dtype=torch.float32
    )
    if len(pixels):  # else nothing need be compiled
        from loaders.decode._patchify import normalize_planes  # noqa: PLC0415  (see there)

        normalize_planes(
            pixels.flatten(2).numpy(), scale.numpy(), shift.numpy(), normalized.numpy()
        )
    return normalized.flatten(1)


def _normalize_lines(
    pixels: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor
) -> torch.Tensor:
    """By lines of pixels: the three channels of one are too few for vector instructions."""
    rows, _, height, width = pixels.shape
    # (rows, height, 3 * width), a view if the pixels are `channels_last`
    lines = pixels.permute(0, 2, 3, 1).flatten(2).to(torch.float32)
    lines.mul_(scale.repeat(width)).add_(shift.repeat(width))
    return lines.view(rows, height, width, 3).permute(0, 3, 1, 2)


def _normalize_on_device(
    rule: VisionRule, pixels: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor
) -> torch.Tensor:
    # (rows, 3, side, side)
    normalized = pixels.to(torch.float32).mul_(scale.view(3, 1, 1)).add_(shift.view(3, 1, 1))
    if not isinstance(rule, NativeRule) or pixels.ndim == 3:
        return normalized
    # (rows, 3, side, side) -> (rows, 3, frames, side, side) -> (rows, 3 * frames * side * side)
    return normalized.unsqueeze(2).expand(-1, -1, rule.temporal_patch_size, -1, -1).flatten(1)


def _centre(image: Image.Image | Pixels, plan: ImagePlan, side: int, *, exact: bool) -> Pixels:
    """The `side` x `side` centre of the image resized to the plan's size."""
    left, top = (plan.resized_width - side) // 2, (plan.resized_height - side) // 2
    if max(plan.resized_width, plan.resized_height) <= _LONGEST_STRIP * side:
        resized = resizer(image, exact=exact)(plan.resized_width, plan.resized_height)
        return resized[top : top + side, left : left + side]
    if not isinstance(image, Image.Image):
        image = Image.fromarray(image)
    # the same filter, but Pillow may take the other axis first and round in between: a few levels
    scale_x, scale_y = image.width / plan.resized_width, image.height / plan.resized_height
    source = (left * scale_x, top * scale_y, (left + side) * scale_x, (top + side) * scale_y)
    return np.array(image.resize((side, side), Image.Resampling.BICUBIC, box=source))


def _write_tiles(rows: Pixels, resize: Resizer, plan: ImagePlan, side: int) -> None:
    """Tiles, then the thumbnail."""
    num_tiles = plan.columns * plan.rows
    patchify(resize(plan.resized_width, plan.resized_height), rows[:num_tiles])
    if plan.whole_image:
        patchify(resize(side, side), rows[num_tiles:])


def _write_anyres(rows: Pixels, resize: Resizer, plan: ImagePlan, side: int) -> None:
    """The whole image resized to one patch, then the tiles of the image centred on black."""
    patchify(resize(side, side), rows[:1])
    patchify(_on_black(resize, plan, side), rows[1:])


def _on_black(resize: Resizer, plan: ImagePlan, side: int) -> Pixels:
    """The resized image in the centre of the black canvas of all tiles."""
    canvas = np.zeros((plan.rows * side, plan.columns * side, 3), dtype=np.uint8)
    left = (canvas.shape[1] - plan.resized_width) // 2
    top = (canvas.shape[0] - plan.resized_height) // 2
    inside = canvas[top : top + plan.resized_height, left : left + plan.resized_width]
    inside[:] = resize(plan.resized_width, plan.resized_height)
    return canvas
