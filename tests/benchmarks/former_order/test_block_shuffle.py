"""Order of groups: every group once whatever is taken, exact resume, balanced and well mixed
micro-batches.
"""

import json
from itertools import pairwise

import numpy as np
import pytest
from former_order.block_shuffle import BlockShuffle, OrderConfig, choose_order
from former_order.sort_groups import arrange_sources, sort_groups, source_shares
from hypothesis import given, settings
from hypothesis import strategies as st

from isobatch.balance.metrics import autocorrelation, dist_ratio, source_entropy
from isobatch.common.types import Groups
from support.group_loads import KINDS, loads_of
from support.sample_pairs import repeated_pairs

sizes = st.lists(st.integers(0, 40), min_size=1, max_size=60)
steps = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 5)), min_size=1, max_size=12)
windows = st.sampled_from([1, 2, 4, 8])
orders = st.builds(
    lambda window, times, lanes: OrderConfig(
        block_size=window * times, num_lanes=lanes, window_size=window
    ),
    windows,
    st.integers(1, 7),
    st.integers(1, 9),
)


def stream_of(num_groups, order, epoch=0, seed=0, **state):
    return BlockShuffle(num_groups=num_groups, order=order, seed=seed, epoch=epoch, **state)


kinds = st.sampled_from(KINDS)


@settings(deadline=None)
@given(num_groups=st.integers(0, 400), order=orders, counts=sizes, seed=st.integers(0, 2**40))
def test_every_group_once_whatever_is_taken_and_wherever_the_state_is_restored(
    num_groups, order, counts, seed
):
    stream = stream_of(num_groups, order, seed=seed)
    seen = []
    for turn, count in enumerate([*counts, num_groups]):
        before = stream.remaining
        taken = stream.take(count)
        assert len(taken) == min(count, before)
        seen += taken.tolist()
        if turn % 2:  # a new process, which knows the state alone
            stream = stream_of(
                num_groups, order, seed=seed, **json.loads(json.dumps(stream.state()))
            )
    assert stream.remaining == 0
    assert sorted(seen) == list(range(num_groups))


@settings(deadline=None)
@given(
    num_groups=st.integers(0, 200),
    runs=steps,
    kind=kinds,
    order=orders,
    seed=st.integers(0, 2**40),
)
def test_every_group_once_in_steps_of_changing_ranks_and_micro_batches(
    num_groups, runs, kind, order, seed
):
    loads = loads_of(num_groups, kind)
    make = lambda n, **state: stream_of(n, order, **state)  # noqa: E731
    stream, seen = make(num_groups, seed=seed), []
    for dp, micro_batches in [*runs, *[(8, 8)] * (num_groups // 64 + 1)]:
        before = stream.remaining
        step = stream.take_step(dp, micro_batches, loads)
        assert step.shape == (dp, micro_batches)
        assert (step >= 0).sum() == min(dp * micro_batches, before)
        seen += step[step >= 0].tolist()
        stream = make(num_groups, seed=seed, **json.loads(json.dumps(stream.state())))
    assert stream.remaining == 0
    assert sorted(seen) == list(range(num_groups))


@settings(deadline=None)
@given(num_groups=st.integers(1, 300), order=orders, counts=sizes)
def test_a_restored_stream_goes_on_as_the_one_it_was_saved_from(num_groups, order, counts):
    make = lambda n, **state: stream_of(n, order, **state)  # noqa: E731
    stream = make(num_groups)
    for count in counts[:-1]:
        stream.take(count)
    restored, copied = make(num_groups, **stream.state()), stream.copy()
    expected = stream.take(counts[-1]).tolist()
    assert restored.take(counts[-1]).tolist() == expected
    assert copied.take(counts[-1]).tolist() == expected


def test_micro_batches_come_from_one_lane_each_and_from_all_lanes_alike():
    order = OrderConfig(block_size=32, num_lanes=4)
    stream = stream_of(4 * 320, order)
    lanes = [set((stream.take(8) // 320).tolist()) for _ in range(160)]
    assert all(len(lane) == 1 for lane in lanes)
    first_half = [lane.pop() for lane in lanes[:80]]
    assert all(10 <= first_half.count(lane) <= 30 for lane in range(4))
    repeats = sum(a == b for a, b in pairwise(first_half))
    assert 10 <= repeats <= 30  # as often as in a random order


@pytest.mark.parametrize("dp", [8, 12, 16, 64, 100, 400])
def test_a_micro_batch_larger_than_a_lane_is_one_stretch_of_the_path(dp):
    stream = stream_of(
        1_600, OrderConfig(block_size=16, num_lanes=32, window_size=8)
    )  # lanes of 48 or 64
    num_steps = 1_600 // dp
    spans = [np.ptp(stream.take(dp)) for _ in range(num_steps)]
    # but for the last, which gather what the lanes could not give in full
    assert np.median(spans) <= 2 * max(dp, 64)
    assert sum(span > 4 * max(dp, 64) for span in spans) <= num_steps / 4


def test_a_window_is_drawn_evenly_from_all_of_its_parts():
    stream = stream_of(64, OrderConfig(block_size=64, num_lanes=1, window_size=64))
    places = stream.take(64)
    for size in (2, 4, 8, 16, 32):
        for start in range(0, 64, size):
            assert sorted((places[start : start + size] * size // 64).tolist()) == list(range(size))


def test_groups_of_a_micro_batch_meet_others_in_the_next_epoch():
    order = choose_order(20_000)  # windows of 32

    def micro_batches(epoch):
        stream = stream_of(20_000, order, epoch)
        return Groups(
            np.concatenate([stream.take(8) for _ in range(2_500)]), np.arange(0, 20_001, 8)
        )

    assert repeated_pairs(micro_batches(0), micro_batches(1)) < 0.25  # 7 of 31 by chance


def test_streams_are_the_same_everywhere_and_others_in_each_epoch_and_seed():
    order = choose_order(5_000)
    first = stream_of(5_000, order).take(5_000)
    # across versions: resume depends on it
    assert first[:8].tolist() == FIRST_BLOCKS
    for make in (lambda **kind: stream_of(5_000, order, **kind),):
        assert not np.array_equal(make().take(5_000), make(epoch=1).take(5_000))
        assert not np.array_equal(make().take(5_000), make(seed=1).take(5_000))


FIRST_BLOCKS = [255, 251, 252, 248, 254, 250, 253, 249]


@pytest.mark.parametrize("state", [{"consumed": [1]}, {"consumed": [-1, 0]}, {"consumed": [99, 0]}])
def test_a_state_that_does_not_fit_is_refused(state):
    with pytest.raises(ValueError, match="does not fit"):
        stream_of(20, OrderConfig(block_size=5, num_lanes=2), **state)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"block_size": 0, "num_lanes": 1}, "at least 1"),
        ({"block_size": 8, "num_lanes": 0}, "at least 1"),
        ({"block_size": 8, "num_lanes": 1, "window_size": 3}, "power of two"),
        ({"block_size": 8, "num_lanes": 1, "window_size": 16}, "divides block_size 8"),
    ],
)
def test_an_order_that_cannot_be_cut_is_refused(config, message):
    with pytest.raises(ValueError, match=message):
        OrderConfig(**config)


@pytest.mark.parametrize("num_groups", [0, 1, 7, 65, 132, 300, 10_000, 250_000_000])
def test_chosen_lanes_have_a_block_each(num_groups):
    order = choose_order(num_groups)
    assert 1 <= order.num_lanes <= 32
    assert order.num_lanes == 1 or num_groups >= order.block_size * order.num_lanes
    assert min(stream_of(num_groups, order).lane_sizes) >= min(num_groups, order.block_size)


def test_a_stream_of_250_million_groups_costs_its_blocks_alone():
    order = choose_order(250_000_000)
    stream = stream_of(250_000_000, order)
    taken = np.concatenate([stream.take(64) for _ in range(300)])
    assert len(np.unique(taken)) == 300 * 64
    opened = sum(part.nbytes for _, part in stream._opened.values())
    assert opened + sum(blocks.nbytes for blocks in stream._blocks.values()) < 2_000_000


def packed_loads(num_groups, kind):
    """Loads as grouping leaves them: near both caps, patches few-valued, ViT tokens (native
    resolution) many-valued.
    """
    rng = np.random.default_rng(1)
    tokens = np.minimum(4_096, 4_096 - rng.exponential(400, num_groups).astype(int)).clip(500)
    if kind == "patches":
        return rng.choice(
            [14, 13, 12, 9, 5, 1], size=num_groups, p=[0.5, 0.2, 0.1, 0.1, 0.05, 0.05]
        ), tokens
    return (16_384 - rng.exponential(1_500, num_groups).astype(int) // 4 * 4).clip(1_000), tokens


@pytest.mark.parametrize("kind", ["patches", "vit_tokens"])
@pytest.mark.parametrize("dp", [4, 8, 32])
def test_ranks_are_balanced_and_consecutive_micro_batches_differ(kind, dp):
    num_groups = 20_000
    vision, tokens = packed_loads(num_groups, kind)
    path = sort_groups(vision, tokens, seed=0)
    stream = stream_of(num_groups, choose_order(num_groups))
    ours = path[np.concatenate([stream.take(dp) for _ in range(num_groups // dp)])]
    random = np.random.default_rng(0).permutation(num_groups)
    # with few vision values one path serves both loads; else both share it, and 4 is what 20,000
    # groups allow
    factors = (50, 15) if kind == "patches" else (4, 4)
    for loads, factor in zip((vision, tokens), factors, strict=True):
        assert dist_ratio(loads[ours], dp) < dist_ratio(loads[random], dp) / factor
        assert abs(autocorrelation(loads[ours], dp)) < 4 / np.sqrt(num_groups / dp)
    along = path[: num_groups // dp * dp]
    assert autocorrelation(vision[along], dp) > 0.9  # what the lanes are for


def test_arranged_sources_are_mixed_better_than_by_chance():
    num_groups = 20_000
    vision, tokens = packed_loads(num_groups, "patches")
    groups = Groups(np.arange(num_groups), np.arange(num_groups + 1))
    sources = np.random.default_rng(2).integers(0, 4, num_groups)
    order = choose_order(num_groups)
    path = sort_groups(vision, tokens, seed=0)
    stream = stream_of(num_groups, order)
    taken = np.concatenate([stream.take(8) for _ in range(num_groups // 8)])
    plain = source_entropy(groups.take(path[taken]), sources, 8)
    arranged = arrange_sources(path, source_shares(groups, sources), order.window_size)
    assert plain == pytest.approx(1, abs=0.02)
    assert source_entropy(groups.take(arranged[taken]), sources, 8) > plain + 0.1
