"""What replicas exchange once per step: by hand for a node and for a network."""

import numpy as np
import pytest

from isobatch.engine.cost_model.parallel import Parallelism, Training, reduction_ns
from isobatch.engine.cost_model.training_mode import TrainingMode
from isobatch.models.clusters import load_cluster

A100 = load_cluster("a100_80g")
BILLION = np.array([1_000_000_000])


def test_one_replica_exchanges_nothing():
    assert reduction_ns(BILLION, A100, Parallelism(tp=2, pp=4), Training()).tolist() == [0]


def test_replicas_of_a_node_scatter_gradients_and_gather_weights_over_nvlink():
    ns = reduction_ns(BILLION, A100, Parallelism(tp=2, dp=4), Training())[0]
    assert ns * 1e-9 == pytest.approx(1e9 * (4 + 2) * 3 / 4 / 240e9, rel=0.01)
    unsharded = Training(mode=TrainingMode(zero_stage=0))
    everything = reduction_ns(BILLION, A100, Parallelism(tp=2, dp=4), unsharded)[0]
    assert everything / ns == pytest.approx(8 / 6, rel=0.01)


def test_a_ring_through_nodes_uses_the_adapters_of_all_its_gpus_in_a_node():
    ns = reduction_ns(BILLION, A100, Parallelism(tp=2, dp=64), Training())[0]
    # four GPUs of the ring in each node, each with 12.5 GB/s, of which .9 is reached
    assert ns * 1e-9 == pytest.approx(1e9 * (4 + 2) * 63 / 64 / (4 * 0.9 * 12.5e9), rel=0.04)
    alone = reduction_ns(BILLION, A100, Parallelism(tp=8, dp=64), Training())[0]
    assert alone > 3.5 * ns


def test_stages_next_to_each_other_leave_fewer_gpus_of_a_ring_in_a_node():
    adjacent = reduction_ns(BILLION, A100, Parallelism(tp=2, pp=4, dp=16), Training())[0]
    stages = Parallelism(tp=2, pp=4, dp=16, innermost="stages")
    apart = reduction_ns(BILLION, A100, stages, Training())[0]
    assert apart > 3 * adjacent
