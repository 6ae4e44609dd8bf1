"""OrchMLLM's plan of a step: ranks of each example, phase by phase. Pure.

Every rank draws its examples; then each phase (vision encoder, audio encoder, LLM) assigns them to
ranks so that the phase is balanced, with the algorithm for how it batches (OrchMLLM, section 5.1).
Batches are placed on nodes that already hold much of them (5.2), and encoder outputs go directly to
the LLM's rank (section 6). Options switch each part off, for the paper's ablations. Deterministic;
2,560 ranks of 60 examples take 50 ms.

As a loader's step planner (`DispatchedSteps`): the m-th micro-batches of all ranks are one
dispatch, so each rank keeps its number of micro-batches. The loader reads every image on the rank
that encodes it; only features travel, by routes that come with the step as its note.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from isobatch.balance.dispatching.all_to_all import Permutation, from_assignment
from isobatch.balance.dispatching.node_placement import place_batches
from isobatch.balance.dispatching.post_balancing import Algorithm, as_batches, assign_batches
from isobatch.balance.metrics import longest
from isobatch.balance.steps.step_planner import ENCODERS, StepAssignment, StepRequest
from isobatch.common.errors import ConfigError
from isobatch.common.types import Counts, Groups, IntArray
from isobatch.engine.cost_model.loads import PhaseLoads
from isobatch.engine.dispatching.routes import planned_routes

PHASES = (*ENCODERS, "llm")


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchOptions:
    """Options of balancing by phase."""

    ranks_per_node: int = 8
    algorithms: Mapping[str, Algorithm] = field(
        default_factory=lambda: {"vision": "sums", "audio": "padded", "llm": "sums"}
    )
    """Algorithm by phase. Encoders without one work on the LLM's rank; the LLM without one, where
    examples were drawn."""
    padded: frozenset[str] = frozenset({"audio"})
    """Phases that pad a batch to its longest example: convolutions in Whisper's encoder."""
    square_weights: Mapping[str, float] = field(default_factory=dict)
    """Cost of a squared token in tokens by phase (OrchMLLM: beta / alpha); otherwise 0."""
    tolerance: float = 0.02
    """Allowed deviation of sums for `squares`, as a share of their mean."""
    node_wise: bool = True
    """Whether batches are placed on nodes that already hold much of them (5.2.2)."""
    reads_directly: bool = False
    """Whether inputs are read where they are needed, as our loader does: only features travel."""

    def __post_init__(self) -> None:
        for name in (*self.algorithms, *self.padded, *self.square_weights):
            if name not in PHASES:
                raise ConfigError(f"there is no phase {name!r}; use {', '.join(PHASES)}")
        smallest = min(self.tolerance, *self.square_weights.values(), 0)
        if self.ranks_per_node < 1 or smallest < 0:
            raise ConfigError(
                f"ranks_per_node {self.ranks_per_node}, tolerance {self.tolerance}, square_weights "
                f"{dict(self.square_weights)}: give at least one rank, and nothing below 0"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Examples:
    """The examples that all ranks drew for a step, rank after rank; int64, (examples,)."""

    lengths: Mapping[str, IntArray]
    """Tokens by phase: of the encoder, or of the LLM's whole interleaved sequence."""
    squares: Mapping[str, IntArray]
    """Sums of squared lengths of what attends together, by phase."""
    features: Mapping[str, IntArray]
    """Tokens in the LLM, by encoder."""
    offsets: IntArray
    """(ranks + 1,): rank r drew the examples `offsets[r]:offsets[r + 1]`."""

    @property
    def num_ranks(self) -> int:
        """Data-parallel ranks."""
        return len(self.offsets) - 1

    @classmethod
    def of_counts(cls, counts: Counts, offsets: IntArray, *, audio_downsample: int = 1) -> Examples:
        """From counts, with equal images in an example, its audio as one clip.

        `audio_downsample`: encoder tokens per LLM token.
        """
        audio = counts.num_audio_tokens * audio_downsample
        images = np.square(counts.num_vit_tokens) // np.maximum(counts.num_image_patches, 1)
        return cls(
            lengths={"vision": counts.num_vit_tokens, "audio": audio, "llm": counts.seq_len},
            squares={"vision": images, "audio": np.square(audio), "llm": np.square(counts.seq_len)},
            features={"vision": counts.num_image_tokens, "audio": counts.num_audio_tokens},
            offsets=offsets,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PhasePlan:
    """One phase of a step."""

    examples: IntArray
    """Examples with tokens of the phase, in the order in which they were drawn."""
    ranks: IntArray
    """Rank that works on each of them."""
    moved: Permutation
    """Permutation from the ranks that drew these examples: Pi_E, for the LLM Pi_M."""
    features: Permutation
    """Permutation from this phase to the LLM: Pi_M o Pi_E^-1; the identity for the LLM."""
    drawn: PhaseLoads
    """(ranks,): loads as drawn, with padding."""
    balanced: PhaseLoads
    """(ranks,): loads as planned, with padding."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DispatchPlan:
    """A step of all ranks."""

    examples: Examples
    options: DispatchOptions
    phases: Mapping[str, PhasePlan]

    def batches(self, phase: str) -> Groups:
        """The examples of each rank in a phase, a group per rank, in the order of drawing."""
        part = self.phases[phase]
        batches = as_batches(part.ranks, self.examples.num_ranks)
        return Groups(part.examples[batches.samples], batches.offsets)


def plan_dispatch(examples: Examples, options: DispatchOptions | None = None) -> DispatchPlan:
    """Balance every phase of a step (OrchMLLM, sections 5 and 6)."""
    options = options or DispatchOptions()
    named = [phase for phase in PHASES if phase in options.algorithms]
    batches = {phase: _batches(examples, options, phase) for phase in named}
    ranks = _ranks(examples, options, batches)
    phases = {}
    for phase in PHASES:
        indices = _having(examples, phase)
        offsets = np.searchsorted(indices, examples.offsets)
        moved = from_assignment(ranks[phase][indices], offsets)
        to_llm = from_assignment(ranks["llm"][indices], offsets)
        planned = as_batches(ranks[phase][indices], examples.num_ranks)
        planned = Groups(indices[planned.samples], planned.offsets)
        phases[phase] = PhasePlan(
            examples=indices,
            ranks=ranks[phase][indices],
            moved=moved,
            features=moved.inverse().then(to_llm),
            drawn=_loads(Groups(indices, offsets), examples, phase, options),
            balanced=_loads(planned, examples, phase, options),
        )
    return DispatchPlan(examples=examples, options=options, phases=phases)


def _having(examples: Examples, phase: str) -> IntArray:
    """Examples with something for a phase; every example has something for the LLM."""
    if phase == "llm":
        return np.arange(len(examples.lengths["llm"]))
    return np.flatnonzero(examples.lengths[phase])


def _batches(examples: Examples, options: DispatchOptions, phase: str) -> IntArray:
    """Batch of each example of the phase, by the phase's algorithm."""
    indices = _having(examples, phase)
    count = examples.num_ranks
    lengths, squares = examples.lengths[phase][indices], examples.squares[phase][indices]
    return assign_batches(
        lengths,
        count,
        algorithm=options.algorithms[phase],
        squares=squares,
        weight=options.square_weights.get(phase, 0.0),
        tolerance=options.tolerance,
        name=phase,
    )


def _ranks(
    examples: Examples, options: DispatchOptions, batches: Mapping[str, IntArray]
) -> dict[str, IntArray]:
    """The rank of every example by phase; encoders without own batches work on the LLM's rank.

    Batches are placed near their inputs; of encoders that read directly, near users of features.
    """
    drawn_by = np.repeat(np.arange(examples.num_ranks), np.diff(examples.offsets))
    sources, weights, llm = drawn_by, examples.lengths, batches.get("llm", drawn_by)
    if options.reads_directly:
        sources, weights = llm, examples.features
    elif "llm" in batches:
        llm = _place(options, examples.lengths["llm"], llm, drawn_by, examples.num_ranks)
    ranks = dict.fromkeys(PHASES, llm)
    for phase in ENCODERS:
        if phase in batches:
            indices = _having(examples, phase)
            sizes, near = weights[phase][indices], sources[indices]
            ranks[phase] = sources.copy()
            ranks[phase][indices] = _place(options, sizes, batches[phase], near, examples.num_ranks)
    return ranks


def _place(
    options: DispatchOptions, sizes: IntArray, batches: IntArray, sources: IntArray, num_ranks: int
) -> IntArray:
    """Rank of each example, whose data of some size is on the rank `sources`, by its batch."""
    if not options.node_wise:
        return batches
    order = np.argsort(sources, kind="stable")
    offsets = np.searchsorted(sources[order], np.arange(num_ranks + 1))
    per_node = options.ranks_per_node
    placed = place_batches(sizes[order], batches[order], offsets, ranks_per_node=per_node)
    return placed[batches]


def _loads(batches: Groups, examples: Examples, phase: str, options: DispatchOptions) -> PhaseLoads:
    """Loads of each rank's batch; in a padded phase every example counts as the longest."""
    lengths, sizes = examples.lengths[phase], batches.sizes
    if phase in options.padded:
        max_lengths = longest(batches, lengths)
        return PhaseLoads(sizes * max_lengths, sizes * max_lengths**2, sizes)
    return PhaseLoads(batches.sum(lengths), batches.sum(examples.squares[phase]), sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchedSteps:
    """A `balance.steps.step_planner.StepPlanner`: give it to a loader as `planner`."""

    options: DispatchOptions = field(default_factory=lambda: DispatchOptions(reads_directly=True))
    audio_downsample: int = 1
    """Encoder tokens per LLM token (`AudioRule.downsample`)."""

    def __call__(self, samples: StepRequest) -> StepAssignment:
        """Micro-batches and encoder batches of every rank, with `PlannedRoutes` as notes."""
        rounds = [self._round(samples, number) for number in range(samples.micro_batches)]
        encoders = [name for name in ENCODERS if name in self.options.algorithms]
        work = StepAssignment(
            micro_batches=_of_ranks(rounds, "llm", samples.dp),
            encoders={name: _of_ranks(rounds, name, samples.dp) for name in encoders},
        )
        return replace(work, notes=planned_routes(work, samples.counts))

    def plan(self, samples: StepRequest) -> list[DispatchPlan]:
        """The plans of all rounds; examples are numbered within each."""
        return [self._round(samples, number)[1] for number in range(samples.micro_batches)]

    def _round(self, samples: StepRequest, number: int) -> tuple[IntArray, DispatchPlan]:
        """(numbers of the samples, their plan)."""
        group_numbers = np.arange(samples.dp) * samples.micro_batches + number
        groups = Groups(np.arange(len(samples)), samples.offsets).take(group_numbers)
        counts = samples.counts.take(groups.samples)
        downsample = self.audio_downsample
        examples = Examples.of_counts(counts, groups.offsets, audio_downsample=downsample)
        return groups.samples, plan_dispatch(examples, replace(self.options, reads_directly=True))


def _of_ranks(
    rounds: list[tuple[IntArray, DispatchPlan]], phase: str, num_ranks: int
) -> tuple[Groups, ...]:
    """Each rank's batches of all rounds."""
    batches = [(numbers, plan.batches(phase)) for numbers, plan in rounds]
    batches_of_ranks = []
    for rank in range(num_ranks):
        parts = [numbers[examples[rank]] for numbers, examples in batches]
        batches_of_ranks.append(Groups(np.concatenate(parts), np.cumsum([0, *map(len, parts)])))
    return tuple(batches_of_ranks)
