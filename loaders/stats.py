"""Figures of a loader so far: `LoaderStats`, and the `Meter` that counts them."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import groupby
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from isobatch.balance.metrics import num_pairs
from isobatch.common.types import IntArray
from isobatch.loaders.steps.step_plan import StepFigures, StepPlan

_NOT_SUMMED = (
    *("cache_hits", "unchosen_samples", "dist_ratio_vit", "dist_ratio_llm"),
    *("label_shares", "gradient_shares", "repeated_pairs"),
)
_STEPS, _GROUPS = 256, 1 << 16
"""Steps whose figures are summed at a time, one by one takes ten times as long; fewer of more than
so many groups together.
"""

REMEMBERED = 1 << 16
"""Groups of an epoch that are looked for in the next."""
_BUILD = 1 << 40
"""Factor that tells groups of several builds apart."""

_Row = TypeVar("_Row")


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
    skipped_samples: int
    """Samples of this rank whose labels `on_error="skip"` has removed, once per epoch each."""
    cache_hits: int
    """Reads from the on-disk cache of remote builds."""
    dist_ratio_vit: float
    """Share of ranks' time that waits for the slowest vision encoder (`metrics.dist_ratio`)."""
    dist_ratio_llm: float
    label_shares: tuple[float, ...]
    """Share of each of the loader's builds in the weights of all labels so far, on all ranks."""
    gradient_shares: tuple[float, ...]
    """Shares in the losses as they are divided: another share shows that `loss_normalizer="step"`
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
        # what is not in the sums yet: parts in any thread, and steps
        self._parts: list[tuple[float, float, int]] = []
        self._steps: list[tuple[StepFigures, int, int, float, float | None]] = []
        # over complete rounds, or the first round until there is one; of ViT and LLM
        self._num_rounds = 0
        self._ratio_sums = np.zeros(2)
        self._first_ratios: NDArray[np.float64] | None = None
        # of each step, shape (2, steps) of some steps each
        self._step_ratios = [np.zeros((2, 0), np.float32)]
        # (2, builds): sums of labels' weights, and of those over the steps' divisors
        self._weights = np.zeros((2, num_builds))
        self._pairs = PairCounter()

    def add_part(self, reading_s: float, decoding_s: float, read_bytes: int) -> None:
        """Count a part of a step, in any thread."""
        self._parts.append((reading_s, decoding_s, read_bytes))

    def add_skipped(self, number: int) -> None:
        """Count samples whose files cannot be used, in any thread."""
        with self._lock:
            self._sums["skipped_samples"] += number

    def add_step(self, plan: StepPlan, num_samples: int, waiting_s: float) -> None:
        """Count a step that the consumer waited for, with `num_samples` of this rank."""
        figures, steps = plan.figures, self._steps
        steps.append((figures, plan.place, num_samples, waiting_s, plan.planning_s))
        _, dp, rounds = figures.vit_tokens.shape
        if len(steps) == _STEPS or len(steps) * dp * rounds > _GROUPS:
            with self._lock:
                self._sum_up()

    def stats(self, cache_hits: int) -> LoaderStats:
        """The figures so far."""
        with self._lock:
            self._sum_up()
            ratios = np.zeros(2) if self._first_ratios is None else self._first_ratios
            if self._num_rounds:
                ratios = self._ratio_sums / self._num_rounds
            vit, llm = ratios.tolist()
            shares = self._weights / np.maximum(
                self._weights.sum(axis=1, keepdims=True), np.finfo(np.float64).tiny
            )
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

    def step_ratios(self) -> NDArray[np.float64]:
        """Dist ratios of ViT and LLM of each step so far, shape (2, steps)."""
        with self._lock:
            self._sum_up()
            self._step_ratios = [np.concatenate(self._step_ratios, axis=1)]
            return self._step_ratios[0].astype(np.float64)

    def _sum_up(self) -> None:
        """Add what is not in the sums yet."""
        parts, steps = _taken_out(self._parts), _taken_out(self._steps)
        planned = [planning_s for *_, planning_s in steps if planning_s is not None]
        sums = {
            "steps": len(steps),
            "samples": sum(num_samples for _, _, num_samples, _, _ in steps),
            "waiting_s": sum(waiting_s for *_, waiting_s, _ in steps),
            "reading_s": sum(reading_s for reading_s, _, _ in parts),
            "decoding_s": sum(decoding_s for _, decoding_s, _ in parts),
            "read_bytes": sum(num_bytes for *_, num_bytes in parts),
            "planned_steps": len(planned),
            "planning_s": sum(planned),
        }
        self._sums = {name: value + sums.get(name, 0) for name, value in self._sums.items()}
        # steps that were planned together follow one another
        runs = [list(run) for _, run in groupby(steps, key=lambda step: id(step[0]))]
        self._add_figures([run[0][0].part(run[0][1], run[-1][1]) for run in runs])

    def _add_figures(self, parts: Sequence[StepFigures]) -> None:
        if not parts:
            return
        # what groups weigh and whether they have met, from one epoch after the other
        for part in parts:
            sizes = np.diff(part.ends, prepend=0)
            divisors = np.repeat(part.loss_normalizers, sizes)
            for row, values in enumerate((part.weights, part.weights / divisors)):
                self._weights[row] += np.bincount(part.builds, values, self._weights.shape[1])
            self._pairs.add(part.epoch, part.builds, part.numbers, sizes)
        # (2, dp, rounds)
        tokens = np.concatenate(
            [
                np.concatenate(np.stack([part.vit_tokens, part.llm_tokens], axis=1), axis=-1)
                for part in parts
            ],
            axis=-1,
        )
        complete = np.concatenate([part.complete.ravel() for part in parts])
        # (2, rounds), both
        largest = tokens.max(axis=1)
        ratios = (largest[:, None] - tokens).mean(axis=1) / np.maximum(largest, 1)
        self._ratio_sums += ratios[:, complete].sum(axis=1)
        self._num_rounds += int(complete.sum())
        rounds = [part.complete.shape[1] for part in parts for _ in part.complete]
        starts = np.cumsum([0, *rounds[:-1]])
        self._step_ratios.append(
            (np.add.reduceat(ratios, starts, axis=1) / rounds).astype(np.float32)
        )
        if self._first_ratios is None:
            self._first_ratios = ratios[:, 0]


class PairCounter:
    """Counts how often groups of a step shared one in the epoch before too.

    Remembers which step the first groups of an epoch came in, a megabyte at most, and looks for
    pairs of them in the next epoch's steps: an estimate of `metrics.repeated_pairs`.
    """

    def __init__(self) -> None:
        self._epoch = -1
        self._num_steps = 0
        self._num_groups = 0
        # keys and steps of the epoch under way, and of the one before, sorted by key
        self._parts: list[IntArray] = []
        self._keys, self._steps = np.empty((2, 0), np.int64)
        self._chance = self._again = self._by_chance = 0.0

    def add(self, epoch: int, builds: IntArray, numbers: IntArray, sizes: IntArray) -> None:
        """Count steps of `sizes` groups, which have a number in their build."""
        if epoch != self._epoch:
            self._begin(epoch)
        keys = builds * _BUILD + numbers
        steps = self._num_steps + np.repeat(np.arange(len(sizes)), sizes)
        self._num_steps += len(sizes)
        if self._num_groups < REMEMBERED:
            self._parts.append(np.stack([keys, steps]))
            self._num_groups += len(keys)
        if len(self._keys):
            places = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
            is_known = self._keys[places] == keys
            now, before = steps[is_known], self._steps[places[is_known]]
            self._again += num_pairs(now * (len(self._steps) + 1) + before)
            self._by_chance += num_pairs(now) * self._chance

    @property
    def repeated_pairs(self) -> float | None:
        """Pairs that met again, relative to chance; None before two groups could have."""
        return self._again / self._by_chance if self._by_chance else None

    def _begin(self, epoch: int) -> None:
        """The epoch so far becomes the one before, if it is that."""
        parts = self._parts if epoch == self._epoch + 1 else []
        # (2, groups)
        keys, steps = np.concatenate([np.empty((2, 0), np.int64), *parts], axis=1)
        order = np.argsort(keys)
        self._keys, self._steps = keys[order], steps[order]
        total = len(keys) * (len(keys) - 1) // 2
        self._chance = num_pairs(steps) / total if total else 0.0
        self._epoch = epoch
        self._parts = []
        self._num_steps = 0
        self._num_groups = 0


def _taken_out(rows: list[_Row]) -> list[_Row]:
    """What is in a list, which it loses, while other threads may append to it."""
    taken = rows[:]
    del rows[: len(taken)]
    return taken
