"""The benchmark of orders: its bound against every grouping, its table, what it calls missed."""

from itertools import product

import numpy as np
import order
import pytest
import regrouping

from isobatch.balance.metrics import dist_ratio
from isobatch.common.types import Groups
from support.sample_pairs import repeated_pairs


def test_the_bound_is_majorized_by_every_grouping():
    rng = np.random.default_rng(0)
    for case in range(60):
        load, num_groups = rng.integers(0, 12, int(rng.integers(3, 8))), int(rng.integers(1, 4))
        even = np.sort(order.most_even(load, num_groups))[::-1]
        assert even.sum() == load.sum()
        for places in product(range(num_groups), repeat=len(load)):
            sums = np.bincount(places, load, num_groups)
            if len(set(places)) == num_groups:
                made = np.sort(sums)[::-1]
                assert (made.cumsum() >= even.cumsum()).all(), (case, load, places)


def test_the_random_dist_ratio_is_that_of_many_random_steps():
    load = np.random.default_rng(0).integers(5, 16, 5_000)
    rng = np.random.default_rng(1)
    drawn = np.concatenate([rng.permutation(load) for _ in range(40)])
    assert order.random_dist(load, 8) == pytest.approx(dist_ratio(drawn, 8), rel=0.01)


def test_it_prints_a_row_per_method_and_says_what_is_missed(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["order.py", "--samples", "400", "--dp", "8"])
    monkeypatch.setattr(order, "MEETING", -1)
    assert order.main() == 1
    shown = capsys.readouterr().out
    assert shown.count("bound, random order") == 4
    assert shown.count(order.DEFAULT) == 4
    assert "meet again at dp 8" in shown


def test_regrouping_prints_a_row_per_window_and_counts_pairs_right(capsys, monkeypatch):
    few = [order.long_documents(1_500, np.random.default_rng(0))]
    monkeypatch.setattr(regrouping, "datasets", lambda options: iter(few))
    monkeypatch.setattr("sys.argv", ["regrouping.py", "--dp", "8", "--windows", "64", "256"])
    assert regrouping.main() == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line[:1] == " "]
    assert [row[0] for row in rows if row and row[0].isdigit()] == ["0", "64", "256"] * 2
    rng = np.random.default_rng(0)
    one, other = (Groups(rng.permutation(90), np.arange(0, 91, 6)) for _ in range(2))
    assert regrouping.shared_pairs(one, other) == pytest.approx(repeated_pairs(one, other))
    assert regrouping.shared_pairs(one, one) == 1
