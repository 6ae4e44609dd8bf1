"""Routes of features: what each rank sends and receives puts every feature where its sample's
micro-batch is.
"""

import numpy as np
import pytest

from isobatch.balance.steps.step_planner import StepAssignment, StepRequest
from isobatch.common.errors import ConfigError
from isobatch.common.types import Groups
from isobatch.engine.dispatching.dispatch import DispatchedSteps
from isobatch.engine.dispatching.routes import feature_moves
from support.cases import for_each
from support.costs.random_examples import random_counts, uneven_offsets
from support.costs.step_routes import step_routes


def planned(seed, dp, micro_batches, count=60):
    rng = np.random.default_rng(seed)
    samples = StepRequest(
        counts=random_counts(rng, count),
        offsets=uneven_offsets(rng, count, dp * micro_batches),
        dp=dp,
        micro_batches=micro_batches,
    )
    features = {"vision": samples.counts.num_image_tokens, "audio": samples.counts.num_audio_tokens}
    return samples, DispatchedSteps()(samples), features


def named(batch, features):
    """Every feature of a batch by its sample and its place in it."""
    return [(int(sample), place) for sample in batch for place in range(features[sample])]


@pytest.mark.parametrize("micro_batches", [1, 3])
@for_each("seed", range(4))
def test_features_arrive_in_the_order_of_the_micro_batch(seed, micro_batches):
    _, work, features = planned(seed, 4, micro_batches)
    routes = [step_routes(work, features, rank) for rank in range(4)]
    for number in range(micro_batches):
        for name in ("vision", "audio"):
            own = [routes[rank][number][name].tokens for rank in range(4)]
            posted = {}  # (sender, receiver) -> what is on its way
            for rank, way in enumerate(own):
                made = named(work.encoders[name][rank][number], features[name])
                sent = [made[place] for place in way.send_places]
                ends = np.cumsum([0, *way.send_counts])
                for other in range(4):
                    posted[rank, other] = sent[ends[other] : ends[other + 1]]
            for rank, way in enumerate(own):
                came = [row for other in range(4) for row in posted[other, rank]]
                assert [
                    len(posted[other, rank]) for other in range(4)
                ] == way.receive_counts.tolist()
                used = dict(zip(way.receive_places.tolist(), came, strict=True))
                wanted = named(work.micro_batches[rank][number], features[name])
                assert [used[place] for place in range(len(wanted))] == wanted


@for_each("seed", range(4))
def test_moves_are_the_plan_s_compositions_and_routes_their_expansions(seed):
    samples, work, features = planned(seed, 6, 2)
    plans = DispatchedSteps().plan(samples)
    for name, moves in feature_moves(work, features).items():
        for number, (move, plan) in enumerate(zip(moves, plans, strict=True)):
            composed = plan.phases[name].features
            np.testing.assert_array_equal(move.examples.order, composed.order)
            np.testing.assert_array_equal(move.examples.target_offsets, composed.target_offsets)
            whole = composed.expand(move.features)
            for rank in range(6):
                route = step_routes(work, features, rank)[number][name].tokens
                for field in ("send_places", "send_counts", "receive_counts", "receive_places"):
                    np.testing.assert_array_equal(
                        getattr(route, field), getattr(whole.exchange(rank), field)
                    )


def test_nothing_travels_if_encoders_work_where_the_language_model_does():
    _, work, features = planned(0, 4, 2)
    alike = StepAssignment(
        micro_batches=work.micro_batches, encoders={"vision": work.micro_batches}
    )
    assert not any(routes["vision"].travels for routes in step_routes(alike, features, 1))
    assert any(routes["vision"].travels for routes in step_routes(work, features, 1))


def test_a_sample_encoded_in_another_round_is_named():
    both = (
        Groups(np.array([0, 1]), np.array([0, 1, 2])),
        Groups(np.array([1, 0]), np.array([0, 1, 2])),
    )
    work = StepAssignment(micro_batches=(both[0],), encoders={"vision": (both[1],)})
    with pytest.raises(ConfigError, match=r"sample 0 .*round 0"):
        step_routes(work, {"vision": np.array([4, 4])}, 0)


def test_uneven_numbers_of_batches_are_named():
    one, two = Groups(np.array([0]), np.array([0, 1])), Groups(np.array([1]), np.array([0, 1, 1]))
    with pytest.raises(ConfigError, match=r"\[1, 2\] batches"):
        step_routes(StepAssignment(micro_batches=(one, two), encoders={}), {}, 0)
