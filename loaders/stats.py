"""Figures of a loader so far: `LoaderStats`, and the `Meter` that counts them."""

import threading
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from balance.types import IntArray
from loaders.plan.steps import StepLoads, StepPlan

_NOT_SUMMED = ("cache_hits", "dist_ratio_vit", "dist_ratio_llm")
_LOADS = 64
"""Steps whose loads are summed at a time: one by one takes ten times as long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderStats:
    """Figures of one loader (one rank) since it was made; dist ratios are of all ranks."""

    steps: int
    samples: int
    """Samples of this rank's micro-batches."""
    waiting_s: float
    """Time that the trainer waited for steps."""
    reading_s: float
    """Time of all threads together, like `decoding_s`; prefetched steps included."""
    decoding_s: float
    """Time of decoding, resizing, normalising and packing."""
    read_bytes: int
    """Stored size of tokens, image and audio files."""
    planned_steps: int
    """Steps that a step planner packed."""
    planning_s: float
    """Time of the planner for these, in the prefetching threads."""
    cache_hits: int
    """Reads from the on-disk cache of remote builds."""
    dist_ratio_vit: float
    """Share of ranks' time that waits for the slowest vision encoder (`metrics.dist_ratio`)."""
    dist_ratio_llm: float

    def scalars(self, prefix: str = "loader/") -> dict[str, float]:
        """Name -> value, for `SummaryWriter.add_scalar` and similar."""
        return {f"{prefix}{name}": float(value) for name, value in asdict(self).items()}


class Meter:
    """Counts the figures of a loader, in any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        names = (field.name for field in fields(LoaderStats))
        self._sums: dict[str, Any] = {name: 0 for name in names if name not in _NOT_SUMMED}
        self._vit, self._llm = _MeanDistRatio(), _MeanDistRatio()
        self._loads: list[StepLoads] = []  # of steps not yet in these two

    def add(self, **figures: float) -> None:
        """Add to figures of `LoaderStats`."""
        with self._lock:
            for name, value in figures.items():
                self._sums[name] += value

    def add_step(self, plan: StepPlan, num_samples: int) -> None:
        """Count a step that the consumer got, with `num_samples` of this rank."""
        self.add(steps=1, samples=num_samples)
        if plan.planning_s is not None:
            self.add(planned_steps=1, planning_s=plan.planning_s)
        self._loads.append(plan.loads)
        if len(self._loads) == _LOADS:
            self._add_loads()

    def stats(self, cache_hits: int) -> LoaderStats:
        """The figures so far."""
        self._add_loads()
        with self._lock:
            return LoaderStats(
                **self._sums,
                cache_hits=cache_hits,
                dist_ratio_vit=self._vit.ratio,
                dist_ratio_llm=self._llm.ratio,
            )

    def _add_loads(self) -> None:
        loads, self._loads = self._loads, []
        if loads:
            complete = np.concatenate([each.complete for each in loads])
            self._vit.add(np.concatenate([each.vit_tokens for each in loads], axis=1), complete)
            self._llm.add(np.concatenate([each.llm_tokens for each in loads], axis=1), complete)


class _MeanDistRatio:
    """Mean dist ratio of complete rounds; of the first round if none is complete."""

    def __init__(self) -> None:
        self._sum, self._count, self._incomplete = 0.0, 0, 0.0
        self._any = False

    def add(self, loads: IntArray, complete: NDArray[np.bool_]) -> None:
        """Count rounds by their loads, shape (dp, rounds), and `complete`, shape (rounds,)."""
        most = loads.max(axis=0)
        shares = (most - loads).mean(axis=0) / np.maximum(most, 1)
        self._sum += float(shares[complete].sum())
        self._count += int(complete.sum())
        if not self._any and len(shares):
            self._incomplete, self._any = float(shares[0]), True

    @property
    def ratio(self) -> float:
        return self._sum / self._count if self._count else self._incomplete
