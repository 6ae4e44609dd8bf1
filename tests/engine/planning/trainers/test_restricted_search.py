"""The search of what trainers can express, beside brute force over everything that they can."""

import itertools
from dataclasses import replace

import numpy as np

from isobatch.engine.planning.trainers.plan_for import (
    RecomputeRule,
    fold_first,
    search_restricted,
)
from isobatch.engine.simulator.evaluate import evaluate
from isobatch.engine.simulator.schedule import make_schedule
from support.cases import for_each
from support.costs.random_costs import random_model

KINDS = ("vision_layer", "token_embedding", "llm_layer", "head")
SHAPES = (("1f1b", 1), ("gpipe", 1), ("interleaved", 2))


def model(rng, num_micro_batches):
    """Costs of an encoder, an embedding, LLM layers and a head; one cost per kind."""
    costs = random_model(rng, 4, num_micro_batches, kinds=1)
    counts = int(rng.integers(1, 5)), 1, int(rng.integers(4, 9)), 1
    rows = np.repeat(np.arange(4), counts).tolist()
    kinds = tuple(np.repeat(KINDS, counts).tolist())
    sends_grad = np.ones(len(rows), np.bool_)
    return replace(costs.rows(rows), kinds=kinds, sends_grad=sends_grad)


def case(seed):
    """-> (costs, schedule, memory, rules) of a small model."""
    rng = np.random.default_rng(seed)
    name, per_rank = SHAPES[seed % len(SHAPES)]
    ranks = int(rng.integers(2, 4)) if per_rank == 1 else 2
    costs = model(rng, 2 * ranks)
    schedule = make_schedule(name, ranks, 2 * ranks, per_rank)
    most = costs.kinds.count("llm_layer")
    rules = [{False: range(most + 1), True: range(most + 1)}, {False: (0,), True: (most,)}]
    every = list(all_choices(costs, schedule, rules[0]))
    peaks = [step.memory.peak_bytes.max() for _, _, step in every]
    memory = int(np.quantile(peaks, rng.uniform(0, 0.6)))
    return costs, schedule, memory, rules[seed % 2]


def all_choices(costs, schedule, rules):
    """Every partition with the encoder in the first stage, under every rule, simulated."""
    first = costs.kinds.index("token_embedding") + 1
    cuts = itertools.combinations(range(first, costs.num_layers), schedule.num_stages - 1)
    for cut in cuts:
        borders = np.array([0, *cut, costs.num_layers])
        for encoder, numbers in rules.items():
            for number in numbers:
                rule = RecomputeRule(encoder, number)
                mask = rule.recomputed(costs.kinds, borders[:-1], borders[1:])
                yield rule, borders, evaluate(costs, borders, mask, schedule)


def test_it_finds_what_brute_force_finds():
    slower = []
    for seed in range(60):
        costs, schedule, memory, rules = case(seed)
        fitting = [step for *_, step in all_choices(costs, schedule, rules) if step.fits(memory)]
        found = search_restricted(costs, schedule, memory, rules)
        if not fitting:
            assert found is None
            continue
        assert found is not None, seed
        step = evaluate(costs, found.borders, found.recompute, schedule)
        assert step.fits(memory)
        assert step.step_ns == found.step_ns
        assert found.borders[1] > costs.kinds.index("token_embedding")
        assert found.rule.num_layers in rules[found.rule.encoder]
        mask = found.rule.recomputed(costs.kinds, found.borders[:-1], found.borders[1:])
        assert found.recompute.tolist() == mask.tolist()
        slower.append(found.step_ns / min(one.step_ns for one in fitting) - 1)
    assert len(slower) > 40
    assert np.mean(np.array(slower) == 0) >= 0.95
    assert max(slower) < 0.02


@for_each("seed", range(30))
def test_a_folded_encoder_takes_the_same_time_and_memory(seed):
    rng = np.random.default_rng(900 + seed)
    costs = model(rng, 4)
    name, per_rank = SHAPES[seed % len(SHAPES)]
    schedule = make_schedule(name, 2, 4, per_rank)
    last = costs.kinds.index("token_embedding")
    inner = last + 1 + np.sort(rng.permutation(costs.num_layers - last - 1)[: 2 * per_rank - 1])
    borders = np.array([0, *inner, costs.num_layers])
    rule = RecomputeRule(bool(seed % 2), int(rng.integers(4)))
    whole = evaluate(
        costs, borders, rule.recomputed(costs.kinds, borders[:-1], borders[1:]), schedule
    )
    chosen = np.array([kind == "vision_layer" for kind in costs.kinds[: last + 1]]) & rule.encoder
    folded, near = fold_first(costs, chosen), np.maximum(borders - last, 0)
    mask = rule.recomputed(folded.kinds, near[:-1], near[1:])
    step = evaluate(folded, near, mask, schedule)
    assert step.step_ns == whole.step_ns
    assert step.memory.peak_bytes.tolist() == whole.memory.peak_bytes.tolist()
