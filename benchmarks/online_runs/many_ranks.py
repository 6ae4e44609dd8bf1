"""Samples per second of more ranks than there are cores: measured micro-batches, planned steps.

What a micro-batch takes is linear in its tokens, padding included, and its tiles; the line is
fitted to all micro-batches that were measured. A step takes as long as its slowest rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from online import DEFAULT_WINDOW, ODB_BUFFERS, Steps, odb_steps, our_steps
from order import Data

from isobatch.balance.metrics import lower_bounds
from isobatch.common.types import FloatArray, Limits
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


def limit_rate(loads: Loads, caps: tuple[int, int], dp: int, line: FloatArray) -> float:
    """Samples per second without padding, waiting or anything but computing, in the fewest
    micro-batches that the caps of tiles and tokens allow: which no method exceeds.
    """
    tiles, tokens = loads
    none = Limits(max_vision=caps[0], max_seq_len=caps[1], min_vision=0, min_seq_len=0)
    fewest = max(lower_bounds(tiles, tokens, none).values())
    return float(len(tokens) * dp / (line @ (fewest, tokens.sum(), tiles.sum())))


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """Of a method."""

    rate: float
    """Samples per second."""
    most: float
    """What any loader's rate is over this one at most, on any machine on which a micro-batch takes
    so much by itself and for each token and tile, whatever each of the three is.
    """


def predict(
    data: Data, dp: int, line: FloatArray, grouping: Any, *, meets_in_batches: bool
) -> dict[str, Predicted]:
    """Each method's figures; with sharded weights ranks meet in each micro-batch of a step."""
    tiles, tokens = data.loads
    caps = data.limits.max_vision, data.limits.max_seq_len
    small = (tiles, tokens / FACTOR)  # of what was trained
    least = limit_rate(small, (caps[0], caps[1] // FACTOR), dp, line)
    found = {"limit": Predicted(rate=least, most=1.0)}
    ours, _ = our_steps(data, dp, DEFAULT_WINDOW)
    found["ours"] = _predicted(ours, data, line, is_padded=False)
    for buffer in ODB_BUFFERS:
        steps, _ = odb_steps(data, dp, buffer, grouping)
        found[f"ODB, {buffer:,}"] = _predicted(steps, data, line, is_padded=True)
    for method in ("random", "grouped"):
        size, accumulation = best_size(method, (tiles, tokens), caps)
        batches = padded_batches(method, (tiles, tokens), size, accumulation)
        batches += [[]] * (-len(batches) % dp)
        rounds = [batches[start : start + dp] for start in range(0, len(batches), dp)]
        found[f"{method}, {size} x {accumulation}"] = _predicted(
            rounds, data, line, is_padded=True, accumulation=1 if meets_in_batches else accumulation
        )
    return found


def _predicted(
    steps: Steps, data: Data, line: FloatArray, *, is_padded: bool, accumulation: int = 1
) -> Predicted:
    """A step takes at most as long as a rank that has the most of everything in it."""
    tiles, tokens = data.loads
    loads = np.zeros((len(steps), len(steps[0]), 3))  # 1, tokens, tiles
    for number, step in enumerate(steps):
        for rank, batch in enumerate(step):
            if batch:
                own = tokens[batch]
                length = len(batch) * own.max() if is_padded else own.sum()
                loads[number, rank] = 1, length / FACTOR, tiles[batch].sum()
    of_steps = np.add.reduceat(loads, np.arange(0, len(steps), accumulation), axis=0)
    least = np.array([_fewest(data), tokens.sum() / FACTOR, tiles.sum()]) / len(steps[0])
    return Predicted(
        rate=float(len(tokens) / (of_steps @ line).max(axis=1).sum()),
        most=float((of_steps.max(axis=1).sum(axis=0) / least).max()),
    )


def _fewest(data: Data) -> float:
    return max(lower_bounds(*data.loads, data.limits).values())
