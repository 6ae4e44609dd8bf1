"""A micro-batch's text with a row per sample, for models without varlen attention.

In causal attention no token sees the padding on its right. Masks of models in which some tokens see
later ones are made row by row, (rows, 1, longest, longest).
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from isobatch.loaders.batch.micro_batch import MicroBatch
from isobatch.loaders.batch.model_inputs.family import Arguments, ModelFamily, config_of_text


def padded_text(batch: MicroBatch, num_rows: int, config: Any, family: ModelFamily) -> Arguments:
    """`input_ids`, `labels`, `attention_mask` and `position_ids`, (rows, longest).

    M-RoPE's positions are (4, rows, longest). Samples after the first `num_rows`, which are blank
    media, become the end of the last row, mostly the shortest: causal, so nothing before sees them.
    """
    borders = torch.cat([batch.cu_seqlens[:num_rows], batch.cu_seqlens[-1:]])
    row_batch = replace(batch, sample_ids=batch.sample_ids[:num_rows], cu_seqlens=borders)
    rows = row_batch.padded(_pad_token_id(config))
    texts = [{name: rows[name][row] for name in rows} for row in range(num_rows)]
    # one row each, for masks
    alone = [_with_text(row_batch, row_batch.sample_ids[:1], text) for text in texts]
    masks: Arguments = _joined([family.masks(row, config) for row in alone])
    positions = family.positions(_with_text(row_batch, row_batch.sample_ids, rows), config)
    shape = *positions.shape[:-2], *rows["input_ids"].shape
    return rows | masks | {"position_ids": positions.reshape(shape)}


def _with_text(
    batch: MicroBatch, sample_ids: tuple[str, ...], text: dict[str, Tensor]
) -> MicroBatch:
    """`batch` with text of as many samples of one length, one after the other."""
    ids = text["input_ids"].flatten()
    borders = torch.arange(len(sample_ids) + 1, dtype=torch.int32, device=ids.device)
    return replace(
        batch,
        sample_ids=sample_ids,
        input_ids=ids,
        labels=text["labels"].flatten(),
        position_ids=text["position_ids"].flatten(),
        cu_seqlens=borders * (len(ids) // len(sample_ids)),
    )


def _joined(parts: list[Any]) -> Any:
    """Tensors, or dicts of them, joined along the first dimension."""
    if isinstance(parts[0], dict):
        return {name: _joined([part[name] for part in parts]) for name in parts[0]}
    return torch.cat(parts)


def _pad_token_id(config: Any) -> int:
    """Any but an image's would do: no token with a label sees it. Some configs have none, or -1."""
    return max(0, getattr(config_of_text(config), "pad_token_id", None) or 0)
