"""Ways to load the same samples into transformers' Trainer, each timed step by step: `run_arm`.

The device is waited for before a step's micro-batches are asked for and after its optimizer, so
that a step is the wait for the loader and then the computation. What is loaded meanwhile is loaded
by threads or worker processes. A micro-batch's own time is from its copy to its backward pass, by
the device's events.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from gpu.device import Bench
from gpu.load_data import Data, Numbers
from isobatch.loaders import BalancedLoader, BalancedTrainer
from isobatch.loaders.batch.micro_batch import MicroBatch
from isobatch.loaders.batch.model_inputs.inputs import model_inputs

LEARNING_RATE = 1e-5
WARM_UP = 2
"""First steps, which are not counted; nor is one of fewer micro-batches, at the end of an epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """A way to load and run the samples."""

    name: str
    attention: str
    accumulation: int
    """Micro-batches of a step."""
    batches: Dataset[dict[str, Any]] | None = None
    """Of transformers' Trainer; None: a `BalancedLoader`."""
    loader_options: dict[str, Any] = field(default_factory=dict)
    max_steps: int = -1
    cudnn: bool = True
    """Whether `scaled_dot_product_attention` may take cuDNN, which plans every new shape."""


@dataclass(slots=True)
class StepTimes:
    """A step."""

    micro_batches: list[Numbers]
    wait_s: float
    """Until the step's micro-batches are there."""
    positions: int
    """Tokens that the LLM runs, padding included."""
    compute_s: float = 0.0
    events: list[tuple[Any, Any]] = field(default_factory=list)

    def is_whole(self, accumulation: int) -> bool:
        """Whether it ended, and has as many micro-batches as others, none empty."""
        return bool(self.compute_s) and sum(map(bool, self.micro_batches)) == accumulation


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """Sums over the counted steps."""

    name: str
    attention: str
    steps: int
    micro_batches: int
    samples: int
    tokens: int
    labels: int
    positions: int
    wait_s: float
    inputs_s: float
    """Of the wait: `model_inputs`."""
    compute_s: float
    flops: float
    peak_bytes: int | None
    reserved_bytes: int | None
    micro_batch_ms: list[list[float]]
    first_wait_s: float
    loss: float

    @property
    def seconds(self) -> float:
        return self.wait_s + self.compute_s

    @property
    def waiting_ranks(self) -> float | None:
        """Share of time that ranks would wait if each ran one of a step's micro-batches."""
        times = np.array([step for step in self.micro_batch_ms if step])
        if times.ndim != 2 or times.shape[1] < 2:
            return None
        return float(1 - times.mean(axis=1).sum() / times.max(axis=1).sum())


class Timed(Trainer):
    """Mixin before a Trainer: notes each step."""

    bench: Bench
    until: float
    steps: list[StepTimes]
    _asked = 0.0

    def get_batch_samples(self, *args: Any, **options: Any) -> Any:
        self.bench.synchronize()
        begun = time.perf_counter()
        batches, items = super().get_batch_samples(*args, **options)
        numbers = [batch.pop("numbers").tolist() for batch in batches]
        positions = sum(batch["input_ids"].numel() for batch in batches)
        self.bench.synchronize()
        self._asked = time.perf_counter()
        self.steps.append(StepTimes(numbers, self._asked - begun, positions))
        return batches, items

    def training_step(self, *args: Any, **options: Any) -> Any:
        if self.bench.device.type != "cuda":
            return super().training_step(*args, **options)
        events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        events[0].record()
        loss = super().training_step(*args, **options)
        events[1].record()
        self.steps[-1].events.append(events)
        return loss

    def end_step(self) -> bool:
        """Note the end of a step; -> whether time is over."""
        self.bench.synchronize()
        self.steps[-1].compute_s = time.perf_counter() - self._asked
        return time.perf_counter() > self.until


class TimedTrainer(Timed, Trainer):
    """transformers' own."""


class TimedBalanced(Timed, BalancedTrainer):
    """With our loader."""


class _StepEnds(TrainerCallback):
    trainer: Timed

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.trainer.end_step():
            control.should_training_stop = True


def run_arm(arm: Arm, model: Any, data: Data, bench: Bench, limit_s: float) -> Loaded:
    """An epoch of the samples, or so many steps as begin within `limit_s`."""
    bench.release()
    on_gpu = bench.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(bench.device)
    torch.backends.cuda.enable_cudnn_sdp(arm.cudnn)
    model.train()
    inputs_s: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        trainer = _trainer(arm, model, data, _arguments(arm, folder, on_gpu=on_gpu), inputs_s)
        trainer.bench, trainer.steps = bench, []
        ends = _StepEnds()
        ends.trainer = trainer
        trainer.add_callback(ends)
        trainer.remove_callback(PrinterCallback)
        trainer.until = time.perf_counter() + limit_s
        loss = trainer.train().training_loss
    peak = torch.cuda.max_memory_allocated(bench.device) if on_gpu else None
    reserved = torch.cuda.max_memory_reserved(bench.device) if on_gpu else None
    steps = [step for step in trainer.steps[WARM_UP:] if step.is_whole(arm.accumulation)]
    model.zero_grad(set_to_none=True)
    samples = np.array([n for step in steps for part in step.micro_batches for n in part], np.int64)
    counts = data.counts
    return Loaded(
        name=arm.name,
        attention=arm.attention,
        steps=len(steps),
        micro_batches=sum(len(step.micro_batches) for step in steps),
        samples=len(samples),
        tokens=int(data.tokens[samples].sum()),
        labels=int(counts.num_loss_tokens[samples].sum()),
        positions=sum(step.positions for step in steps),
        wait_s=sum(step.wait_s for step in steps),
        inputs_s=sum(inputs_s) / max(1, len(inputs_s)) * sum(len(s.micro_batches) for s in steps),
        compute_s=sum(step.compute_s for step in steps),
        flops=float(data.flops[samples].sum()),
        peak_bytes=peak,
        reserved_bytes=reserved,
        micro_batch_ms=[[a.elapsed_time(b) for a, b in step.events] for step in steps],
        first_wait_s=trainer.steps[0].wait_s,
        loss=float(loss),
    )


def _arguments(arm: Arm, folder: str, *, on_gpu: bool) -> TrainingArguments:
    workers: dict[str, Any] = {}
    if arm.batches is not None:
        workers = {"dataloader_num_workers": 8, "dataloader_prefetch_factor": 2}
        workers |= {"per_device_train_batch_size": 1, "train_sampling_strategy": "sequential"}
        workers |= {"dataloader_multiprocessing_context": "fork"}  # templates can't be pickled
        if not on_gpu:
            workers |= {"dataloader_num_workers": 1}
    return TrainingArguments(
        output_dir=folder,
        gradient_accumulation_steps=arm.accumulation,
        num_train_epochs=1,
        max_steps=arm.max_steps,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused" if on_gpu else "adamw_torch",
        gradient_checkpointing=True,
        logging_strategy="no",
        logging_nan_inf_filter=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        use_cpu=not on_gpu,
        **workers,
    )


def _trainer(
    arm: Arm, model: Any, data: Data, args: TrainingArguments, inputs_s: list[float]
) -> Any:
    if arm.batches is not None:
        return TimedTrainer(
            model=model, args=args, train_dataset=arm.batches, data_collator=lambda items: items[0]
        )
    loader = balanced_loader(data, arm.accumulation, arm.loader_options)
    to_inputs = _inputs_of(model.config, inputs_s)
    return TimedBalanced(model=model, args=args, train_dataset=loader, to_inputs=to_inputs)


def balanced_loader(data: Data, accumulation: int, options: dict[str, Any]) -> BalancedLoader:
    """The loader of an arm."""
    return BalancedLoader(
        data.rows, **data.source, micro_batches_per_step=accumulation, seed=0, **options
    )


def _inputs_of(config: Any, inputs_s: list[float]) -> Callable[[MicroBatch], dict[str, Any]]:
    """`model_inputs`, timed, with the numbers of the samples."""

    def to_inputs(batch: MicroBatch) -> dict[str, Any]:
        begun = time.perf_counter()
        inputs = model_inputs(batch, config)
        inputs_s.append(time.perf_counter() - begun)
        numbers = [int(name.rpartition("-")[2]) for name in batch.sample_ids]
        return inputs | {"numbers": torch.tensor(numbers)}

    return to_inputs
