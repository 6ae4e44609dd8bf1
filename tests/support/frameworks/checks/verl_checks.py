"""BalancedRollouts with verl's own trainer class, batches and dispatch, without Ray and GPUs."""

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from verl.protocol import DataProto
from verl.trainer.ppo.ray_trainer import RayPPOTrainer

from isobatch.common.errors import ConfigError, DataError
from isobatch.loaders.integrations import verl as hook

RANKS, PROMPTS, EACH = 4, 16, 4


class Trainer(hook.BalancedRollouts, RayPPOTrainer):
    rollout_model = "qwen2_5_vl"


def trainer():
    """As RayPPOTrainer, but for the workers that its __init__ starts."""
    made = object.__new__(Trainer)
    made.actor_rollout_wg = SimpleNamespace(_dispatch_info={"actor": list(range(RANKS))})
    actor = {"ppo_mini_batch_size": PROMPTS * EACH // 2}
    made.config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(actor=actor))
    return made


def rollouts():
    """Prompts of 0 to 3 images, of sizes that text does not follow; answers of 5 to 400 tokens."""
    rng = np.random.default_rng(0)
    grids = [
        torch.tensor([[1, 2 * rng.integers(5, 40), 60] for _ in range(prompt % 4)]).reshape(-1, 3)
        for prompt in range(PROMPTS)
    ]
    rows = []
    for number in range(PROMPTS * EACH):
        grid = grids[number // EACH]
        rows.append(int(grid.prod(1).sum()) // 4 + int(rng.integers(5, 400)))
    lengths = torch.tensor(rows)
    mask = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
    media = np.empty(len(rows), dtype=object)
    for number in range(len(rows)):
        grid = grids[number // EACH]
        media[number] = {"image_grid_thw": grid, "pixel_values": grid} if len(grid) else {}
    uid = np.array([f"p{number // EACH}" for number in range(len(rows))], dtype=object)
    numbers = torch.arange(len(rows))
    return DataProto.from_dict(
        {"attention_mask": mask, "number": numbers}, {"multi_modal_inputs": media, "uid": uid}
    )


def waits(batch):
    costs, _ = hook.rollout_costs(batch, "qwen2_5_vl")
    ranks = [part.batch["number"].numpy() for part in batch.chunk(RANKS)]
    ends = np.cumsum([0, *map(len, ranks)])
    loads = np.stack([costs[a:b].sum(axis=0) for a, b in pairwise(ends)])
    return 1 - loads.mean(axis=0) / loads.max(axis=0)


def test_ranks_wait_less_for_vision_than_by_verls_own_balance():
    theirs, ours, their_metrics, metrics = rollouts(), rollouts(), {}, {}
    RayPPOTrainer._balance_batch(trainer(), theirs, their_metrics)
    trainer()._balance_batch(ours, metrics)
    assert sorted(ours.batch["number"].tolist()) == list(range(PROMPTS * EACH))
    assert {len(part) for part in ours.chunk(RANKS)} == {PROMPTS * EACH // RANKS}
    found = waits(ours)
    assert found[0] < waits(theirs)[0]
    assert found.max() < 0.05
    expected = [metrics[f"global_seqlen/wait_{name}"] for name in ("vision", "llm", "attention")]
    np.testing.assert_allclose(found, expected)
    assert their_metrics.keys() < metrics.keys()
    for name in ("min", "max", "mean"):  # of the batch as it was
        assert metrics[f"global_seqlen/{name}"] == their_metrics[f"global_seqlen/{name}"]
    parts = [part.batch["attention_mask"].sum() for part in ours.chunk(RANKS)]
    assert metrics["global_seqlen/balanced_max"] == max(parts)
    costs = hook.rollout_costs(ours.chunk(RANKS)[0], "qwen2_5_vl")[0].sum(axis=1)
    top = int(costs.argmax())
    assert 0 < top < len(costs) - 1
    assert (np.diff(costs[: top + 1]) >= 0).all()
    assert (np.diff(costs[top:]) <= 0).all()
    # what is no tensor has moved along
    for row, number in enumerate(ours.batch["number"].tolist()):
        assert ours.non_tensor_batch["uid"][row] == f"p{number // EACH}"


def test_mini_batches_and_prompts_stay_where_verl_keeps_them():
    batch, made = rollouts(), trainer()
    made._balance_batch(batch, {}, keep_minibatch=True)
    half = PROMPTS * EACH // 2
    for part in batch.chunk(RANKS):
        numbers = part.batch["number"].tolist()
        assert [number < half for number in numbers] == [True] * 8 + [False] * 8
    batch = rollouts()
    made.use_prefix_grouper = True
    made._balance_batch(batch, {})
    parts = [set(part.non_tensor_batch["uid"]) for part in batch.chunk(RANKS)]
    assert sum(map(len, parts)) == PROMPTS
    # without the prompts' names, and with mini-batches that do not fit
    batch = rollouts()
    del batch.non_tensor_batch["uid"]
    made._balance_batch(batch, {})
    assert sorted(batch.batch["number"].tolist()) == list(range(PROMPTS * EACH))
    made.config.actor_rollout_ref.actor["ppo_mini_batch_size"] = 24
    with pytest.raises(ConfigError, match="64 rollouts are no multiple of ppo_mini_batch_size, 24"):
        made._balance_batch(batch, {}, keep_minibatch=True)


def test_other_versions_and_pixels_without_grids_are_told(monkeypatch):
    hook.check_version()
    monkeypatch.setattr(hook, "version", lambda _: "9.9")
    with pytest.raises(ConfigError, match=r"verl is 9.9; .* tested with 0.9.1"):
        Trainer()
    batch = rollouts()
    batch.non_tensor_batch["multi_modal_inputs"][3] = {"pixel_values": torch.zeros(1)}
    with pytest.raises(DataError, match="rollout 3 has pixels without a grid"):
        hook.rollout_costs(batch, "qwen2_5_vl")
