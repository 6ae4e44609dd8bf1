"""Which layers are recomputed where memory can only be measured: the four steps of OmniBal 4.3.

`engine.planning.recompute` knows every layer's bytes; a running model tells what each stage has
left, or that it ran out. So: (1) run with everything recomputed; (2) run with some layers not
recomputed, one kind of layer after the other; (3) find by least squares what a layer of each kind
holds per micro-batch under way, the paper's M_v and M_t, whose names its text swaps; (4) run what
should be best by that; recompute more in the stages that ran out; and, beyond the paper, less where
runs show that more may fit. Some 6 runs more than kinds of layers.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from balance.errors import ConfigError, IsobatchError
from balance.types import IntArray
from engine.cost_model.costs import Costs
from engine.planning.recompute import InfeasiblePlan
from engine.simulator.schedule import PassKind, Schedule

FloatArray = NDArray[np.float64]

MOST_TESTS = 12
"""Runs of step 4 at most."""
PROBED = 2
"""Layers of a kind and stage that step 2 does not recompute."""


class OutOfMemory(IsobatchError):
    """A run ended because stages ran out of memory."""

    def __init__(self, stages: Sequence[int], passes: Sequence[str] = ()) -> None:
        """`passes`: which, of which samples, where a step of training says so."""
        where = f": {'; '.join(passes)}; the gradients of this step are void" if passes else ""
        super().__init__(f"out of memory in stages {list(stages)}{where}")
        self.stages = tuple(stages)


class Observe(Protocol):
    """A few steps of training."""

    def __call__(self, recompute: NDArray[np.bool_]) -> IntArray:
        """Bytes that each stage had left at its peak, (stages,), where layer l is recomputed if
        `recompute[l]`.

        Raises OutOfMemory if any had too little.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A run."""

    recompute: NDArray[np.bool_]
    """(layers,)."""
    left_bytes: IntArray | None
    """(stages,); None if it ran out of memory."""
    ran_out: tuple[int, ...] = ()
    """Stages that ran out of memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedRecompute:
    """The choice, and how it came about."""

    recompute: NDArray[np.bool_]
    """(layers,); it has been run."""
    left_bytes: IntArray
    """(stages,): in that run."""
    held_bytes: dict[str, float]
    """By kind: what one layer holds for one micro-batch under way, and recomputation frees."""
    trials: tuple[Trial, ...]


def adapt_recompute(
    costs: Costs, borders: IntArray, schedule: Schedule, observe: Observe, *, reserve_bytes: int = 0
) -> AdaptedRecompute:
    """The least recomputation that runs and leaves `reserve_bytes` in every stage, found by runs.

    Of `costs` only kinds and times of recomputation count. InfeasiblePlan if even everything
    recomputed runs out of memory; ConfigError for several stages per rank, which share a memory.
    """
    if schedule.num_stages != schedule.num_ranks:
        raise ConfigError(
            f"{schedule.name} runs {schedule.num_stages} stages on {schedule.num_ranks} ranks, but recomputation is "
            "adapted for one stage per rank; use schedule '1f1b' or 'zero_bubble', or engine.planning.recompute"
        )
    steps = _Steps(costs, borders, schedule, observe, reserve_bytes)
    steps.recompute_all()
    steps.recompute_less()
    for _ in range(MOST_TESTS):
        choice = steps.estimate()
        if steps.was_tried(choice):
            choice = steps.improve()
        if steps.was_tried(choice):
            break
        steps.test(choice)
    best = min((trial for trial in steps.trials if steps.is_enough(trial)), key=steps.extra_ns)
    assert best.left_bytes is not None
    return AdaptedRecompute(
        recompute=best.recompute,
        left_bytes=best.left_bytes,
        held_bytes=dict(zip(steps.kinds, steps.held.tolist(), strict=True)),
        trials=tuple(steps.trials),
    )


def under_way(schedule: Schedule) -> IntArray:
    """Micro-batches whose activations a stage holds at once, at most, (stages,).

    >>> from engine.simulator.schedule import one_f_one_b
    >>> under_way(one_f_one_b(4, 8)).tolist()
    [4, 3, 2, 1]
    """
    goes_back = (schedule.kinds == PassKind.BACKWARD) | (schedule.kinds == PassKind.INPUT_GRAD)
    change = (schedule.kinds == PassKind.FORWARD).astype(np.int64) - goes_back
    return np.array(
        [np.cumsum(change[schedule.stages == stage]).max() for stage in range(schedule.num_stages)]
    )


class _Steps:
    """What is known after each run. Layers are counted by stage and kind: (stages, kinds)."""

    def __init__(
        self,
        costs: Costs,
        borders: IntArray,
        schedule: Schedule,
        observe: Observe,
        reserve_bytes: int,
    ) -> None:
        self.observe, self.reserve_bytes = observe, reserve_bytes
        self.kinds = tuple(dict.fromkeys(costs.kinds))
        self.kind_of = np.array([self.kinds.index(kind) for kind in costs.kinds])
        self.stage_of = np.repeat(np.arange(len(borders) - 1), np.diff(borders))
        self.layer_ns = costs.recompute_ns.sum(axis=1)
        self.each_ns = np.array(
            [self.layer_ns[self.kind_of == kind].max() for kind in range(len(self.kinds))]
        )
        self.sizes = self.count(np.ones(costs.num_layers, np.bool_))
        self.times = under_way(schedule)
        self.held: FloatArray = np.zeros(len(self.kinds))
        self.is_known = np.zeros(len(self.kinds), np.bool_)
        """Whether a run without recomputing layers of the kind came to its end."""
        self.too_much: list[list[IntArray]] = [[] for _ in self.sizes]
        """By stage, how many of each kind were not recomputed when it ran out, (kinds,)."""
        self.trials: list[Trial] = []

    def count(self, recompute: NDArray[np.bool_]) -> IntArray:
        counts = np.zeros((int(self.stage_of[-1]) + 1, len(self.kinds)), np.int64)
        np.add.at(counts, (self.stage_of, self.kind_of), recompute)
        return counts

    def extra_ns(self, trial: Trial) -> int:
        return int(self.layer_ns[trial.recompute].sum())

    def is_enough(self, trial: Trial) -> bool:
        return trial.left_bytes is not None and bool((trial.left_bytes >= self.reserve_bytes).all())

    def was_tried(self, recompute: NDArray[np.bool_]) -> bool:
        return any(np.array_equal(trial.recompute, recompute) for trial in self.trials)

    def try_out(self, recompute: NDArray[np.bool_]) -> tuple[int, ...]:
        """Run; -> stages that ran out of memory."""
        try:
            left = np.asarray(self.observe(recompute))
        except OutOfMemory as error:
            self.trials.append(Trial(recompute=recompute, left_bytes=None, ran_out=error.stages))
            return error.stages
        self.trials.append(Trial(recompute=recompute, left_bytes=left))
        return ()

    def recompute_all(self) -> None:
        """Step 1."""
        failed = self.try_out(np.ones(len(self.kind_of), np.bool_))
        left = self.trials[0].left_bytes
        if left is None or not self.is_enough(self.trials[0]):
            stages = (
                list(failed) if left is None else np.flatnonzero(left < self.reserve_bytes).tolist()
            )
            raise InfeasiblePlan(
                f"stages {stages} run out of memory with every layer recomputed and {self.reserve_bytes} bytes in "
                "reserve: use smaller micro-batches, or more stages or tensor-parallel ranks"
            )

    def recompute_less(self) -> None:
        """Steps 2 and 3: without a few layers of one kind at a time, in all stages that stand
        it.
        """
        for kind in range(len(self.kinds)):
            off = np.zeros_like(self.sizes)
            off[:, kind] = np.minimum(self.sizes[:, kind], PROBED)
            while off.any():
                failed = self.try_out(self.layers(off))
                if not failed:
                    self.is_known[kind] = True
                    break
                off[list(failed), kind] //= 2
        self.infer()

    def infer(self) -> None:
        """Step 3: what a layer holds, by least squares over all runs and stages."""
        if not self.is_known.any():
            return
        ran = [
            (trial.recompute, trial.left_bytes)
            for trial in self.trials
            if trial.left_bytes is not None
        ]
        off = np.stack(
            [self.sizes - self.count(recompute) for recompute, _ in ran]
        )  # (runs, stages, kinds)
        less = np.stack([ran[0][1] - left for _, left in ran])
        known = np.flatnonzero(self.is_known)
        holds = (off * self.times[:, np.newaxis])[:, :, known].reshape(-1, len(known))
        self.held[known] = np.maximum(np.linalg.lstsq(holds, less.ravel(), rcond=None)[0], 0.0)

    def estimate(self) -> NDArray[np.bool_]:
        """Step 4: what takes least time of what should fit into each stage."""
        off = np.zeros_like(self.sizes)
        for stage, size in enumerate(self.sizes):
            able = np.where(self.is_known, size, 0)
            off[stage] = _most_saved(
                able, self.held * self.times[stage], self.each_ns, self.room(stage)
            )
        return self.layers(off)

    def improve(self) -> NDArray[np.bool_]:
        """Beyond the paper, where an estimate has been tried: in each stage what takes less time
        than all that fitted.

        Of that, what should hold least, and nothing that ran out of memory with fewer layers held.
        Stages do not wait for each other: one goes on from what fitted into it in runs in which
        others ran out.
        """
        return self.layers(np.stack([self.next_of(stage) for stage in range(len(self.sizes))]))

    def next_of(self, stage: int) -> IntArray:
        """How many layers of each kind a stage should not recompute next, (kinds,): the best so far
        if none is left.
        """
        fitted, failed = self.runs_of(stage)
        best = max(fitted, key=lambda off: float(off @ self.each_ns))
        able = np.where(self.is_known, self.sizes[stage], 0)
        options = np.array(list(itertools.product(*(range(size + 1) for size in able))))
        options = options[options @ self.each_ns > best @ self.each_ns]
        for off in failed:
            options = options[(options < off).any(axis=1)]
        return options[np.argmin(options @ self.held)] if len(options) else best

    def runs_of(self, stage: int) -> tuple[list[IntArray], list[IntArray]]:
        """Layers of each kind that a stage did not recompute, (kinds,), in runs that it stood, and
        in others.
        """
        fitted, failed = [], []
        for trial in self.trials:
            off = (self.sizes - self.count(trial.recompute))[stage]
            if trial.left_bytes is None:
                # another stage ran out: what this one had left is not known
                is_good = stage not in trial.ran_out and not self.reserve_bytes
            else:
                is_good = bool(trial.left_bytes[stage] >= self.reserve_bytes)
            if is_good:
                fitted.append(off)
            elif trial.left_bytes is not None or stage in trial.ran_out:
                failed.append(off)
        return fitted, failed

    def room(self, stage: int) -> float:
        """Bytes that the layers of a stage may hold that are not recomputed.

        By the run in which they held most, because the nearer it is to the answer the less an error
        of the estimate counts. Less than in any run in which the stage ran out: a layer less after
        the first, two after the second and so on, but no farther than half the way back to what
        ran.
        """
        held = self.held * self.times[stage]
        ran = [
            (
                float((self.sizes - self.count(trial.recompute))[stage] @ held),
                int(trial.left_bytes[stage]),
            )
            for trial in self.trials
            if trial.left_bytes is not None
        ]
        used, left = max(ran)
        room = used + left - self.reserve_bytes
        if not self.too_much[stage]:
            return room
        least = min(float(off @ held) for off in self.too_much[stage])
        good = max((used for used, _ in ran if used < least), default=0.0)
        layer = held[(self.sizes[stage] > 0) & (held > 0)].min(initial=least)
        return min(room, max(least - len(self.too_much[stage]) * float(layer), (good + least) / 2))

    def test(self, recompute: NDArray[np.bool_]) -> None:
        """Step 4: run a choice, and learn from it."""
        off = self.sizes - self.count(recompute)
        for stage in self.try_out(recompute):
            self.too_much[stage].append(off[stage])
        self.infer()

    def layers(self, off: IntArray) -> NDArray[np.bool_]:
        """Which layers are recomputed if so many of each stage and kind are not: the last ones are
        not.
        """
        recompute = np.ones(len(self.kind_of), np.bool_)
        for stage, kind in np.argwhere(off):
            alike = np.flatnonzero((self.stage_of == stage) & (self.kind_of == kind))
            recompute[alike[len(alike) - off[stage, kind] :]] = False
        return recompute


def _most_saved(sizes: IntArray, weights: FloatArray, each_ns: IntArray, room: float) -> IntArray:
    """How many layers of each kind not to recompute, (kinds,): most time saved of what weighs no
    more than `room`.
    """
    order = np.argsort(sizes, kind="stable")
    last, others = order[-1], order[:-1]
    best, most = np.zeros_like(sizes), (-1.0, 0.0)
    for counts in itertools.product(*(range(size + 1) for size in sizes[others])):
        off = np.zeros_like(sizes)
        off[others] = counts
        rest = room - off @ weights
        if rest >= 0:  # as many of the largest group as still go in
            off[last] = (
                sizes[last] if weights[last] <= 0 else min(sizes[last], int(rest / weights[last]))
            )
            saved = float(off @ each_ns), -float(off @ weights)
            if saved > most:
                most, best = saved, off
    return best
