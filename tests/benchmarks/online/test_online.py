"""`benchmarks/online.py`: its figures, on few samples and without ODB."""

from types import SimpleNamespace

import numpy as np
import online
import torch
from automodel_groups import automodel_steps


def test_windows_are_full_even_and_mixed():
    rng = np.random.default_rng(0)
    tiles = rng.integers(1, 6, 1_500)
    data = online.mixture(tiles, 256 * tiles + rng.integers(20, 400, 1_500), 1_500, rng)
    found = online.ours(data, 4, 512)
    bound = max(online.lower_bounds(*data.loads, data.limits).values()) / 4
    assert found.num_steps <= 1.05 * bound + 1
    assert found.dist_llm < 0.03
    assert found.dist_vit < 0.05
    assert found.entropy > 0.95
    assert found.label == 1
    assert online.judge(data, found, found, bound)  # not ten times below itself
    own = online.ours(data, 4, 512, is_own=True)
    assert own.label == 1
    assert own.entropy > 0.9
    assert found.num_steps <= own.num_steps <= 1.1 * bound + 1
    assert own.dist_llm < 0.1
    padded = online.ours(data, 4, 512, packing=False)
    assert padded.label == 1
    assert padded.padding < 0.05
    assert padded.dist_llm < 0.2
    assert found.num_steps < padded.num_steps < 2 * found.num_steps
    assert online.judge_padded(data, padded, padded)  # not better than itself


def test_ranks_of_a_peer_exchange_what_they_have():
    def grouping(buffer, cap, *, ddp_group, **_):
        told = torch.zeros(2, dtype=torch.long)
        ddp_group.all_gather_into_tensor(told, torch.tensor([len(buffer[0])]), ddp_group)
        assert ddp_group.get_world_size(None) == 2
        return [buffer[0][:1], buffer[0][1:2]], buffer[0][2:], False, int(told.sum()) == 0

    rng = np.random.default_rng(0)
    data = online.mixture(rng.integers(1, 6, 300), rng.integers(1600, 2000, 300), 41, rng)
    found = online.odb(data, 2, 8, SimpleNamespace(grouping_data=grouping))
    assert found.num_steps >= 21
    assert found.label > 1


def test_packs_of_automodel_are_dealt_and_what_does_not_fit_is_lost():
    rng = np.random.default_rng(0)
    data = online.mixture(rng.integers(1, 6, 300), rng.integers(1600, 2000, 300), 41, rng)

    def pairs(*_, **__):
        return [[i, i + 1] for i in range(0, 40, 2)] + [[40]]

    exact = SimpleNamespace(greedy_knapsack_vt_balanced=pairs)
    steps, _ = automodel_steps(data, 4, exact, shuffle=False)
    assert len(steps) == 6  # 21 packs, and three places of the last step are empty
    assert [len(batch) for batch in steps[-1]] == [1, 0, 0, 0]
    assert len(online.automodel(data, 4, exact_and_estimates(exact))) == 3


def exact_and_estimates(exact):
    def whole(dataset, pack_size, *, ds_raw):
        images = [sum(len(turn["content"]) for turn in row["conversation"]) for row in ds_raw]
        assert min(images) == 0
        assert max(images) > 1
        return SimpleNamespace(bins=[[*range(len(ds_raw))]])

    exact.neat_pack_dataset_vlm = whole
    return exact
