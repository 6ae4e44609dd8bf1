"""The device of a run: its name, data sheet and matmul speed, and a world of one rank."""

from __future__ import annotations

import gc
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from isobatch.common.errors import ConfigError
from isobatch.models.clusters import Cluster, load_cluster

CLUSTERS = {
    "GH200": "gh200",
    "H200": "h200",
    "H100": "h100",
    "A100-SXM4-80GB": "a100_80g",
    "A100 80GB": "a100_80g",
}
"""Cluster presets by what a GPU's name has in it; the first that fits counts."""
SIDES = {"cuda": 8192, "cpu": 512}
"""Of the square matrices that are multiplied."""
PRODUCTS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Where a benchmark runs."""

    device: torch.device
    name: str
    dtype: torch.dtype
    """Of weights and activations."""
    cluster: Cluster
    """Whose data sheet the predictions are made of."""
    tiny: bool

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def release(self) -> None:
        """Give back what nobody holds any more; pipelines are circles, which wait to be found."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def open_bench(*, tiny: bool, cluster: str | None) -> Bench:
    """The GPU in bf16, or with `tiny` the CPU in float32. ConfigError without a GPU, or if no
    preset knows it.
    """
    if tiny:
        preset = load_cluster(cluster or "h100")
        return Bench(
            device=torch.device("cpu"), name="cpu", dtype=torch.float32, cluster=preset, tiny=True
        )
    if not torch.cuda.is_available():
        raise ConfigError(
            "torch sees no GPU; run this where there is one, or give --tiny to see the path run on "
            "a CPU"
        )
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    name = torch.cuda.get_device_name(device)
    found = cluster or next((preset for part, preset in CLUSTERS.items() if part in name), None)
    if found is None:
        raise ConfigError(
            f"no cluster preset is known for the GPU {name!r}; give --cluster, a preset or a TOML "
            f"file"
        )
    return Bench(
        device=device, name=name, dtype=torch.bfloat16, cluster=load_cluster(found), tiny=False
    )


@contextmanager
def one_rank(device: torch.device) -> Iterator[None]:
    """torch.distributed with this process alone: what a pipeline of one stage needs."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    on_gpu = device.type == "cuda" and dist.is_nccl_available()
    backend = (
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    )  # gloo alone knows GPUs too, for one rank well enough
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(backend, init_method=f"file://{folder}/meet", rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def matmul_flops(bench: Bench) -> float:
    """FLOP/s of large square products: the limit of all that is measured."""
    side = SIDES[bench.device.type]
    first, second = (
        torch.randn(side, side, device=bench.device, dtype=bench.dtype) for _ in range(2)
    )
    for _ in range(PRODUCTS):
        first @ second
    bench.synchronize()
    begun = time.perf_counter()
    for _ in range(PRODUCTS):
        first @ second
    bench.synchronize()
    return 2 * side**3 * PRODUCTS / (time.perf_counter() - begun)
