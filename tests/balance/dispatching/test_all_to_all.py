"""Rearrangements as permutations: inverse, composition, expansion, All-to-All, volumes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isobatch.balance.dispatching.all_to_all import Permutation, comm_volumes, from_assignment
from isobatch.common.types import IntArray
from support.oracles import post_balancing_oracle as oracle


@st.composite
def layouts(draw: st.DrawFn, how_many: int = 1) -> tuple[list[IntArray], IntArray]:
    """(`how_many` arrays of target ranks, source offsets): some ranks may be empty, a step may be,
    too.
    """
    num_ranks = draw(st.integers(1, 7))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    sizes = rng.integers(0, draw(st.integers(1, 6)), num_ranks)
    return [rng.integers(0, num_ranks, sizes.sum()) for _ in range(how_many)], np.cumsum(
        [0, *sizes]
    )


@settings(max_examples=100, deadline=None)
@given(layouts())
def test_the_inverse_undoes(problem: tuple[list[IntArray], IntArray]) -> None:
    (targets,), offsets = problem
    there = from_assignment(targets, offsets)
    values = np.arange(len(targets)) * 10
    assert there.inverse().apply(there.apply(values)).tolist() == values.tolist()
    assert there.then(there.inverse()).order.tolist() == list(range(len(targets)))
    assert there.target_ranks.tolist() == targets.tolist()
    assert (
        there.inverse().target_ranks.tolist()
        == np.repeat(np.arange(len(offsets) - 1), np.diff(there.source_offsets))[
            there.order
        ].tolist()
    )


@settings(max_examples=100, deadline=None)
@given(layouts(how_many=2))
def test_composition_equals_going_home_first_and_then_to_the_llm(
    problem: tuple[list[IntArray], IntArray],
) -> None:
    (vision, llm), offsets = problem
    to_vision, to_llm = from_assignment(vision, offsets), from_assignment(llm, offsets)
    outputs = to_vision.apply(np.arange(len(vision)))
    at_once = to_vision.inverse().then(to_llm)
    assert (
        at_once.apply(outputs).tolist() == to_llm.apply(to_vision.inverse().apply(outputs)).tolist()
    )
    assert at_once.target_offsets.tolist() == to_llm.target_offsets.tolist()
    # which is where the examples' texts are: outputs meet their texts
    assert at_once.apply(outputs).tolist() == to_llm.apply(np.arange(len(llm))).tolist()


@settings(max_examples=100, deadline=None)
@given(layouts(), st.randoms())
def test_items_move_with_their_examples(
    problem: tuple[list[IntArray], IntArray], random: object
) -> None:
    (targets,), offsets = problem
    drawn = [random.randint(0, 3) for _ in targets]  # type: ignore[attr-defined]
    counts = np.array(drawn, np.int64)
    examples = from_assignment(targets, offsets)
    items = examples.expand(counts)
    names = [
        f"{example}.{item}" for example in range(len(targets)) for item in range(counts[example])
    ]
    expected = [
        f"{example}.{item}" for example in examples.order for item in range(counts[example])
    ]
    assert items.apply(np.array(names, object)).tolist() == expected
    assert items.target_ranks.tolist() == np.repeat(targets, counts).tolist()


@settings(max_examples=100, deadline=None)
@given(layouts(how_many=2))
def test_an_all_to_all_of_the_exchanges_is_the_rearrangement(
    problem: tuple[list[IntArray], IntArray],
) -> None:
    (first, second), offsets = problem
    # a composition: arrival order and target order differ
    moved = from_assignment(first, offsets).inverse().then(from_assignment(second, offsets))
    values, num_ranks = np.arange(len(first)), moved.num_ranks
    exchanges = [moved.exchange(rank) for rank in range(num_ranks)]
    sent = [
        np.split(
            values[moved.source_offsets[r] : moved.source_offsets[r + 1]][e.send_places],
            np.cumsum(e.send_counts),
        )
        for r, e in enumerate(exchanges)
    ]
    for rank, exchange in enumerate(exchanges):
        received = np.concatenate([sent[source][rank] for source in range(num_ranks)])
        assert [
            len(sent[source][rank]) for source in range(num_ranks)
        ] == exchange.receive_counts.tolist()
        batch = np.empty_like(received)
        batch[exchange.receive_places] = received
        expected = moved.apply(values)[moved.target_offsets[rank] : moved.target_offsets[rank + 1]]
        assert batch.tolist() == expected.tolist()


@settings(max_examples=100, deadline=None)
@given(layouts())
def test_an_all_to_all_delivers_an_assignment_in_target_order(
    problem: tuple[list[IntArray], IntArray],
) -> None:
    (targets,), offsets = problem
    moved = from_assignment(targets, offsets)
    for rank in range(moved.num_ranks):
        places = moved.exchange(rank).receive_places
        assert places.tolist() == list(range(len(places)))


@settings(max_examples=100, deadline=None)
@given(layouts(), st.integers(1, 4), st.integers(0, 99))
def test_volumes_equal_plain_sums(
    problem: tuple[list[IntArray], IntArray], ranks_per_node: int, seed: int
) -> None:
    (targets,), offsets = problem
    lengths = np.random.default_rng(seed).integers(0, 10**6, len(targets))
    num_ranks = len(offsets) - 1
    sources = np.repeat(np.arange(num_ranks), np.diff(offsets)).tolist()
    sends = oracle.sends(lengths.tolist(), sources, targets.tolist(), ranks_per_node, num_ranks)
    got = comm_volumes(from_assignment(targets, offsets), lengths, ranks_per_node=ranks_per_node)
    assert got.largest_inter_node == max(sends)
    assert got.average_inter_node == pytest.approx(sum(sends) / num_ranks)
    moves = oracle.sends(lengths.tolist(), sources, targets.tolist(), 1, num_ranks)
    assert got.total == sum(moves)
    held = oracle.loads(lengths.tolist(), sources, num_ranks, sum)
    assert got.all_gather == (num_ranks - 1) * max(held)


def test_layouts_that_do_not_meet_are_errors() -> None:
    first = from_assignment(np.array([0, 1]), np.array([0, 1, 2]))
    second = from_assignment(np.array([0, 1]), np.array([0, 2, 2]))
    with pytest.raises(ValueError, match="must be equal"):
        first.then(second)
    with pytest.raises(ValueError, match="must be 0 to 1"):
        from_assignment(np.array([0, 2]), np.array([0, 1, 2]))
    with pytest.raises(ValueError, match="all must agree"):
        Permutation(np.array([0]), np.array([0, 2]), np.array([0, 1]))
