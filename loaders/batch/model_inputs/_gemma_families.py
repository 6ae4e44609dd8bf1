"""Gemma 3 and 4, PaliGemma: models in which some tokens see later ones.

transformers' own masks for that are wrong for packed samples: with borders of samples, the images
of one are looked up at the places of another (Gemma's layers with a window), and all prefixes see
each other (PaliGemma). So masks are made here, (1, 1, tokens, tokens) on the micro-batch's device:
a byte per pair of tokens, so 64 MB at 8,192 tokens, and twice that for layers with a window.

`MicroBatch.pixel_values` are (images, 3, side, side). Gemma 4: a row per ViT token, row by row,
(ViT tokens, 3 * side * side), channel, row, column, values from 0 to 1; `image_grid_thw` has grids.
"""

from typing import Any

import torch
from torch import Tensor

from isobatch.common.errors import ConfigError
from isobatch.common.types import LABEL_IGNORE
from isobatch.loaders.batch.micro_batch import MicroBatch
from isobatch.loaders.batch.model_inputs.family import (
    Arguments,
    BlankImage,
    ModelFamily,
    causal,
    config_of_text,
    crop_sides,
    image_grids,
)
from isobatch.tensors.rotary_positions import image_runs


def _gemma3_masks(batch: MicroBatch, config: Any) -> Arguments:
    """Tokens of an image see each other, in layers with a window as far as that reaches."""
    text = config_of_text(config)
    _check_causal(config, text)
    _check_attention(config, text)
    allowed = _earlier(batch) | _same_image(batch, config)
    near = allowed & _within_window(batch, text)
    return {"attention_mask": _by_layer_type(allowed, near, text)}


def _gemma4_masks(batch: MicroBatch, config: Any) -> Arguments:
    """Masks as of Gemma 3, but in layers with a window only, and only in models configured so."""
    text = config_of_text(config)
    _check_causal(config, text)
    if text.use_bidirectional_attention != "vision":
        return causal(batch, config)
    _check_attention(config, text)
    earlier = _earlier(batch)
    near = (earlier | _same_image(batch, config)) & _within_window(batch, text)
    return {"attention_mask": _by_layer_type(earlier, near, text)}


def _paligemma_masks(batch: MicroBatch, config: Any) -> Arguments:
    """All that precedes a sample's first label is its prefix, whose tokens see each other."""
    text = config_of_text(config)
    _check_attention(config, text)
    window = getattr(text, "sliding_window", None)
    if window is not None and batch.max_seqlen > window:
        raise ConfigError(
            f"a sample of {batch.max_seqlen} tokens: beyond the window of {window},"
            f" {config.model_type} of transformers takes no masks of samples that are packed;"
            f" build with max_seq_len={window}"
        )
    # labels of each sample up to and including a token
    labels = (batch.labels != LABEL_IGNORE).cumsum(0)
    before = torch.cat([labels.new_zeros(1), labels])[batch.cu_seqlens.long()]
    sample = _sample_of_token(batch)
    is_prefix = labels == before[sample]
    in_prefixes = is_prefix[:, None] & is_prefix & (sample[:, None] == sample)
    return {"attention_mask": _as_mask(_earlier(batch) | in_prefixes, text)}


def _positions_from_1(batch: MicroBatch, config: Any) -> Tensor:
    """PaliGemma counts positions from 1: (1, tokens)."""
    return batch.position_ids[None] + 1


def _sample_of_token(batch: MicroBatch) -> Tensor:
    """Index of the sample of each token: (tokens,)."""
    lengths = batch.cu_seqlens.diff().long()
    return torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)


def _earlier(batch: MicroBatch) -> Tensor:
    """Whether each token (row) comes after another of its sample, or is it: (tokens, tokens)."""
    sample = _sample_of_token(batch)
    same: Tensor = sample[:, None] == sample
    same.tril_()
    return same


def _same_image(batch: MicroBatch, config: Any) -> Tensor:
    """Whether two tokens are of one run of image tokens: (tokens, tokens)."""
    is_image = batch.input_ids == config.image_token_id
    image = image_runs(is_image, batch.cu_seqlens)
    return torch.logical_and(image[:, None] == image, is_image)


def _within_window(batch: MicroBatch, text: Any) -> Tensor:
    """Whether a token is less than the window before another, or later: (tokens, tokens)."""
    number = torch.arange(len(batch.input_ids), device=batch.input_ids.device)
    near: Tensor = number[:, None] - number < text.sliding_window
    return near


def _by_layer_type(allowed: Tensor, near: Tensor, text: Any) -> dict[str, Tensor]:
    return {"full_attention": _as_mask(allowed, text), "sliding_attention": _as_mask(near, text)}


def _as_mask(allowed: Tensor, text: Any) -> Tensor:
    """The mask that a model's attention takes: (1, 1, tokens, tokens)."""
    if getattr(text, "_attn_implementation", None) != "eager":
        return allowed[None, None]
    mask = torch.zeros(allowed.shape, device=allowed.device)  # is added to scores
    return mask.masked_fill_(~allowed, float("-inf"))[None, None]


def _check_attention(config: Any, text: Any) -> None:
    """ConfigError if a model's attention takes no mask."""
    chosen = getattr(text, "_attn_implementation", None)
    if chosen not in (None, "eager", "sdpa"):
        raise ConfigError(
            f"{config.model_type} with {chosen}: tokens of an image see later ones, for which that"
            " has no mask; load the model with attn_implementation='sdpa'"
        )


def _check_causal(config: Any, text: Any) -> None:
    """ConfigError if text sees later tokens, as in models that embed."""
    if text.use_bidirectional_attention in (True, "all"):
        raise ConfigError(
            f"{config.model_type} with use_bidirectional_attention: no token predicts the next one;"
            " set it to what the published model has"
        )


def _blank_gemma3(config: Any) -> BlankImage:
    pixels, _ = crop_sides(config)
    return BlankImage(1, config.mm_tokens_per_image, (pixels, pixels))


def _blank_paligemma(config: Any) -> BlankImage:
    pixels, side = crop_sides(config)
    return BlankImage(1, side**2, (pixels, pixels))


def _blank_gemma4(config: Any) -> BlankImage:
    merge = config.vision_config.pooling_kernel_size
    side = merge * config.vision_config.patch_size
    return BlankImage(merge**2, 1, (side, side), (1, merge, merge))


def _gemma4_images(batch: MicroBatch, config: Any) -> Arguments:
    """Images padded to the longest, (images, ViT tokens, side * side * 3), and places (x, y).

    Channels come last in a row; the places of padding are -1.
    """
    grids = image_grids(batch)
    counts = grids.prod(dim=1).tolist()
    shape = len(counts), max(counts)
    values = batch.pixel_values.reshape(sum(counts), 3, -1).transpose(1, 2).flatten(1)
    pixels = values.new_zeros(*shape, values.shape[1])
    places = grids.new_full((*shape, 2), -1)
    images = zip(torch.split(values, counts), grids[:, 1:].tolist(), strict=True)
    for number, (image, (rows, columns)) in enumerate(images):
        pixels[number, : len(image)] = image
        token = torch.arange(rows * columns, device=grids.device)
        places[number, : len(image)] = torch.stack([token % columns, token // columns], dim=1)
    return {"pixel_values": pixels, "image_position_ids": places}


GEMMA_FAMILIES = {
    "gemma3": ModelFamily(blank=_blank_gemma3, masks=_gemma3_masks),
    "gemma4": ModelFamily(
        blank=_blank_gemma4, images=_gemma4_images, masks=_gemma4_masks, is_native=True
    ),
    "paligemma": ModelFamily(
        blank=_blank_paligemma, masks=_paligemma_masks, positions=_positions_from_1
    ),
}
