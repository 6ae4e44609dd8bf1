"""Figures of a loader so far: `LoaderStats`, and the `Meter` that counts them."""

import threading
from dataclasses import dataclass, fields
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loaders._pair_counter import PairCounter
from loaders.plan.step_plan import StepLoads, StepPlan, StepTotals

_NOT_SUMMED = (
    *("cache_hits", "unchosen_samples", "dist_ratio_vit", "dist_ratio_llm"),
    *("label_shares", "gradient_shares", "repeated_pairs"),
)
_LOADS, _GROUPS = 256, 1 << 16
"""Steps whose figures are summed at a time, one by one takes ten times as long; fewer of more than
so many groups together.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderStats:
    """Figures of one loader (one rank) since it was made; dist ratios are of all ranks."""

    steps: int
    samples: int
    """Samples of this rank's micro-batches."""
    unchosen_samples: int
    """Samples of the builds that `split`, `filter` and `limit` leave out of every epoch."""
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
    label_shares: tuple[float, ...]
    """Share of each of the loader's builds in the weights of all labels so far, on all ranks."""
    gradient_shares: tuple[float, ...]
    """The same of the losses as they are divided: another share shows that `loss_normalizer="step"`
    weighs a build's labels more than others'.
    """
    repeated_pairs: float | None
    """How often groups of a step shared one in the epoch before too, relative to chance: 1 in a
    random order. None in the first epoch, and where a step has one group.
    """


class Meter:
    """Counts the figures of a loader, in any thread."""

    def __init__(self, unchosen_samples: int = 0, num_builds: int = 1) -> None:
        self._unchosen_samples = unchosen_samples
        self._lock = threading.Lock()
        names = (field.name for field in fields(LoaderStats))
        self._sums: dict[str, Any] = {name: 0 for name in names if name not in _NOT_SUMMED}
        # of steps that are not in the figures yet
        self._loads: list[StepLoads] = []
        self._totals: list[StepTotals] = []
        # over complete rounds, or the first round until there is one; of ViT and LLM
        self._num_rounds, self._ratio_sums = 0, np.zeros(2)
        self._first_ratios: NDArray[np.float64] | None = None
        # (2, builds): sums of labels' weights, and of those over the steps' divisors
        self._weights = np.zeros((2, num_builds))
        self._pairs = PairCounter()

    def add(self, **figures: float) -> None:
        """Add to figures of `LoaderStats`."""
        with self._lock:
            for name, value in figures.items():
                self._sums[name] += value

    def add_step(self, plan: StepPlan, num_samples: int, waiting_s: float) -> None:
        """Count a step that the consumer waited for, with `num_samples` of this rank."""
        self.add(steps=1, samples=num_samples, waiting_s=waiting_s)
        if plan.planning_s is not None:
            self.add(planned_steps=1, planning_s=plan.planning_s)
        self._loads.append(plan.loads)
        self._totals.append(plan.totals)
        if len(self._loads) == _LOADS or len(self._loads) * plan.loads.vit_tokens.size > _GROUPS:
            self._add_loads()

    def stats(self, cache_hits: int) -> LoaderStats:
        """The figures so far."""
        self._add_loads()
        ratios = np.zeros(2) if self._first_ratios is None else self._first_ratios
        if self._num_rounds:
            ratios = self._ratio_sums / self._num_rounds
        vit, llm = ratios.tolist()
        shares = self._weights / np.maximum(
            self._weights.sum(axis=1, keepdims=True), np.finfo(np.float64).tiny
        )
        with self._lock:
            return LoaderStats(
                **self._sums,
                unchosen_samples=self._unchosen_samples,
                cache_hits=cache_hits,
                dist_ratio_vit=vit,
                dist_ratio_llm=llm,
                label_shares=tuple(shares[0].tolist()),
                gradient_shares=tuple(shares[1].tolist()),
                repeated_pairs=self._pairs.repeated_pairs,
            )

    def _add_loads(self) -> None:
        loads, self._loads = self._loads, []
        if not loads:
            return
        self._add_groups()
        # (2, dp, rounds)
        vit = np.concatenate([each.vit_tokens for each in loads], axis=1)
        tokens = np.stack([vit, np.concatenate([each.llm_tokens for each in loads], axis=1)])
        complete = np.concatenate([each.complete for each in loads])
        # (2, rounds), both
        most = tokens.max(axis=1)
        ratios = (most[:, None] - tokens).mean(axis=1) / np.maximum(most, 1)
        self._ratio_sums += ratios[:, complete].sum(axis=1)
        self._num_rounds += int(complete.sum())
        if self._first_ratios is None:
            self._first_ratios = ratios[:, 0]

    def _add_groups(self) -> None:
        """What steps' groups weigh and whether they have met, from one epoch after the other."""
        totals, self._totals = self._totals, []
        for epoch, each in groupby(totals, key=lambda total: total.groups.epoch):
            own = list(each)
            sizes = np.array([len(total.groups.builds) for total in own])
            # each (groups,)
            builds, numbers, weights = (
                np.concatenate(columns)
                for columns in zip(*(total.groups[1:] for total in own), strict=True)
            )
            divisors = np.repeat([total.loss_normalizer for total in own], sizes)
            for row, values in enumerate((weights, weights / divisors)):
                self._weights[row] += np.bincount(builds, values, self._weights.shape[1])
            self._pairs.add(epoch, builds, numbers, sizes)
