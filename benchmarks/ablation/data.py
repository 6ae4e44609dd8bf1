"""Steps of the ablations: samples like InternVL's, padded at random or in balanced groups.

Samples of the full size are for layers that wait; `shrunk` ones, an eighth as long, for a model
that CPUs can train.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from former_order.block_shuffle import BlockShuffle, choose_order
from former_order.sort_groups import sort_groups

from balance.baseline_samplers import BATCH_SIZE, as_groups, random_batches
from balance.grouping.best_fit import group_best_fit
from balance.metrics import longest
from balance.types import Counts, Groups, IntArray, Limits
from engine.cost_model.loads import Loads, PhaseLoads

Steps = tuple[tuple[Groups, ...], ...]
"""[step][replica]: micro-batches of samples, in the order in which they enter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Of the data: what a tile is, and the caps of a micro-batch."""

    vit_tokens: int
    """Per tile."""
    image_tokens: int
    """Per tile, in the LLM."""
    seq_len: int
    tiles: int


INTERNVL = Sizes(vit_tokens=1025, image_tokens=256, seq_len=4096, tiles=9)
SHRUNK = Sizes(vit_tokens=128, image_tokens=32, seq_len=512, tiles=9)


def shrunk(counts: Counts) -> Counts:
    """The same samples in a model whose tiles and texts are an eighth as long."""
    tiles, text = counts.num_image_patches, np.maximum(counts.num_text_tokens // 8, 3)
    return replace(
        counts,
        num_vit_tokens=SHRUNK.vit_tokens * tiles,
        num_image_tokens=SHRUNK.image_tokens * tiles,
        num_text_tokens=text,
        num_loss_tokens=text - 1,
    )


def random_steps(
    counts: Counts, replicas: int, micro_batches: int, steps: int, seed: int = 1
) -> Steps:
    """Micro-batches of BATCH_SIZE random samples."""
    drawn = random_batches(counts.seq_len, replicas * micro_batches, BATCH_SIZE, seed)[:steps]
    return tuple(
        tuple(
            as_groups(own[np.newaxis]) for own in step.reshape(replicas, micro_batches, BATCH_SIZE)
        )
        for step in drawn
    )


def balanced_steps(
    counts: Counts, sizes: Sizes, replicas: int, micro_batches: int, steps: int
) -> Steps:
    """Groups within the caps, as a build holds them, in the loaders' order."""
    limits = Limits(
        max_seq_len=sizes.seq_len,
        max_vision=sizes.tiles,
        min_seq_len=sizes.seq_len * 31 // 32,
        min_vision=sizes.tiles,
    )
    vision, tokens = counts.num_image_patches, counts.seq_len
    groups = group_best_fit(vision, tokens, limits, seed=0)
    groups = groups.take(sort_groups(groups.sum(vision), groups.sum(tokens), seed=0))
    stream = BlockShuffle(num_groups=len(groups), order=choose_order(len(groups)), seed=0, epoch=0)
    # each (replicas, micro_batches)
    taken = [stream.take_step(replicas, micro_batches) for _ in range(steps)]
    return tuple(tuple(groups.take(own) for own in step) for step in taken)


def loads_of(groups: Groups, counts: Counts, sizes: Sizes, *, padded: bool) -> Loads:
    """What micro-batches bring to each phase; padded to the longest of their samples, or packed."""
    tiles, number = groups.sum(counts.num_image_patches), groups.sizes
    if padded:
        length = longest(groups, counts.seq_len)
        llm = PhaseLoads(tokens=length * number, squares=length**2 * number, items=number)
    else:
        llm = PhaseLoads(
            tokens=groups.sum(counts.seq_len), squares=groups.sum(counts.seq_len**2), items=number
        )
    vision = PhaseLoads(
        tokens=tiles * sizes.vit_tokens, squares=tiles * sizes.vit_tokens**2, items=tiles
    )
    return Loads(vision=vision, audio=PhaseLoads.nothing(len(groups)), llm=llm)


def true_tokens(steps: Steps, counts: Counts) -> int:
    """LLM tokens of all samples, without padding."""
    return sum(int(counts.seq_len[own.samples].sum()) for own in every(steps))


def every(steps: Steps) -> Iterator[Groups]:
    """The micro-batches of each step and replica."""
    for step in steps:
        yield from step


def samples_of(groups: Groups) -> list[IntArray]:
    """The samples of each micro-batch."""
    return [
        groups.samples[first:end]
        for first, end in zip(groups.offsets[:-1], groups.offsets[1:], strict=True)
    ]
