"""OrchMLLM's plan: nothing lost, every phase balanced, and each of its parts is worth having."""

from itertools import product

import numpy as np
import pytest
from papers.dispatch_times import TokenBytes, phase_cost, phase_times, phase_volumes, step_times

from isobatch.balance.dispatching.all_to_all import from_assignment
from isobatch.common.errors import ConfigError
from isobatch.engine.cost_model.loads import PhaseLoads
from isobatch.engine.dispatching.dispatch import PHASES, DispatchOptions, Examples, plan_dispatch
from isobatch.models.clusters import Link
from support.cases import for_each
from support.costs.linear_costs import LinearModel
from support.costs.random_examples import random_counts, uneven_offsets

OPTIONS = {
    "full": {},
    "not node-wise": {"node_wise": False},
    "direct": {"reads_directly": True},
    "squares": {"algorithms": {"vision": "squares", "audio": "padded_attention", "llm": "squares"}},
    "weighted": {"square_weights": {"llm": 1e-4, "audio": 1e-3}},
    "conv": {"algorithms": {"vision": "conv", "llm": "sums"}},
    "llm only": {"algorithms": {"llm": "sums"}},
    "nothing": {"algorithms": {}},
    "encoders only": {"algorithms": {"vision": "sums", "audio": "padded"}},
}


def examples_of(seed, num_ranks=16, per_rank=12, *, uneven=False):
    rng = np.random.default_rng(seed)
    count = num_ranks * per_rank
    offsets = (
        uneven_offsets(rng, count, num_ranks) if uneven else np.arange(num_ranks + 1) * per_rank
    )
    return Examples.of_counts(random_counts(rng, count), offsets, audio_downsample=2)


def options_of(name, ranks_per_node=4):
    return DispatchOptions(ranks_per_node=ranks_per_node, **OPTIONS[name])


@for_each("name", OPTIONS)
@for_each("seed", range(8))
def test_every_example_is_worked_on_once_in_each_phase_that_it_has(name, seed):
    examples = examples_of(seed, uneven=seed % 2 == 1)
    plan = plan_dispatch(examples, options_of(name))
    for phase in PHASES:
        batches = plan.batches(phase)
        has = (
            np.flatnonzero(examples.lengths[phase])
            if phase != "llm"
            else np.arange(len(examples.lengths["llm"]))
        )
        assert len(batches) == examples.num_ranks
        assert sorted(batches.samples.tolist()) == has.tolist()
        tokens = [examples.lengths[phase][batches[rank]] for rank in range(len(batches))]
        padded = phase in plan.options.padded
        loads = [len(own) * own.max(initial=0) if padded else own.sum() for own in tokens]
        assert plan.phases[phase].balanced.tokens.tolist() == loads


@for_each("name", OPTIONS)
@for_each("seed", range(8))
def test_features_go_to_the_llm_as_if_they_had_gone_home_first(name, seed):
    examples = examples_of(seed, uneven=seed % 2 == 1)
    plan = plan_dispatch(examples, options_of(name))
    llm = plan.phases["llm"].ranks
    for phase in ("vision", "audio"):
        own = plan.phases[phase]
        values = np.arange(len(own.examples))
        made = own.moved.apply(values)
        home = own.moved.inverse().apply(made)
        offsets = np.searchsorted(own.examples, examples.offsets)
        wanted = from_assignment(llm[own.examples], offsets).apply(home)
        np.testing.assert_array_equal(own.features.apply(made), wanted)
        # which is where the LLM has these examples, in its order
        batches = plan.batches("llm")
        has = np.isin(batches.samples, own.examples)
        np.testing.assert_array_equal(own.examples[wanted], batches.samples[has])


@for_each("seed", range(10))
def test_balanced_phases_come_near_to_the_bound_on_heavy_tails(seed):
    examples = examples_of(seed, 32, 24)
    plan = plan_dispatch(examples)
    for phase in ("vision", "llm"):
        own, lengths = plan.phases[phase], examples.lengths[phase]
        bound = max(lengths.sum() / 32, lengths.max())
        assert bound <= own.balanced.tokens.max() <= 1.03 * bound
        assert own.balanced.tokens.max() < own.drawn.tokens.max()
    audio = plan.phases["audio"]
    most, useful = audio.balanced.tokens.max(), examples.lengths["audio"].sum()
    assert useful / 32 <= most < 0.7 * audio.drawn.tokens.max()


@for_each("seed", range(15))
def test_no_rank_has_more_than_four_thirds_of_the_best_possible(seed):
    examples = examples_of(seed, 3, 2, uneven=True)
    plan = plan_dispatch(examples)
    for phase in PHASES:
        lengths = examples.lengths[phase][plan.phases[phase].examples].tolist()
        padded = phase in plan.options.padded
        best = None
        for ranks in product(range(3), repeat=len(lengths)):
            own = [
                [x for x, at in zip(lengths, ranks, strict=True) if at == rank] for rank in range(3)
            ]
            most = max(len(x) * max(x, default=0) if padded else sum(x) for x in own)
            best = most if best is None else min(best, most)
        most = plan.phases[phase].balanced.tokens.max()
        # the padded algorithm is exact
        assert best == most if padded else best <= most <= 4 / 3 * best


def step_cost(phase, loads):
    """A large vision encoder, a small audio encoder, an LLM; ns."""
    per_token = {"vision": 3_000, "audio": 500, "llm": 6_000}[phase]
    return per_token * loads.tokens + loads.squares // 100


def whole_step(examples, communicator="all_to_all", **changes):
    plan = plan_dispatch(examples, DispatchOptions(ranks_per_node=8, **changes))
    token_bytes = TokenBytes(inputs={"vision": 588, "audio": 512, "llm": 8}, feature=7_168)
    link = Link(bytes_per_s=40e9, latency_ns=10_000)
    return step_times(plan, step_cost, link, token_bytes, communicator=communicator)


def test_every_ablation_costs_time_as_in_the_paper():
    mean = dict.fromkeys(
        ("full", "llm only", "nothing", "all rmpad", "all pad", "all gather", "not node-wise"), 0.0
    )
    for seed in range(6):
        examples = examples_of(seed, 64, 25)
        mean["full"] += whole_step(examples).step_ns
        mean["llm only"] += whole_step(examples, algorithms={"llm": "sums"}).step_ns
        mean["nothing"] += whole_step(examples, algorithms={}).step_ns
        rmpad, pad = ({"vision": name, "audio": name, "llm": "sums"} for name in ("sums", "padded"))
        mean["all rmpad"] += whole_step(examples, algorithms=rmpad).step_ns
        mean["all pad"] += whole_step(examples, algorithms=pad).step_ns
        mean["all gather"] += whole_step(examples, "all_gather").step_ns
        mean["not node-wise"] += whole_step(examples, node_wise=False).step_ns
    # figures 8 and 10 to 13
    assert mean["full"] < mean["llm only"] < mean["nothing"]
    assert all(mean["full"] < time for name, time in mean.items() if name != "full")


def test_node_wise_placement_keeps_inputs_in_their_node_and_features_where_inputs_are_read():
    inputs, features = dict.fromkeys((False, True), 0.0), dict.fromkeys((False, True), 0.0)
    for seed, node_wise in product(range(5), (False, True)):
        examples = examples_of(seed, 64, 25)
        plan = plan_dispatch(examples, DispatchOptions(node_wise=node_wise))
        direct = plan_dispatch(examples, DispatchOptions(node_wise=node_wise, reads_directly=True))
        for phase in ("vision", "audio"):
            inputs[node_wise] += phase_volumes(plan, phase).inputs.average_inter_node
            read = phase_volumes(direct, phase)
            assert read.inputs.total == 0
            features[node_wise] += read.features.average_inter_node
    assert inputs[True] < 0.85 * inputs[False]
    assert features[True] < 0.85 * features[False]


def test_going_home_first_moves_more():
    plan = plan_dispatch(examples_of(0, 64, 25))
    for phase in ("vision", "audio"):
        moved = phase_volumes(plan, phase)
        assert moved.features_home.average_inter_node > 0
        assert moved.features.average_inter_node < 2 * moved.features_home.average_inter_node
    assert phase_volumes(plan, "llm").features.total == 0


def test_llm_only_leaves_encoders_with_the_llm_and_nothing_moves_features():
    plan = plan_dispatch(examples_of(1), options_of("llm only"))
    llm = plan.phases["llm"].ranks
    for phase in ("vision", "audio"):
        own = plan.phases[phase]
        np.testing.assert_array_equal(own.ranks, llm[own.examples])
        assert phase_volumes(plan, phase).features.total == 0
    nothing = plan_dispatch(examples_of(1), options_of("nothing"))
    for phase in PHASES:
        assert (
            nothing.phases[phase].drawn.tokens.tolist()
            == nothing.phases[phase].balanced.tokens.tolist()
        )


def test_phase_times_are_a_phase_s_part_of_a_cost_function():
    model = LinearModel(encoders=2, layers=3)
    loads = PhaseLoads(tokens=np.array([0, 10]), squares=np.array([0, 100]), items=np.array([0, 1]))
    assert phase_cost(model)("vision", loads).tolist() == [0, 2 * 10 * model.vit_token_ns]
    assert phase_cost(model)("audio", loads).tolist() == [0, 0]
    assert phase_cost(model)("llm", loads).tolist() == [0, 9 * (10 * model.token_ns + 10)]
    plan = plan_dispatch(examples_of(0))
    drawn, planned = phase_times(plan, step_cost)["llm"]
    assert planned.max() < drawn.max()


def test_a_step_without_examples_of_a_phase_is_balanced():
    examples = examples_of(0, 4, 3)
    nothing = np.zeros(12, np.int64)
    silent = Examples(
        lengths=dict(examples.lengths) | {"audio": nothing},
        squares=dict(examples.squares) | {"audio": nothing},
        features=dict(examples.features) | {"audio": nothing},
        offsets=examples.offsets,
    )
    own = plan_dispatch(silent).phases["audio"]
    assert len(own.examples) == 0
    assert not own.balanced.tokens.any()


def test_the_same_draw_gives_the_same_plan():
    one, other = (plan_dispatch(examples_of(2)) for _ in range(2))
    for phase in PHASES:
        np.testing.assert_array_equal(one.phases[phase].ranks, other.phases[phase].ranks)


def test_unknown_phases_and_algorithms_are_errors():
    with pytest.raises(ConfigError, match="no phase 'smell'"):
        DispatchOptions(algorithms={"smell": "sums"})
    with pytest.raises(ConfigError, match="at least one rank"):
        DispatchOptions(ranks_per_node=0)
    with pytest.raises(ConfigError, match="algorithm of llm is 'best'"):
        plan_dispatch(examples_of(0), DispatchOptions(algorithms={"llm": "best"}))
