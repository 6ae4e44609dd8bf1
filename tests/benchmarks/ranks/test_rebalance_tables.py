"""The benchmarks of moved samples and of rollouts print their tables, with figures that hold."""

import re
import sys

import numpy as np
import pytest
import rebalance
import rollouts

from isobatch.balance.dispatching.rollouts import assign_rollouts


def test_waits_of_rollouts_are_those_of_the_plan(capfd):
    drawn = rollouts.draw(16, 4, 0)
    plan = assign_rollouts(drawn.costs, drawn.counts.seq_len, num_ranks=4, max_tokens=16_384)
    vision, llm, attention, batches, step, _, _ = rollouts.measure(drawn, plan.micro_batches)
    loads = np.array([drawn.costs[plan.ranks == rank].sum(axis=0) for rank in range(4)])
    assert vision == pytest.approx(1 - loads[:, 0].mean() / loads[:, 0].max())
    assert 0 <= attention < 0.5
    assert 0 <= llm < 0.2
    assert batches == len(plan.micro_batches[0])
    assert step >= 1
    rollouts.main(["--prompts", "16", "--each", "4", "--ranks", "4", "--steps", "1"])
    printed = capfd.readouterr().out
    assert printed.count("Isobatch") == 4
    assert "nan" not in printed


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_the_table_of_moved_samples_has_fewer_waits_and_equal_gradients(capfd, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["rebalance.py"])
    rebalance.main(["--ranks", "2", "--steps", "2", "--samples", "4"])
    printed = capfd.readouterr().out
    rows = [row for row in printed.splitlines() if re.search(r"\de-\d\d", row)]
    assert len(rows) == len(rebalance.ROWS)
    for row in rows:
        assert float(re.findall(r"\d+e-\d+", row)[0]) < 1e-5
