"""Plans: never slower than the choices beside them, of the given steps, and within memory for the
largest ones.
"""

import itertools
from dataclasses import replace
from io import StringIO

import numpy as np
import pytest
from rich.console import Console

from isobatch.common.errors import ConfigError
from isobatch.engine.cost_model.costs import MEMORY
from isobatch.engine.cost_model.parallel import Training, reduction_ns
from isobatch.engine.plan_report import (
    comparison,
    gain_text,
    layers_text,
    print_plan,
    stage_names,
    stage_rows,
    time_shares,
)
from isobatch.engine.planning import planner
from isobatch.engine.planning.partition import METHODS, by_layers, by_params
from isobatch.engine.planning.plan import plan_from_json
from isobatch.engine.planning.planner import simulate_run, tensor_parallel_ns
from isobatch.engine.planning.recompute import InfeasiblePlan, choose_recompute
from isobatch.engine.planning.search.limits import SearchLimits
from isobatch.engine.planning.search.partition_search import search_partition
from isobatch.engine.runtime.pipeline import PipelineOptions
from isobatch.engine.simulator.evaluate import evaluate
from isobatch.engine.simulator.schedule import most_deferred
from support.cases import for_each
from support.costs.plan_questions import plan_request, uneven_loads
from support.costs.random_costs import schedule_for


@pytest.fixture(scope="module")
def result():
    return planner.plan(plan_request(), random=uneven_loads(32, seed=1, model="internvl_1_5"))


def one_step():
    """A request for one step of one replica: what is planned is what is searched."""
    asked = plan_request()
    loads = uneven_loads(8, model="internvl_1_5")
    return replace(asked, parallel=replace(asked.parallel, dp=1), loads=loads)


def test_the_plan_is_what_is_simulated(result):
    asked, plan, best = plan_request(), result.plan, result.best
    assert best.borders.tolist() == list(plan.borders)
    np.testing.assert_array_equal(best.recompute, plan.recompute_mask)
    schedule = schedule_for("1f1b", best.borders, 8)
    for place, step in enumerate(best.steps):
        costs = asked.costs(asked.loads.take(np.arange(8 * place, 8 * place + 8)))
        assert evaluate(costs, best.borders, best.recompute, schedule).step_ns == step.step_ns


def test_a_step_takes_as_long_as_its_slowest_replica(result):
    times = np.array([step.step_ns for step in result.best.steps]).reshape(2, 2)
    assert result.best.step_ns == round(times.max(axis=1).mean())
    assert result.plan.predicted.step_ns == result.best.step_ns
    samples = plan_request().loads.llm.items.sum()
    assert result.best.sample_ns == pytest.approx(2 * result.best.step_ns / samples)


def test_the_plan_is_compared_with_the_papers_baseline_and_with_a_careful_users(result):
    asked = plan_request()
    papers, drawn, careful, plan = result.runs
    assert (result.careful, result.best) == (careful, plan)
    assert papers.sample_ns > drawn.sample_ns > careful.sample_ns >= plan.sample_ns
    assert papers.recompute.all()
    costs = careful.costs[0]
    assert papers.borders.tolist() == by_params(costs, 4).tolist()
    assert drawn.borders.tolist() == careful.borders.tolist() == by_layers(costs, 4).tolist()
    # as little recomputed as fits if all micro-batches are the largest, of the drawn ones too
    full = asked.costs(asked.full_step)
    schedule = schedule_for("1f1b", careful.borders, 8)
    expected = choose_recompute(full, careful.borders, schedule, asked.memory_bytes)
    assert careful.recompute.tolist() == expected.tolist()
    assert drawn.peak_bytes.max() <= asked.memory_bytes
    gain = careful.sample_ns / plan.sample_ns
    assert gain_text(result).startswith(f"the plan is {gain:.2f}x as fast as even layers")
    assert [row[4] for row in comparison(result)][2:] == ["1.00x", f"{gain:.2f}x"]


def test_even_layers_that_do_not_fit_say_so():
    asked = plan_request(memory_bytes=20 * 2**30)
    result = planner.plan(asked)
    assert result.careful.recompute.all()
    assert "does not fit" in comparison(result)[-2][-1]
    assert gain_text(result) == "the plan fits; even layers do not, with everything recomputed"


def test_over_all_steps_no_plan_is_slower_than_even_layers_and_its_gap_is_its_own():
    """The search is for one step; of these, even layers are faster over all."""
    result = planner.plan(plan_request(memory_bytes=60 * 2**30))
    assert result.best.borders.tolist() == result.careful.borders.tolist()
    assert result.best.step_ns == result.careful.step_ns
    assert "the plan: even layers" in result.best.name
    found = result.best
    typical = sorted(found.costs, key=lambda costs: costs.forward_ns.sum())[2]
    schedule = schedule_for("1f1b", found.borders, 8)
    step_ns = evaluate(typical, found.borders, found.recompute, schedule).step_ns
    bound_ns = search_partition(typical, schedule, 60 * 2**30).lower_bound_ns
    assert result.plan.gap == pytest.approx(1 - bound_ns / step_ns)
    assert result.plan.gap > 0


def test_a_plan_keeps_the_gap_of_its_search_whose_time_was_up():
    looks = itertools.count()
    limits = SearchLimits(deadline_s=2, clock=lambda: next(looks))
    asked = one_step()
    short, whole = planner.plan(asked, limits=limits), planner.plan(asked)
    assert 0 <= whole.plan.gap <= short.plan.gap < 1
    assert short.plan.predicted.step_ns >= whole.plan.predicted.step_ns
    assert plan_from_json(short.plan.to_json(), where="here").gap == short.plan.gap


def test_the_largest_micro_batches_fit_and_with_less_recomputed_they_would_not():
    asked = plan_request(memory_bytes=28 * 2**30)
    result = planner.plan(asked)
    plan = result.plan
    full = asked.costs(asked.full.take(np.zeros(8, np.int64)))
    schedule = schedule_for("1f1b", np.array(plan.borders), 8)
    step = evaluate(full, np.array(plan.borders), plan.recompute_mask, schedule)
    assert tuple(step.memory.peak_bytes) == plan.predicted.full_peak_bytes
    assert step.fits(plan.memory_bytes)
    assert (result.best.peak_bytes <= step.memory.peak_bytes).all()
    assert plan.recompute
    for layer in plan.recompute:
        less = plan.recompute_mask
        less[layer] = False
        assert not evaluate(full, np.array(plan.borders), less, schedule).fits(plan.memory_bytes)


def test_the_searched_partition_is_no_slower_than_other_methods_for_the_searched_step():
    asked = one_step()
    best = planner.plan(asked).best
    (costs,) = asked.split(asked.costs(asked.loads))
    full = asked.costs(asked.full.take(np.zeros(8, np.int64)))
    schedule = schedule_for("1f1b", best.borders, 8)
    for method in METHODS.values():
        borders = method(costs, 4)
        try:
            recompute = choose_recompute(full, borders, schedule, asked.memory_bytes)
        except InfeasiblePlan:
            continue
        assert evaluate(costs, borders, recompute, schedule).step_ns >= best.step_ns


def test_what_does_not_fit_says_so():
    with pytest.raises(InfeasiblePlan, match="GiB too little"):
        planner.plan(replace(plan_request(), memory_bytes=2**30))


def test_the_same_request_has_the_same_result(result):
    again = planner.plan(plan_request(), random=uneven_loads(32, seed=1, model="internvl_1_5"))
    assert again.plan.to_json() == result.plan.to_json()
    assert comparison(again) == comparison(result)


@pytest.mark.parametrize(
    ("schedule", "stages_per_rank"),
    [("zero_bubble", 1), ("gpipe", 1), ("interleaved", 2), ("interleaved_zero_bubble", 2)],
)
def test_every_schedule_can_be_planned(schedule, stages_per_rank):
    asked = plan_request(schedule=schedule, stages_per_rank=stages_per_rank)
    plan = planner.plan(asked).plan
    assert len(plan.borders) - 1 == 4 * stages_per_rank
    assert len(plan.predicted.bubble_ratio) == len(plan.predicted.peak_bytes) == 4


@pytest.mark.parametrize(
    ("schedule", "per_rank", "joint"),
    [("zero_bubble", 1, "1f1b"), ("interleaved_zero_bubble", 2, "interleaved")],
)
def test_deferred_weight_gradients_fit_and_are_run_as_simulated(schedule, per_rank, joint):
    """And a plan that defers is never slower than one that does not."""
    asked = one_step().changed(schedule=schedule, stages_per_rank=per_rank)
    most = most_deferred(schedule, 4)
    free = planner.plan(asked.changed(memory_bytes=1 << 50)).plan
    memory = int(0.6 * max(free.predicted.full_peak_bytes))
    tight = asked.changed(memory_bytes=memory)
    result = planner.plan(tight)
    plain = planner.plan(tight.changed(schedule=joint))
    assert result.best.step_ns <= plain.best.step_ns
    plan = result.plan
    assert max(plan.predicted.full_peak_bytes) <= memory
    # the bound is of plans that hold back all, one or none
    assert plan.gap is None or plan.deferred in (None, (0,) * 4, (1,) * 4)
    read = plan_from_json(plan.to_json(), where="here")
    options = PipelineOptions(schedule=schedule, stages_per_rank=per_rank, deferred=read.deferred)
    ran = options.make_schedule(4, plan.num_micro_batches)
    assert same_orders(ran, result.best.steps[0].timeline.program.schedule)
    # as many as fit, of which one more would not
    costs = tight.costs(tight.full_step)
    filled = planner.deferring_more(
        tight.changed(deferred=(0,) * 4), costs, plan.border_array, plan.recompute_mask
    )
    for rank, count in enumerate(filled.deferred):
        more = [*filled.deferred]
        more[rank] = min(count + 1, most[rank])
        over = tight.changed(deferred=tuple(more)).make_schedule()
        step = evaluate(costs, plan.border_array, plan.recompute_mask, over)
        assert count == most[rank] or step.memory.peak_bytes[rank] > memory


def same_orders(one, other):
    return all(one.of_rank(rank) == other.of_rank(rank) for rank in range(one.num_ranks))


def test_shares_of_time_add_up_and_waiting_is_what_is_left(result):
    for each in result.runs:
        shares = time_shares(each)
        assert sum(shares.values()) == pytest.approx(1)
        assert min(shares.values()) >= 0
    ratios = [step.timeline.bubble_ratio.mean() for step in result.best.steps]
    assert (
        time_shares(result.best)["waiting"] >= np.mean(ratios) - 1e-9
    )  # waiting for other replicas comes on top


def test_one_gpu_per_group_has_no_tensor_parallel_communication(result):
    assert (tensor_parallel_ns(plan_request(), result.best) > 0).all()
    alone = replace(plan_request(), parallel=replace(plan_request().parallel, tp=1))
    found = simulate_run(
        alone,
        "alone",
        alone.split(alone.costs(alone.loads)),
        alone.loads,
        result.best.borders,
        result.best.recompute,
    )
    assert not tensor_parallel_ns(alone, found).any()


def test_tensor_parallel_communication_is_part_of_what_ranks_compute(result):
    busy = np.mean([step.timeline.busy_ns for step in result.best.steps], axis=0)
    assert (tensor_parallel_ns(plan_request(), result.best) < busy).all()


def test_replicas_reduce_gradients_of_what_is_trained(result):
    asked = plan_request()
    assert result.plan.predicted.reduction_ns > 0
    single = replace(
        asked, parallel=replace(asked.parallel, dp=1), loads=asked.loads.take(np.arange(16))
    )
    assert planner.plan(single).plan.predicted.reduction_ns == 0
    frozen = replace(asked, training=replace(asked.training, llm=False))
    less = planner.plan(frozen).plan.predicted.reduction_ns
    assert (
        0
        < less
        < result.plan.predicted.reduction_ns
        + reduction_ns(np.array([1]), asked.cluster, asked.parallel, asked.training).max()
    )


def test_what_cannot_be_trained_or_costed_is_refused():
    asked = plan_request()
    with pytest.raises(ConfigError, match="everything is frozen: there is nothing to train"):
        replace(
            asked, training=Training(vision=False, projector=False, llm=False)
        )  # the model hears nothing
    heard = replace(asked.loads, audio=asked.loads.vision)
    with pytest.raises(ConfigError, match=r"internvl_1_5 has no \[audio_encoder\] table"):
        replace(asked, loads=heard)
    with pytest.raises(ConfigError, match="tp is 3, but a node of a100_80g has 8 GPUs"):
        replace(asked, parallel=replace(asked.parallel, tp=3))
    assert replace(asked, parallel=replace(asked.parallel, tp=16)).parallel.tp == 16


@for_each("seed", range(3))
def test_a_plan_is_at_most_2_percent_slower_than_a_new_one_after_a_change_of_1_percent(seed):
    rng = np.random.default_rng(seed)
    asked = one_step()
    result = planner.plan(asked)
    full = asked.costs(asked.full.take(np.zeros(8, np.int64)))
    # memory as the plan was made for: of full micro-batches
    sizes = {name: getattr(full, name) for name in MEMORY}
    costs = replace(result.best.costs[0], **sizes)
    factors = rng.choice([0.99, 1.01], (costs.num_layers, 1))
    times = ("forward_ns", "input_grad_ns", "weight_grad_ns", "recompute_ns")
    changed = replace(
        costs, **{name: np.rint(factors * getattr(costs, name)).astype(np.int64) for name in times}
    )
    schedule = schedule_for("1f1b", result.best.borders, 8)
    kept = evaluate(changed, result.best.borders, result.best.recompute, schedule).step_ns
    anew = search_partition(changed, schedule, asked.memory_bytes)
    assert kept <= 1.02 * evaluate(changed, anew.borders, anew.recompute, schedule).step_ns


def test_a_plan_that_would_not_fit_if_all_micro_batches_were_full_says_so(result):
    peak = int(result.best.peak_bytes.max())
    plan = replace(
        result.plan,
        memory_bytes=peak,
        predicted=replace(result.plan.predicted, full_peak_bytes=(peak, peak + 2**30, peak, peak)),
    )
    console = Console(file=StringIO(), width=150)
    print_plan(plan, result.best, console)
    assert "may not fit: rank 1 needs " in console.file.getvalue()


def test_every_layer_is_named_once_in_the_stages(result):
    names = stage_names(result.plan)
    assert len(names) == 4
    assert names[0].startswith("patch_embedding, vision_layer 0-")
    assert names[-1].endswith("head")
    assert len(stage_rows(result.plan, result.best)) == 4
    assert layers_text(["a 0", "a 1", "b", "c 7"]) == "a 0-1, b, c 7"
