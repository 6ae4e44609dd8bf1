"""Figures of a loader so far: `LoaderStats`, and the `Meter` that counts them."""

import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from isobatch.balance.metrics import num_pairs
from isobatch.common.types import IntArray
from isobatch.loaders.steps.step_plan import StepFigures, StepPlan

_NOT_SUMMED = (
    *("cache_hits", "unchosen_samples", "rejected_samples", "fill"),
    *("dist_ratio_vit", "dist_ratio_llm", "dist_ratio_attention"),
    *("label_shares", "gradient_shares", "repeated_pairs"),
)
LOADS = "vit", "llm", "attention"
"""What ranks wait for one another with; attention where somebody asks for it."""
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
    tokens: int
    """LLM tokens of all ranks' micro-batches, padding included."""
    fill: float
    """Share of the LLM tokens that these may have."""
    rejected_samples: int
    """Samples that packing could not use; without a build those found so far."""
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
    dist_ratio_attention: float | None
    """Of the LLM's attention; None where nobody has asked for it (`log_to`)."""
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

    def __str__(self) -> str:
        """A small table: a figure a line."""
        return "\n".join(f"{name:<20} {_text(name, of)}" for name, of in asdict(self).items())


def _text(name: str, value: Any) -> str:
    """A figure for people, right-aligned; a tuple has one per build."""
    if isinstance(value, tuple):
        return " ".join(_text(name, part) for part in value)
    if value is None:
        return f"{'-':>16}"
    if name.endswith("_s"):
        return f"{value:>14,.2f} s"
    is_share = isinstance(value, float) and name != "repeated_pairs"
    return f"{value:>16.2%}" if is_share else f"{value:>16,{'.6g' * isinstance(value, float)}}"


class MeterSums(NamedTuple):
    """What a `Meter` has counted, to be compared with what it has later."""

    steps: int
    tokens: int
    room: int
    waiting_s: float
    skipped_samples: int
    rounds: NDArray[np.float64]
    """Sums of ratios and number of rounds, of all rounds and of complete ones, by `LOADS`."""


def mean_ratios(rounds: NDArray[np.float64]) -> dict[str, float]:
    """Dist ratios by load: of complete rounds, or of all if none is; `MeterSums.rounds`."""
    sums, counts = np.where(rounds[1, 1] > 0, rounds[1], rounds[0])
    means = zip(LOADS, sums.tolist(), counts.tolist(), strict=True)
    return {name: total / count for name, total, count in means if count}


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
        self._room = 0
        self._rounds = np.zeros((2, 2, len(LOADS)))
        # of the first round, until there is a complete one
        self._first_ratios: dict[str, float] = {}
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

    def sums(self) -> MeterSums:
        """What has been counted so far."""
        with self._lock:
            self._sum_up()
            names = "steps", "tokens", "waiting_s", "skipped_samples"
            sums = {name: self._sums[name] for name in names}
            return MeterSums(**sums, room=self._room, rounds=self._rounds.copy())

    def stats(self, cache_hits: int, rejected_samples: int = 0) -> LoaderStats:
        """The figures so far."""
        with self._lock:
            self._sum_up()
            is_complete = bool(self._rounds[1, 1].any())
            ratios = mean_ratios(self._rounds) if is_complete else self._first_ratios
            shares = self._weights / np.maximum(
                self._weights.sum(axis=1, keepdims=True), np.finfo(np.float64).tiny
            )
            return LoaderStats(
                **self._sums,
                unchosen_samples=self._unchosen_samples,
                cache_hits=cache_hits,
                rejected_samples=rejected_samples,
                fill=self._sums["tokens"] / max(1, self._room),
                dist_ratio_vit=ratios.get("vit", 0.0),
                dist_ratio_llm=ratios.get("llm", 0.0),
                dist_ratio_attention=ratios.get("attention"),
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
            self._room += int(part.room.sum())
            self._sums["tokens"] += int(part.llm_tokens.sum())
        attention = [part.llm_squares for part in parts if part.llm_squares is not None]
        columns = [[part.vit_tokens for part in parts], [part.llm_tokens for part in parts]]
        if len(attention) == len(parts):
            columns.append(attention)
        # (loads, dp, rounds)
        steps = [[step for part in column for step in part] for column in columns]
        loads = np.stack([np.concatenate(column, axis=-1) for column in steps])
        complete = np.concatenate([part.complete.ravel() for part in parts])
        # (loads, rounds), both
        largest = loads.max(axis=1)
        ratios = (largest[:, None] - loads).mean(axis=1) / np.maximum(largest, 1)
        for row, chosen in enumerate((ratios, ratios[:, complete])):
            self._rounds[row, :, : len(loads)] += np.stack([chosen, np.ones_like(chosen)]).sum(-1)
        rounds = [part.complete.shape[1] for part in parts for _ in part.complete]
        starts = np.cumsum([0, *rounds[:-1]])
        self._step_ratios.append(
            (np.add.reduceat(ratios[:2], starts, axis=1) / rounds).astype(np.float32)
        )
        if not self._first_ratios:
            self._first_ratios = dict(zip(LOADS, ratios[:, 0].tolist(), strict=False))


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
