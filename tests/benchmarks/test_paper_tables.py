"""docs/results/papers.md is what the command makes, and what it claims of our plans holds."""

from __future__ import annotations

import re

import numpy as np
import paper_tables as tables
import pytest
from papers import omnibal_models as models
from papers import omnibal_steps as steps
from papers import omnibal_training as training
from papers import page

from isobatch.engine.cost_model.parallel import Training
from isobatch.engine.planning.search.partition_search import search_partition
from isobatch.engine.simulator.evaluate import evaluate
from isobatch.engine.simulator.schedule import make_schedule
from support import ROOT
from support.cases import for_each

PAGE = ROOT / "docs" / "results" / "papers.md"
CLOCKED = {"pipetune-2", "pipetune-8"}
"""Sections with search times."""


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in tables.SECTIONS if name not in CLOCKED])
def test_the_page_holds_what_the_command_makes(name):
    assert str(tables.SECTIONS[name]()) in PAGE.read_text("utf-8"), (
        "run `python benchmarks/paper_tables.py`"
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CLOCKED))
def test_sections_with_times_hold_the_same_figures_but_for_these(name):
    def without_times(text: str) -> str:
        return re.sub(r"\d\.\d{3}", "", text)

    assert without_times(str(tables.SECTIONS[name]())) in without_times(PAGE.read_text("utf-8"))


@pytest.mark.parametrize(
    "place", [place for place in range(9) if "EVA-4B" not in models.PAIRS[place].name]
)
@for_each("sequence_parallel", [True, False])
def test_our_plan_is_never_slower_than_the_papers_and_fits(place, sequence_parallel):
    pair = models.replace_parallel(models.PAIRS[place], sequence_parallel)
    costs, schedule = pair.constant_costs, make_schedule("1f1b", pair.pp, models.MICRO_BATCHES)
    memory = models.a100().usable_memory_bytes
    found = search_partition(costs, schedule, memory)
    borders = models.borders_of(costs, pair.layers)
    assert models.layers_of(costs, borders) == list(pair.layers)
    theirs = evaluate(
        costs, borders, models.first_recomputed(costs, borders, pair.recomputed), schedule
    )
    ours = evaluate(costs, found.borders, found.recompute, schedule)
    assert ours.step_ns == found.step_ns <= theirs.step_ns
    assert ours.fits(memory)
    assert found.gap < 0.04


def test_drawn_samples_are_like_those_the_paper_tells_of():
    counts = training.internvl_samples(20_000)
    random, groups = steps.random_data(counts, 8), steps.balanced_data(counts, 8)
    assert groups.samples / len(groups.loads) == pytest.approx(4.6, abs=0.1)
    assert random.pad_ratio == pytest.approx(0.31, abs=0.07)
    assert (random.dist_vit, random.dist_llm) == (
        pytest.approx(0.34, abs=0.04),
        pytest.approx(0.30, abs=0.02),
    )
    assert groups.loads.vision.items.max() <= models.IMAGES
    assert groups.loads.llm.tokens.max() <= models.SEQ_LEN


def test_each_kind_of_balance_makes_steps_faster():
    counts = training.internvl_samples(20_000)
    start, balanced, adaptive = steps.trainers(models.INTERNVL, models.a100(), models.TRAINING)
    groups = steps.balanced_data(counts, 4)
    times = [
        start.sample_ms(steps.random_data(counts, 4)),
        *(one.sample_ms(groups) for one in (start, balanced, adaptive)),
    ]
    assert (np.diff(times) < 0).all()


def test_gradients_of_frozen_parts_are_not_exchanged(monkeypatch):
    """Table 11: with the projector alone trained, one stage has parameters to exchange."""
    seen = []

    def count(params, *_):
        seen.append(params)
        return params

    monkeypatch.setattr(steps, "reduction_ns", count)
    start, _, _ = steps.trainers(models.INTERNVL, models.a100(), Training(vision=False, llm=False))
    start.sample_ms(steps.random_data(training.caption_samples(5_000), models.INTERNVL.dp))
    assert (np.concatenate(seen) > 0).tolist() == [True, False, False, False]


def test_a_table_is_markdown():
    assert page.table(["a", "b"], [[1, "2"]]).splitlines() == [
        "| a | b |",
        "|---|---|",
        "| 1 | 2 |",
    ]
