"""Decoded images -> patch tensors, equal to those of transformers' processors.

For the loader; the rules of `models.image_rules` say how an image is cut, as steps that are
executed here for any rule. Pixels stay uint8 from the decoder to the device: a quarter of float32's
bytes through collation and transfer. The channels of a pixel stay side by side in memory (torch's
`channels_last`): a line of a patch is then copied at once, and GPUs' convolutions are fastest so.
With `exact=True` pixels are the processors' bit for bit, else near Pillow's filter
(`loaders.decode.resize` says how near, and which reference that equals).
"""

from collections.abc import Iterable
from functools import cached_property

import numpy as np
import torch
from PIL import Image

from isobatch.loaders.decode._buffer_pool import pixel_pool
from isobatch.loaders.decode.resize import FILTERS, Pixels, Resizer, patchify, resizer
from isobatch.models.image_rules import NativeSizeRule, VisionRule
from isobatch.models.image_rules.base import PicturePlan, PlaceOn, Resample, ResizeTo
from isobatch.models.image_tokens import ImagePlan
from isobatch.models.video_tokens import VideoPlan

_LONGEST_STRIP = 200
"""Ratio of sides above which only the centre is resized: 1 x 100,000 px would take 45 GB."""
_Steps = tuple[ResizeTo | PlaceOn, ...]


def patch_shape(rule: VisionRule) -> tuple[int, int, int]:
    """(channels, height, width) of a row of pixels: an image patch, or a ViT patch if native."""
    return 3, rule.patch_side, rule.patch_side


def num_rows(rule: VisionRule, plan: ImagePlan) -> int:
    """Rows of an image: its patches, or its ViT patches at native resolution."""
    return plan.num_vit_tokens if isinstance(rule, NativeSizeRule) else plan.num_patches


def empty_patches(rule: VisionRule, rows: int, *, videos: bool = False) -> torch.Tensor:
    """Memory for rows of patches: uint8; `channels_last` except at native resolution.

    With `videos` at native resolution of several frames each: (rows, 3, frames, side, side).
    """
    channels, height, width = patch_shape(rule)
    frames = rule.num_frames if videos and isinstance(rule, NativeSizeRule) else 1
    block = pixel_pool.empty(rows * channels * frames * height * width)
    if frames > 1:
        return block.view(rows, channels, frames, height, width)
    if isinstance(rule, NativeSizeRule):
        return block.view(rows, channels, height, width)
    return block.view(rows, height, width, channels).permute(0, 3, 1, 2)


def patch_memory(rule: VisionRule, patches: torch.Tensor) -> Pixels:
    """Contiguous view: (rows, side, side, 3), or as `empty_patches` at native resolution."""
    array: Pixels = patches.numpy()
    return array if isinstance(rule, NativeSizeRule) else array.transpose(0, 2, 3, 1)


def write_patches(
    memory: Pixels,
    rule: VisionRule,
    image: Image.Image | Pixels,
    plan: ImagePlan,
    *,
    exact: bool = False,
) -> None:
    """Write the patches of an upright RGB image into `memory`: `num_rows` rows of `patch_memory`.

    Into the first of several frames, and then into all of them.

    Those of the plan's pictures, one after the other. At native resolution the ViT patches of one
    LLM token are neighbours, where the merger takes them so. `plan` is that of the image in full
    size; the image itself may be reduced. `exact` resizes as Pillow does.
    """
    if isinstance(image, Image.Image) and image.mode != "RGB":
        raise ValueError(f"image of mode {image.mode}; give an RGB image, as `decode` returns it")
    first = memory[:, :, 0] if memory.ndim > 4 else memory
    _write_pictures(first, rule, _Cutter(rule.resample, image, exact=exact), plan)
    if memory.ndim > 4:
        memory[:, :, 1:] = memory[:, :, :1]


def write_frames(
    memory: Pixels,
    rule: VisionRule,
    frames: Iterable[Pixels],
    plan: VideoPlan,
    *,
    resample: Resample,
    exact: bool = False,
) -> None:
    """Write the patches of a video's frames into `memory`, as `write_patches` does an image's.

    At native resolution frame after frame of the grid, whose ViT patches have several frames of the
    video each; the last one is repeated where they are too few.
    """
    slots = memory[:, None] if memory.ndim < 5 else memory.swapaxes(1, 2)
    is_native = isinstance(rule, NativeSizeRule)
    frame_rows = len(memory) // plan.num_patches if is_native else 1
    count = slots.shape[1]
    place = 0
    for pixels in frames:
        target = slots[place // count * frame_rows :][:frame_rows, place % count]
        _write_pictures(target, rule, _Cutter(resample, pixels, exact=exact), plan)
        place += 1
    for repeated in range(place, plan.num_patches * count):
        target = slots[repeated // count * frame_rows :][:frame_rows]
        target[:, repeated % count] = target[:, repeated % count - 1]


def _write_pictures(memory: Pixels, rule: VisionRule, cutter: "_Cutter", plan: ImagePlan) -> None:
    start = 0
    # every row is filled or something fails, so counts and pixels cannot disagree
    for picture in plan.pictures:
        start += _write_picture(memory[start:], rule, cutter(picture.steps), picture)
    if start != len(memory):
        raise ValueError(f"{start} patches in pictures that were planned as {len(memory)}")


def _write_picture(memory: Pixels, rule: VisionRule, pixels: Pixels, picture: PicturePlan) -> int:
    """Write a picture's patches into the first rows of `memory`; -> how many."""
    side = rule.patch_side
    width, height = picture.size
    if not isinstance(rule, NativeSizeRule):
        count = width // side * (height // side)
        patchify(pixels, memory[:count])
        return count
    from isobatch.loaders.decode._patchify import patchify_planes  # noqa: PLC0415  (see there)

    across, down = picture.cell or picture.size
    start = 0
    count = across // side * (down // side)
    for y in range(0, height, down):
        for x in range(0, width, across):
            cell = pixels[y : y + down, x : x + across]
            patchify_planes(cell, memory[start : start + count], rule.block_size)
            start += count
    return start


def resized_image(
    rule: VisionRule, image: Image.Image | Pixels, plan: ImagePlan, *, exact: bool = False
) -> torch.Tensor:
    """What `write_patches` cuts most patches from: uint8 (3, height, width), `channels_last`.

    With tiles the grid of all tiles, with anyres also its black borders; without the whole image
    that both, and slices, have too.
    """
    resized = _Cutter(rule.resample, image, exact=exact)(plan.main.steps)
    # copied: it may be the memory that the thread decodes into
    copy = pixel_pool.empty(resized.size).view(resized.shape)
    np.copyto(copy.numpy(), resized)
    return copy.permute(2, 0, 1)


def decode_target(
    memory: Pixels, rule: VisionRule, plan: ImagePlan, size: tuple[int, int]
) -> Pixels | None:
    """Memory to decode an image of (width, height) to if its only patch is the image; else None."""
    if isinstance(rule, NativeSizeRule) or len(memory) != 1 or size != (rule.patch_side,) * 2:
        return None
    return memory[0] if all(step[:2] == size for step in plan.pictures[0].steps) else None


class _Cutter:
    """Takes the steps of a rule's pictures, each once."""

    def __init__(self, resample: Resample, image: Image.Image | Pixels, *, exact: bool) -> None:
        self._filter, self._exact, self._image = resample, exact, image
        self._done: dict[_Steps, Pixels] = {}

    def __call__(self, steps: _Steps) -> Pixels:
        """The picture after these steps."""
        if steps not in self._done:
            self._done[steps] = self._taken(steps)
        return self._done[steps]

    def _taken(self, steps: _Steps) -> Pixels:
        before, last = steps[:-1], steps[-1]
        if isinstance(last, ResizeTo):
            if before:
                return resizer(self(before), self._filter, exact=self._exact)(*last)
            return self._from_image(*last)
        if before and max(before[-1][:2]) > _LONGEST_STRIP * max(last[:2]):
            return self._strip(before[-1], last)
        return _placed(self(before) if before else np.asarray(self._image), last)

    @cached_property
    def _from_image(self) -> Resizer:
        """Made once: it may have to convert the image."""
        return resizer(self._image, self._filter, exact=self._exact)

    def _strip(self, resized: ResizeTo | PlaceOn, canvas: PlaceOn) -> Pixels:
        """The part of a very long resized image that stays on a canvas inside of it."""
        image = self._image
        if not isinstance(image, Image.Image):
            image = Image.fromarray(image)
        # the same filter, but Pillow may take the other axis first and round in between: few levels
        scale_x, scale_y = image.width / resized.width, image.height / resized.height
        x0, y0 = -canvas.x, -canvas.y
        x1, y1 = x0 + canvas.width, y0 + canvas.height
        source = (x0 * scale_x, y0 * scale_y, x1 * scale_x, y1 * scale_y)
        return np.array(image.resize(canvas[:2], FILTERS[self._filter], box=source))


def _placed(pixels: Pixels, step: PlaceOn) -> Pixels:
    """The picture on its canvas; a view if it only loses pixels."""
    x, y = max(step.x, 0), max(step.y, 0)
    cut_x, cut_y = max(-step.x, 0), max(-step.y, 0)
    inside = pixels[cut_y : cut_y + step.height - y, cut_x : cut_x + step.width - x]
    if inside.shape[:2] == (step.height, step.width):
        return inside
    canvas = np.zeros((step.height, step.width, 3), dtype=np.uint8)
    if any(step.fill):
        canvas[:] = step.fill
    canvas[y : y + inside.shape[0], x : x + inside.shape[1]] = inside
    return canvas


def normalize(rule: VisionRule, pixels: torch.Tensor) -> torch.Tensor:
    """What the vision encoder takes: float32 of raw pixels, within 1e-6 of the reference.

    Of patches, or of one image (3, height, width). Same shape and device; of patches at native
    resolution (rows, 3 * num_frames * side * side), each repeated for every frame unless they have
    them (`empty_patches` with `videos`). The scale 1/255, mean and std are one multiply and add.
    """
    if pixels.dtype != torch.uint8:
        raise ValueError(f"pixels are {pixels.dtype}; give raw pixels (torch.uint8)")
    mean, std = (torch.tensor(values, dtype=torch.float64) for values in (rule.mean, rule.std))
    scale, shift = (values.to(torch.float32) for values in (1 / (255 * std), -mean / std))
    if pixels.device.type != "cpu":
        return _normalize_on_device(rule, pixels, scale.to(pixels.device), shift.to(pixels.device))
    if pixels.ndim == 3:
        return _normalize_lines(pixels[None], scale, shift)[0]
    if not isinstance(rule, NativeSizeRule):
        return _normalize_lines(pixels, scale, shift)
    # those of videos have all frames
    frames = rule.num_frames if pixels.ndim == 4 else 1
    # (rows, 3, frames, pixels)
    normalized = torch.empty(
        (len(pixels), 3, frames, pixels.shape[2:].numel()), dtype=torch.float32
    )
    if len(pixels):  # else nothing need be compiled
        from isobatch.loaders.decode._patchify import normalize_planes  # noqa: PLC0415  (see there)

        normalize_planes(
            pixels.flatten(2).numpy(), scale.numpy(), shift.numpy(), normalized.numpy()
        )
    return normalized.flatten(1)


def _normalize_lines(
    pixels: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor
) -> torch.Tensor:
    """Normalised lines of pixels: a pixel's three channels are too few for vector instructions."""
    rows, _, height, width = pixels.shape
    # (rows, height, 3 * width), a view if the pixels are `channels_last`
    lines = pixels.permute(0, 2, 3, 1).flatten(2).to(torch.float32)
    lines.mul_(scale.repeat(width)).add_(shift.repeat(width))
    return lines.view(rows, height, width, 3).permute(0, 3, 1, 2)


def _normalize_on_device(
    rule: VisionRule, pixels: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor
) -> torch.Tensor:
    # (rows, 3, side, side), of videos (rows, 3, frames, side, side)
    shape = 3, *(1,) * max(2, pixels.ndim - 2)
    normalized = pixels.to(torch.float32).mul_(scale.view(shape)).add_(shift.view(shape))
    if not isinstance(rule, NativeSizeRule) or pixels.ndim == 3:
        return normalized
    if pixels.ndim > 4:
        return normalized.flatten(1)
    # (rows, 3, side, side) -> (rows, 3, frames, side, side) -> (rows, 3 * frames * side * side)
    return normalized.unsqueeze(2).expand(-1, -1, rule.num_frames, -1, -1).flatten(1)
