"""Batches of equally many samples, padded to the longest: what Trainer does without packing."""

from __future__ import annotations

import torch
from transformers.trainer_pt_utils import LengthGroupedSampler

from isobatch.common.types import IntArray

Loads = tuple[IntArray, IntArray]
"""Tiles and tokens of each sample."""


def padded_batches(method: str, loads: Loads, size: int, accumulation: int) -> list[list[int]]:
    """Batches of all ranks, in turns: in random order, or `grouped` by length as Trainer does."""
    generator = torch.Generator().manual_seed(0)
    tokens = loads[1].tolist()
    if method == "grouped":
        order = list(LengthGroupedSampler(size * accumulation, lengths=tokens, generator=generator))
    else:
        order = torch.randperm(len(tokens), generator=generator).tolist()
    return [order[start : start + size] for start in range(0, len(order), size)]


def best_size(method: str, loads: Loads, caps: tuple[int, int]) -> tuple[int, int]:
    """The most samples of which no batch is above the caps of tiles and tokens, and how many
    batches a step needs to have about as many samples as a packed one.
    """
    size = 1
    while _fits(padded_batches(method, loads, size + 1, 1), loads, caps):
        size += 1
    groups = max(load.sum() / cap for load, cap in zip(loads, caps, strict=True))
    return size, max(1, round(len(loads[0]) / groups / size))


def _fits(batches: list[list[int]], loads: Loads, caps: tuple[int, int]) -> bool:
    tiles, tokens = loads
    return all(
        tiles[batch].sum() <= caps[0] and len(batch) * tokens[batch].max() <= caps[1]
        for batch in batches
    )
