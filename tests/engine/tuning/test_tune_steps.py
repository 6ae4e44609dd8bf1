"""The tuner behind the loader's hook."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from isobatch.balance.steps.step_planner import StepPlanner, StepRequest, check_assignment
from isobatch.common.types import Counts
from isobatch.engine.cost_model.loads import Loads, PhaseLoads
from isobatch.engine.tuning.step_planner import TunedSteps
from isobatch.engine.tuning.tune import PartitionedModel, TuneOptions
from support.cases import for_each
from support.costs.linear_costs import LinearModel, even_borders

MODEL = LinearModel(layers=8, vit_token_ns=6_000)


def loads_of(counts):
    return Loads(
        vision=PhaseLoads(
            tokens=counts.num_vit_tokens,
            squares=576 * counts.num_vit_tokens,
            items=counts.num_image_patches,
        ),
        audio=PhaseLoads.nothing(len(counts)),
        llm=PhaseLoads(
            tokens=counts.seq_len, squares=counts.seq_len**2, items=np.ones(len(counts), np.int64)
        ),
    )


def planner_of(model=MODEL, **changes):
    options = TuneOptions(
        **{"max_seq_len": 4096, "effort": 10_000, "finalists": 2, "encode": "own"} | changes
    )
    pipeline = PartitionedModel(
        cost=model, borders=even_borders(model, 2), recompute=np.zeros(10, bool)
    )
    return TunedSteps(pipeline=pipeline, options=options, loads=loads_of)


def samples_of(seed, dp, micro_batches, *, empty=False):
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 6, dp * micro_batches)
    if empty:
        sizes[-micro_batches:] = 0
        sizes[0] = 0
    count = int(sizes.sum())
    images = np.where(rng.random(count) < 0.5, rng.integers(1, 4, count), 0)
    text = rng.lognormal(5, 1, count).astype(np.int64) % 3000 + 1
    counts = Counts(
        num_image_patches=images,
        num_vit_tokens=576 * images,
        num_image_tokens=576 * images,
        num_text_tokens=text,
        num_audio_tokens=np.zeros(count, np.int64),
        num_loss_tokens=text,
    )
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    return StepRequest(counts=counts, offsets=offsets, dp=dp, micro_batches=micro_batches)


@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize("dp", [1, 3])
@for_each("seed", range(5))
def test_every_sample_is_given_out_once_and_the_slowest_rank_is_not_slower(seed, dp, empty):
    samples = samples_of(seed, dp, 6, empty=empty and dp > 1)
    planner: StepPlanner = planner_of()
    check_assignment(planner(samples), samples)
    plan = planner_of().plan(samples)
    assert 0 < plan.step_ns <= plan.untuned_ns
    for groups, tuned in zip(plan.groups, plan.tuned, strict=True):
        assert len(groups) >= 1
        if tuned is not None:
            assert len(groups) == tuned.step.schedule.num_micro_batches


def test_dealing_samples_anew_helps_a_rank_that_got_too_much():
    samples = samples_of(3, 2, 8)
    # one rank gets the first two micro-batches only, the other all else
    offsets = samples.offsets.copy()
    offsets[3:9] = offsets[2]
    uneven = StepRequest(counts=samples.counts, offsets=offsets, dp=2, micro_batches=8)
    plan = planner_of().plan(uneven)
    times = [tuned.step_ns for tuned in plan.tuned if tuned is not None]
    assert len(times) == 2
    assert max(times) < 1.1 * min(times)
    assert plan.step_ns < 0.8 * plan.untuned_ns


def test_a_step_without_samples_gives_every_rank_an_empty_micro_batch():
    samples = samples_of(0, 2, 2)
    nothing = StepRequest(
        counts=samples.counts.take(np.zeros(0, np.int64)),
        offsets=np.zeros(5, np.int64),
        dp=2,
        micro_batches=2,
    )
    assert [groups.sizes.tolist() for groups in planner_of()(nothing).micro_batches] == [[0], [0]]


@for_each("seed", range(3))
def test_every_rank_is_told_its_own_schedule_and_all_the_same_of_the_step(seed):
    samples = samples_of(seed, 2, 6)
    work, plan = planner_of()(samples), planner_of().plan(samples)
    assert len(work.notes) == 2
    for rank, note in enumerate(work.notes):
        own, groups = plan.tuned[rank], work.micro_batches[rank]
        assert note.rank == rank
        assert note.schedule.num_micro_batches == len(groups)
        assert note.schedule.micro_batches.tolist() == own.step.schedule.micro_batches.tolist()
        assert (note.step_ns, note.untuned_ns) == (own.step_ns, plan.untuned_ns)
    (fingerprint,) = {note.fingerprint for note in work.notes}
    assert {note.fingerprint for note in planner_of()(samples).notes} == {fingerprint}
    assert planner_of()(samples_of(seed + 10, 2, 6)).notes[0].fingerprint != fingerprint
    # the same micro-batches, of which a rank does not run its own
    idle = replace(plan, tuned=(None, plan.tuned[1])).notes
    assert idle[0].pipeline_fingerprint != plan.notes[0].pipeline_fingerprint
    assert idle[1].pipeline_fingerprint == plan.notes[1].pipeline_fingerprint


@pytest.mark.parametrize("empty", [False, True])
@for_each("seed", range(4))
def test_ranks_that_tune_their_own_pipeline_plan_the_step_that_one_would_plan_for_all(seed, empty):
    samples = samples_of(seed, 4, 4, empty=empty)
    plan, tuned = planner_of().plan(samples), []
    for rank, (groups, note) in enumerate(zip(plan.groups, plan.notes, strict=True)):
        asked = replace(samples, rank=rank)
        work = planner_of()(asked)  # a planner of its own: ranks share nothing
        check_assignment(work, asked)
        own = work.micro_batches[rank]
        assert own.samples.tolist() == groups.samples.tolist()
        assert own.offsets.tolist() == groups.offsets.tolist()
        found = work.notes[rank]
        assert (found.fingerprint, found.pipeline_fingerprint) == (
            note.fingerprint,
            note.pipeline_fingerprint,
        )
        assert (found.step_ns, found.untuned_ns) == (note.step_ns, plan.untuned_ns)
        for other, theirs in enumerate(work.micro_batches):
            assert set(theirs.samples) == set(plan.groups[other].samples)
            assert other == rank or len(theirs) == 1
        tuned.append(sum(one is not None for one in planner_of().plan(asked).tuned))
    assert max(tuned) == 1


@for_each("seed", range(3))
def test_an_assignment_that_would_be_slower_is_not_taken(seed):
    samples = samples_of(seed, 2, 6)
    planner = planner_of()
    loads = planner.loads(samples.counts)
    given = [planner._rank_groups(samples, rank) for rank in range(2)]
    # both ranks as one of them: even already
    twice = np.concatenate([given[0].samples, given[0].samples])
    offsets = np.concatenate([given[0].offsets, given[0].offsets[-1] + given[0].offsets[1:]])
    even = StepRequest(
        counts=samples.counts.take(twice), offsets=offsets, dp=2, micro_batches=len(given[0])
    )
    plan = planner.plan(even)
    assert plan.step_ns <= plan.untuned_ns
    alone = planner._tune(loads, given[0]).step_ns
    assert plan.step_ns <= 1.02 * alone


def test_micro_batches_stay_as_small_as_costs_are_known_for_unless_they_were_larger():
    samples = samples_of(1, 1, 6)
    sizes = [int(samples.counts.seq_len[a:b].sum()) for a, b in pairwise(samples.offsets.tolist())]
    # large ones are worth their while
    model = LinearModel(layers=8, overhead_ns=100_000_000)
    free, bound = (
        max(
            int(groups.sum(samples.counts.seq_len).max())
            for groups in planner_of(model, **options)(samples).micro_batches
        )
        for options in ({}, {"largest_len": max(sizes)})
    )
    assert bound <= max(sizes) < free
    planned = planner_of(model, largest_len=1)(samples).micro_batches[0]
    assert int(planned.sum(samples.counts.seq_len).max()) <= max(sizes)
