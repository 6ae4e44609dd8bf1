"""PipeTune's tuner: for each step the micro-batches, their size, their order and what the encoder
does ahead.

For whoever runs steps (`engine.tuning.step_planner` puts it behind the loader's hook) and for
`python -m engine`. All candidates are costed in one call of the cost function; each is then
simulated in the order in which it was packed, and the best few are searched: PipeTune's clusters,
then exchanges (`engine.tuning.order_search`), with the encoder's forward passes placed in idle time
(`engine.tuning.precompute`). What is chosen has been simulated exactly, within the memory of every
rank. The given micro-batches in their order are among the candidates, so a tuned step is never
slower than an untuned one. Pure and deterministic. In 4 stages 128 samples take 15 ms with
PipeTune's search, 80 with ours, 1,024 samples 60 and 180 (PipeTune: 200 and 1,500;
`benchmarks/tuner_speed.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from balance.errors import ConfigError
from balance.types import Groups, IntArray
from engine.cost_model.loads import Loads, joined_loads, packed_loads
from engine.simulator.evaluate import schedule_for
from engine.simulator.stages import StageCosts, stage_costs
from engine.tuning.order_search import OrderResult, search_clusters, search_swaps
from engine.tuning.order_times import OrderProblem, nothing_ahead, order_problem, times_of_orders
from engine.tuning.pack import (
    CostFunction,
    MicroBatchSizes,
    Packing,
    balanced_packings,
    lengths_to_try,
    marginal_costs,
)
from engine.tuning.precompute import (
    EncodedStep,
    Encoder,
    EncodeRanks,
    encode_ahead,
    frozen_encoder,
    where_to_encode,
)

OrderSearch = Literal["none", "clusters", "swaps"]
"""Orders to try: as packed, PipeTune's clusters, and exchanges from the best of those."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionedModel:
    """What is tuned: a partitioned model whose costs depend on the micro-batches."""

    cost: CostFunction
    borders: IntArray
    recompute: NDArray[np.bool_]
    schedule: str = "1f1b"
    stages_per_rank: int = 1
    memory_bytes: int | None = None
    """Of each rank; None for any amount."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneOptions:
    """What the tuner may change, and how long it may search."""

    max_seq_len: int
    """PipeTune's: micro-batch sizes are multiples of it."""
    largest_len: int | None = None
    """Tokens of a micro-batch at most, where neither a sample nor the given ones have more: as many
    as the costs are known for. None for any number.
    """
    sizes: MicroBatchSizes = "any"
    search: OrderSearch = "swaps"
    encode: EncodeRanks = "never"
    """Whose idle time a frozen encoder may run in."""
    effort: int = 400_000
    """Actions that one search by exchanges simulates, at some 6 ns (10 to 50 with ahead)."""
    finalists: int = 3
    """Packings whose orders are searched."""

    def __post_init__(self) -> None:
        if self.max_seq_len < 1 or self.effort < 0 or self.finalists < 1:
            raise ConfigError(
                f"max_seq_len {self.max_seq_len}, effort {self.effort}, finalists {self.finalists}: give a length and "
                "finalists of at least 1, and an effort of 0 or more"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """Best step by ingredient, cumulative, ns (PipeTune, Table 2); None: does not fit."""

    untuned_ns: int
    """The given micro-batches in their order."""
    balanced_ns: int
    """Packed anew to even costs, at the given size."""
    reordered_ns: int
    """And in the best order found, with the encoder ahead."""
    resized_ns: int
    """And of any size that fits."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TuneResult:
    """A step as it shall run."""

    groups: Groups
    """The samples of each micro-batch, in the order in which they enter."""
    max_len: int
    """Tokens that a micro-batch was allowed."""
    step: EncodedStep
    """Its schedule, costs and timeline."""
    breakdown: Breakdown
    fits_untuned: bool
    """Whether the given micro-batches fit into memory."""
    num_simulated: int
    """Orders simulated on the way."""

    @property
    def step_ns(self) -> int:
        """Predicted time."""
        return self.step.timeline.step_ns


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Candidate:
    packing: Packing
    problem: OrderProblem
    encoder: Encoder
    came_ns: int
    """Step time in the order in which the micro-batches came; NEVER where they do not fit."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Found:
    candidate: _Candidate
    order: IntArray
    step: EncodedStep
    num_simulated: int

    @property
    def step_ns(self) -> int:
        return self.step.timeline.step_ns


def tune(
    samples: Loads, given: Groups, pipeline: PartitionedModel, options: TuneOptions
) -> TuneResult:
    """Choose how a step's samples run through a pipeline.

    `samples`: a column per sample. `given`: the micro-batches as they would run untuned, every
    sample in one of them. ConfigError if no micro-batches fit into memory, or if a trained encoder
    shall run ahead.
    """
    lengths = samples.llm.tokens
    if not len(given) or not len(lengths):
        raise ConfigError(
            f"{len(given)} micro-batches of {len(lengths)} samples; give at least one of each"
        )
    untuned, same_size, others = _candidates(samples, given, pipeline, options)
    plain = _as_came(untuned)
    found = _fitting([plain], pipeline)
    fits_untuned = bool(found)
    found += _fitting([_as_came(one) for one in same_size], pipeline)
    balanced_ns = _least(found, plain)
    found += _search([untuned], pipeline, options) + _search(same_size, pipeline, options)
    reordered_ns = _least(found, plain)
    found += _search(others, pipeline, options)
    if not found:
        raise _nothing_fits([untuned, *same_size, *others], pipeline)
    best = min(found, key=lambda one: one.step_ns)
    return TuneResult(
        groups=best.candidate.packing.groups.take(best.order),
        max_len=best.candidate.packing.max_len,
        step=best.step,
        breakdown=Breakdown(
            untuned_ns=plain.step_ns,
            balanced_ns=balanced_ns,
            reordered_ns=reordered_ns,
            resized_ns=best.step_ns,
        ),
        fits_untuned=fits_untuned,
        num_simulated=len(others) + sum(one.num_simulated for one in found),
    )


def _least(found: Sequence[_Found], plain: _Found) -> int:
    """The best step so far; the untuned one's while nothing fits."""
    return min([one.step_ns for one in found], default=plain.step_ns)


def _given_length(given: Groups, lengths: IntArray, max_seq_len: int) -> int:
    """The least L_max that allows the given micro-batches."""
    longest = int(given.sum(lengths).max())
    return max(1, -(-longest // max_seq_len)) * max_seq_len


def _candidates(
    samples: Loads, given: Groups, pipeline: PartitionedModel, options: TuneOptions
) -> tuple[_Candidate, list[_Candidate], list[_Candidate]]:
    """The given micro-batches and packings of theirs and other sizes, costed at once."""
    lengths = samples.llm.tokens
    max_lens = lengths_to_try(
        lengths,
        max_seq_len=options.max_seq_len,
        sizes=options.sizes,
        given=_given_length(given, lengths, options.max_seq_len),
        num_stages=len(pipeline.borders) - 1,
    )
    if options.largest_len is not None:
        first = max(int(given.sum(lengths).max()), min(max_lens[0], options.largest_len))
        max_lens = [first, *(length for length in max_lens[1:] if length <= options.largest_len)]
    weights = marginal_costs(pipeline.cost, samples, pipeline.recompute, len(given))
    packings = [
        Packing(groups=given, max_len=max_lens[0]),
        *balanced_packings(lengths, weights, max_lens),
    ]
    costs = pipeline.cost(
        joined_loads([packed_loads(samples, packing.groups) for packing in packings])
    )
    stages = stage_costs(costs, pipeline.borders, pipeline.recompute)
    encoder = Encoder.nothing(costs.num_micro_batches)
    if options.encode != "never":
        encoder = frozen_encoder(costs, pipeline.borders)
    ends = np.cumsum([0, *(len(packing.groups) for packing in packings)])
    untuned, *rest = [
        _candidate(packing, stages.take(own), encoder.take(own), pipeline, options.encode)
        for packing, own in zip(packings, map(np.arange, ends[:-1], ends[1:]), strict=True)
    ]
    same_size = [one for one in rest if one.packing.max_len == max_lens[0]]
    return untuned, same_size, [one for one in rest if one.packing.max_len != max_lens[0]]


def _candidate(
    packing: Packing,
    stages: StageCosts,
    encoder: Encoder,
    pipeline: PartitionedModel,
    encode: EncodeRanks,
) -> _Candidate:
    schedule = schedule_for(
        pipeline.schedule, pipeline.borders, len(packing.groups), pipeline.stages_per_rank
    )
    ahead = where_to_encode(
        encoder, schedule, stages, where=encode, memory_bytes=pipeline.memory_bytes
    )
    problem = order_problem(schedule, stages, pipeline.memory_bytes, ahead)
    came = int(times_of_orders(problem, np.arange(len(packing.groups))[np.newaxis])[0])
    return _Candidate(packing=packing, problem=problem, encoder=encoder, came_ns=came)


def _search(
    candidates: Sequence[_Candidate], pipeline: PartitionedModel, options: TuneOptions
) -> list[_Found]:
    """The best orders of the candidates that were best as they came; those that fit."""
    best = sorted(candidates, key=lambda one: one.came_ns)[: options.finalists]
    found = []
    for candidate in best:
        ways = (False, True) if options.encode != "never" else (True,)
        found += [_arrange(candidate, options, plain=plain) for plain in ways]
    return _fitting(found, pipeline)


def _arrange(candidate: _Candidate, options: TuneOptions, *, plain: bool) -> _Found:
    """The best order of one packing; `plain` without encoding ahead."""
    problem = _plain(candidate.problem) if plain else candidate.problem
    came = np.arange(problem.num_micro_batches)
    ordered = OrderResult(order=came, step_ns=candidate.came_ns, num_simulated=1)
    if options.search != "none":
        ordered = search_clusters(problem)
    num = ordered.num_simulated
    if options.search == "swaps":
        ordered = search_swaps(
            problem, ordered.order, trials=options.effort // max(1, len(problem.schedule))
        )
        num += ordered.num_simulated
    return _exact(candidate, ordered.order, plain=plain, num_simulated=num)


def _exact(
    candidate: _Candidate, order: IntArray, *, plain: bool, num_simulated: int = 1
) -> _Found:
    problem = _plain(candidate.problem) if plain else candidate.problem
    step = encode_ahead(problem, candidate.encoder, order)
    return _Found(candidate=candidate, order=order, step=step, num_simulated=num_simulated)


def _plain(problem: OrderProblem) -> OrderProblem:
    """The same without encoding ahead."""
    sizes = problem.sizes._replace(state=problem.sizes.state - problem.ahead.reserved_bytes)
    return OrderProblem(
        schedule=problem.schedule,
        stages=problem.stages,
        actions=problem.actions,
        work=problem.work,
        sizes=sizes,
        ahead=nothing_ahead(problem.schedule),
    )


def _as_came(candidate: _Candidate) -> _Found:
    """Untouched but for its packing."""
    return _exact(candidate, np.arange(candidate.problem.num_micro_batches), plain=True)


def _fitting(found: Sequence[_Found], pipeline: PartitionedModel) -> list[_Found]:
    """Those that fit into every rank's memory."""
    limit = pipeline.memory_bytes
    return [one for one in found if limit is None or int(one.step.peak_bytes.max()) <= limit]


def _nothing_fits(candidates: Sequence[_Candidate], pipeline: PartitionedModel) -> ConfigError:
    """Says how much memory the most modest candidate needs."""
    least = min(
        (_as_came(one).step.peak_bytes for one in candidates), key=lambda peak: int(peak.max())
    )
    rank = int(least.argmax())
    return ConfigError(
        f"no micro-batches of this step fit: rank {rank} needs at least {int(least[rank]):,} bytes, memory_bytes is "
        f"{pipeline.memory_bytes:,}; recompute more layers, use more stages, or shorten the longest sample"
    )
