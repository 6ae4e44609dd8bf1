"""What ranks run in the tests of planned memory: training steps in a mode, every byte counted."""

import gc
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from isobatch.engine.cost_model.analytical import layer_names
from isobatch.engine.cost_model.layer_list import layers_of, phases_of
from isobatch.engine.cost_model.loads import largest_micro_batch
from isobatch.engine.cost_model.parallel import Parallelism, Training
from isobatch.engine.cost_model.profile_table import profile_to_dict
from isobatch.engine.planning.plan import PlanRequest
from isobatch.engine.runtime.batch_loads import batch_loads
from isobatch.engine.runtime.cpu_memory import LiveBytes
from isobatch.engine.runtime.optimizer.main_weights import gradient_of
from isobatch.engine.runtime.pipeline import Pipeline, PipelineOptions
from isobatch.engine.runtime.profiling.measure_layers import (
    LayerLabels,
    MeasureOptions,
    measure_layers,
)
from isobatch.engine.train.models.tiny_vlm import make_tiny_vlm
from isobatch.models.clusters import load_cluster
from isobatch.models.presets import load_model

IMAGE, VOCAB, MICRO_BATCHES, PP = 1, 3_000, 3, 2
BORDERS = np.array([0, 5, 8])
NOTHING, SOME, ALL = np.zeros(8, np.bool_), np.arange(8) % 2 == 0, np.ones(8, np.bool_)


@dataclass(frozen=True, kw_only=True)
class MemoryRun:
    """Steps whose memory is counted."""

    schedule: str
    recompute: np.ndarray = field(default_factory=NOTHING.copy)
    borders: tuple[int, ...] = tuple(BORDERS.tolist())
    deferred: tuple[int, ...] | None = None

    @property
    def stages_per_rank(self):
        return (len(self.borders) - 1) // PP


FOUR = (0, 2, 5, 6, 8)
RUNS = {
    "1f1b": MemoryRun(schedule="1f1b"),
    "1f1b, some recomputed": MemoryRun(schedule="1f1b", recompute=SOME),
    "1f1b, all recomputed": MemoryRun(schedule="1f1b", recompute=ALL),
    "gpipe": MemoryRun(schedule="gpipe"),
    "interleaved": MemoryRun(schedule="interleaved", borders=FOUR),
    "zero bubble": MemoryRun(schedule="zero_bubble"),
    "zero bubble, some recomputed": MemoryRun(schedule="zero_bubble", recompute=SOME),
    "zero bubble, one held back": MemoryRun(schedule="zero_bubble", deferred=(1, 1)),
    "zero bubble, some joint": MemoryRun(schedule="zero_bubble", deferred=(0, 2)),
    "interleaved zero bubble": MemoryRun(schedule="interleaved_zero_bubble", borders=FOUR),
    "interleaved zero bubble, some recomputed": MemoryRun(
        schedule="interleaved_zero_bubble", borders=FOUR, recompute=SOME
    ),
}


@dataclass(frozen=True, kw_only=True)
class Packed:
    """Fields of `loaders.MicroBatch` that the tiny model needs."""

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor
    pixel_values: Tensor
    patches_per_image: Tensor
    sample_ids: tuple[str, ...]
    loss_weights: Tensor | None = None


def packed(seed, length=160, tiles=6, num_labels=60):
    """One sample, whose last tokens have labels; equally large ones for all seeds."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, VOCAB, (length,), generator=generator)
    ids[: 4 * tiles] = IMAGE
    return Packed(
        input_ids=ids,
        labels=ids.where(torch.arange(length) >= length - num_labels, -100),
        position_ids=torch.arange(length),
        cu_seqlens=torch.tensor([0, length]),
        pixel_values=torch.randn(tiles, 3, 56, 56, generator=generator),
        patches_per_image=torch.tensor([tiles]),
        sample_ids=(f"sample-{seed}",),
    )


def request_for(mode, dp, run):
    """What these tests train: all micro-batches are equally large."""
    loads = batch_loads([packed(seed) for seed in range(MICRO_BATCHES)], tiny())
    cluster = load_cluster("a100_80g")
    return PlanRequest(
        model=tiny(),
        cluster=cluster,
        parallel=Parallelism(pp=PP, dp=dp),
        training=Training(mode=mode),
        schedule=run.schedule,
        stages_per_rank=run.stages_per_rank,
        deferred=run.deferred,
        num_micro_batches=MICRO_BATCHES,
        memory_bytes=cluster.usable_memory_bytes,
        loads=loads.take(np.tile(np.arange(len(loads)), dp)),
        full=largest_micro_batch(loads),
    )


def tiny():
    preset = load_model("tiny")
    return replace(preset, llm=replace(preset.llm, vocab_size=VOCAB))


def profile_mode(said, mode):
    """On the ranks of one pipeline: the profile of the model in a mode."""
    preset, sizes = tiny(), ((160, 6, 20), (120, 4, 110), (80, 2, 50), (160, 6, 100))
    batches = [packed(seed, *size) for seed, size in enumerate(sizes)]
    torch.manual_seed(0)
    model = make_tiny_vlm(preset, VOCAB, IMAGE)
    pipeline = Pipeline(model, BORDERS, [False] * 8, [list(range(PP))], PipelineOptions(mode=mode))
    listed = layers_of(preset, Parallelism())
    labels = LayerLabels(
        names=layer_names(listed),
        kinds=[layer.kind for layer in listed],
        phases=phases_of(preset),
    )
    loads, options = batch_loads(batches, preset), MeasureOptions(repeats=2)
    said["profile"] = profile_to_dict(measure_layers(pipeline, batches, loads, labels, options))


def train_counted(said, mode, dp, runs):
    """Of each run a step of training with the optimizer's state, then one whose gradients are there
    from the beginning, as plans have them: bytes that are live before it, and at most in both.
    """
    for name, run in runs.items():
        said[name] = _train_counted(mode, dp, run)


def _train_counted(mode, dp, run):
    said = {}
    batches = [packed(seed) for seed in range(MICRO_BATCHES)]
    pipelines = [list(range(first, first + PP)) for first in range(0, PP * dp, PP)]
    options = PipelineOptions(
        mode=mode,
        schedule=run.schedule,
        stages_per_rank=run.stages_per_rank,
        deferred=run.deferred,
    )
    with LiveBytes() as memory:
        torch.manual_seed(0)
        model = make_tiny_vlm(tiny(), VOCAB, IMAGE)
        pipeline = Pipeline(model, run.borders, run.recompute, pipelines, options)
        del model  # with the other ranks' layers
        optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-3, fused=True)
        weights = [each for layer in pipeline.layers.values() for each in layer.parameters()]
        for weight in weights:
            gradient_of(weight)
        _end_step(pipeline, optimizer)  # which makes the optimizer's state
        for key in ("peak", "planned"):
            optimizer.zero_grad()
            gc.collect()
            memory.restart()
            said["kept"] = memory.live_bytes
            if key == "planned":
                for weight in weights:
                    gradient_of(weight)
            pipeline.step(batches, 100)
            said["gradients"] = sum(weight.grad.nbytes for weight in weights)
            _end_step(pipeline, optimizer)
            said[key] = memory.peak_bytes
    return said


def _end_step(pipeline, optimizer):
    pipeline.reduce_gradients()
    pipeline.clip_gradients(1.0)
    optimizer.step()
