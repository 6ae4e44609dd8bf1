"""Causal attention within samples of a packed micro-batch.

With flash attention the sample borders go straight to its kernel. With anything else transformers
would build one mask over the whole micro-batch and compute all of its square. Here each sample is
computed alone, so time and memory follow the sum of the samples' squared lengths, which is what the
planner counts. The model's own setting is restored after each call.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from isobatch.common.errors import ConfigError

NAME = "isobatch_samples"
"""Name of our function in transformers' table of attention functions."""
_HALF = (torch.bfloat16, torch.float16)


@contextmanager
def packed_attention(
    attention: Any, borders: Tensor, hidden: Tensor, images: Tensor | None = None
) -> Iterator[dict[str, Any]]:
    """Make `attention` separate the samples; yields the arguments that its layer must be given.

    `borders`: int64, (samples + 1,), on the CPU, so that nothing waits for the GPU; `hidden`: the
    layer's input; `images`: the run of image tokens of each token, 0 for text, on the CPU, if those
    of a run see each other. ConfigError for flash attention in float32, which its kernels do not
    support, and with `images`.
    """
    config = attention.config
    before = config._attn_implementation
    if "flash" in str(before):
        if str(before).startswith("flash_attention") and hidden.dtype not in _HALF:
            raise ConfigError(
                f"{before} computes in bfloat16 only, but the tokens are {hidden.dtype}; give"
                " PipelineOptions(mode=TrainingMode()), or load the model with"
                " attn_implementation='sdpa'"
            )
        if images is not None:
            raise ConfigError(
                f"{before}: tokens of an image see later ones, for which it has no mask; load the"
                " model with attn_implementation='sdpa'"
            )
        longest = int(borders.diff().max())
        on_device = borders.to(hidden.device, torch.int32, non_blocking=True)
        yield {
            "cu_seq_lens_q": on_device,
            "cu_seq_lens_k": on_device,
            "max_length_q": longest,
            "max_length_k": longest,
        }
        return
    table = getattr(sys.modules[type(attention).__module__], "ALL_ATTENTION_FUNCTIONS", None)
    if table is None:
        raise ConfigError(
            f"{type(attention).__name__} has no table of attention functions; set flash_attention_2"
        )
    table[NAME] = sample_attention
    config._attn_implementation = NAME
    try:
        yield {"sample_borders": borders, "images_of_tokens": images}
    finally:
        config._attn_implementation = before


def sample_attention(  # noqa: PLR0913 - the arguments are transformers'
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    sample_borders: Tensor,
    images_of_tokens: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention per sample: (1, heads, tokens, width) each -> (1, tokens, heads, width).

    `key` and `value` may have fewer heads. `sliding_window` counts the token itself.
    """
    if attention_mask is not None or softcap is not None or s_aux is not None:
        raise ConfigError(
            f"{type(module).__name__} needs a mask, a cap or sinks; set flash_attention_2"
        )
    outputs = []
    for start, end in pairwise(sample_borders.tolist()):
        images = None if images_of_tokens is None else images_of_tokens[start:end]
        mask = _sample_mask(end - start, sliding_window, images, query.device)
        outputs.append(
            functional.scaled_dot_product_attention(
                query[:, :, start:end],
                key[:, :, start:end],
                value[:, :, start:end],
                attn_mask=mask,
                is_causal=mask is None,
                dropout_p=dropout,
                scale=scaling,
                enable_gqa=query.shape[1] != key.shape[1],
            )
        )
    return torch.cat(outputs, dim=2).transpose(1, 2), None


def _sample_mask(
    length: int, window: int | None, images: Tensor | None, device: torch.device
) -> Tensor | None:
    """Which tokens (columns) of a sample each of its tokens sees; None: it and all before it."""
    has_images = images is not None and bool(images.any())
    is_cut = window is not None and length > window
    if not has_images and not is_cut:
        return None
    mask = torch.ones(length, length, dtype=torch.bool, device=device).tril_()
    if images is not None and has_images:
        images = images.to(device, non_blocking=True)
        mask |= (images[:, None] == images) & (images > 0)
    return mask.triu_(1 - window) if window is not None and is_cut else mask
