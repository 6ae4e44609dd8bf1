import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.oracles.fit_oracle import best_by_brute_force
from support.oracles.lp_bound import lp_bound


@st.composite
def problems(draw):
    caps = [draw(st.integers(0, 8)), draw(st.integers(1, 20))]
    rows = draw(st.lists(st.tuples(*(st.integers(0, cap) for cap in caps)), min_size=1, max_size=8))
    return list(np.array(rows).T), caps


@pytest.mark.thorough
@settings(max_examples=80, deadline=None)
@given(problems(), st.sampled_from([1, 2, 4]))
def test_never_above_the_best_grouping_nor_below_the_sums(problem, unit):
    loads, caps = problem
    bound = lp_bound(*loads, caps, unit=unit)
    assert bound <= best_by_brute_force(loads, caps) + 1e-6
    assert bound >= max(loads[0].sum() / max(caps[0], 1), loads[1].sum() / caps[1]) - 1e-9


def test_sees_room_that_nothing_can_fill():
    vision, tokens = np.full(600, 5), np.full(600, 1300)
    assert lp_bound(vision, tokens, [14, 4096]) == pytest.approx(300)  # the sums say 214.3
    assert lp_bound(vision, tokens, [15, 4096]) == pytest.approx(200)
    assert lp_bound(0 * vision, np.repeat([60, 41], 300), [0, 100]) == pytest.approx(
        450
    )  # 60 and 41 never meet
