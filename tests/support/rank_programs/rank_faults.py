"""What ranks run in the tests of faults, of measured steps and of bf16; each writes down what it
saw.
"""

import os
import signal
import time
from dataclasses import replace
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from isobatch.engine.charts.trace import KIND_NAMES
from isobatch.engine.cost_model.training_mode import TrainingMode
from isobatch.engine.runtime.communication.p2p import P2PQueue
from isobatch.engine.runtime.errors import IsobatchError, LossNotFinite
from isobatch.engine.runtime.pipeline import Pipeline, PipelineOptions
from isobatch.engine.runtime.stage_io import LayerStack, TensorSpec
from isobatch.engine.simulator.simulate import critical_path
from support.models.toy_model import make_batch, make_model, run_alone


def batches_of(count, seed=0):
    """With ids that tell them apart."""
    generator = torch.Generator().manual_seed(seed)
    made = [make_batch(generator, [7, 4 + place], 2) for place in range(count)]
    return [
        replace(batch, sample_ids=(f"a{place}", f"b{place}")) for place, batch in enumerate(made)
    ]


def make_pipeline(pp, dp=1, model=None, **options):
    model = model or make_model()
    borders = np.linspace(0, len(model.layers), pp + 1).astype(int)
    pipelines = [list(range(first, first + pp)) for first in range(0, pp * dp, pp)]
    recompute = options.pop("recompute", np.zeros(len(model.layers), bool))
    return Pipeline(model, borders, recompute, pipelines, PipelineOptions(**options))


def lose(said, pp, victim):
    """The victim kills itself in the second step, in the midst of a forward pass."""
    pipeline = make_pipeline(pp)
    batches = batches_of(6)
    pipeline.step(batches, 10)
    if dist.get_rank() == victim:
        passes = []

        def die(*_):
            passes.append(0)
            if len(passes) == 3:
                os.kill(os.getpid(), signal.SIGKILL)

        next(iter(pipeline.layers.values())).register_forward_pre_hook(die)
    begun = time.monotonic()
    try:
        pipeline.step(batches, 10)
        pipeline.reduce_gradients()
    except IsobatchError as error:
        said["error"], said["type"] = str(error), type(error).__name__
    said["seconds"] = time.monotonic() - begun


def delay(said, seconds, timeout_s):
    """Rank 1 stops for a while, in the midst of a forward pass."""
    pipeline = make_pipeline(2, timeout_s=timeout_s)
    if dist.get_rank() == 1:
        next(iter(pipeline.layers.values())).register_forward_pre_hook(
            lambda *_: time.sleep(seconds)
        )
    try:
        pipeline.step(batches_of(1), 10)
    except IsobatchError as error:
        said["error"] = str(error)


def not_finite(said):
    """A NaN in a stage's output, in a replica; steps after it run. Then a tensor that is unlike its
    spec.
    """
    batches = batches_of(4)
    broken = [*batches]
    broken[2] = replace(batches[2], pixel_values=batches[2].pixel_values * float("nan"))
    for name, pipeline in {"stages": make_pipeline(2), "replicas": make_pipeline(1, 2)}.items():
        own = batches if name == "replicas" and dist.get_rank() == 0 else broken
        try:
            pipeline.step(own, 10)
        except LossNotFinite as error:
            said[name] = str(error)
        said[f"{name}, after"] = pipeline.step(batches, 10).loss
    pipeline = make_pipeline(2)
    rank = dist.get_rank()
    others = [replace(batch, sample_ids=(f"of {rank}",)) for batch in batches]
    for name, own in {"fewer": batches[: 4 - rank], "other": others}.items():
        try:
            pipeline.step(own, 10)
        except IsobatchError as error:
            said[name] = str(error)
    model = make_model()

    def wrong(cut, batch):
        specs = dict(model.specs(cut, batch))
        if "a1" in batch.sample_ids:
            specs["features"] = TensorSpec(shape=(1, 2), dtype=torch.float32)
        return specs

    pipeline = make_pipeline(2, model=LayerStack(layers=model.layers, specs=wrong))
    try:
        pipeline.step(batches, 10)
    except IsobatchError as error:
        said["mismatch"], said["mismatch type"] = str(error), type(error).__name__


def measure(said):
    """A step's timeline on all ranks; dropout from torch's generators; bf16; a schedule that cannot
    run.
    """
    batches = batches_of(5)
    pipeline = make_pipeline(2, schedule="zero_bubble")
    pipeline.step(batches, 10)
    begun = time.perf_counter_ns()
    result = pipeline.step(batches, 10)
    most = time.perf_counter_ns() - begun
    timeline = pipeline.timeline(result)
    offsets = timeline.program.schedule.rank_offsets
    said["starts"], said["ends"] = timeline.start_ns.tolist(), timeline.end_ns.tolist()
    first, last = offsets[dist.get_rank() : dist.get_rank() + 2]
    own = timeline.end_ns[last - 1] - timeline.start_ns[first]
    said["own share of the step's wall time"] = float(own / most)
    said["same durations"] = bool(
        (timeline.program.duration_ns[first:last] == result.end_ns - result.start_ns).all()
    )
    said["path"] = [
        KIND_NAMES[timeline.program.schedule.action(place).kind]
        for place in critical_path(timeline)
    ]
    said["peak"] = pipeline.peak_bytes()
    said["under way"] = _most_under_way()
    said["dropout"] = [_gradient(batches, recompute) for recompute in (False, True)]
    said["bf16"] = _bf16(batches)


def _most_under_way():
    """The most tensors on their way at any time in a step of many micro-batches."""
    pipeline, counts, send = make_pipeline(2), [], P2PQueue.send

    def counted(queue, *arguments):
        send(queue, *arguments)
        counts.append(len(queue._sent))

    with mock.patch.object(P2PQueue, "send", counted):
        pipeline.step(batches_of(12), 10)
    return max(counts)


def _gradient(batches, recompute):
    model = make_model(dropout=0.3)
    pipeline = make_pipeline(2, model=model, recompute=np.full(len(model.layers), recompute))
    torch.manual_seed(3)
    pipeline.step(batches, 10)
    pipeline.reduce_gradients()
    return torch.cat([weight.grad.flatten() for weight in pipeline.parameters()]).tolist()


def _bf16(batches):
    """Losses of some steps in bf16 and in float32, alone."""
    pipeline, alone = make_pipeline(2, mode=TrainingMode(zero_stage=0)), make_model()
    weights = list(
        {id(weight): weight for layer in alone.layers for weight in layer.parameters()}.values()
    )
    optimizers = [torch.optim.SGD(own, lr=0.05) for own in (pipeline.parameters(), weights)]
    labels = sum(batch.num_loss_tokens for batch in batches)
    losses = []
    for _ in range(4):
        losses.append((pipeline.step(batches, labels).loss, run_alone(alone, batches, labels)))
        pipeline.reduce_gradients()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return losses
