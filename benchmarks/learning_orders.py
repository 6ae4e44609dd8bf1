"""The orders that `learning.py` compares: the steps of each method, and their simulated time.

Methods differ in what a step holds; learning.py says how. Time is FLOPs of the tiny model.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from learning_data import Data
from numpy.typing import NDArray

from isobatch.balance.grouping.best_fit import group_best_fit
from isobatch.balance.metrics import longest, padded_loads
from isobatch.balance.order.step_order import MAX_BALANCE
from isobatch.common.types import Groups
from isobatch.loaders import StreamingLoader
from isobatch.models.flops import FlopsModel, GpuSpeed
from isobatch.models.presets import load_model

LOADER: dict[str, dict[str, object]] = {"default": {}, "most balanced": {"balance": MAX_BALANCE}}
"""Orders of the loader -> its options."""
PADDED, PACKED = "random padded", "random packed"
METHODS = (PADDED, PACKED, *LOADER)

Step = list[list[str]]
"""Ids of the samples of each rank."""


def epochs_of(data: Data, method: str, seed: int, dp: int) -> Iterator[list[Step]]:
    """The steps of epoch after epoch."""
    if method in LOADER:
        # only ids are taken: every rank of the loader says which samples are its own
        ranks = [
            StreamingLoader(
                [(build, 1.0) for build in data.builds],
                dp_rank=rank,
                dp_world_size=dp,
                seed=seed,
                workers=0,
                images="encoded",
                **LOADER[method],  # type: ignore[arg-type]
            )
            for rank in range(dp)
        ]
        while True:
            parts = zip(*ranks, strict=True)
            yield [[list(batch.sample_ids) for (batch,) in step] for step in parts]
    rng, ids = np.random.default_rng(seed), list(data.samples)
    groups = fit_groups(data)
    while True:
        order = rng.permutation(len(groups))
        drawn = groups
        if method == PADDED:
            borders = np.linspace(0, len(ids), len(groups) + 1).round().astype(np.int64)
            drawn = Groups(rng.permutation(len(ids)), borders)
        parts = [[ids[place] for place in drawn[group]] for group in order.tolist()]
        yield [parts[start : start + dp] for start in range(0, len(parts), dp)]


def fit_groups(data: Data) -> Groups:
    """Groups by best fit with the caps of the builds."""
    counts, sources = data.counts(list(data.samples)), data.sources
    parts = []
    for number, limits in enumerate(data.limits):
        own = np.arange(len(counts))
        if len(data.limits) > 1:
            own = own[sources == number]
        part = counts.take(own)
        found = group_best_fit(part.num_image_patches, part.seq_len, limits, seed=0)
        parts += [own[found[group]] for group in range(len(found))]
    sizes = np.array([0, *map(len, parts)])
    return Groups(np.concatenate(parts), np.cumsum(sizes))


def groups_of(data: Data, steps: list[Step]) -> tuple[Groups, list[str]]:
    """Micro-batches as groups of places in a list of ids."""
    ids = [name for step in steps for rank in step for name in rank]
    sizes = [len(rank) for step in steps for rank in step]
    return Groups(np.arange(len(ids)), np.concatenate([[0], np.cumsum(sizes)])), ids


def rank_times(data: Data, step: Step, *, padded: bool) -> NDArray[np.float64]:
    """FLOPs of each rank."""
    groups, ids = groups_of(data, [step])
    model = FlopsModel.of(load_model("tiny_audio"), GpuSpeed(micro_batch_overhead_ms=0))
    counts = data.counts(ids)
    load = model.loads(counts).sum(groups)
    if padded:
        tokens = padded_loads(groups, counts.seq_len)
        load = type(load)(
            vit_tokens=load.vit_tokens,
            vit_squares=load.vit_squares,
            llm_tokens=tokens,
            llm_squares=tokens * longest(groups, counts.seq_len),
        )
    return model.train_flops(load)


def step_time(data: Data, step: Step, *, padded: bool) -> float:
    """FLOPs of the slowest rank."""
    return float(rank_times(data, step, padded=padded).max())


def average_time(data: Data, dp: int) -> float:
    """FLOPs of a rank in an average step of packed samples."""
    whole = [[list(data.samples)]]
    steps = len(data.stored) / dp
    return float(rank_times(data, whole[0], padded=False).sum() / dp / steps)
