"""What replicas of a pipeline say to each other once per step, beside the pipeline's own `Costs`.
Pure.

Nothing is taken to overlap with computing; the step of a pipeline whose stages end at different
times hides a part.
"""

from __future__ import annotations

import numpy as np

from balance.types import IntArray
from engine.cost_model.clusters import NS_PER_S, Cluster
from engine.cost_model.parallel import WEIGHT_BYTES, Parallelism, Training


def reduction_ns(
    gpu_params: IntArray, cluster: Cluster, parallel: Parallelism, training: Training
) -> IntArray:
    """To sum the gradients of so many trained parameters over replicas, and to hand on the new
    weights; int64.

    `gpu_params`: of one GPU, an entry per stage. With the optimizer shared out (ZeRO), gradients
    are scattered and weights gathered; without, every replica gets all gradients.
    """
    gathered = training.gradient_bytes if parallel.zero_stage == 0 else WEIGHT_BYTES
    return _ring_ns(gpu_params, training.gradient_bytes + gathered, cluster, parallel)


def gather_ns(gpu_params: IntArray, cluster: Cluster, parallel: Parallelism) -> IntArray:
    """To gather so many bf16 weights from all replicas: ZeRO-3 does it ahead of forward and
    backward pass; int64.
    """
    return _ring_ns(gpu_params, WEIGHT_BYTES, cluster, parallel)


def _ring_ns(
    gpu_params: IntArray, bytes_each: int, cluster: Cluster, parallel: Parallelism
) -> IntArray:
    """A gather or scatter around a ring: every GPU passes on all parts but one.

    A ring crosses between nodes once per node, over the adapters of all its GPUs there.
    """
    if parallel.dp == 1:
        return np.zeros_like(gpu_params)
    link = parallel.replica_link(cluster)
    own = parallel.tp * (parallel.pp if parallel.innermost == "stages" else 1)
    beside = min(max(cluster.gpus_per_node // own, 1), parallel.dp)
    rate = min(
        link.bytes_per_s * (beside if link == cluster.network else 1), cluster.nvlink.bytes_per_s
    )
    share = (parallel.dp - 1) / parallel.dp
    taken = gpu_params * bytes_each * share / rate * NS_PER_S + link.latency_ns * (parallel.dp - 1)
    return np.asarray(np.rint(taken), dtype=np.int64)
