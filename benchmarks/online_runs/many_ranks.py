"""Samples per second of more ranks than there are cores: measured micro-batches, planned steps.

What a micro-batch takes is linear in its tokens, padding included, and its tiles; the line is
fitted to all micro-batches that were measured. A step takes as long as its slowest rank.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from online import DEFAULT_WINDOW, ODB_BUFFERS, Steps, odb_steps, our_steps
from order import Data

from balance.metrics import lower_bounds
from balance.types import FloatArray, Limits
from online_runs.padded import Loads, best_size, padded_batches
from online_runs.records import FACTOR

Cost = tuple[int, int, int, float]
"""1, tokens, tiles and seconds of a micro-batch."""


def fit(costs: list[Cost]) -> tuple[FloatArray, float]:
    """Seconds of a micro-batch, a token and a tile; and the mean error, of the mean."""
    measured = np.array(costs, np.float64)
    loads, seconds = measured[:, :3], measured[:, 3]
    found, *_ = np.linalg.lstsq(loads, seconds, rcond=None)
    error = np.abs(loads @ found - seconds).mean() / seconds.mean()
    return found, float(error)


def limit(loads: Loads, caps: tuple[int, int], dp: int, line: FloatArray) -> float:
    """Samples per second without padding, waiting or anything but computing, in the fewest
    micro-batches that the caps of tiles and tokens allow: which no method exceeds.
    """
    tiles, tokens = loads
    none = Limits(max_vision=caps[0], max_seq_len=caps[1], min_vision=0, min_seq_len=0)
    fewest = max(lower_bounds(tiles, tokens, none).values())
    return float(len(tokens) * dp / (line @ (fewest, tokens.sum(), tiles.sum())))


def rates(data: Data, dp: int, line: FloatArray, grouping: Any) -> dict[str, float]:
    """Samples per second of each method."""
    tiles, tokens = data.loads
    caps = data.limits.max_vision, data.limits.max_seq_len
    small = (tiles, tokens / FACTOR)  # of what was trained
    found = {"limit": limit(small, (caps[0], caps[1] // FACTOR), dp, line)}
    found["ours"] = _rate(our_steps(data, dp, DEFAULT_WINDOW)[0], data, line, is_padded=False)
    for buffer in ODB_BUFFERS:
        steps, _ = odb_steps(data, dp, buffer, grouping)
        found[f"ODB, {buffer:,}"] = _rate(steps, data, line, is_padded=True)
    for method in ("random", "grouped"):
        size, accumulation = best_size(method, (tiles, tokens), caps)
        batches = padded_batches(method, (tiles, tokens), size, accumulation)
        rounds = [batches[start : start + dp] for start in range(0, len(batches), dp)]
        found[f"{method}, {size} x {accumulation}"] = _rate(
            rounds, data, line, is_padded=True, accumulation=accumulation
        )
    return found


def _rate(
    steps: Steps, data: Data, line: FloatArray, *, is_padded: bool, accumulation: int = 1
) -> float:
    tiles, tokens = data.loads
    seconds = np.zeros((len(steps), len(steps[0])))
    for number, step in enumerate(steps):
        for rank, batch in enumerate(step):
            if batch:
                own = tokens[batch]
                length = len(batch) * own.max() if is_padded else own.sum()
                seconds[number, rank] = line @ (1, length / FACTOR, tiles[batch].sum())
    borders = np.arange(0, len(steps), accumulation)
    of_steps = np.add.reduceat(seconds, borders, axis=0)
    return float(len(tokens) / of_steps.max(axis=1).sum())
