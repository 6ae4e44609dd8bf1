"""Recomputation adapted on the running model: the choice fits, and all choices that there are show
how good it is.
"""

import pytest

from support.rank_programs.rank_memory_trials import (
    BORDERS,
    KINDS,
    STAGES,
    TIMES,
    adapt_both,
    every_mask,
    observe,
)
from support.ranks import run_ranks, what_they_said

SIZE = len(STAGES[0])


def time_of(stage, chosen):
    return sum(TIMES[kind] for kind, again in zip(STAGES[stage], chosen, strict=True) if again)


def best_of(stage, needs, limit):
    """The least recomputation of any choice that needs no more, by brute force."""
    return min(
        time_of(stage, mask[:SIZE])
        for mask, need in zip(every_mask(), needs, strict=True)
        if need[stage] <= limit
    )


CASES = [
    (1, {"1f1b": (0.0, 0.3, 0.7, 1.0), "zero_bubble": (0.5,), "gpipe": (0.6,)}),
    (2, {"1f1b": (0.4,)}),
]
"""Replicas of two ranks, and memory by schedule: a share of what recomputation can free."""


@pytest.fixture(scope="module", params=CASES, ids=["two ranks", "two replicas"])
def said(request, shared):
    dp, shares = request.param
    folder = shared(
        f"recompute-trials-{dp}",
        lambda folder: run_ranks(folder, 2 * dp, adapt_both, dp, shares, str(folder)),
    )
    return what_they_said(folder, 2 * dp)


def test_all_ranks_of_all_replicas_choose_alike(said):
    for schedule, found in said[0].items():
        for own in said[1:]:
            assert own[schedule]["limits"] == found["limits"]
            for theirs, ours in zip(own[schedule]["adapted"], found["adapted"], strict=True):
                assert (theirs["mask"], theirs["left"]) == (ours["mask"], ours["left"])


def test_the_choice_fits_and_is_the_best_of_all(said):
    for schedule, found in said[0].items():
        for limit, adapted in zip(found["limits"], found["adapted"], strict=True):
            assert min(adapted["left"]) >= 0
            for stage in range(2):
                own = adapted["mask"][BORDERS[stage] : BORDERS[stage + 1]]
                assert time_of(stage, own) <= best_of(stage, found["needs"], limit), (
                    schedule,
                    limit,
                    stage,
                )


def test_what_is_chosen_leaves_what_brute_force_measured(said):
    for found in said[0].values():
        numbers = {tuple(mask[:SIZE].tolist()): number for number, mask in enumerate(every_mask())}
        for limit, adapted in zip(found["limits"], found["adapted"], strict=True):
            for stage in range(2):
                number = numbers[tuple(adapted["mask"][BORDERS[stage] : BORDERS[stage + 1]])]
                need = found["needs"][number][stage]
                # nearly full memory has messages come later, which needs less
                assert adapted["left"][stage] == limit - min(need, limit)


def test_the_evidence_says_what_was_run(said):
    for schedule, found in said[0].items():
        for limit, adapted in zip(found["limits"], found["adapted"], strict=True):
            told = adapted["told"]
            assert (told["limit_bytes"], told["schedule"], told["kinds"]) == (
                limit,
                schedule,
                list(KINDS),
            )
            assert told["chosen"] == {"recompute": adapted["mask"], "left_bytes": adapted["left"]}
            assert all(told["trials"][0]["recompute"])
            ran = [trial for trial in told["trials"] if trial["left_bytes"] is not None]
            assert {
                "recompute": adapted["mask"],
                "left_bytes": adapted["left"],
                "out_of_memory": [],
            } in ran
            assert all(
                trial["out_of_memory"] for trial in told["trials"] if trial["left_bytes"] is None
            )
            assert set(told["held_bytes"]) == set(KINDS)
    assert any(
        trial["out_of_memory"]
        for found in said[0].values()
        for adapted in found["adapted"]
        for trial in adapted["told"]["trials"]
    )


def test_too_little_for_full_recomputation_is_infeasible_on_all_ranks_and_changes_nothing(said):
    for schedule in said[0]:
        for own in said:
            for kind, text in own[schedule]["refused"]:
                assert kind == "InfeasiblePlan"
                assert "run out of memory with every layer recomputed" in text
            assert own[schedule]["refused"] == said[0][schedule]["refused"]
            assert own[schedule]["mask then"] == [place % 2 == 0 for place in range(len(KINDS))]


def test_observations_leave_all_as_it_was_and_gradients_are_right_with_any_mask(tmp_path):
    for rank, own in enumerate(run_ranks(tmp_path, 2, observe)):
        assert max(own["off"]) <= 1e-6
        assert own["same generator"]
        assert own["same weights"]
        assert own["no gradients"]
        assert own["steps run"] == 0
        assert own["state"][0] == own["state"][1] > 0
        left, ran_out = own["exact limit"]
        assert left == 0
        assert ran_out == [0, 1]
        several, cpu, *nothing, layers, kinds, mask = own["questions"]
        assert "4 stages on 2 ranks" in several
        assert "limit_bytes is None" in cpu
        assert all("give at least one step" in text for text in nothing)
        assert layers == "costs are of 8 layers; the model has 11"
        assert kinds == "ranks were given costs of other kinds of layers; give each the same"
        assert mask == "recompute names 1 layers; the model has 11"
        assert len(nothing) == 2, rank
