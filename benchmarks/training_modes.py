"""Memory and time of training modes, on two gloo ranks as replicas of one stage.

    python benchmarks/training_modes.py

First, bytes that are live at most while more and more micro-batches are in flight (GPipe), beyond
weights: with autocast, as the runtime had it, each micro-batch holds bf16 copies of all weights.
Then a step's time and the optimizer's bytes per parameter: sharded as `DTensor` by the pipeline,
by `ZeroRedundancyOptimizer` and by FSDP2's `fully_shard`, in a plain loop over the micro-batches.
"""

import gc
import tempfile
import time
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

from isobatch.engine.cost_model.training_mode import TrainingMode
from isobatch.engine.runtime.cpu_memory import LiveBytes
from isobatch.engine.runtime.optimizer.main_weights import local_part
from isobatch.engine.runtime.pipeline import Pipeline, PipelineOptions
from isobatch.engine.runtime.stage_io import LayerStack, TensorSpec

WIDTH, LAYERS, TOKENS, STEPS = 512, 4, 64, 7
MIB = 2**20


class Block(nn.Module):
    """A feed-forward layer; the last one's loss is a sum of squares."""

    def __init__(self, *, is_last: bool, autocast: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.is_last, self.autocast = is_last, autocast

    def forward(self, inputs, batch):
        hidden = inputs.get("hidden", batch).to(self.up.weight.dtype)
        with torch.autocast("cpu", enabled=self.autocast):
            hidden = hidden + self.down(nn.functional.gelu(self.up(hidden)))
        return {"loss": hidden.float().square().mean()} if self.is_last else {"hidden": hidden}


def blocks(**options) -> list[Block]:
    """The layers, with the same weights on all ranks."""
    torch.manual_seed(0)
    return [Block(is_last=place == LAYERS - 1, **options) for place in range(LAYERS)]


def make_pipeline(mode: TrainingMode | None, **options) -> Pipeline:
    """One stage, on two replicas."""
    spec = {"hidden": TensorSpec(shape=(TOKENS, WIDTH), dtype=torch.float32)}
    stack = LayerStack(layers=blocks(**options), specs=lambda cut, batch: spec)
    settings = PipelineOptions(mode=mode, schedule="gpipe")
    return Pipeline(stack, [0, LAYERS], [False] * LAYERS, [[0], [1]], settings)


def batches(count: int) -> list[torch.Tensor]:
    return [torch.randn(TOKENS, WIDTH) for _ in range(count)]


def peaks(mode: TrainingMode | None, **options) -> list[float]:
    """MiB beyond weights and masters at 1, 2, 4 and 8 micro-batches in flight."""
    pipeline, found = make_pipeline(mode, **options), []
    for count in (1, 2, 4, 8):
        given = batches(count)
        gc.collect()
        with LiveBytes() as memory:
            pipeline.step(given, 1)
        found.append(memory.peak_bytes / MIB)
        pipeline.drop_gradients()
    return found


def step_by_pipeline(mode: TrainingMode):
    """-> (a step, the optimizer)."""
    pipeline = make_pipeline(mode)
    optimizer = torch.optim.AdamW(pipeline.parameters(), fused=True)

    def step() -> None:
        pipeline.step(batches(4), 1)
        pipeline.reduce_gradients()
        optimizer.step()
        optimizer.zero_grad()

    return step, optimizer


def sharded_by_fsdp(layers: list[Block]) -> torch.optim.Optimizer:
    """The layers by FSDP2 as ZeRO-1: weights stay gathered, gradients unreduced until asked for."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    return torch.optim.AdamW((w for layer in layers for w in layer.parameters()), fused=True)


def step_by_torch(name: str):
    """The same in a plain loop, with one of torch's own tools."""
    layers, is_fsdp = blocks(), name == "fully_shard"
    weights = [weight for layer in layers for weight in layer.parameters()]
    if is_fsdp:
        optimizer = sharded_by_fsdp(layers)
    else:
        optimizer = ZeroRedundancyOptimizer(weights, torch.optim.AdamW, fused=True)

    def step() -> None:
        for number, batch in enumerate(batches(4)):
            tensors = {}
            for layer in layers:
                if is_fsdp:
                    layer.set_requires_gradient_sync(number == 3)
                tensors = layer(tensors, batch)
            tensors["loss"].backward()
        for weight in [] if is_fsdp else weights:
            dist.all_reduce(weight.grad)
        optimizer.step()
        optimizer.zero_grad()

    return step, optimizer


def row(name: str, made) -> str:
    """Median time, and the optimizer's bytes per parameter without masters."""
    step, optimizer = made
    times = []
    for _ in range(STEPS):
        dist.barrier()
        begun = time.perf_counter()
        step()
        times.append(1e3 * (time.perf_counter() - begun))
    states = getattr(optimizer, "optim", optimizer).state.values()
    held = sum(local_part(value).nbytes for state in states for value in state.values())
    count = LAYERS * (8 * WIDTH**2 + 5 * WIDTH)
    return f"| {name} | {median(times[1:]):.0f} | {held / count:.2f} |"


def run(rank: int, meeting: str) -> None:
    """Both tables, on one of the ranks; the first one prints them."""
    dist.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=2)
    torch.set_num_threads(1)
    lines = ["| mode | 1 | 2 | 4 | 8 in flight, MiB |", "|---|--:|--:|--:|--:|"]
    for name, mode, options in (
        ("fp32", TrainingMode(precision="fp32"), {}),
        ("fp32 weights, autocast", TrainingMode(precision="fp32"), {"autocast": True}),
        ("bf16 weights, masters", TrainingMode(), {}),
    ):
        cells = " | ".join(f"{peak:.1f}" for peak in peaks(mode, **options))
        lines.append(f"| {name} | {cells} |")
    lines += ["", "| optimizer | step, ms | moments, bytes per parameter |", "|---|--:|--:|"]
    for precision in ("fp32", "bf16"):
        for stage in (0, 1):
            mode = TrainingMode(precision=precision, zero_stage=stage)
            lines.append(row(f"{precision}, ZeRO-{stage}", step_by_pipeline(mode)))
    lines.append(row("fp32, ZeroRedundancyOptimizer", step_by_torch("zero")))
    lines.append(row("bf16, FSDP2 fully_shard", step_by_torch("fully_shard")))
    if dist.get_rank() == 0:
        print("\n".join(lines))
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run, (f"{folder}/meeting",), nprocs=2)
