"""Profiles of running models: times that are known, bytes that can be counted by hand, and planning
with both.
"""

import numpy as np
import pytest

from isobatch.engine.cost_model.costs import NS_PER_MS
from isobatch.engine.cost_model.profile_table import (
    profile_from_dict,
    profiled_costs,
    read_profile,
    write_profile,
)
from isobatch.engine.simulator.evaluate import evaluate
from support.costs.random_costs import schedule_for
from support.models.measured_models import loads_of, rows
from support.rank_programs.measuring_ranks import (
    COUNTS,
    DURATIONS,
    ROWS,
    WIDTHS,
    profile_chains,
    profile_timed,
)
from support.ranks import run_ranks

FLOAT = 4


@pytest.fixture(scope="module")
def chains(tmp_path_factory):
    return run_ranks(tmp_path_factory.mktemp("chains"), 2, profile_chains)


def column(profile, name):
    """(kinds, micro-batches)."""
    return np.array([kind[name] for kind in profile["kinds"]])


@pytest.fixture(scope="module")
def timed(tmp_path_factory):
    return run_ranks(tmp_path_factory.mktemp("timed"), 2, profile_timed)


@pytest.mark.parametrize("apart", [False, True])
def test_known_times_are_found_on_both_ranks_alike(timed, apart):
    first, second = (said[f"apart: {apart}"] for said in timed)
    assert first["profile"] == second["profile"]
    assert all(own["gradients kept"] and own["generator kept"] for own in (first, second))
    expected = {
        name: np.outer([getattr(own, field) for own in DURATIONS], ROWS) * NS_PER_MS
        for name, field in (
            ("forward_ns", "forward"),
            ("recompute_ns", "forward"),
            ("input_grad_ns", "input_grad"),
            ("weight_grad_ns", "weight_grad"),
        )
    }
    expected["input_grad_ns"][0] = 0  # nothing before the first layer is trained
    for name, true in expected.items():
        assert column(first["profile"], name).tolist() == true.tolist(), name


def test_bytes_of_a_linear_gelu_chain_equal_the_hand_count(chains):
    assert chains[0] == chains[1]
    profile = chains[0]["gelu"]
    inputs, outputs = np.array(WIDTHS[:-1]), np.array(WIDTHS[1:])
    given = (
        np.outer([0, *inputs[1:], outputs[-1]], COUNTS) * FLOAT
    )  # the first layer reads the micro-batch itself
    # a linear map needs its input, GELU its own, the loss its input
    saved = given + np.outer([*outputs, 0], COUNTS) * FLOAT
    assert column(profile, "saved_bytes").tolist() == saved.tolist()
    assert column(profile, "kept_bytes").tolist() == given.tolist()
    # a deferred weight gradient needs the map's input and the gradient of its output
    later = saved * np.array([1, 1, 1, 1, 0])[:, np.newaxis]
    assert column(profile, "deferred_bytes").tolist() == later.tolist()
    assert (
        column(profile, "sent_bytes").tolist() == (np.outer([*outputs, 0], COUNTS) * FLOAT).tolist()
    )
    params = [*(inputs * outputs + outputs), 0]
    assert column(profile, "param_counts").tolist() == params
    # weights, gradients, two moments
    assert column(profile, "state_bytes").tolist() == [4 * FLOAT * count for count in params]
    working, made = column(profile, "working_bytes")[:-1], np.outer(outputs, COUNTS) * FLOAT
    # going back through GELU, its output's gradient and its input's; then the input's and the
    # weights' at most
    assert (working >= 2 * made).all()
    assert (working <= 2 * made + given[:-1] + FLOAT * np.array(params[:-1])[:, np.newaxis]).all()


def test_what_two_layers_share_counts_once_whoever_needs_it(chains):
    # ReLU needs its own output, which is the input of the map behind it; the sum needs none of what
    # it is given
    outputs = np.array(WIDTHS[1:])
    assert (
        column(chains[0]["relu"], "saved_bytes").tolist()
        == (np.outer([0, *outputs], COUNTS) * FLOAT).tolist()
    )


def test_a_frozen_layer_in_front_only_runs_forward(chains):
    frozen, trained = chains[0]["frozen"], chains[0]["gelu"]
    for name in ("input_grad_ns", "weight_grad_ns", "recompute_ns", "saved_bytes", "kept_bytes"):
        assert (column(frozen, name)[0] == 0).all(), name
    assert [kind["sends_grad"] for kind in frozen["kinds"]] == [False, True, True, True, True]
    # the first trained layer goes back to its map, whose weights then follow apart
    assert (column(frozen, "input_grad_ns")[1:] > 0).all()
    assert column(frozen, "state_bytes")[0] * 4 == column(trained, "state_bytes")[0]
    # how a model is cut while it is measured does not matter
    assert (column(frozen, "saved_bytes")[2:] == column(trained, "saved_bytes")[2:]).all()


def test_equal_layers_are_one_kind_unless_one_has_nothing_trained_before_it(chains):
    alike = chains[0]["alike"]
    assert [kind["kind"] for kind in alike["kinds"]] == [
        "block, first trained",
        "block, trained",
        "loss",
    ]
    assert [layer["kind"] for layer in alike["layers"]] == [0, 1, 1, 2]
    assert chains[0]["unlike"] == (
        "layers block 0 and block 1 are of one kind, block, but have 70 and 154 parameters; "
        "give them different kinds"
    )


def test_a_profile_survives_disk_and_feeds_the_planner(chains, tmp_path):
    measured = profile_from_dict(chains[0]["gelu"])
    write_profile(measured, tmp_path / "profile.json")
    profile = read_profile(tmp_path / "profile.json")
    between = [rows(count, WIDTHS[0]) for count in (12, 24, 32, 36)]
    costs = profiled_costs(profile, loads_of(between))
    assert costs.names == ("block 0", "block 1", "block 2", "block 3", "loss")
    # bytes are linear in rows
    exact = np.outer(WIDTHS[1:], [12, 24, 32, 36]) * FLOAT
    assert np.abs(costs.sent_bytes[:-1] - exact).max() <= 2
    assert (costs.send_ns[:-1] > 0).all()
    assert (costs.send_ns[-1] == 0).all()
    borders = np.array([0, 2, 5])
    outcome = evaluate(costs, borders, np.zeros(5, bool), schedule_for("1f1b", borders, 4))
    assert outcome.step_ns >= int((costs.forward_ns + costs.backward_ns).sum(axis=1)[:2].sum())
