"""Attention of packed samples without flash-attn: torch's varlen kernel for transformers' models.

`set_packed_attention` makes a model call it in the LLM and in the encoder. Its name contains
"flash", so transformers and `model_inputs` give it the borders of samples and images, and build no
mask. Off the GPU, and where torch has no such kernel, samples are computed one by one.
"""

from __future__ import annotations

import inspect
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import flash_attention_mask

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # before torch 2.10
    varlen_attn = None

NAME = "flash_torch_varlen"
_KEYWORDS = () if varlen_attn is None else tuple(inspect.signature(varlen_attn).parameters)


def set_attention(model: Any, name: str) -> None:
    """Let all of a model's parts use an attention of transformers, or this one."""
    AttentionInterface.register(NAME, packed_attention)
    AttentionMaskInterface.register(NAME, flash_attention_mask)
    config = model.config
    for part in (config, config.text_config, config.vision_config):
        part._attn_implementation = name


def packed_attention(  # noqa: PLR0913 - the arguments are transformers'
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention inside sequences: (1, heads, tokens, width) each -> (1, tokens, heads, width)."""
    if attention_mask is not None or cu_seq_lens_q is None:
        raise ValueError(f"{NAME} needs the borders of packed samples, and no mask")
    causal = bool(module.is_causal) if is_causal is None else is_causal
    borders = cu_seq_lens_q.to(torch.int32)
    if varlen_attn is None or not query.is_cuda:
        return one_by_one(query, key, value, borders, causal=causal, scaling=scaling), None
    longest = int(max_length_q or borders.diff().max())
    rows = [part[0].transpose(0, 1) for part in (query, key, value)]
    return varlen(rows, borders, longest, causal=causal, scaling=scaling)[None], None


def varlen(
    rows: list[Tensor], borders: Tensor, longest: int, *, causal: bool, scaling: float | None
) -> Tensor:
    """torch's kernel, whose keywords differ by version; (tokens, heads, width) each."""
    query, key, value = (part.contiguous() for part in rows)
    options: dict[str, Any] = {}
    if "is_causal" in _KEYWORDS:
        options["is_causal"] = causal
    else:
        options["window_size"] = (-1, 0) if causal else (-1, -1)
    if "scale" in _KEYWORDS:
        options["scale"] = scaling
    elif scaling is not None:
        query = query * (scaling * query.shape[-1] ** 0.5)
    if query.shape[1] != key.shape[1]:
        if "enable_gqa" in _KEYWORDS:
            options["enable_gqa"] = True
        else:
            times = query.shape[1] // key.shape[1]
            key, value = (part.repeat_interleave(times, dim=1) for part in (key, value))
    assert varlen_attn is not None
    return varlen_attn(query, key, value, borders, borders, longest, longest, **options)


def one_by_one(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    borders: Tensor,
    *,
    causal: bool,
    scaling: float | None,
) -> Tensor:
    """`scaled_dot_product_attention` of each sequence: (1, heads, tokens, width) each ->
    (1, tokens, heads, width).
    """
    parts = [
        functional.scaled_dot_product_attention(
            query[:, :, start:end],
            key[:, :, start:end],
            value[:, :, start:end],
            is_causal=causal,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        for start, end in pairwise(borders.tolist())
    ]
    return torch.cat(parts, dim=2).transpose(1, 2)
