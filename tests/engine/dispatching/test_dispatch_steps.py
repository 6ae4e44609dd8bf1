"""Dispatching behind the loader's hook."""

import numpy as np
import pytest

from isobatch.balance.steps.step_planner import StepPlanner, StepRequest, check_assignment
from isobatch.engine.dispatching.dispatch import DispatchedSteps, DispatchOptions
from support.cases import for_each
from support.costs.random_examples import random_counts, uneven_offsets


def samples_of(seed, dp, micro_batches, count=90):
    rng = np.random.default_rng(seed)
    return StepRequest(
        counts=random_counts(rng, count),
        offsets=uneven_offsets(rng, count, dp * micro_batches),
        dp=dp,
        micro_batches=micro_batches,
    )


@pytest.mark.parametrize("micro_batches", [1, 3])
@for_each("seed", range(6))
def test_the_loader_s_check_passes_and_samples_stay_in_their_round(seed, micro_batches):
    samples = samples_of(seed, 8, micro_batches)
    planner: StepPlanner = DispatchedSteps(audio_downsample=2)
    work = planner(samples)
    check_assignment(work, samples)
    rounds = np.repeat(np.arange(8 * micro_batches) % micro_batches, np.diff(samples.offsets))
    for ranks in (work.micro_batches, work.encoders["vision"], work.encoders["audio"]):
        for groups in ranks:
            assert len(groups) == micro_batches
            for number in range(micro_batches):
                assert set(rounds[groups[number]]) <= {number}


def test_encoders_get_only_samples_with_something_for_them():
    samples = samples_of(0, 4, 2)
    work = DispatchedSteps()(samples)
    given = np.concatenate([groups.samples for groups in work.encoders["audio"]])
    np.testing.assert_array_equal(np.sort(given), np.flatnonzero(samples.counts.num_audio_tokens))


def test_vision_and_llm_are_even_over_ranks():
    samples = samples_of(1, 8, 1, count=400)
    work = DispatchedSteps()(samples)
    for ranks, column in (
        (work.encoders["vision"], samples.counts.num_vit_tokens),
        (work.micro_batches, samples.counts.seq_len),
    ):
        tokens = np.array([groups.sum(column)[0] for groups in ranks])
        assert tokens.max() <= 1.05 * max(tokens.mean(), column.max())


def test_phases_that_are_not_balanced_are_not_named():
    samples = samples_of(2, 4, 1)
    work = DispatchedSteps(options=DispatchOptions(algorithms={"llm": "sums"}))(samples)
    check_assignment(work, samples)
    assert not work.encoders
