"""The exact search: brute force over partitions and recomputed layers, its bounds, its answer's
stability.
"""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from isobatch.engine.cost_model.costs import Costs
from isobatch.engine.planning.partition import by_step_time
from isobatch.engine.planning.recompute import InfeasiblePlan, RecomputeChooser
from isobatch.engine.planning.search import branch_and_bound, local_search
from isobatch.engine.planning.search._stage_choices import MOST_COMBINED
from isobatch.engine.planning.search.branch_and_bound import MOST_WHOLE, anchors, search_exact
from isobatch.engine.planning.search.limits import MOST_WINDOWS, SearchLimits
from isobatch.engine.planning.search.local_search import PartitionEvaluator
from isobatch.engine.simulator.evaluate import evaluate, schedule_for
from isobatch.engine.simulator.schedule import make_schedule
from support.cases import draws, for_each
from support.costs.random_costs import SHAPES, instance, peak, random_model, vlm

PLENTY = 10**15


def partitions(num_layers, num_stages):
    for inner in itertools.combinations(range(1, num_layers), num_stages - 1):
        yield np.array([0, *inner, num_layers])


def subsets(num_layers):
    return (np.array(bits) for bits in itertools.product([False, True], repeat=num_layers))


def check(costs, schedule, memory, best):
    """The search finds `best`, a step's time or None, and proves it."""
    if best is None:
        with pytest.raises(InfeasiblePlan):
            search_exact(costs, schedule, memory)
        return
    found = search_exact(costs, schedule, memory)
    assert (found.step_ns, found.lower_bound_ns, found.gap) == (best, best, 0.0)
    outcome = evaluate(costs, found.borders, found.recompute, schedule)
    assert outcome.step_ns == best
    assert outcome.fits(memory)


@pytest.mark.slow
@for_each("seed", draws(15))
def test_nothing_beats_it_of_all_partitions_and_all_subsets_of_recomputed_layers(seed):
    costs, schedule, memory = instance(seed, most_layers=6)
    outcomes = (
        evaluate(costs, borders, recompute, schedule)
        for borders in partitions(costs.num_layers, schedule.num_stages)
        for recompute in subsets(costs.num_layers)
        if peak(costs, borders, schedule, recompute) <= memory
    )
    check(costs, schedule, memory, min((outcome.step_ns for outcome in outcomes), default=None))


@for_each("seed", draws(50))
def test_nothing_beats_it_of_all_partitions_of_up_to_12_layers_with_all_minimal_choices(seed):
    costs, schedule, memory = instance(1000 + seed, most_layers=12)
    chooser = RecomputeChooser(costs, schedule, memory)
    best = None
    for borders in partitions(costs.num_layers, schedule.num_stages):
        own = [
            chooser.choices(rank, *chooser.stages_of(borders, rank))[0]
            for rank in range(schedule.num_ranks)
        ]
        for combination in itertools.product(*own):
            step = evaluate(costs, borders, np.logical_or.reduce(combination), schedule).step_ns
            best = step if best is None else min(best, step)
    check(costs, schedule, memory, best)


@for_each("seed", draws(50))
def test_nothing_beats_it_of_all_partitions_of_up_to_12_layers_where_all_fits(seed):
    costs, schedule, _ = instance(2000 + seed, most_layers=12)
    nothing = np.zeros(costs.num_layers, bool)
    every = partitions(costs.num_layers, schedule.num_stages)
    check(
        costs,
        schedule,
        PLENTY,
        min(evaluate(costs, borders, nothing, schedule).step_ns for borders in every),
    )


@pytest.mark.parametrize(("name", "chunks"), SHAPES)
@for_each(("most_windows", "gap"), [(0, 0.25), (500, 0.2), (2_000, 0.2), (6_000, 0.2)])
def test_a_search_of_few_windows_keeps_to_them_and_still_knows_a_bound(
    name, chunks, most_windows, gap
):
    costs = vlm(np.random.default_rng(1), 14, 14, 16, spread=0.2)
    schedule = make_schedule(name, 4 // chunks * 2, 16, chunks)
    short = search_exact(costs, schedule, PLENTY, SearchLimits(most_windows=most_windows))
    whole = search_exact(costs, schedule, PLENTY, SearchLimits(most_windows=3_000_000))
    assert short.lower_bound_ns <= whole.step_ns <= short.step_ns
    assert 0 <= short.gap < gap
    assert short.windows <= most_windows
    assert evaluate(costs, short.borders, short.recompute, schedule).step_ns == short.step_ns


def test_a_step_that_takes_no_time_is_proven_without_a_gap():
    costs = vlm(np.random.default_rng(0), 3, 3, 2)
    costs = replace(
        costs,
        **{name: 0 * getattr(costs, name) for name in Costs.__slots__ if name.endswith("_ns")},
    )
    found = search_exact(costs, make_schedule("1f1b", 2, 2), PLENTY)
    assert (found.step_ns, found.gap, found.lower_bound_ns) == (0, 0.0, 0)


@pytest.mark.parametrize("chunks", [2, 3])
def test_ranks_of_several_stages_that_must_recompute_end_with_a_plan_that_fits_and_a_bound(chunks):
    """Their choices multiply: thousands of partitions, of each hundreds of combinations."""
    costs = vlm(np.random.default_rng(2), 12, 12, 8, spread=0.1)
    schedule = make_schedule("interleaved", 2, 8, chunks)
    free = search_exact(costs, schedule, PLENTY)
    least, most = (
        peak(costs, free.borders, schedule, np.full(costs.num_layers, full))
        for full in (True, False)
    )
    before = None
    for share in (1, 0.5, 0.05):
        memory = int(least + share * (most - least))
        found = search_exact(costs, schedule, memory)
        outcome = evaluate(costs, found.borders, found.recompute, schedule)
        assert outcome.fits(memory)
        assert found.lower_bound_ns <= outcome.step_ns == found.step_ns
        assert free.lower_bound_ns <= found.step_ns
        assert found.windows <= MOST_WINDOWS + MOST_WHOLE * MOST_COMBINED
        # what fits into less fits into more
        assert before is None or before.lower_bound_ns <= found.step_ns
        before = found


def test_where_no_anchor_fits_one_that_does_is_found():
    """One layer's weights fill a rank, so its stage must be as short as can be, which no method
    aims at.
    """
    costs = vlm(np.random.default_rng(0), 12, 12, 8, spread=0.0)
    costs.state_bytes[:] = 1
    costs.state_bytes[20] = 10**12
    for name, chunks in SHAPES:
        schedule = make_schedule(name, 4 // chunks, 8, chunks)
        with pytest.raises(
            InfeasiblePlan, match=r"rank \d needs .* split the model over \d+ times"
        ):
            search_exact(costs, schedule, 10**12)
        found = search_exact(costs, schedule, 10**12 + 8 * 10**9)
        assert evaluate(costs, found.borders, found.recompute, schedule).fits(10**12 + 8 * 10**9)


def shaken(costs: Costs, rng: np.random.Generator) -> Costs:
    """Every layer's times 1 % more or less, the same for all micro-batches."""
    factors = 1 + 0.01 * rng.choice([-1, 1], (costs.num_layers, 1))
    names = ("forward_ns", "input_grad_ns", "weight_grad_ns", "recompute_ns", "send_ns")
    return replace(
        costs, **{name: np.rint(getattr(costs, name) * factors).astype(np.int64) for name in names}
    )


def models(seed):
    rng = np.random.default_rng(seed)
    if seed % 2:
        return vlm(rng, int(rng.integers(10, 50)), int(rng.integers(10, 60)), 16, spread=0.1)
    return random_model(rng, int(rng.integers(8, 24)), 8, most=10**6)


@for_each("seed", range(8))
def test_after_a_change_of_a_percent_the_old_plan_is_at_most_two_percent_slower_than_a_new_one(
    seed,
):
    rng = np.random.default_rng(seed)
    costs, num_stages = models(seed), int(rng.choice([2, 4, 8]))
    schedule = schedule_for("1f1b", np.arange(num_stages + 1), costs.num_micro_batches)
    need = search_exact(costs, schedule, PLENTY)
    memory = int(0.9 * peak(costs, need.borders, schedule, need.recompute))
    try:
        old = search_exact(costs, schedule, memory)
    except InfeasiblePlan:
        old, memory = need, PLENTY
    for _ in range(3):
        changed = shaken(costs, rng)
        new = search_exact(changed, schedule, memory)
        kept = evaluate(changed, old.borders, old.recompute, schedule)
        assert kept.step_ns <= 1.02 * new.step_ns


@for_each("seed", range(8))
def test_the_same_costs_give_the_same_plan(seed):
    costs = models(seed)
    schedule = schedule_for("1f1b", np.arange(5), costs.num_micro_batches)
    one, other = (
        search_exact(costs, schedule, PLENTY, SearchLimits(most_windows=5_000)) for _ in range(2)
    )
    assert one.borders.tolist() == other.borders.tolist()
    assert one.recompute.tolist() == other.recompute.tolist()
    assert (one.step_ns, one.lower_bound_ns) == (other.step_ns, other.lower_bound_ns)


def test_more_kinds_of_layers_than_can_be_tried_leave_a_gap_and_a_plan_that_fits():
    costs = random_model(np.random.default_rng(7), 40, 4, kinds=40)
    schedule = make_schedule("gpipe", 2, 4)
    even = np.array([0, 20, 40])
    least, most = (peak(costs, even, schedule, np.full(40, full)) for full in (True, False))
    memory = least + (most - least) // 3
    found = search_exact(costs, schedule, memory)
    assert evaluate(costs, found.borders, found.recompute, schedule).fits(memory)
    assert 0 < found.lower_bound_ns < found.step_ns


def ticking(deadline_s):
    """Limits with a clock that moves by a second whenever somebody looks at it, and its looks."""
    looks = itertools.count()
    return SearchLimits(deadline_s=deadline_s, clock=lambda: float(next(looks))), looks


@for_each("seed", draws(15))
def test_whenever_the_time_is_up_the_plan_is_no_slower_than_an_anchor_and_the_bound_holds(seed):
    costs, schedule, memory = instance(6000 + seed, most_layers=12)
    try:
        best = search_exact(costs, schedule, memory)
    except InfeasiblePlan:
        return
    evaluator = PartitionEvaluator(costs, schedule, memory)
    start_ns = evaluator.steps(np.stack(anchors(costs, schedule.num_stages))).min()
    for deadline_s in (0, 1, 2, 3, 5, 8, 13, 21, 34, 10**6):
        limits, _ = ticking(deadline_s)
        found = search_exact(costs, schedule, memory, limits)
        assert found.lower_bound_ns <= best.step_ns <= found.step_ns <= start_ns
        outcome = evaluate(costs, found.borders, found.recompute, schedule)
        assert outcome.step_ns == found.step_ns
        assert outcome.fits(memory)
    assert (found.step_ns, found.gap) == (best.step_ns, 0.0)


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_a_time_limit_is_kept_to_a_chunk_of_simulations(monkeypatch, share):
    """By a clock that only simulated actions move, 1 ns each."""
    costs = vlm(np.random.default_rng(3), 30, 30, 16, spread=0.15)
    schedule = make_schedule("1f1b", 12, 16)
    even = by_step_time(costs, 12)
    memory = int(share * peak(costs, even, schedule, np.zeros(costs.num_layers, bool)))
    chunk, spent = 20_000, [0]
    for module in (branch_and_bound, local_search):
        monkeypatch.setattr(module, "CHUNK_ACTIONS", chunk)

        def counted(schedule, sums, first, borders, choices, extra_ns, real=module.window_steps):
            spent[0] += choices.size * 2 * schedule.num_micro_batches
            return real(schedule, sums, first, borders, choices, extra_ns)

        monkeypatch.setattr(module, "window_steps", counted)

    def search(deadline_s):
        spent[0] = 0
        limits = SearchLimits(deadline_s=deadline_s, clock=lambda: spent[0] / 1e9)
        return search_exact(costs, schedule, memory, limits), spent[0]

    whole, most = search(1.0)
    for actions in range(0, most, most // 9):
        found, used = search(actions / 1e9)
        # the anchors, and what a chunk of them needs to know of single stages
        assert used <= actions + 3 * chunk
        assert found.lower_bound_ns <= whole.step_ns <= found.step_ns
    assert most > 20 * chunk


def test_what_a_search_finds_does_not_depend_on_the_clock_while_there_is_time():
    costs, schedule, memory = instance(7, most_layers=12)
    limits, looks = ticking(10**6)
    slow, fast = (search_exact(costs, schedule, memory, *own) for own in ([limits], []))
    assert slow.borders.tolist() == fast.borders.tolist()
    assert (slow.step_ns, slow.windows) == (fast.step_ns, fast.windows)
    assert next(looks) > 0


def test_a_search_without_time_says_that_something_may_fit_that_it_did_not_try():
    """Small moves from no anchor lead to what fits here, but joining windows does."""
    costs, schedule, memory = instance(5567, most_layers=12, shape=("interleaved", 2))
    limits, _ = ticking(0)
    with pytest.raises(InfeasiblePlan, match="the search did not try every partition"):
        search_exact(costs, schedule, memory, limits)
    found = search_exact(costs, schedule, memory)
    assert evaluate(costs, found.borders, found.recompute, schedule).fits(memory)


def test_a_search_tells_where_it_is():
    costs = vlm(np.random.default_rng(3), 14, 14, 16, spread=0.15)
    told = []
    found = search_exact(
        costs, make_schedule("1f1b", 6, 16), PLENTY, SearchLimits(report=told.append)
    )
    assert [each.width for each in told] == list(range(1, len(told) + 1))
    assert told[0].num_stages == 6
    assert told[0].gap >= told[-1].gap >= found.gap
    assert told[-1].step_ns >= found.step_ns
