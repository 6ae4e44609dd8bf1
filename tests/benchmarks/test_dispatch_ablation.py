"""The benchmark of OrchMLLM's ablations runs on a tiny model, computed and with stand-ins, and
refuses wrong losses.
"""

from dataclasses import replace
from types import SimpleNamespace

import dispatch_ablation as ablation
import numpy as np
import pytest
from dispatching import runs


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    "options", [[], ["--standin", "--step-ms", "20"]], ids=["computed", "stand-ins"]
)
def test_every_variant_has_a_row_in_each_table_and_all_losses_agree(options, capsys):
    given = ["--tiny", "--steps", "1", "--samples", "3", "--ranks", "2"]
    assert ablation.main([*given, *options]) == 0
    printed = capsys.readouterr().out
    assert "…" not in printed  # nothing is cut off
    lines = printed.splitlines()
    names = [variant.name for variant in runs.variants(1)]
    for name in names:
        rows = [
            line.replace(name, "", 1).split()
            for line in lines
            if line.strip().startswith(f"{name}  ")
        ]
        assert len(rows) == 4  # of times and of balance, in two settings
        assert [float(row[1].removesuffix("x")) > 0 for row in rows[::2]] == [True, True]
        assert all(0 <= float(ratio) < 1 for row in rows[1::2] for ratio in row[:3])
    assert sum("limit" in line for line in lines) == 2  # one in each setting


def test_runs_are_compared_with_no_balance_and_with_a_careful_user(capsys):
    def took(**seconds):
        return {
            name: SimpleNamespace(step_s=seconds[key])
            for name, key in (
                (runs.NOT_BALANCED, "no"),
                (runs.CAREFUL, "careful"),
                ("ours", "ours"),
            )
        }

    three = [took(no=6, careful=4, ours=ours) for ours in (2, 3, 4)]
    ablation.console.print(ablation.compared(three, "weights replicated"))
    row = next(line for line in capsys.readouterr().out.splitlines() if " ours " in f" {line} ")
    assert row.split() == ["ours", "2.00", "1.50-3.00", "1.33", "1.00-2.00"]


def test_losses_that_differ_are_refused():  # with them the status above is not 0
    one = runs.Measured(
        seconds={"llm": np.ones((2, 1))},
        losses=np.array([4.0]),
        sent_bytes=np.zeros((2, 1)),
        abroad_bytes=np.zeros((2, 1)),
        peak_bytes=np.zeros((2, 1)),
    )
    assert ablation.losses_agree({"one": one, "same": replace(one, losses=np.array([4.00001]))})
    assert not ablation.losses_agree({"one": one, "other": replace(one, losses=np.array([4.0002]))})
