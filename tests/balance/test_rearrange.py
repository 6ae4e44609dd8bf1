import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from balance.rearrange import from_assignment, volumes


@st.composite
def assignments(draw):
    """(target ranks of the examples, source offsets)"""
    num_ranks = draw(st.integers(1, 6))
    sizes = draw(st.lists(st.integers(0, 5), min_size=num_ranks, max_size=num_ranks))
    targets = draw(st.lists(st.integers(0, num_ranks - 1), min_size=sum(sizes), max_size=sum(sizes)))
    return np.array(targets, dtype=np.int64), np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


@settings(max_examples=150, deadline=None)
@given(assignments())
def test_examples_arrive_where_they_were_sent_in_source_order(case):
    targets, offsets = case
    there = from_assignment(targets, offsets)
    arrived = there.apply(np.arange(len(targets)))
    for rank in range(there.num_ranks):
        got = arrived[there.target_offsets[rank] : there.target_offsets[rank + 1]].tolist()
        assert got == np.flatnonzero(targets == rank).tolist()
    assert there.target_ranks.tolist() == targets.tolist()


@settings(max_examples=150, deadline=None)
@given(assignments())
def test_the_inverse_undoes(case):
    there = from_assignment(*case)
    values = np.arange(len(case[0]))
    assert there.inverse().apply(there.apply(values)).tolist() == values.tolist()
    assert there.apply(there.inverse().apply(values)).tolist() == values.tolist()


@settings(max_examples=150, deadline=None)
@given(assignments(), st.integers(0, 1000))
def test_composition_equals_one_after_the_other(case, seed):
    """OrchMLLM: encoder outputs travel by Pi_M o Pi_E^-1 to where the LLM wants them."""
    targets, offsets = case
    encoder = from_assignment(targets, offsets)
    llm = from_assignment(np.random.default_rng(seed).integers(0, encoder.num_ranks, len(targets)), offsets)
    values = np.arange(len(targets)) * 10
    moved = encoder.inverse().then(llm)
    assert moved.apply(encoder.apply(values)).tolist() == llm.apply(values).tolist()


@settings(max_examples=100, deadline=None)
@given(assignments())
def test_what_all_ranks_exchange_is_the_rearrangement(case):
    targets, offsets = case
    there = from_assignment(targets, offsets)
    values = np.arange(len(targets)) + 100
    exchanges = [there.exchange(rank) for rank in range(there.num_ranks)]
    mail = {}
    for rank, exchange in enumerate(exchanges):
        own = values[offsets[rank] : offsets[rank + 1]][exchange.send_places]
        for to, part in enumerate(np.split(own, np.cumsum(exchange.send_counts)[:-1])):
            mail[rank, to] = part
    for rank, exchange in enumerate(exchanges):
        received = np.concatenate([mail[source, rank] for source in range(there.num_ranks)])
        assert [len(mail[s, rank]) for s in range(there.num_ranks)] == exchange.receive_counts.tolist()
        batch = np.empty_like(received)
        batch[exchange.receive_places] = received
        assert (
            batch.tolist() == there.apply(values)[there.target_offsets[rank] : there.target_offsets[rank + 1]].tolist()
        )


@settings(max_examples=100, deadline=None)
@given(assignments(), st.integers(0, 1000))
def test_items_move_with_their_examples(case, seed):
    targets, offsets = case
    counts = np.random.default_rng(seed).integers(0, 4, len(targets))
    there = from_assignment(targets, offsets)
    owners = np.repeat(np.arange(len(targets)), counts)
    moved = there.expand(counts).apply(owners)
    assert moved.tolist() == [owner for owner in there.order.tolist() for _ in range(counts[owner])]


@settings(max_examples=100, deadline=None)
@given(assignments(), st.integers(1, 3), st.integers(0, 1000))
def test_volumes_equal_a_plain_count(case, ranks_per_node, seed):
    targets, offsets = case
    lengths = np.random.default_rng(seed).integers(0, 50, len(targets))
    there = from_assignment(targets, offsets)
    sends, held, total = [0] * there.num_ranks, [0] * there.num_ranks, 0
    for example, source in enumerate(there.source_ranks.tolist()):
        length, target = int(lengths[example]), int(targets[example])
        held[source] += length
        total += length if source != target else 0
        sends[source] += length if source // ranks_per_node != target // ranks_per_node else 0
    found = volumes(there, lengths, ranks_per_node=ranks_per_node)
    assert (found.total, found.largest_inter_node) == (total, max(sends))
    assert found.average_inter_node == pytest.approx(sum(sends) / len(sends))
    assert found.all_gather == (there.num_ranks - 1) * max(held)


def test_layouts_that_do_not_meet_are_refused():
    first = from_assignment(np.array([0, 0]), np.array([0, 1, 2]))
    with pytest.raises(ValueError, match="must be equal"):
        first.then(from_assignment(np.array([1, 0]), np.array([0, 1, 2])))
    with pytest.raises(ValueError, match="target ranks"):
        from_assignment(np.array([2]), np.array([0, 1]))
