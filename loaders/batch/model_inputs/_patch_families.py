"""Models with patches of one size: LLaVA, InternVL, SmolVLM and others.

`MicroBatch.pixel_values` are (patches, 3, side, side). A video's frames are patches; InternVL and
SmolVLM take them as images.
"""

from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from isobatch.common.errors import ConfigError
from isobatch.loaders.batch.micro_batch import MicroBatch
from isobatch.loaders.batch.model_inputs.family import (
    Arguments,
    BlankImage,
    ModelFamily,
    crop_sides,
    pixel_arguments,
)


def _blank_llava(config: Any) -> BlankImage:
    pixels, side = crop_sides(config)
    keeps_class_token = config.vision_feature_select_strategy == "full"
    # SigLIP has no class token
    has_class_token = config.vision_config.model_type != "siglip_vision_model"
    tokens = side**2 + (keeps_class_token and has_class_token)
    return BlankImage(1, tokens, (pixels, pixels))


def _blank_anyres(config: Any) -> BlankImage:
    pixels, side = crop_sides(config)
    # an image that fills the smallest canvas: no padding; each row ends in a newline feature
    height, width = min(config.image_grid_pinpoints, key=lambda size: size[0] * size[1])
    rows, columns = height // pixels, width // pixels
    tokens = side**2 + rows * side * (columns * side + 1)
    return BlankImage(1 + rows * columns, tokens, (height, width))


def _blank_internvl(config: Any) -> BlankImage:
    pixels, side = crop_sides(config)
    return BlankImage(1, round(side * config.downsample_ratio) ** 2, (pixels, pixels))


def _blank_idefics(config: Any) -> BlankImage:
    pixels, side = crop_sides(config)
    return BlankImage(1, side**2 // config.scale_factor**2, (pixels, pixels))


def _onevision_images(batch: MicroBatch, config: Any) -> Arguments:
    """Images with `batch_num_images`, and videos apart: (videos, frames, 3, side, side)."""
    seconds, counts = batch.video_seconds, batch.patches_per_image
    if seconds is None:
        return _onevision_tiles(batch.pixel_values, batch.image_sizes, counts, config)
    is_video = seconds > 0
    parts = torch.split(batch.pixel_values, counts.tolist())
    videos = [parts[number] for number in is_video.nonzero().flatten().tolist()]
    images = [parts[number] for number in (~is_video).nonzero().flatten().tolist()]
    if len({len(frames) for frames in videos}) > 1:
        raise ConfigError(
            f"videos of {', '.join(str(len(frames)) for frames in videos)} frames: transformers'"
            f" {config.model_type} takes only equally many in one micro-batch; build with lists of"
            " frames of one length, or with files"
        )
    arguments: Arguments = {"pixel_values_videos": torch.stack(videos)}
    if images:
        sizes = batch.image_sizes[~is_video]
        arguments |= _onevision_tiles(torch.cat(images), sizes, counts[~is_video], config)
    return arguments


def _onevision_tiles(
    pixels: Tensor, image_sizes: Tensor, patch_counts: Tensor, config: Any
) -> Arguments:
    """Images with `batch_num_images`: one that is alone in its sample has tiles, others have none.

    transformers asks for images per sample and needs nothing else of them. So neighbouring images
    of one patch count as one sample here, whichever samples they belong to.
    """
    counts: list[int] = []
    for has_tiles, images in groupby(patch_counts.tolist(), key=lambda rows: rows > 1):
        number = len(list(images))
        if number == 1 and not has_tiles:
            raise ConfigError(
                f"an image without tiles that is alone in its sample: {config.model_type} cuts"
                " such images; build with that model's preset"
            )
        counts += [1] * number if has_tiles else [number]
    num_images = patch_counts.new_tensor(counts)
    return {"pixel_values": pixels, "image_sizes": image_sizes, "batch_num_images": num_images}


def _idefics_images(batch: MicroBatch, config: Any) -> Arguments:
    """All patches as images of one row; none has padding, so there is no `pixel_attention_mask`."""
    return {"pixel_values": batch.pixel_values[None]}


_IDEFICS = ModelFamily(blank=_blank_idefics, images=_idefics_images)
PATCH_FAMILIES = {
    "llava": ModelFamily(blank=_blank_llava),
    "llava_next": ModelFamily(blank=_blank_anyres, images=pixel_arguments("image_sizes")),
    "llava_onevision": ModelFamily(blank=_blank_anyres, images=_onevision_images),
    "internvl": ModelFamily(blank=_blank_internvl),
    "idefics3": _IDEFICS,
    "smolvlm": _IDEFICS,
}
