"""Shards of a packed row for context parallelism: which tokens each rank has.

For adapters. Pure index functions over a `PackedBatch`; ranks are those of one context-parallel
group, which all have the same row. Three schemes:

- "zigzag" (Megatron-LM, Transformer Engine's THD): each sample is cut into 2 * size pieces, and a
  rank has piece `rank` and piece `2 * size - 1 - rank` of every sample, so that causal attention
  costs all the same. Each sample's slot must be a multiple of 2 * size.
- "head_tail" (torch's context parallelism, TorchTitan): the same cut, of the whole row.
- "ulysses" (DeepSpeed-Ulysses, VeOmni): the row in `size` stretches. All-to-all brings heads
  together later, so every rank needs the borders of the whole row.

Labels are shifted before, so that no piece lacks the label of its last token.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from isobatch.common.errors import ConfigError
from isobatch.loaders.batch.packed import PackedBatch

Scheme = Literal["zigzag", "head_tail", "ulysses"]
PER_TOKEN = (
    *("input_ids", "labels", "loss_mask", "position_ids"),
    *("mrope_positions", "mm_token_type_ids", "is_token"),
)
"""Fields of `PackedBatch` with a value per token, in the last dimension."""


def context_shard(batch: PackedBatch, rank: int, size: int, scheme: Scheme) -> PackedBatch:
    """What one rank of a context-parallel group has: T / size tokens in each field per token.

    `cu_seqlens`, `cu_seqlens_padded` and `max_seqlen` stay those of the whole row, as attention
    over ranks takes them, and so do `media` and `samples`. ConfigError as `shard_indices`.
    """
    indices = shard_indices(batch.cu_seqlens_padded, rank, size, scheme)
    values: dict[str, Any] = {name: getattr(batch, name) for name in PER_TOKEN}
    for name, value in values.items():
        values[name] = None if value is None else value[..., indices]
    return replace(batch, **values)


def shard_indices(cu_seqlens_padded: Tensor, rank: int, size: int, scheme: Scheme) -> Tensor:
    """Places in the row of a rank's tokens, in their order there: int64, (T / size,).

    ConfigError if the row cannot be cut so; it names the multiple to pad to.

    >>> shard_indices(torch.tensor([0, 4, 12]), 0, 2, "zigzag").tolist()
    [0, 3, 4, 5, 10, 11]
    >>> shard_indices(torch.tensor([0, 4, 12]), 1, 2, "ulysses").tolist()
    [6, 7, 8, 9, 10, 11]
    """
    if scheme not in get_args(Scheme):
        raise ConfigError(f"scheme is {scheme!r}; use one of {', '.join(get_args(Scheme))}")
    if not 0 <= rank < size:
        raise ConfigError(f"rank is {rank}; it must be in 0..{size - 1}")
    borders = cu_seqlens_padded.long()
    if scheme != "zigzag":
        borders = borders[[0, -1]]
    num_pieces = size if scheme == "ulysses" else 2 * size
    sizes = borders.diff()
    if (rest := sizes % num_pieces).any():
        place = int(rest.nonzero()[0, 0])
        what, option = (
            ("the row", "pad_total_to")
            if scheme != "zigzag"
            else (f"sample {place}", "pad_each_to")
        )
        raise ConfigError(
            f"{what} has {int(sizes[place])} tokens, which {scheme} over {size} ranks cannot cut "
            f"into {num_pieces} pieces; {option} must be a multiple of {num_pieces}"
        )
    numbers = [rank] if scheme == "ulysses" else [rank, 2 * size - 1 - rank]
    pieces = sizes // num_pieces
    # of every sample its pieces in turn, (samples, pieces of the rank)
    starts = borders[:-1, None] + pieces[:, None] * pieces.new_tensor(numbers)
    lengths = pieces[:, None].expand_as(starts).flatten()
    before = lengths.cumsum(0) - lengths
    within = torch.arange(int(lengths.sum()), device=borders.device)
    within -= before.repeat_interleave(lengths)
    return starts.flatten().repeat_interleave(lengths) + within


def join_shards(shards: Sequence[Tensor], cu_seqlens_padded: Tensor, scheme: Scheme) -> Tensor:
    """The values of the whole row, (..., T), from those of all ranks in order, (..., T / size)."""
    size = len(shards)
    places = [shard_indices(cu_seqlens_padded, rank, size, scheme) for rank in range(size)]
    indices = torch.cat(places)
    joined = torch.cat([*shards], dim=-1)
    row = torch.empty_like(joined)
    row[..., indices] = joined
    return row
