"""PipeTune's tuner: packing, size, order and early encoding. Pure.

All candidates are costed in one call of the cost function; each is simulated in the order in which
it was packed, and the orders of the best few are searched: PipeTune's clusters, then exchanges,
with encoder passes in idle time. The result is simulated exactly, within the memory of every rank.
The given micro-batches in their order are a candidate, so a tuned step is never slower than an
untuned one. Deterministic. In 4 stages 128 samples take 15 ms with PipeTune's search, 80 with ours,
1,024 samples 60 and 180 (PipeTune: 200 and 1,500; `benchmarks/tuner_speed.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from isobatch.common.errors import ConfigError
from isobatch.common.types import BoolArray, Groups, IntArray
from isobatch.engine.cost_model.loads import Loads, joined_loads, packed_loads
from isobatch.engine.simulator.schedule import Schedule, make_schedule
from isobatch.engine.simulator.stages import stage_costs
from isobatch.engine.tuning._order_search import search_clusters, search_swaps
from isobatch.engine.tuning.order_times import OrderProblem, order_problem, times_of_orders
from isobatch.engine.tuning.pack import (
    CostFunction,
    MicroBatchSizes,
    balanced_packings,
    lengths_to_try,
    marginal_costs,
)
from isobatch.engine.tuning.precompute import (
    EncodedStep,
    Encoder,
    EncodeRanks,
    encode_ahead,
    frozen_encoder,
    where_to_encode,
)

OrderSearch = Literal["none", "clusters", "swaps"]
"""Orders to try: as packed; also PipeTune's orders of clusters; also exchanges from the best."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionedModel:
    """A partitioned model whose costs depend on the micro-batches."""

    cost: CostFunction
    borders: IntArray
    recompute: BoolArray
    schedule: str = "1f1b"
    stages_per_rank: int = 1
    deferred: tuple[int, ...] | None = None
    """Weight gradients that each rank may hold back, as a plan has it."""
    memory_bytes: int | None = None
    """Memory of each rank; None for no limit."""

    def make_schedule(self, num_micro_batches: int) -> Schedule:
        """The schedule of so many micro-batches."""
        per_rank = self.stages_per_rank
        num_ranks = (len(self.borders) - 1) // per_rank
        return make_schedule(self.schedule, num_ranks, num_micro_batches, per_rank, self.deferred)


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneOptions:
    """Choices that the tuner may change, and the effort of its search."""

    max_seq_len: int
    """PipeTune's unit: micro-batch sizes are multiples of it."""
    largest_len: int | None = None
    """Most tokens that costs are known for, unless samples or given micro-batches have more."""
    sizes: MicroBatchSizes = "any"
    search: OrderSearch = "swaps"
    encode: EncodeRanks = "never"
    """Ranks in whose idle time a frozen encoder may run."""
    effort: int = 400_000
    """Actions that one search by exchanges simulates, 6 ns each (10 to 50 with early encoding)."""
    finalists: int = 3
    """Packings whose orders are searched."""

    def __post_init__(self) -> None:
        if self.max_seq_len < 1 or self.effort < 0 or self.finalists < 1:
            raise ConfigError(
                f"max_seq_len {self.max_seq_len}, effort {self.effort}, finalists "
                f"{self.finalists}: give a length and finalists of at least 1, and effort from 0 on"
            )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TuneResult:
    """A tuned step."""

    groups: Groups
    """The samples of each micro-batch, in the order in which they enter."""
    max_len: int
    """Most tokens that a micro-batch was allowed."""
    step: EncodedStep
    """Its schedule, costs and timeline."""
    num_simulated: int
    """Number of orders that were simulated."""

    @property
    def step_ns(self) -> int:
        """Predicted time."""
        return self.step.timeline.step_ns


@dataclass(frozen=True, slots=True, eq=False)
class _Candidate:
    """Micro-batches that hold all samples, before their order is searched."""

    groups: Groups
    max_len: int
    """Most tokens that a micro-batch was allowed."""
    problem: OrderProblem
    encoder: Encoder
    given_ns: int
    """Step time in the given order; NEVER where the micro-batches do not fit."""


@dataclass(frozen=True, slots=True, eq=False)
class _Found:
    """A packing in one order, simulated."""

    candidate: _Candidate
    order: IntArray
    step: EncodedStep
    num_simulated: int

    @property
    def step_ns(self) -> int:
        return self.step.timeline.step_ns


def tune(
    samples: Loads, micro_batches: Groups, pipeline: PartitionedModel, options: TuneOptions
) -> TuneResult:
    """Choose the micro-batches of a step, their order and early encodings.

    `samples`: a column per sample. `micro_batches`: the untuned ones, with every sample in one.
    ConfigError if no micro-batches fit into memory, or if a trained encoder would run ahead.
    """
    lengths = samples.llm.tokens
    if not len(micro_batches) or not len(lengths):
        raise ConfigError(
            f"{len(micro_batches)} micro-batches of {len(lengths)} samples; give at least one of"
            " each"
        )
    untuned, same_size, others = _candidates(samples, micro_batches, pipeline, options)
    steps = _fitting([_as_given(one) for one in (untuned, *same_size)], pipeline)
    for candidates in ([untuned], same_size, others):
        steps += _search(candidates, pipeline, options)
    if not steps:
        raise _nothing_fits([untuned, *same_size, *others], pipeline)
    best = min(steps, key=lambda one: one.step_ns)
    return TuneResult(
        groups=best.candidate.groups.take(best.order),
        max_len=best.candidate.max_len,
        step=best.step,
        num_simulated=len(others) + sum(one.num_simulated for one in steps),
    )


def _candidates(
    samples: Loads, micro_batches: Groups, pipeline: PartitionedModel, options: TuneOptions
) -> tuple[_Candidate, list[_Candidate], list[_Candidate]]:
    """The given micro-batches, packings of their size, and packings of other sizes."""
    lengths, unit = samples.llm.tokens, options.max_seq_len
    longest = int(micro_batches.sum(lengths).max())
    max_lens = lengths_to_try(
        lengths,
        max_seq_len=unit,
        sizes=options.sizes,
        first_len=max(1, -(-longest // unit)) * unit,
        num_stages=len(pipeline.borders) - 1,
    )
    if options.largest_len is not None:
        first = max(longest, min(max_lens[0], options.largest_len))
        max_lens = [first, *(length for length in max_lens[1:] if length <= options.largest_len)]
    weights = marginal_costs(pipeline.cost, samples, pipeline.recompute, len(micro_batches))
    packings = [(micro_batches, max_lens[0])]
    for max_len in max_lens:
        balanced = balanced_packings(lengths, weights, max_len)
        packings += [(groups, max_len) for groups in balanced]
    loads = [packed_loads(samples, groups) for groups, _ in packings]
    costs = pipeline.cost(joined_loads(loads))  # one call for all
    stages = stage_costs(costs, pipeline.borders, pipeline.recompute)
    encoder = Encoder.nothing(costs.num_micro_batches)
    if options.encode != "never":
        encoder = frozen_encoder(costs, pipeline.borders)
    ends = np.cumsum([0, *(len(groups) for groups, _ in packings)])
    candidates = []
    for number, (groups, max_len) in enumerate(packings):
        columns = np.arange(ends[number], ends[number + 1])
        memory = pipeline.memory_bytes
        part, encoded = stages.take(columns), encoder.take(columns)
        schedule = pipeline.make_schedule(len(groups))
        ahead = where_to_encode(encoded, schedule, part, where=options.encode, memory_bytes=memory)
        problem = order_problem(schedule, part, memory, ahead)
        given_ns = int(times_of_orders(problem, np.arange(len(groups))[np.newaxis])[0])
        candidates.append(_Candidate(groups, max_len, problem, encoded, given_ns))
    untuned, *rest = candidates
    same_size = [one for one in rest if one.max_len == max_lens[0]]
    return untuned, same_size, [one for one in rest if one.max_len != max_lens[0]]


def _search(
    candidates: Sequence[_Candidate], pipeline: PartitionedModel, options: TuneOptions
) -> list[_Found]:
    """The best orders of the finalists, those that fit into memory."""
    best = sorted(candidates, key=lambda one: one.given_ns)[: options.finalists]
    modes = (True, False) if options.encode != "never" else (False,)
    steps = [_ordered(one, options, ahead=ahead) for one in best for ahead in modes]
    return _fitting(steps, pipeline)


def _ordered(candidate: _Candidate, options: TuneOptions, *, ahead: bool) -> _Found:
    """The best order of one packing, with or without encoding ahead."""
    problem = candidate.problem if ahead else candidate.problem.without_ahead()
    order, num = np.arange(problem.num_micro_batches), 1
    if options.search != "none":
        result = search_clusters(problem)
        order, num = result.order, result.num_simulated
    if options.search == "swaps":
        trials = options.effort // max(1, len(problem.schedule))
        result = search_swaps(problem, order, trials=trials)
        order, num = result.order, num + result.num_simulated
    return _Found(candidate, order, encode_ahead(problem, candidate.encoder, order), num)


def _as_given(candidate: _Candidate) -> _Found:
    """A packing in its given order, without encoding ahead."""
    problem = candidate.problem.without_ahead()
    order = np.arange(len(candidate.groups))
    return _Found(candidate, order, encode_ahead(problem, candidate.encoder, order), 1)


def _fitting(steps: Sequence[_Found], pipeline: PartitionedModel) -> list[_Found]:
    """The ones that fit into every rank's memory."""
    limit = pipeline.memory_bytes
    return [one for one in steps if limit is None or int(one.step.peak_bytes.max()) <= limit]


def _nothing_fits(candidates: Sequence[_Candidate], pipeline: PartitionedModel) -> ConfigError:
    """The error with the memory of the smallest candidate."""
    peaks = (_as_given(one).step.peak_bytes for one in candidates)
    smallest = min(peaks, key=lambda peak: int(peak.max()))
    rank = int(smallest.argmax())
    return ConfigError(
        f"no micro-batches of this step fit: rank {rank} needs at least {int(smallest[rank]):,} "
        f"bytes, memory_bytes is {pipeline.memory_bytes:,}; recompute more layers, use more "
        "stages, or shorten the longest sample"
    )
