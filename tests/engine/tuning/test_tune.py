"""PipeTune's tuner: never slower than untuned, within memory, nothing lost, and each ingredient
helps.
"""

from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest

from isobatch.balance.baseline_samplers import pack_in_order
from isobatch.common.errors import ConfigError
from isobatch.engine.cost_model.loads import packed_loads
from isobatch.engine.simulator.evaluate import evaluate, memory_of
from isobatch.engine.simulator.program import Encodings, make_program
from isobatch.engine.simulator.schedule import PassKind
from isobatch.engine.simulator.simulate import simulate
from isobatch.engine.simulator.stages import stage_costs
from isobatch.engine.tuning.tune import PartitionedModel, TuneOptions, tune
from support.cases import draws, for_each
from support.costs.linear_costs import LinearModel, as_groups, even_borders, mixed_samples
from support.costs.random_costs import schedule_for

MODEL = LinearModel(layers=12, vit_token_ns=6_000)
LENGTH = 8192


def pipeline_of(model=MODEL, stages=4, **changes):
    recompute = np.zeros(model.encoders + model.layers, bool)
    return PartitionedModel(
        cost=model, borders=even_borders(model, stages), recompute=recompute, **changes
    )


def step_of(seed, count=64, *, length=LENGTH):
    samples = mixed_samples(np.random.default_rng(seed), count)
    return samples, pack_in_order(samples.llm.tokens, length)


def quick(**changes):
    return TuneOptions(**{"max_seq_len": 4096, "effort": 30_000, "finalists": 2} | changes)


def untuned(samples, given, pipeline):
    schedule = schedule_for(
        pipeline.schedule, pipeline.borders, len(given), pipeline.stages_per_rank
    )
    costs = pipeline.cost(packed_loads(samples, given))
    return evaluate(costs, pipeline.borders, pipeline.recompute, schedule)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero_bubble"])
@for_each("encode", ["never", "own", "any"])
@for_each("seed", draws(3))
def test_a_tuned_step_is_never_slower_and_holds_every_sample_once(seed, schedule, encode):
    samples, given = step_of(seed)
    pipeline = pipeline_of(schedule=schedule)
    tuned = tune(samples, given, pipeline, quick(encode=encode))
    packed, reordered = (
        tune(samples, given, pipeline, quick(sizes="given", **options)).step_ns
        for options in ({"search": "none"}, {"encode": encode})
    )
    assert untuned(samples, given, pipeline).step_ns >= packed >= reordered >= tuned.step_ns
    assert sorted(tuned.groups.samples.tolist()) == list(range(len(samples)))
    assert (tuned.groups.sum(samples.llm.tokens) <= max(tuned.max_len, LENGTH)).all()


@pytest.mark.parametrize("encode", ["never", "own", "any"])
@for_each("seed", draws(3))
def test_the_prediction_is_the_simulation_of_the_groups_in_their_order(seed, encode):
    samples, given = step_of(seed)
    pipeline = pipeline_of()
    tuned = tune(samples, given, pipeline, quick(encode=encode))
    plain = untuned(samples, tuned.groups, pipeline)
    ahead = (tuned.step.schedule.kinds == PassKind.ENCODE).sum()
    assert ahead == len(tuned.step.encoding_ranks)
    assert tuned.step_ns <= plain.step_ns if ahead else tuned.step_ns == plain.step_ns
    busy = plain.timeline.busy_ns.sum()
    assert tuned.step.timeline.busy_ns.sum() == busy


def test_even_micro_batches_in_one_order_leave_nothing_to_tune():
    # one sample per micro-batch, all alike, and no other size allowed
    samples, _ = step_of(0)
    samples = samples.take(np.zeros(8, np.int64))
    given = as_groups([[number] for number in range(8)])
    tuned = tune(
        samples, given, pipeline_of(), quick(sizes="given", max_seq_len=int(samples.llm.tokens[0]))
    )
    assert tuned.step_ns == untuned(samples, given, pipeline_of()).step_ns


@for_each("seed", draws(3))
def test_what_is_chosen_fits_into_memory(seed):
    samples, given = step_of(seed)
    plain = untuned(samples, given, pipeline_of())
    for share in (0.65, 0.8, 1.0):
        limit = int(share * plain.memory.peak_bytes.max())
        tuned = tune(samples, given, pipeline_of(memory_bytes=limit), quick(encode="any"))
        assert tuned.step.peak_bytes.max() <= limit
        own = memory_of(tuned.step.schedule, tuned.step.stages).peak_bytes
        assert (own <= tuned.step.peak_bytes).all()


@for_each("seed", draws(3))
def test_with_less_memory_than_the_best_step_needs_another_is_found(seed):
    samples, given = step_of(seed)
    best = tune(samples, given, pipeline_of(), quick(encode="own"))
    limit = int(best.step.peak_bytes.max()) - 1
    second = tune(samples, given, pipeline_of(memory_bytes=limit), quick(encode="own"))
    assert second.step.peak_bytes.max() <= limit
    assert best.step_ns <= second.step_ns <= 1.05 * best.step_ns


def test_without_room_for_any_packing_the_error_names_rank_and_need():
    samples, given = step_of(0, 8)
    with pytest.raises(
        ConfigError, match=r"rank \d needs at least [\d,]+ bytes, memory_bytes is 1,000;"
    ):
        tune(samples, given, pipeline_of(memory_bytes=1_000), quick())


def test_the_same_step_gives_the_same_answer():
    samples, given = step_of(5)
    one, other = (tune(samples, given, pipeline_of(), quick(encode="any")) for _ in range(2))
    np.testing.assert_array_equal(one.groups.samples, other.groups.samples)
    np.testing.assert_array_equal(one.groups.offsets, other.groups.offsets)
    np.testing.assert_array_equal(one.step.timeline.start_ns, other.step.timeline.start_ns)


@for_each("seed", range(8))
def test_on_small_steps_the_order_is_the_best_of_all(seed):
    samples, _ = step_of(seed, 6)
    given = as_groups([[number] for number in range(6)])
    pipeline = pipeline_of(stages=3)
    tuned = tune(samples, given, pipeline, quick(sizes="given", max_seq_len=1))
    best = min(
        untuned(samples, given.take(np.array(order)), pipeline).step_ns
        for order in permutations(range(6))
    )
    assert tuned.step_ns <= best


def test_each_ingredient_gains_on_mixed_data():
    gains = []
    for seed in range(8):
        samples, given = step_of(seed, 128, length=4 * LENGTH)
        times = [
            tune(samples, given, pipeline_of(), quick(**options)).step_ns
            for options in (
                {"sizes": "given", "search": "none"},
                {"sizes": "given", "encode": "own"},
                {"encode": "own"},
            )
        ]
        gains.append([untuned(samples, given, pipeline_of()).step_ns, *times])
    original, balanced, reordered, resized = np.array(gains).mean(axis=0)
    assert balanced < original
    assert reordered < 0.99 * balanced
    assert resized < 0.998 * reordered


def test_exchanges_and_more_sizes_gain_over_the_paper_s_search():
    ours, theirs = [], []
    for seed in range(6):
        samples, given = step_of(seed, 96)
        theirs.append(
            tune(samples, given, pipeline_of(), quick(search="clusters", sizes="multiples")).step_ns
        )
        ours.append(tune(samples, given, pipeline_of(), quick()).step_ns)
    assert sum(ours) < 0.99 * sum(theirs)


def test_a_trained_encoder_cannot_run_ahead():
    samples, given = step_of(0)
    model = replace(MODEL, encoder_trained=True)
    with pytest.raises(ConfigError, match="frozen encoder"):
        tune(samples, given, pipeline_of(model), quick(encode="own"))
    assert tune(samples, given, pipeline_of(model), quick()).step_ns > 0


def test_options_out_of_range_are_errors():
    with pytest.raises(ConfigError, match="max_seq_len 0"):
        TuneOptions(max_seq_len=0)
    samples, given = step_of(0)
    with pytest.raises(ConfigError, match="0 micro-batches"):
        tune(samples, given.take(np.zeros(0, np.int64)), pipeline_of(), quick())


def one_percent_off(model, seed):
    """The same costs with every layer 1 % faster or slower."""
    factors = np.random.default_rng(seed).choice([0.99, 1.01], (model.encoders + model.layers, 1))

    def cost(loads):
        costs = model(loads)
        names = ("forward_ns", "input_grad_ns", "weight_grad_ns", "recompute_ns")
        return replace(
            costs,
            **{name: np.rint(factors * getattr(costs, name)).astype(np.int64) for name in names},
        )

    return cost


@pytest.mark.parametrize("encode", ["never", "own"])
@for_each("seed", draws(3))
def test_a_tuned_step_is_at_most_2_percent_slower_than_a_new_one_after_a_change_of_1_percent(
    seed, encode
):
    samples, given = step_of(seed, 96)
    pipeline, options = pipeline_of(), quick(encode=encode)
    tuned = tune(samples, given, pipeline, options)
    changed = replace(pipeline, cost=one_percent_off(MODEL, seed))
    # the same micro-batches in the same order, encoded ahead where they were
    costs = changed.cost(packed_loads(samples, tuned.groups))
    stages, encoder = stage_costs(costs, pipeline.borders, pipeline.recompute), MODEL.encoders
    forward, encode_ns = stages.forward_ns.copy(), costs.forward_ns[:encoder].sum(axis=0)
    ahead = list(tuned.step.encoding_ranks)
    forward[0, ahead] -= encode_ns[ahead]
    encodings = Encodings(forward_ns=encode_ns, send_ns=tuned.step.encodings.send_ns)
    kept = simulate(
        make_program(tuned.step.schedule, replace(stages, forward_ns=forward), encodings)
    ).step_ns
    assert kept <= 1.02 * tune(samples, given, changed, options).step_ns
