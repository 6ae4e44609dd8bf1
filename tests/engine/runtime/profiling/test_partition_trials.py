"""Partitions that are really run: the best one is found, all ranks agree, and what does not fit is
none of them.
"""

import json

import pytest

from support.rank_programs.measuring_ranks import try_partitions
from support.ranks import run_ranks


@pytest.fixture(scope="module")
def tried(tmp_path_factory):
    return run_ranks(tmp_path_factory.mktemp("tried"), 2, try_partitions)


def test_the_fastest_partition_is_chosen_though_another_is_ranked_first(tried):
    best = tried[0]["best"]
    assert best["anchor"] == best["candidates"][0]["borders"] == [0, 2, 4]
    assert best["chosen"] == [0, 1, 4]
    assert sorted(row["borders"][1] for row in best["candidates"]) == [1, 2, 3]
    for row in best["candidates"]:
        cut = row["borders"][1]
        # what the rank with more work does in a step of six micro-batches
        assert row["steps_ms"] == [6 * max(24 + 8 * (cut - 1), 8 * (4 - cut))] * 3
        assert row["median_ms"] == row["steps_ms"][0]
        assert row["predicted_ms"] >= row["median_ms"]  # which waits for the other one, too
        assert row["failure"] is None
    assert best["chosen_step_ms"] == min(row["median_ms"] for row in best["candidates"])


def test_all_ranks_agree_and_nothing_is_left_behind(tried):
    first, second = tried
    assert first == second
    assert first["gradients"] == first["groups left"] == 0
    assert first["weights"]


def test_evidence_says_what_was_measured_where(tried):
    best = json.loads(json.dumps(tried[0]["best"]))
    assert best["ranks"] == 2
    assert all(best[name] for name in ("host", "processor", "torch"))
    metrics = [row["metric_ms"] for row in best["candidates"]]
    assert metrics == sorted(metrics)


def test_a_partition_that_runs_out_of_memory_is_none(tried):
    crowded = tried[0]["crowded"]
    assert crowded["chosen"] == [0, 3, 4]
    for row in crowded["candidates"]:
        failed = row["borders"] != [0, 3, 4]
        assert (row["median_ms"] is None) == failed
        assert (row["steps_ms"] == []) == failed
        if failed:
            assert "out of memory in stages [1]" in row["failure"]
            assert row["predicted_ms"] is not None


def test_if_nothing_fits_all_ranks_say_so(tried):
    for own in tried:
        name, text = own["nowhere"]
        assert name == "InfeasiblePlan"
        assert text.startswith("partition [0, ")
        assert "out of memory" in text
        assert own["radius"][0] == "ConfigError"


def test_what_the_planner_refuses_is_not_run(tried):
    rows = {row["borders"][1]: row for row in tried[0]["planned"]["candidates"]}
    for cut in (1, 3):
        assert rows[cut]["failure"].startswith("rank 0 needs more")
        assert rows[cut]["steps_ms"] == []
        assert rows[cut]["predicted_ms"] is None
    assert len(rows[2]["steps_ms"]) == 1
    assert rows[2]["recompute"] == [0]
