"""Routes of encoder features: what one rank sends and receives. Pure.

They come with the step as its note (`PlannedRoutes`). In a round ranks process together every
rank's m-th batch of each encoder, then its m-th micro-batch; an encoder's features go directly to
the LLM's rank, Pi_M o Pi_E^-1 (OrchMLLM, section 6). Examples are permuted over all ranks, tokens
only of this rank: .4 ms for 8 ranks of 60 examples and two encoders, 65 ms for 2,560 ranks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from isobatch.balance.dispatching.all_to_all import Exchange, Permutation
from isobatch.balance.steps.step_planner import StepAssignment
from isobatch.common.errors import ConfigError
from isobatch.common.types import Counts, Groups, IntArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Route:
    """One rank's part of the exchange of one encoder's features in one round."""

    tokens: Exchange
    """Its sends and receives, counted in features (LLM tokens)."""
    travels: bool
    """Whether any rank sends to another one; if not, no exchange is needed."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlannedRoutes:
    """The routes of a step for one rank, as a planner's note (`StepAssignment.notes`)."""

    moves: "Mapping[str, tuple[FeatureMove, ...]]"
    """Exchange of each round by encoder; all ranks' notes share it."""
    num_rounds: int
    rank: int

    @property
    def rounds(self) -> tuple[dict[str, Route], ...]:
        """This rank's route by encoder in each round; a planner need not know its own rank."""
        return tuple(
            {name: rank_route(moves[number], self.rank) for name, moves in self.moves.items()}
            for number in range(self.num_rounds)
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FeatureMove:
    """The exchange of one encoder's features in one round, over all ranks."""

    examples: Permutation
    """Pi_M o Pi_E^-1: samples with features from encoder batches to micro-batches."""
    features: IntArray
    """Features of each sample in the order of encoding, rank after rank."""


def feature_moves(
    work: StepAssignment, features: Mapping[str, IntArray]
) -> dict[str, tuple[FeatureMove, ...]]:
    """The exchange of each round by encoder.

    `features`: LLM tokens of every sample by encoder, (num_samples,). ConfigError unless all ranks
    have equally many batches of everything, and each sample is encoded in the round that uses it.
    """
    every = (work.micro_batches, *work.encoders.values())
    rounds = {len(groups) for ranks in every for groups in ranks}
    if len(rounds) > 1:
        raise ConfigError(
            f"ranks and encoders have {sorted(rounds)} batches in one step; give all equally many"
        )
    return {
        name: tuple(
            _move(makers, work.micro_batches, features[name], number)
            for number in range(max(rounds))
        )
        for name, makers in work.encoders.items()
    }


def planned_routes(work: StepAssignment, counts: Counts) -> tuple[PlannedRoutes, ...]:
    """The routes of each rank; they match, as every rank plans from the same counts."""
    features = {"vision": counts.num_image_tokens, "audio": counts.num_audio_tokens}
    moves = feature_moves(work, features)
    rounds = len(work.micro_batches[0])
    return tuple(
        PlannedRoutes(moves=moves, num_rounds=rounds, rank=rank)
        for rank in range(len(work.micro_batches))
    )


def rank_route(move: FeatureMove, rank: int) -> Route:
    """`move.examples.expand(move.features).exchange(rank)`, without other ranks' tokens."""
    examples, features = move.examples, move.features
    exchange = examples.exchange(rank)
    sent = features[examples.source_offsets[rank] : examples.source_offsets[rank + 1]]
    targets = examples.target_offsets
    received = features[examples.order[targets[rank] : targets[rank + 1]]]
    return Route(
        tokens=Exchange(
            send_places=_tokens(sent, exchange.send_places),
            send_counts=_sums(sent[exchange.send_places], exchange.send_counts),
            receive_counts=_sums(received[exchange.receive_places], exchange.receive_counts),
            receive_places=_tokens(received, exchange.receive_places),
        ),
        travels=bool((examples.source_ranks != examples.target_ranks).any()),
    )


def _move(
    makers: Sequence[Groups], users: Sequence[Groups], features: IntArray, number: int
) -> FeatureMove:
    encoded, source_offsets = _layout(makers, features, number)
    used, target_offsets = _layout(users, features, number)
    elsewhere = np.setxor1d(encoded, used)
    if len(elsewhere):
        raise ConfigError(
            f"sample {elsewhere[0]} of the step is not encoded in the round that uses it (round "
            f"{number}); plan both in one round, as DispatchedSteps does"
        )
    sorter = np.argsort(encoded)
    order = sorter[np.searchsorted(encoded, used, sorter=sorter)]
    return FeatureMove(
        examples=Permutation(order, source_offsets, target_offsets), features=features[encoded]
    )


def _layout(ranks: Sequence[Groups], features: IntArray, number: int) -> tuple[IntArray, IntArray]:
    """A round's samples with features, rank after rank, and the offsets of ranks."""
    batches = [groups[number] for groups in ranks]
    batches = [batch[features[batch] > 0] for batch in batches]
    return np.concatenate(batches), np.cumsum([0, *map(len, batches)])


def _tokens(counts: IntArray, places: IntArray) -> IntArray:
    """Tokens of the examples at `places`, where examples have `counts` tokens each."""
    every = Groups(np.arange(counts.sum()), np.concatenate([[0], np.cumsum(counts)]))
    return every.take(places).samples


def _sums(values: IntArray, counts: IntArray) -> IntArray:
    """Sums over the first `counts[0]` values, the next `counts[1]`, ..."""
    running = np.concatenate([[0], np.cumsum(values)])
    return np.asarray(np.diff(running[np.concatenate([[0], np.cumsum(counts)])]))
