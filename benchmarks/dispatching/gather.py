"""All features gathered on every rank: OrchMLLM's strawman (section 5.2.1)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from isobatch.common.types import IntArray
from isobatch.engine.dispatching.dispatch import DispatchPlan


def gather_features(made: Tensor, plan: DispatchPlan, name: str, rank: int) -> Tensor:
    """An encoder's features where they are used, of (features that this rank made, width); a
    collective of all ranks.

    The backward pass gathers all gradients in the same way.
    """
    own = plan.phases[name]
    tokens = own.features.expand(own.moved.apply(plan.examples.features[name][own.examples]))
    home = tokens.inverse()
    ways = tuple(
        (
            _padded_places(
                way.order[way.target_offsets[rank] : way.target_offsets[rank + 1]],
                way.source_offsets,
            )
        )
        for way in (tokens, home)
    )
    moved: Tensor = _Gathered.apply(made, *ways)  # type: ignore[no-untyped-call]
    return moved


def _padded_places(places: IntArray, offsets: IntArray) -> tuple[Tensor, int]:
    """(where rows lie if every rank's are padded to the most that any has, those most)."""
    most = int(np.diff(offsets).max())
    ranks = np.searchsorted(offsets, places, side="right") - 1
    return torch.from_numpy(ranks * most + places - offsets[ranks]), most


def _gather(rows: Tensor, places: Tensor, most: int) -> Tensor:
    padded = rows.new_zeros((most, rows.shape[1]))
    padded[: len(rows)] = rows
    every = rows.new_empty((dist.get_world_size(), most, rows.shape[1]))
    dist.all_gather(list(every), padded)
    return every.flatten(0, 1).index_select(0, places)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, made: Tensor, there: tuple[Tensor, int], back: tuple[Tensor, int]
    ) -> Tensor:
        ctx.back = back
        return _gather(made, *there)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _gather(gradients[0], *ctx.back), None, None
