"""Adaptive recomputation from measured memory (OmniBal 4.3).

A running model only tells how much each stage has left, or that it ran out. So: (1) run with
everything recomputed; (2) run with some layers of one kind at a time not recomputed; (3) fit by
least squares the bytes of a layer of each kind per micro-batch in flight (the paper's M_v and M_t,
whose names its text swaps); (4) run the best choice by that estimate, recompute more in stages that
ran out and, beyond the paper, less where it may fit. About 6 runs more than kinds of layers.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from isobatch.common.errors import ConfigError, IsobatchError
from isobatch.common.types import BoolArray, FloatArray, IntArray
from isobatch.engine.cost_model.costs import Costs
from isobatch.engine.planning.recompute import InfeasiblePlan
from isobatch.engine.simulator.schedule import PassKind, Schedule

MOST_TESTS = 12
"""Runs of step 4 at most."""
PROBED = 2
"""Layers per kind and stage that step 2 does not recompute."""


class OutOfMemory(IsobatchError):
    """A run ended because stages ran out of memory."""

    def __init__(self, stages: Sequence[int], passes: Sequence[str] = ()) -> None:
        """`passes`: the passes that failed and their samples, if a training step reports them."""
        where = f": {'; '.join(passes)}; the gradients of this step are void" if passes else ""
        super().__init__(f"out of memory in stages {list(stages)}{where}")
        self.stages = tuple(stages)


Observe = Callable[[BoolArray], IntArray]
"""Steps of training with these layers recomputed -> bytes left at each stage's peak, (stages,)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A run with some layers recomputed, (layers,)."""

    recompute: BoolArray
    left_bytes: IntArray | None
    """(stages,); None if it ran out of memory."""
    ran_out: tuple[int, ...] = ()
    """Stages that did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedRecompute:
    """The choice, (layers,), the bytes left in its run, (stages,), and the runs that led to it."""

    recompute: BoolArray
    left_bytes: IntArray
    held_bytes: dict[str, float]
    """Bytes of a layer of each kind per micro-batch in flight, which recomputation frees."""
    trials: tuple[Trial, ...]


def adapt_recompute(
    costs: Costs, borders: IntArray, schedule: Schedule, observe: Observe, *, reserve_bytes: int = 0
) -> AdaptedRecompute:
    """The least recomputation that runs and leaves `reserve_bytes` in every stage, found by runs.

    Only kinds and recomputation times of `costs` are used. InfeasiblePlan if even everything
    recomputed runs out of memory; ConfigError for several stages per rank, which share a memory.
    """
    if schedule.num_stages != schedule.num_ranks:
        raise ConfigError(
            f"{schedule.name} runs {schedule.num_stages} stages on {schedule.num_ranks} ranks, but "
            "recomputation is adapted for one stage per rank; use schedule '1f1b' or "
            "'zero_bubble', or isobatch.engine.planning.recompute"
        )
    search = _Adaptation(costs, borders, schedule, observe, reserve_bytes)
    search.recompute_all()
    search.recompute_less()
    for _ in range(MOST_TESTS):
        choice = search.estimate()
        if search.was_tried(choice):
            choice = search.improve()
        if search.was_tried(choice):
            break
        search.test(choice)
    best = min((trial for trial in search.trials if search.is_enough(trial)), key=search.extra_ns)
    assert best.left_bytes is not None
    return AdaptedRecompute(
        recompute=best.recompute,
        left_bytes=best.left_bytes,
        held_bytes=dict(zip(search.kinds, search.held.tolist(), strict=True)),
        trials=tuple(search.trials),
    )


def in_flight(schedule: Schedule) -> IntArray:
    """Most micro-batches whose activations a stage holds at once, (stages,).

    >>> from isobatch.engine.simulator.schedule import make_schedule
    >>> in_flight(make_schedule("1f1b", 4, 8)).tolist()
    [4, 3, 2, 1]
    """
    goes_back = (schedule.kinds == PassKind.BACKWARD) | (schedule.kinds == PassKind.INPUT_GRAD)
    change = (schedule.kinds == PassKind.FORWARD).astype(np.int64) - goes_back
    stages = range(schedule.num_stages)
    return np.array([np.cumsum(change[schedule.stages == stage]).max() for stage in stages])


class _Adaptation:
    """Knowledge from the runs so far. Layers are counted by stage and kind: (stages, kinds)."""

    def __init__(
        self, costs: Costs, borders: IntArray, schedule: Schedule, run: Observe, reserve_bytes: int
    ) -> None:
        self.run, self.reserve_bytes = run, reserve_bytes
        self.kinds = tuple(dict.fromkeys(costs.kinds))
        self.kind_of = np.array([self.kinds.index(kind) for kind in costs.kinds])
        self.stage_of = np.repeat(np.arange(len(borders) - 1), np.diff(borders))
        self.layer_ns = costs.recompute_ns.sum(axis=1)
        numbers = range(len(self.kinds))
        self.each_ns = np.array([self.layer_ns[self.kind_of == kind].max() for kind in numbers])
        self.sizes = self.count(np.ones(costs.num_layers, np.bool_))
        self.in_flight = in_flight(schedule)
        self.held: FloatArray = np.zeros(len(self.kinds))
        self.is_known = np.zeros(len(self.kinds), np.bool_)
        """Whether a run that did not recompute layers of the kind finished."""
        self.too_much: list[list[IntArray]] = [[] for _ in self.sizes]
        """Layers of each kind, (kinds,), not recomputed in runs in which the stage ran out."""
        self.trials: list[Trial] = []

    def count(self, layers: BoolArray) -> IntArray:
        counts = np.zeros((int(self.stage_of[-1]) + 1, len(self.kinds)), np.int64)
        np.add.at(counts, (self.stage_of, self.kind_of), layers)
        return counts

    def extra_ns(self, trial: Trial) -> int:
        return int(self.layer_ns[trial.recompute].sum())

    def is_enough(self, trial: Trial) -> bool:
        return trial.left_bytes is not None and bool((trial.left_bytes >= self.reserve_bytes).all())

    def was_tried(self, recompute: BoolArray) -> bool:
        return any(np.array_equal(trial.recompute, recompute) for trial in self.trials)

    def try_out(self, recompute: BoolArray) -> tuple[int, ...]:
        """Run; -> stages that ran out of memory."""
        try:
            left_bytes = np.asarray(self.run(recompute))
        except OutOfMemory as error:
            self.trials.append(Trial(recompute=recompute, left_bytes=None, ran_out=error.stages))
            return error.stages
        self.trials.append(Trial(recompute=recompute, left_bytes=left_bytes))
        return ()

    def recompute_all(self) -> None:
        """Step 1."""
        failed = self.try_out(np.ones(len(self.kind_of), np.bool_))
        left_bytes = self.trials[0].left_bytes
        if left_bytes is None or not self.is_enough(self.trials[0]):
            short = (
                failed
                if left_bytes is None
                else np.flatnonzero(left_bytes < self.reserve_bytes).tolist()
            )
            raise InfeasiblePlan(
                f"stages {list(short)} run out of memory with every layer recomputed and "
                f"{self.reserve_bytes} bytes in reserve: use smaller micro-batches, or more stages "
                "or tensor-parallel ranks"
            )

    def recompute_less(self) -> None:
        """Steps 2 and 3: a few layers of one kind at a time not recomputed, where they fit."""
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
        """Step 3: bytes of a layer, by least squares over all runs and stages."""
        if not self.is_known.any():
            return
        # (runs, stages, kinds), (runs, stages)
        off, left_bytes = (np.stack(arrays) for arrays in zip(*self.finished(), strict=True))
        less = left_bytes[0] - left_bytes
        known = np.flatnonzero(self.is_known)
        holds = (off * self.in_flight[:, np.newaxis])[:, :, known].reshape(-1, len(known))
        self.held[known] = np.maximum(np.linalg.lstsq(holds, less.ravel(), rcond=None)[0], 0.0)

    def finished(self) -> list[tuple[IntArray, IntArray]]:
        """(layers not recomputed, left_bytes) of the runs that did not run out of memory."""
        pairs = ((self.count(~trial.recompute), trial.left_bytes) for trial in self.trials)
        return [(off, left_bytes) for off, left_bytes in pairs if left_bytes is not None]

    def estimate(self) -> BoolArray:
        """Step 4: the choice of least time that should fit into each stage."""
        off = np.zeros_like(self.sizes)
        for stage, size in enumerate(self.sizes):
            able = np.where(self.is_known, size, 0)
            held = self.held * self.in_flight[stage]
            off[stage] = _most_saved(able, held, self.each_ns, self.free_bytes(stage))
        return self.layers(off)

    def improve(self) -> BoolArray:
        """Beyond the paper, after an estimate was tried: a faster choice than all that fitted.

        For each stage the one that should hold least, unless one with fewer layers held ran out of
        memory. Stages are independent: a stage uses runs in which only others ran out.
        """
        return self.layers(np.stack([self.next_of(stage) for stage in range(len(self.sizes))]))

    def next_of(self, stage: int) -> IntArray:
        """Layers of each kind, (kinds,), that a stage should not recompute next; else the best."""
        fitted, failed = self.runs_of(stage)
        best = max(fitted, key=lambda off: float(off @ self.each_ns))
        able = np.where(self.is_known, self.sizes[stage], 0)
        options = np.array(list(itertools.product(*(range(size + 1) for size in able))))
        options = options[options @ self.each_ns > best @ self.each_ns]
        for off in failed:
            options = options[(options < off).any(axis=1)]
        return options[np.argmin(options @ self.held)] if len(options) else best

    def runs_of(self, stage: int) -> tuple[list[IntArray], list[IntArray]]:
        """Layers of each kind, (kinds,), not recomputed in runs that fit a stage, and in others."""
        fitted, failed = [], []
        for trial in self.trials:
            off = self.count(~trial.recompute)[stage]
            if trial.left_bytes is None:
                # another stage ran out: this one's free memory is unknown
                is_good = stage not in trial.ran_out and not self.reserve_bytes
            else:
                is_good = bool(trial.left_bytes[stage] >= self.reserve_bytes)
            if is_good:
                fitted.append(off)
            elif trial.left_bytes is not None or stage in trial.ran_out:
                failed.append(off)
        return fitted, failed

    def free_bytes(self, stage: int) -> float:
        """Bytes that the layers of a stage may hold that are not recomputed.

        By the run in which they held most, as nearer estimates err less. Less than in any run in
        which the stage ran out: by a layer after the first, by two after the second and so on, but
        at most half the way back to what fitted.
        """
        held = self.held * self.in_flight[stage]
        ran = [
            (float(off[stage] @ held), int(left_bytes[stage]))
            for off, left_bytes in self.finished()
        ]
        used, unused = max(ran)
        free = used + unused - self.reserve_bytes
        if not self.too_much[stage]:
            return free
        failed = min(float(off @ held) for off in self.too_much[stage])
        good = max((used for used, _ in ran if used < failed), default=0.0)
        layer = held[(self.sizes[stage] > 0) & (held > 0)].min(initial=failed)
        return min(
            free, max(failed - len(self.too_much[stage]) * float(layer), (good + failed) / 2)
        )

    def test(self, recompute: BoolArray) -> None:
        """Step 4: run a choice, and learn from it."""
        for stage in self.try_out(recompute):
            self.too_much[stage].append(self.count(~recompute)[stage])
        self.infer()

    def layers(self, off: IntArray) -> BoolArray:
        """The choice that does not recompute the last `off` layers of each stage and kind."""
        recompute = np.ones(len(self.kind_of), np.bool_)
        for stage, kind in np.argwhere(off):
            equal = np.flatnonzero((self.stage_of == stage) & (self.kind_of == kind))
            recompute[equal[len(equal) - off[stage, kind] :]] = False
        return recompute


def _most_saved(sizes: IntArray, held: FloatArray, each_ns: IntArray, free: float) -> IntArray:
    """Layers of each kind not to recompute, (kinds,): most time saved that holds at most `free`."""
    order = np.argsort(sizes, kind="stable")
    last, others = order[-1], order[:-1]
    best, best_saved = np.zeros_like(sizes), (-1.0, 0.0)
    for counts in itertools.product(*(range(size + 1) for size in sizes[others])):
        off = np.zeros_like(sizes)
        off[others] = counts
        rest = free - off @ held
        if rest >= 0:  # as many of the largest group as still fit
            most_last = sizes[last] if held[last] <= 0 else int(rest / held[last])
            off[last] = min(sizes[last], most_last)
            saved = float(off @ each_ns), -float(off @ held)
            if saved > best_saved:
                best_saved, best = saved, off
    return best
