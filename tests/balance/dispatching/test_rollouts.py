"""Rollouts to ranks and micro-batches: each once, prompts together, caps kept, loads even."""

import numpy as np
import pytest

from isobatch.balance.dispatching.even_ranks import slot_loads
from isobatch.balance.dispatching.rollouts import assign_rollouts
from isobatch.common.errors import ConfigError


def draw(seed, num_prompts=64, each=8):
    rng = np.random.default_rng(seed)
    prompts = np.repeat(np.arange(num_prompts), each)
    vision = np.where(rng.random(num_prompts) < 0.3, 0, rng.lognormal(6.5, 0.8, num_prompts))
    tokens = (vision / 4)[prompts] + rng.lognormal(6.5, 0.9, len(prompts))
    tokens = np.minimum(tokens, 8_000).astype(np.int64)
    costs = np.stack([vision[prompts] * 0.01, tokens * 0.02, tokens**2 * 4e-7], axis=1)
    return costs, tokens, prompts


@pytest.mark.parametrize("together", ["nothing", "rank", "micro_batch"])
@pytest.mark.parametrize("equal_sizes", [False, True])
def test_each_rollout_is_in_one_micro_batch_and_loads_are_even(together, equal_sizes):
    costs, tokens, prompts = draw(1)
    cap = 64_000 if together == "micro_batch" else 16_384
    plan = assign_rollouts(
        costs,
        tokens,
        num_ranks=8,
        max_tokens=cap,
        prompts=prompts.tolist(),
        together=together,
        equal_sizes=equal_sizes,
    )
    assert sorted(plan.order.tolist()) == list(range(len(tokens)))
    counts = {len(groups) for groups in plan.micro_batches}
    assert len(counts) == 1
    assert all(groups.sum(tokens).max() <= cap for groups in plan.micro_batches)
    for rank, groups in enumerate(plan.micro_batches):
        assert (plan.ranks[groups.samples] == rank).all()
        for number in range(len(groups)):
            assert (plan.micro_batch_of[groups[number]] == number).all()
    if equal_sizes:
        assert set(np.bincount(plan.ranks).tolist()) == {64}
    places = plan.ranks * 1000 + (plan.micro_batch_of if together == "micro_batch" else 0)
    if together != "nothing":
        assert all(len(set(places[prompts == prompt])) == 1 for prompt in range(64))
    # waiting of ranks in vision and LLM
    loads = slot_loads(costs, plan.ranks, 8)[0]
    waits = 1 - loads.mean(axis=0) / loads.max(axis=0)
    assert waits[0] < 0.08
    assert waits[1] < 0.05


def test_micro_batches_keep_a_cap_of_vision_too():
    costs, tokens, prompts = draw(5)
    vision = (100 * costs[:, 0]).astype(np.int64)
    assert vision.max() > 4 * vision.mean()
    for together in ("rank", "nothing"):
        options = {"prompts": prompts.tolist(), "together": together, "num_ranks": 8}
        caps = {"vision": vision, "max_vision": int(vision.max())}
        for max_tokens in (None, 16_384):
            plan = assign_rollouts(costs, tokens, max_tokens=max_tokens, **caps, **options)
            assert sorted(plan.order.tolist()) == list(range(len(tokens)))
            assert len({len(groups) for groups in plan.micro_batches}) == 1
            for groups in plan.micro_batches:
                assert groups.sum(vision).max() <= vision.max()
                assert groups.sum(tokens).max() <= (max_tokens or tokens.sum())
            by_tokens = assign_rollouts(costs, tokens, max_tokens=max_tokens, **options)
            assert max(g.sum(vision).max() for g in by_tokens.micro_batches) > vision.max()


def test_without_a_cap_each_rank_has_one_micro_batch():
    costs, tokens, _ = draw(2)
    plan = assign_rollouts(costs, tokens, num_ranks=4)
    assert [len(groups) for groups in plan.micro_batches] == [1] * 4


def test_prompts_may_have_any_names_and_need_not_be_neighbours():
    costs, tokens, prompts = draw(3, 8, 4)
    order = np.random.default_rng(0).permutation(len(tokens))
    names = [f"prompt {prompts[row]}" for row in order]
    plan = assign_rollouts(costs[order], tokens[order], num_ranks=2, prompts=names)
    for name in set(names):
        rows = [row for row, other in enumerate(names) if other == name]
        assert len(set(plan.ranks[rows].tolist())) == 1


def test_wrong_values_are_named():
    costs, tokens, prompts = draw(4, 6, 2)
    for options, message in (
        ({"max_tokens": 10}, "more than max_tokens 10"),
        ({"max_vision": 9}, "max_vision is 9; give vision of each rollout"),
        ({"max_vision": 9, "vision": np.full(12, 10)}, "10 vision, more than max_vision 9"),
        ({"prompts": prompts[:3].tolist()}, "3 prompts"),
        ({"together": "group"}, "use one of nothing, rank"),
        ({"equal_sizes": True, "prompts": prompts.tolist()}, "do not go evenly to 4 ranks"),
    ):
        with pytest.raises(ConfigError, match=message):
            assign_rollouts(costs, tokens, num_ranks=4, **options)
