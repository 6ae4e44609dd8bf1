"""OrchMLLM's plan of a step: which rank encodes and trains which example, phase by phase, and what
travels between.

For `engine.dispatching.step_planner` (the loader's hook) and `engine.dispatching.times` (what it
comes to). Every rank draws its examples as ever; then each phase (vision encoder, audio encoder,
LLM) deals them to the ranks anew so that this phase is balanced, with the algorithm that suits how
the phase batches (OrchMLLM, section 5.1); batches go to nodes that hold much of them already (5.2);
and encoders' outputs travel at once to where the LLM wants them (section 6). Options switch each
part off, for the paper's ablations. Pure and deterministic; 2,560 ranks of 60 examples take 50 ms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from balance.errors import ConfigError
from balance.metrics import longest
from balance.steps.all_to_all import Permutation, from_assignment
from balance.steps.node_placement import place_batches
from balance.steps.post_balancing import (
    as_batches,
    balance_conv,
    balance_padded,
    balance_padded_attention,
    balance_squares,
    balance_sums,
)
from balance.steps.step_planner import ENCODERS
from balance.types import Counts, Groups, IntArray
from engine.cost_model.loads import PhaseLoads

PHASES = (*ENCODERS, "llm")

Algorithm = Literal["sums", "padded", "squares", "padded_attention", "conv"]
"""OrchMLLM's algorithms 1, 2 and 4, ours for padded attention, and algorithm 5."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchOptions:
    """How each phase is balanced."""

    ranks_per_node: int = 8
    algorithms: Mapping[str, Algorithm] = field(
        default_factory=lambda: {"vision": "sums", "audio": "padded", "llm": "sums"}
    )
    """Method by phase. Encoders not named work where the LLM does; the LLM, where drawn."""
    padded: frozenset[str] = frozenset({"audio"})
    """Phases that pad a batch to its longest example: convolutions in Whisper's encoder."""
    square_weights: Mapping[str, float] = field(default_factory=dict)
    """Cost of a squared token in tokens, by phase (OrchMLLM: beta / alpha); default 0."""
    tolerance: float = 0.02
    """Of `squares`: how uneven sums may be, as a share of their mean."""
    node_wise: bool = True
    """Whether batches move to nodes that hold much of them already (OrchMLLM, 5.2.2)."""
    reads_directly: bool = False
    """Whether inputs are read where they are needed, as our loader does: then only features travel,
    and node-wise placement brings encoders' batches near to where the LLM wants them.
    """

    def __post_init__(self) -> None:
        for name in (*self.algorithms, *self.padded, *self.square_weights):
            if name not in PHASES:
                raise ConfigError(f"there is no phase {name!r}; use {', '.join(PHASES)}")
        if (
            self.ranks_per_node < 1
            or self.tolerance < 0
            or min(self.square_weights.values(), default=0) < 0
        ):
            raise ConfigError(
                f"ranks_per_node {self.ranks_per_node}, tolerance {self.tolerance}, square_weights "
                f"{dict(self.square_weights)}: give at least one rank, and nothing below 0"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Examples:
    """What all ranks drew for a step, rank after rank; int64, (examples,)."""

    lengths: Mapping[str, IntArray]
    """By phase: tokens that the encoder processes; the LLM's whole interleaved sequence."""
    squares: Mapping[str, IntArray]
    """By phase: sum of the squared lengths of what attends at once."""
    features: Mapping[str, IntArray]
    """By encoder: tokens that it gives to the LLM."""
    offsets: IntArray
    """(ranks + 1,): rank r drew the examples `offsets[r]:offsets[r + 1]`."""

    @property
    def num_ranks(self) -> int:
        """Data-parallel ranks."""
        return len(self.offsets) - 1

    @property
    def texts(self) -> IntArray:
        """LLM tokens that no encoder made."""
        return np.asarray(self.lengths["llm"] - sum(self.features.values()))

    @classmethod
    def of_counts(cls, counts: Counts, offsets: IntArray, *, audio_downsample: int = 1) -> Examples:
        """From the counts table. `audio_downsample`: encoder tokens per LLM token; images are taken
        as equally large.

        An example's clips are taken as one.
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
    """Those that have anything for the phase, in the order in which they were drawn."""
    ranks: IntArray
    """Rank that works on each of them."""
    moved: Permutation
    """Of these examples from where they were drawn: Pi_E, for the LLM Pi_M."""
    features: Permutation
    """Of these examples from this phase to the LLM: Pi_M o Pi_E^-1; for the LLM nothing moves."""
    drawn: PhaseLoads
    """(ranks,): what every rank would do with what it drew, padding included."""
    balanced: PhaseLoads
    """(ranks,): the same as planned."""
    useful_tokens: int
    """Of all ranks, padding left out."""

    @property
    def imbalance(self) -> tuple[float, float]:
        """Largest / mean tokens of a rank, as drawn and as planned; 1 without tokens."""
        before, after = (
            own.tokens.max() / max(own.tokens.mean(), 1e-9) for own in (self.drawn, self.balanced)
        )
        return (float(before), float(after)) if self.useful_tokens else (1.0, 1.0)

    @property
    def efficiency(self) -> tuple[float, float]:
        """Useful tokens / (ranks x tokens of the slowest rank), as drawn and as planned: what MFU
        is in proportion to.

        It counts padding as lost, which `imbalance` does not.
        """
        slowest = (own.tokens.max() * len(own) for own in (self.drawn, self.balanced))
        before, after = (self.useful_tokens / max(int(most), 1) for most in slowest)
        return (before, after) if self.useful_tokens else (1.0, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DispatchPlan:
    """A step of all ranks."""

    examples: Examples
    options: DispatchOptions
    phases: Mapping[str, PhasePlan]

    def batches(self, phase: str) -> Groups:
        """The examples of each rank in a phase, in the order drawn; (ranks,) groups."""
        own = self.phases[phase]
        batches = as_batches(own.ranks, self.examples.num_ranks)
        return Groups(own.examples[batches.samples], batches.offsets)


def plan_dispatch(examples: Examples, options: DispatchOptions | None = None) -> DispatchPlan:
    """Balance every phase of a step (OrchMLLM, sections 5 and 6)."""
    options = options or DispatchOptions()
    drawn_by = np.repeat(np.arange(examples.num_ranks), np.diff(examples.offsets))
    batches = {
        phase: _batches(examples, options, phase) for phase in PHASES if phase in options.algorithms
    }
    ranks = _direct(examples, options, batches, drawn_by) if options.reads_directly else None
    if ranks is None:
        ranks = _exchanged(examples, options, batches, drawn_by)
    phases = {phase: _phase(examples, options, phase, ranks) for phase in PHASES}
    return DispatchPlan(examples=examples, options=options, phases=phases)


def _having(examples: Examples, phase: str) -> IntArray:
    """Examples with something for a phase; every example has something for the LLM."""
    if phase == "llm":
        return np.arange(len(examples.lengths["llm"]))
    return np.flatnonzero(examples.lengths[phase])


def _batches(examples: Examples, options: DispatchOptions, phase: str) -> IntArray:
    """Batch of each example that the phase has, as the phase's algorithm balances them."""
    own, count = _having(examples, phase), examples.num_ranks
    lengths, squares = examples.lengths[phase][own], examples.squares[phase][own]
    weight = options.square_weights.get(phase, 0.0)
    algorithm = options.algorithms[phase]
    if algorithm == "sums":
        return balance_sums(lengths + weight * squares if weight else lengths, count)
    if algorithm == "squares":
        return balance_squares(
            lengths, count, tolerance=int(options.tolerance * lengths.sum() / count)
        )
    if algorithm == "padded_attention":
        return balance_padded_attention(lengths, count, weight=weight)
    if algorithm not in ("padded", "conv"):
        raise ConfigError(
            f"algorithm of {phase} is {algorithm!r}; use sums, padded, squares, padded_attention or conv"
        )
    return balance_padded(lengths, count) if algorithm == "padded" else balance_conv(lengths, count)


def _exchanged(
    examples: Examples,
    options: DispatchOptions,
    batches: Mapping[str, IntArray],
    drawn_by: IntArray,
) -> dict[str, IntArray]:
    """By phase, the rank of every example, if inputs travel from where they were drawn."""
    ranks = {}
    for phase in ENCODERS:
        if phase in batches:
            own = _having(examples, phase)
            ranks[phase] = drawn_by.copy()
            ranks[phase][own] = _place(
                examples, options, examples.lengths[phase][own], batches[phase], drawn_by[own]
            )
    if "llm" not in batches:
        return {phase: ranks.get(phase, drawn_by) for phase in PHASES}
    ranks["llm"] = _place(examples, options, examples.lengths["llm"], batches["llm"], drawn_by)
    return {phase: ranks.get(phase, ranks["llm"]) for phase in PHASES}


def _direct(
    examples: Examples,
    options: DispatchOptions,
    batches: Mapping[str, IntArray],
    drawn_by: IntArray,
) -> dict[str, IntArray]:
    """The same if inputs are read where needed: encoders' batches go near to their users."""
    ranks = {"llm": batches.get("llm", drawn_by)}
    for phase in ENCODERS:
        ranks[phase] = ranks["llm"].copy()
        if phase in batches:
            own = _having(examples, phase)
            ranks[phase][own] = _place(
                examples, options, examples.features[phase][own], batches[phase], ranks["llm"][own]
            )
    return ranks


def _place(
    examples: Examples,
    options: DispatchOptions,
    weights: IntArray,
    batches: IntArray,
    sources: IntArray,
) -> IntArray:
    """Rank of each part of a batch; the parts, of some weight each, lie on the ranks `sources`."""
    if not options.node_wise:
        return batches
    order = np.argsort(sources, kind="stable")
    offsets = np.searchsorted(sources[order], np.arange(examples.num_ranks + 1))
    places = place_batches(
        weights[order], batches[order], offsets, ranks_per_node=options.ranks_per_node
    )
    return places[batches]


def _phase(
    examples: Examples, options: DispatchOptions, phase: str, ranks: Mapping[str, IntArray]
) -> PhasePlan:
    own = _having(examples, phase)
    offsets = np.searchsorted(own, examples.offsets)
    moved = from_assignment(ranks[phase][own], offsets)
    to_llm = from_assignment(ranks["llm"][own], offsets)
    drawn = Groups(own, offsets)
    planned = as_batches(ranks[phase][own], examples.num_ranks)
    return PhasePlan(
        examples=own,
        ranks=ranks[phase][own],
        moved=moved,
        features=moved.inverse().then(to_llm),
        drawn=_loads(drawn, examples, phase, options),
        balanced=_loads(Groups(own[planned.samples], planned.offsets), examples, phase, options),
        useful_tokens=int(examples.lengths[phase].sum()),
    )


def _loads(batches: Groups, examples: Examples, phase: str, options: DispatchOptions) -> PhaseLoads:
    """What each rank's batch comes to; in a padded phase every example counts as the longest."""
    lengths, sizes = examples.lengths[phase], batches.sizes
    if phase in options.padded:
        most = longest(batches, lengths)
        return PhaseLoads(tokens=sizes * most, squares=sizes * most**2, items=sizes)
    return PhaseLoads(
        tokens=batches.sum(lengths), squares=batches.sum(examples.squares[phase]), items=sizes
    )
