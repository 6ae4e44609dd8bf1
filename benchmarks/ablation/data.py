"""Samples and steps of the ablations: padded or packed at random, or in even groups.

Samples of the full size are for layers that wait; `shrunk` ones, an eighth as long, for models
that CPUs can train.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from papers.datasets import counts_of

from isobatch.balance.baseline_samplers import BATCH_SIZE, as_groups, pack_in_order, random_batches
from isobatch.balance.grouping.even_out import group_balanced
from isobatch.balance.metrics import longest
from isobatch.balance.order.step_order import epoch_steps
from isobatch.common.types import Counts, Groups, IntArray, Limits
from isobatch.engine.cost_model.loads import Loads, PhaseLoads

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
QWEN = Sizes(vit_tokens=64, image_tokens=16, seq_len=4096, tiles=200)
SHRUNK = Sizes(vit_tokens=128, image_tokens=32, seq_len=512, tiles=9)
WINDOWS = Sizes(vit_tokens=64, image_tokens=16, seq_len=512, tiles=25)
"""A window of Qwen2.5-VL's encoder, 112 x 112 px: what its attention sees in most layers."""


def qwen_samples(count: int, seed: int = 0) -> Counts:
    """Samples at native resolution for Qwen2.5-VL; an image patch is a window of 16 LLM tokens.

    Drawn, since nobody publishes lengths: a fifth has no image and a tenth has two to four, of a
    log-normal size (median 400 LLM tokens, sigma .7, at most 1,280); texts as InternVL's.
    """
    rng = np.random.default_rng(seed)
    images = rng.choice([0, 1, 2, 3, 4], count, p=[0.2, 0.7, 0.06, 0.02, 0.02])
    sizes = np.clip(rng.lognormal(np.log(400 / 16), 0.7, (count, 4)), 1, 80).astype(np.int64)
    windows = np.where(np.arange(4) < images[:, np.newaxis], sizes, 0).sum(axis=1)
    text = np.clip(rng.lognormal(np.log(330), 0.6, count), 20, 2_800).astype(np.int64)
    # together at most 4,096 tokens
    windows = np.minimum(windows, np.minimum(200, (4_096 - text) // 16))
    return counts_of(
        patches=windows, vit_tokens=64 * windows, image_tokens=16 * windows, text_tokens=text
    )


def shrunk(counts: Counts, sizes: Sizes = SHRUNK) -> Counts:
    """The same samples in a model whose images and texts are an eighth as long.

    InternVL's tiles become shorter, Qwen2.5-VL's windows fewer.
    """
    tiles, text = counts.num_image_patches, np.maximum(counts.num_text_tokens // 8, 3)
    if sizes is WINDOWS:
        tiles = np.where(tiles > 0, np.maximum(tiles // 8, 1), 0)
    return replace(
        counts,
        num_image_patches=tiles,
        num_vit_tokens=sizes.vit_tokens * tiles,
        num_image_tokens=sizes.image_tokens * tiles,
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


def packed_steps(
    counts: Counts, seq_len: int, replicas: int, micro_batches: int, steps: int, seed: int = 1
) -> Steps:
    """Samples in random order, packed to the token limit one after the other, as trainers do."""
    order = np.random.default_rng(seed).permutation(len(counts))
    packed = pack_in_order(counts.seq_len[order], seq_len)
    groups = Groups(order[packed.samples], packed.offsets)
    count = min(steps, len(groups) // (replicas * micro_batches))
    places = np.arange(count * replicas * micro_batches).reshape(count, replicas, micro_batches)
    return tuple(tuple(groups.take(own) for own in step) for step in places)


def balanced_steps(
    counts: Counts, sizes: Sizes, replicas: int, micro_batches: int, steps: int
) -> Steps:
    """Even groups within the caps, as a build holds them, in the loaders' order."""
    limits = Limits(
        max_seq_len=sizes.seq_len,
        max_vision=sizes.tiles,
        min_seq_len=sizes.seq_len * 31 // 32,
        min_vision=sizes.tiles,
    )
    vision, tokens = counts.num_image_patches, counts.seq_len
    groups = group_balanced(vision, tokens, limits, seed=0)
    loads = groups.sum(vision), groups.sum(tokens)
    taken = epoch_steps(loads, (replicas, micro_batches), seed=0, max_steps=steps)
    # the end of an epoch is filled with nothing
    whole = [step for step in taken if (step >= 0).all()]
    return tuple(tuple(groups.take(own) for own in step) for step in whole)


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
