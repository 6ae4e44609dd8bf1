"""`MicroBatch` as keyword arguments of transformers' models, without padding.

For trainers that run LLaVA, LLaVA-NeXT, InternVL, Qwen2-VL or Qwen2.5-VL. Needs only the model's
config, and imports nothing of transformers. Avoids what transformers accepts and computes wrongly:
samples would see each other with a key-value cache, with an attention mask, or, in Qwen2-VL, with
three rows of `position_ids` instead of four. Pure; reads tensors' values, so call it on the CPU.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from balance.errors import ConfigError
from balance.types import LABEL_IGNORE
from loaders.batch.micro_batch import MicroBatch

BLANK_SAMPLE_ID = "(blank image)"


def model_inputs(
    batch: MicroBatch, config: Any, *, always_encode: bool = True, with_labels: bool = True
) -> dict[str, Any]:
    """What `model(**inputs)` takes for a model with transformers' `config`; new tensors.

    `input_ids` and `labels` (1, tokens), `position_ids` (1, tokens) from 0 in each sample, or for
    Qwen2-VL (4, 1, tokens): those and the three of M-RoPE. `pixel_values` as in `MicroBatch`, with
    `image_sizes` (LLaVA-NeXT) or `image_grid_thw` (Qwen2-VL). With flash attention also the
    boundaries of the samples. No loss crosses a boundary, and the model's `loss` is this
    micro-batch's part of the step's mean: parts of all micro-batches and ranks are summed.

    `always_encode`: a micro-batch without images gets a sample of one small blank image at its end,
    without labels. The vision encoder then runs on every rank in every micro-batch: DDP finds no
    unused parameter, FSDP does not hang, and empty micro-batches work. Otherwise a micro-batch
    without images has no `pixel_values`, and an empty one, which no model accepts, is a ValueError.

    `with_labels=False` leaves out labels and divisor, for a loss of your own: that of the logits'
    first `len(batch.labels)` rows, by `MicroBatch.reduce_loss`. Losses with weights need that.

    Raises ConfigError for another model, another preset's pixels, raw pixels
    (`pixel_dtype=torch.uint8`), audio, images that a planner gave to another rank, and labels of
    unequal weight, which transformers' losses do not know.
    """
    layout = _layout(config)
    is_native = "image_grid_thw" in layout.image_fields
    _check_media(batch, config, is_native=is_native)
    if with_labels and batch.loss_weights is not None:
        raise ConfigError(
            "transformers' losses have no weights: use the loader's loss_weights='token', or "
            "with_labels=False and MicroBatch.reduce_loss"
        )
    if always_encode and not len(batch.image_sizes):
        batch = _with_blank_image(batch, layout.blank(config), int(config.image_token_id))
    if not len(batch.input_ids):
        raise ValueError("an empty micro-batch; skip it, or leave always_encode=True")
    inputs: dict[str, Any] = {
        "input_ids": batch.input_ids[None],
        "position_ids": batch.position_ids[None],
        "use_cache": False,
    }
    if with_labels:
        # transformers' shift over the whole sequence then moves no label across a sample boundary
        labels = batch.labels.clone()
        labels[batch.cu_seqlens[:-1].long()] = LABEL_IGNORE
        inputs |= {"labels": labels[None], "num_items_in_batch": batch.loss_normalizer}
    if is_native:
        positions = torch.cat([batch.position_ids[None], _mrope(batch, config)])
        inputs["position_ids"] = positions[:, None]
    if len(batch.image_sizes):
        inputs |= {name: getattr(batch, name) for name in ("pixel_values", *layout.image_fields)}
    if "flash" in str(getattr(config, "_attn_implementation", None)):
        # else transformers finds the boundaries in position_ids, waiting for the GPU in every layer
        inputs |= {"cu_seq_lens_q": batch.cu_seqlens, "cu_seq_lens_k": batch.cu_seqlens}
        inputs |= {"max_length_q": batch.max_seqlen, "max_length_k": batch.max_seqlen}
    return inputs


@dataclass(frozen=True, slots=True)
class _Blank:
    """The smallest image of a model."""

    rows: int
    """Rows of `pixel_values`."""
    tokens: int
    """LLM tokens."""
    size: tuple[int, int]
    """Height and width in pixels."""
    grid: tuple[int, int, int] | None = None
    """Frames, rows and columns of ViT patches, at native resolution."""


@dataclass(frozen=True, slots=True)
class _Layout:
    """What differs between models."""

    blank: Callable[[Any], _Blank]
    image_fields: tuple[str, ...] = ()
    """Fields of `MicroBatch` that are passed on with `pixel_values`."""


def _layout(config: Any) -> _Layout:
    layout = _LAYOUTS.get(getattr(config, "model_type", None))
    if layout is None:
        name = getattr(config, "model_type", type(config).__name__)
        raise ConfigError(f"model type {name!r}: give a config of {', '.join(_LAYOUTS)}")
    return layout


def _check_media(batch: MicroBatch, config: Any, *, is_native: bool) -> None:
    if not batch.pixel_values.is_floating_point():
        raise ConfigError("pixel_values are raw (torch.uint8); use loaders.normalize first")
    if (batch.image_grid_thw is not None) != is_native:
        raise ConfigError(
            f"the micro-batch was not made for {config.model_type}; build with that model's preset"
        )
    if batch.audio_lengths is not None and len(batch.audio_lengths):
        raise ConfigError(f"there are audio clips, but {config.model_type} has no audio encoder")
    if not len(batch.image_sizes) and bool((batch.input_ids == config.image_token_id).any()):
        raise ConfigError(
            f"image tokens ({config.image_token_id}) without images: a planner gave them to "
            "another rank's encoder, or the model's image_token_id is not the build's"
        )


def _with_blank_image(batch: MicroBatch, blank: _Blank, image_token_id: int) -> MicroBatch:
    """`batch`, which has no images, followed by a sample of nothing but the image."""
    ids, grid = batch.input_ids, batch.image_grid_thw
    tokens = torch.arange(blank.tokens, device=ids.device)
    end = batch.cu_seqlens.new_tensor([len(ids) + blank.tokens])
    return replace(
        batch,
        sample_ids=(*batch.sample_ids, BLANK_SAMPLE_ID),
        input_ids=torch.cat([ids, torch.full_like(tokens, image_token_id)]),
        labels=torch.cat([batch.labels, torch.full_like(tokens, LABEL_IGNORE)]),
        position_ids=torch.cat([batch.position_ids, tokens]),
        cu_seqlens=torch.cat([batch.cu_seqlens, end]),
        pixel_values=batch.pixel_values.new_zeros(blank.rows, *batch.pixel_values.shape[1:]),
        patches_per_image=batch.patches_per_image.new_tensor([1 if blank.grid else blank.rows]),
        image_sizes=batch.image_sizes.new_tensor([blank.size]),
        image_grid_thw=None if grid is None else grid.new_tensor([blank.grid]),
    )


def _mrope(batch: MicroBatch, config: Any) -> Tensor:
    """Qwen2-VL's rotary positions (frame, row, column), (3, tokens), from 0 in each sample.

    Text counts up in all three rows. An image starts where the text before it ended, plus row and
    column of the merged patch; the text after it, after its larger side (arXiv 2409.12191, 2.1).
    """
    merge = config.vision_config.spatial_merge_size
    thw = batch.image_grid_thw
    # (images, 2): rows and columns of LLM tokens
    grids = iter([] if thw is None else (thw[:, 1:] // merge).tolist())
    image_places = (batch.input_ids == config.image_token_id).nonzero().flatten().tolist()
    parts = [torch.zeros(3, 0, dtype=torch.long)]
    taken = 0  # image tokens so far
    for start, end in pairwise(batch.cu_seqlens.tolist()):
        place, position = start, 0
        while place < end:
            text_end = min(end, image_places[taken]) if taken < len(image_places) else end
            parts.append(torch.arange(position, position + text_end - place).expand(3, -1))
            position, place = position + text_end - place, text_end
            if place < end:
                rows, columns = next(grids)
                parts.append(position + _grid_places(rows, columns))
                position, place, taken = (
                    position + max(rows, columns),
                    place + rows * columns,
                    taken + rows * columns,
                )
    return torch.cat(parts, dim=1).to(batch.position_ids.device)


def _grid_places(rows: int, columns: int) -> Tensor:
    """Frame 0, row and column of each merged patch, row by row: (3, rows * columns)."""
    places = torch.zeros(3, rows, columns, dtype=torch.long)
    places[1] = torch.arange(rows)[:, None]
    places[2] = torch.arange(columns)
    return places.flatten(1)


def _side(config: Any) -> tuple[int, int]:
    """Side of an image patch in pixels and in ViT patches."""
    vision = config.vision_config
    # some configs give sides as (height, width)
    pixels, vit_patch = (
        value if isinstance(value, int) else value[0]
        for value in (vision.image_size, vision.patch_size)
    )
    return pixels, pixels // vit_patch


def _blank_llava(config: Any) -> _Blank:
    pixels, side = _side(config)
    keeps_class_token = config.vision_feature_select_strategy == "full"
    return _Blank(1, side**2 + keeps_class_token, (pixels, pixels))


def _blank_llava_next(config: Any) -> _Blank:
    pixels, side = _side(config)
    # an image that fills the smallest canvas: no padding; each row ends in a newline feature
    height, width = min(config.image_grid_pinpoints, key=lambda size: size[0] * size[1])
    rows, columns = height // pixels, width // pixels
    tokens = side**2 + rows * side * (columns * side + 1)
    return _Blank(1 + rows * columns, tokens, (height, width))


def _blank_internvl(config: Any) -> _Blank:
    pixels, side = _side(config)
    return _Blank(1, round(side * config.downsample_ratio) ** 2, (pixels, pixels))


def _blank_qwen(config: Any) -> _Blank:
    merge = config.vision_config.spatial_merge_size
    side = merge * config.vision_config.patch_size
    return _Blank(merge**2, 1, (side, side), (1, merge, merge))


_LAYOUTS: dict[Any, _Layout] = {
    "llava": _Layout(_blank_llava),
    "llava_next": _Layout(_blank_llava_next, ("image_sizes",)),
    "internvl": _Layout(_blank_internvl),
    "qwen2_vl": _Layout(_blank_qwen, ("image_grid_thw",)),
    "qwen2_5_vl": _Layout(_blank_qwen, ("image_grid_thw",)),
}
