"""Permutations of a step's examples between ranks: All-to-All and volumes.

A layout numbers a step's examples rank after rank. A `Permutation` leads from where the examples
were drawn to where an encoder or the LLM processes them. OrchMLLM, sections 5.2 and 6: texts move
by Pi_M (to the LLM's batches), encoder inputs by Pi_E, and encoder outputs by Pi_M o Pi_E^-1:

    from_assignment(vision_batches, offsets).inverse().then(from_assignment(llm_batches, offsets))

Pure NumPy, arrays of one entry per example. Volumes are of the forward pass; gradients go back.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isobatch.balance.dispatching.post_balancing import as_batches
from isobatch.common.types import Groups, IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One rank's arguments of `torch.distributed.all_to_all_single`, counted in examples."""

    send_places: IntArray
    """Places in the rank's source batch in the order to send them: by target rank, then place."""
    send_counts: IntArray
    """Examples to each rank, shape (num_ranks,)."""
    receive_counts: IntArray
    """Examples from each rank, shape (num_ranks,)."""
    receive_places: IntArray
    """Places in the rank's target batch of the examples in the order of arrival: by source rank."""


@dataclass(frozen=True, slots=True)
class Permutation:
    """A permutation of a step's examples between ranks."""

    order: IntArray
    """Place in the source layout of each place of the target layout, shape (num_examples,)."""
    source_offsets: IntArray
    """Rank r holds the places `source_offsets[r]:source_offsets[r + 1]` of the source layout."""
    target_offsets: IntArray
    """Places of each rank in the target layout, likewise."""

    def __post_init__(self) -> None:
        source, target, num_examples = self.source_offsets, self.target_offsets, len(self.order)
        if len(source) != len(target) or not source[-1] == target[-1] == num_examples:
            raise ValueError(
                f"{num_examples} examples, {len(source) - 1} source ranks with {source[-1]},"
                f" {len(target) - 1} target ranks with {target[-1]}; all must agree"
            )

    @property
    def num_ranks(self) -> int:
        """Ranks of both layouts."""
        return len(self.source_offsets) - 1

    @property
    def source_ranks(self) -> IntArray:
        """Rank that holds each example in the source layout, in source order."""
        return np.repeat(np.arange(self.num_ranks), np.diff(self.source_offsets))

    @property
    def target_ranks(self) -> IntArray:
        """Rank that gets each example, in source order: what `from_assignment` was given."""
        ranks = np.empty(len(self.order), np.int64)
        ranks[self.order] = np.repeat(np.arange(self.num_ranks), np.diff(self.target_offsets))
        return ranks

    def apply(self, values: NDArray[Any]) -> NDArray[Any]:
        """Per-example values in target order, given in source order.

        >>> move = from_assignment(np.array([1, 0, 1]), np.array([0, 2, 3]))
        >>> move.apply(np.array([5, 6, 7])).tolist()
        [6, 5, 7]
        """
        return values[self.order]

    def inverse(self) -> "Permutation":
        """The way back."""
        order = np.empty_like(self.order)
        order[self.order] = np.arange(len(order))
        return Permutation(order, self.target_offsets, self.source_offsets)

    def then(self, after: "Permutation") -> "Permutation":
        """`after` o self in one move (OrchMLLM, Rearrangement Composition)."""
        ends, starts = self.target_offsets, after.source_offsets
        if not np.array_equal(ends, starts):
            raise ValueError(
                f"the first permutation ends with {np.diff(ends)[:8]} examples per rank, the second"
                f" starts from {np.diff(starts)[:8]} (first 8 ranks); they must be equal"
            )
        return Permutation(self.order[after.order], self.source_offsets, after.target_offsets)

    def expand(self, counts: IntArray) -> "Permutation":
        """The same permutation of the examples' items: their images, or their tokens.

        `counts`: items of each example in source order, shape (num_examples,), none negative. Items
        of an example stay together and in order. So an encoder may be balanced image by image.
        """
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        items = Groups(np.arange(starts[-1]), starts).take(self.order)
        ends = items.offsets[self.target_offsets]
        return Permutation(items.samples, starts[self.source_offsets], ends)

    def exchange(self, rank: int) -> Exchange:
        """What `rank` sends and receives; the result of all ranks' exchanges is `apply`."""
        sent = slice(self.source_offsets[rank], self.source_offsets[rank + 1])
        received = slice(self.target_offsets[rank], self.target_offsets[rank + 1])
        to_place, from_place = self.inverse().order[sent], self.order[received]
        return Exchange(
            send_places=np.argsort(to_place, kind="stable"),
            send_counts=_per_rank(to_place, self.target_offsets),
            receive_counts=_per_rank(from_place, self.source_offsets),
            # by source rank, and inside it as the sender sorts them: by target place
            receive_places=np.argsort(_rank_of(from_place, self.source_offsets), kind="stable"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CommVolumes:
    """Communication volumes of a permutation, in the unit of the lengths (tokens)."""

    total: int
    """Sum of everything that changes its rank."""
    average_inter_node: float
    """Sends to other nodes, mean over ranks: OrchMLLM's figure 13."""
    largest_inter_node: int
    """Most that a rank sends to other nodes: OrchMLLM's equation 5; small by `place_batches`."""
    all_gather: int
    """Receives of a rank if all batches were gathered: (d - 1) x largest batch, equation 3."""


def from_assignment(target_ranks: IntArray, source_offsets: IntArray) -> Permutation:
    """The permutation that brings each example to its target rank, in source order there.

    `target_ranks` in source order, shape (num_examples,): the result of a function of
    `balance.dispatching.post_balancing`, or with node-wise placement `place_batches(...)[batches]`.

    >>> from_assignment(np.array([1, 0, 1]), np.array([0, 2, 3])).order.tolist()
    [1, 0, 2]
    """
    num_ranks = len(source_offsets) - 1
    target_ranks = np.asarray(target_ranks, dtype=np.int64)
    if len(target_ranks) and not (target_ranks.min() >= 0 and target_ranks.max() < num_ranks):
        raise ValueError(
            f"target ranks {target_ranks.min()} to {target_ranks.max()}; "
            f"must be 0 to {num_ranks - 1}"
        )
    batches = as_batches(target_ranks, num_ranks)
    return Permutation(batches.samples, np.asarray(source_offsets, dtype=np.int64), batches.offsets)


def comm_volumes(move: Permutation, lengths: IntArray, *, ranks_per_node: int) -> CommVolumes:
    """Communication volumes of examples of these `lengths` (source order, (num_examples,)).

    >>> swap = from_assignment(np.array([1, 0, 2]), np.array([0, 1, 2, 3]))
    >>> comm_volumes(swap, np.array([5, 7, 9]), ranks_per_node=1)
    CommVolumes(total=12, average_inter_node=4.0, largest_inter_node=7, all_gather=18)
    """
    source, target, num_ranks = move.source_ranks, move.target_ranks, move.num_ranks
    abroad = np.where(source // ranks_per_node != target // ranks_per_node, lengths, 0)
    # sums of int64 per rank: examples of a rank are neighbours in source order
    examples = Groups(np.arange(len(source)), move.source_offsets)
    sends, held = examples.sum(abroad), examples.sum(lengths)
    return CommVolumes(
        total=int(lengths[source != target].sum()),
        average_inter_node=float(sends.mean()),
        largest_inter_node=int(sends.max()),
        all_gather=(num_ranks - 1) * int(held.max()),
    )


def _rank_of(places: IntArray, offsets: IntArray) -> IntArray:
    """Rank that holds each place of a layout."""
    return np.searchsorted(offsets, places, side="right") - 1


def _per_rank(places: IntArray, offsets: IntArray) -> IntArray:
    return np.bincount(_rank_of(places, offsets), minlength=len(offsets) - 1)
