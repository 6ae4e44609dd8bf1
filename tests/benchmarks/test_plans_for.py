"""The benchmark of plans for other trainers prints a row for each trainer that has a pipeline."""

import plans_for

from isobatch.engine.cost_model.parallel import Parallelism


def test_a_row_has_both_plans(monkeypatch):
    monkeypatch.setattr(plans_for, "SHAPES", (("1f1b", 1),))
    monkeypatch.setattr(plans_for, "MICRO_BATCHES", 4)
    rows = plans_for.rows_of("one", "qwen3_5", Parallelism(tp=2, pp=4, dp=1))
    assert [row[3] for row in rows] == ["megatron", "torchtitan", "automodel"]
    for row in rows:
        assert float(row[4]) >= float(row[5]) > 0
        assert sum(map(int, row[8].partition(";")[0].split())) == 32
    assert len(plans_for.rows_of("one", "internvl_1_5", Parallelism(tp=2, pp=4, dp=1))) == 1
