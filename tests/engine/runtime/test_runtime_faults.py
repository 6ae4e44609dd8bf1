"""A rank that dies, a loss that is no number, a tensor unlike its spec: all ranks end soon, with
one clear line.
"""

import pytest

from support.rank_programs.rank_faults import delay, lose, measure, not_finite
from support.ranks import run_ranks


@pytest.mark.parametrize(("num_ranks", "victim"), [(4, 2), (3, 0)])
def test_a_killed_rank_ends_the_others_who_all_name_it(tmp_path, num_ranks, victim):
    said = run_ranks(tmp_path, num_ranks, lose, num_ranks, victim)
    assert said[victim] is None
    for rank, own in enumerate(said):
        if rank != victim:
            assert own["type"] == "PeerLost"
            assert f"rank {rank} stops: rank {victim} does not answer" in own["error"]
            assert "\n" not in own["error"]
            assert own["seconds"] < 60


def test_a_rank_that_stops_for_longer_than_the_timeout_counts_as_lost(tmp_path):
    said = run_ranks(tmp_path, 2, delay, 6.0, 2.0)
    assert "rank 0 stops: rank 1 does not answer" in said[0]["error"]
    assert "rank 1 stops: the others waited for it longer than timeout_s" in said[1]["error"]


def test_a_loss_that_is_not_finite_and_a_wrong_shape_name_their_samples_on_all_ranks(tmp_path):
    said = run_ranks(tmp_path, 2, not_finite)
    for own in said:
        assert "nan in micro-batch 2 of replica 0, samples a2, b2" in own["stages"]
        assert "nan in micro-batch 2 of replica 1, samples a2, b2" in own["replicas"]
        assert own["stages, after"] > 0
        assert own["replicas, after"] > 0
        assert own["fewer"].startswith(
            "the ranks [0, 1] of a pipeline were given different micro-batches, schedules"
        )
        assert own["other"].startswith(
            "the ranks [0, 1] of a pipeline were given different micro-batches;"
        )
    assert said[0]["mismatch type"] == "SpecMismatch"
    assert said[0]["mismatch"] == (
        "the output of layer 4 for micro-batch 1 (samples a1, b1): "
        "'features' has the shape (2, 16), but the model's "
        "specs say (1, 2)"
    )
    assert said[1]["mismatch type"] == "PeerLost"
    assert "rank 0 does not answer" in said[1]["mismatch"]


def test_measured_steps_dropout_and_bf16(tmp_path):
    said = run_ranks(tmp_path, 2, measure)
    assert said[0]["starts"] == said[1]["starts"]
    assert said[0]["ends"] == said[1]["ends"]
    assert min(said[0]["starts"]) == 0
    for own in said:
        assert 0 < own["own share of the step's wall time"] <= 1
        assert own["same durations"]
        assert own["path"][0] == "forward"
        assert own["path"][-1] == "weight gradient"
        assert own["peak"] is None  # no GPU
        assert own["under way"] <= 2  # of 12 that were sent: as many as 1F1B has under way
        kept, again = own["dropout"]
        assert kept == pytest.approx(again, rel=1e-5, abs=1e-7)
        assert any(kept)
        for low, exact in own["bf16"]:
            assert low == pytest.approx(exact, rel=0.02)
            assert low != exact
        losses = [low for low, _ in own["bf16"]]
        assert losses == sorted(losses, reverse=True)
