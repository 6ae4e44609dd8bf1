"""Whole images to the ranks of a context-parallel group: equal work for encoders.

For adapters. All ranks of such a group have the same row (`context_shards`): encoding its images on
each would do the work as often as there are ranks, and dealing them by number leaves it uneven.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from isobatch.common.errors import ConfigError


def deal_images(loads: Sequence[int], size: int) -> list[list[int]]:
    """Numbers of the whole images that each rank encodes, so that ranks encode about the same.

    `loads`: ViT tokens of each image, at native resolution `grids.prod(dim=1)`. The largest first,
    each to the rank with the least; no rank is above 4/3 of the best possible (Graham, 1969). A
    rank has its images in their order, and the same on all ranks.

    >>> deal_images([4, 9, 4, 1], 2)
    [[1], [0, 2, 3]]
    """
    if size < 1:
        raise ConfigError(f"size is {size}; it must be at least 1")
    ranks: list[list[int]] = [[] for _ in range(size)]
    totals = [0] * size
    for image in sorted(range(len(loads)), key=lambda number: -loads[number]):
        rank = totals.index(min(totals))
        ranks[rank].append(image)
        totals[rank] += loads[image]
    return [sorted(images) for images in ranks]


def encode_dealt(
    encode: Callable[[list[int]], Tensor],
    loads: Sequence[int],
    num_tokens: Sequence[int],
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Embeddings of all images of a row, each encoded on one rank: (sum of `num_tokens`, dim).

    All ranks of `group` (`mesh["cp"].get_group()`; None: all ranks) call it with the same `loads`,
    as `deal_images` takes them, and `num_tokens`, embeddings of each image. `encode`: numbers of
    images -> their embeddings in that order, (tokens, dim), of one dtype on all ranks. A rank that
    is dealt nothing encodes the cheapest image too and its result counts for nothing, so that
    FSDP's ranks stay in step. Embeddings come with one all-reduce, and so do their gradients: those
    of a rank's images are sums over the ranks' tokens.

    ConfigError if there is no image, if the lists differ in length, or if `encode` gives another
    number of embeddings.
    """
    if not loads or len(loads) != len(num_tokens):
        raise ConfigError(
            f"{len(loads)} loads and {len(num_tokens)} num_tokens; both are one per image of a row "
            "with an image (packed_batch gives each row one)"
        )
    images = deal_images(loads, dist.get_world_size(group))[dist.get_rank(group)]
    encoded_images = images or [min(range(len(loads)), key=loads.__getitem__)]
    encoded = encode(encoded_images)
    if len(encoded) != (expected := sum(num_tokens[image] for image in encoded_images)):
        raise ConfigError(
            f"encode gave {len(encoded):,} embeddings for the images {encoded_images}; num_tokens "
            f"says {expected:,}"
        )
    counts = torch.tensor(num_tokens, device=encoded.device)
    is_dealt = torch.zeros_like(counts, dtype=torch.bool)
    is_dealt[images] = True
    row = encoded.new_zeros(sum(num_tokens), encoded.shape[1])
    if images:
        row = row.masked_scatter(is_dealt.repeat_interleave(counts)[:, None], encoded)
    else:
        row = row + 0 * encoded.sum()
    whole: Tensor = _SumOverRanks.apply(row, group)  # type: ignore[no-untyped-call]
    return whole


class _SumOverRanks(Function):
    """An all-reduce of the values, and of their gradients."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        summed = values.clone()
        dist.all_reduce(summed, group=group)
        return summed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        summed = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(summed, group=ctx.group)
        return summed, None
