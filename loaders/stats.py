"""What the loader has done so far: `LoaderStats`, and the `Meter` that counts it."""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from balance.types import IntArray
from loaders.plan.steps import StepLoads, StepPlan

_LOADS = 64
"""Steps whose loads are added up at a time: one by one takes ten times as long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderStats:
    """Figures of one loader, thus of one rank, since it was made; only the dist ratios are of all
    ranks.
    """

    steps: int
    samples: int
    """Of the micro-batches that this rank got."""
    waiting_s: float
    """That the trainer waited for steps."""
    reading_s: float
    """Of all threads together, as `decoding_s`; work ahead of the trainer included."""
    decoding_s: float
    """Decoding, resizing, normalising and packing."""
    read_bytes: int
    """Of tokens and image and audio files, as stored."""
    planned_steps: int
    """Of `steps`, those that a step planner packed."""
    planning_s: float
    """That the planner took for these, in the threads that work ahead."""
    cache_hits: int
    """Reads that the on-disk cache of remote builds served."""
    dist_ratio_vit: float
    """Share of the ranks' time that is waiting for the slowest vision encoder
    (`balance.metrics.dist_ratio`).
    """
    dist_ratio_llm: float

    def scalars(self, prefix: str = "loader/") -> dict[str, float]:
        """Name -> value, for `SummaryWriter.add_scalar` and its like."""
        return {f"{prefix}{name}": float(value) for name, value in asdict(self).items()}


class Meter:
    """Counts; parts in any thread, the rest in the consumer's."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting_s = self._reading_s = self._decoding_s = 0.0
        self._read_bytes = 0
        self._steps = self._samples = self._planned_steps = 0
        self._planning_s = 0.0
        self._vit, self._llm = _Idle(), _Idle()
        self._loads: list[StepLoads] = []  # of steps that the two do not know yet

    def add_part(self, reading_s: float, decoding_s: float, num_bytes: int) -> None:
        """Count a micro-batch: seconds of reading and of decoding, and bytes that were read. In any
        thread.
        """
        with self._lock:
            self._reading_s += reading_s
            self._decoding_s += decoding_s
            self._read_bytes += num_bytes

    def add_wait(self, waiting_s: float) -> None:
        """Count seconds that the consumer waited."""
        self._waiting_s += waiting_s

    def add_step(self, plan: StepPlan, num_samples: int) -> None:
        """Count a step that the consumer got, with `num_samples` of its own."""
        self._steps += 1
        self._samples += num_samples
        if plan.planning_s is not None:
            self._planned_steps += 1
            self._planning_s += plan.planning_s
        self._loads.append(plan.loads)
        if len(self._loads) == _LOADS:
            self._add_loads()

    def stats(self, cache_hits: int) -> LoaderStats:
        """The figures so far."""
        self._add_loads()
        with self._lock:
            return LoaderStats(
                steps=self._steps,
                samples=self._samples,
                waiting_s=self._waiting_s,
                reading_s=self._reading_s,
                decoding_s=self._decoding_s,
                read_bytes=self._read_bytes,
                planned_steps=self._planned_steps,
                planning_s=self._planning_s,
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


class _Idle:
    """A dist ratio, round by round: the mean over complete rounds, or the first one if none is
    complete.
    """

    def __init__(self) -> None:
        self._sum, self._count, self._incomplete = 0.0, 0, 0.0
        self._any = False

    def add(self, loads: IntArray, complete: NDArray[np.bool_]) -> None:
        """Count rounds with what each rank did, shape (dp, rounds), and whether all had work, shape
        (rounds,).
        """
        most = loads.max(axis=0)
        shares = (most - loads).mean(axis=0) / np.maximum(most, 1)
        self._sum, self._count = (
            self._sum + float(shares[complete].sum()),
            self._count + int(complete.sum()),
        )
        if not self._any and len(shares):
            self._incomplete, self._any = float(shares[0]), True

    @property
    def ratio(self) -> float:
        return self._sum / self._count if self._count else self._incomplete
