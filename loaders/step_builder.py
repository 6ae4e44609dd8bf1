"""From a plan to what the trainer gets: `StepBuilder` lists the work of a step and makes
`StepBatches` of the results.
"""

from __future__ import annotations

import math
import time
from functools import partial
from typing import Any

import torch

from balance.presets import NativeRule, VisionRule
from loaders.batch.collate import MediaOptions, collate
from loaders.batch.micro_batch import MicroBatch
from loaders.decode import pixels
from loaders.plan.selection import Selection
from loaders.plan.steps import StepPlan
from loaders.prefetch import Work
from loaders.read.reader import SampleReader, only_media, stored_bytes, without_media
from loaders.stats import Meter

TOKEN_BYTES = 3 * 8
"""`input_ids`, `labels`, `position_ids`."""
AUDIO_TOKEN_BYTES = 4096
"""At most: 30 s of audio are 750 tokens or more, and 2 MB as a waveform or as features."""


class StepBatches(list[MicroBatch]):
    """The micro-batches of one step of one rank."""

    encoders: dict[str, list[MicroBatch]]
    """With a step planner that deals out encoders' work: by encoder, this rank's batches of
    samples, without tokens.
    """

    note: object
    """What the step planner tells this rank's trainer
    (`balance.steps.step_planner.StepWork.notes`); None if nothing.
    """

    def __init__(
        self, batches: list[MicroBatch], encoders: dict[str, list[MicroBatch]], note: object = None
    ) -> None:
        super().__init__(batches)
        self.encoders, self.note = encoders, note

    def __reduce__(self) -> tuple[Any, ...]:
        return StepBatches, (list(self), self.encoders, self.note)


class StepBuilder:
    """Makes steps of plans; `device` is where their tensors shall be, None for ordinary memory."""

    def __init__(
        self,
        reader: SampleReader,
        rule: VisionRule,
        pixel_dtype: torch.dtype,
        media: MediaOptions,
        device: torch.device | None,
        meter: Meter,
    ) -> None:
        self._reader, self._rule, self._pixel_dtype, self._media = reader, rule, pixel_dtype, media
        self._device, self._meter = device, meter
        self._pin = device is not None and device.type == "cuda" and torch.cuda.is_available()
        repeats = 1
        if isinstance(rule, NativeRule) and pixel_dtype != torch.uint8:
            repeats = rule.temporal_patch_size
        self._row_bytes = math.prod(pixels.patch_shape(rule)) * pixel_dtype.itemsize * repeats

    def work(self, plan: StepPlan) -> Work[StepPlan, MicroBatch]:
        """What there is to do for a step: a part per micro-batch and per encoder's batch."""
        items: list[tuple[Selection, str | None]] = [(item, None) for item in plan.micro_batches]
        items += [(item, name) for name, batches in plan.encoders.items() for item in batches]
        return Work(
            subject=plan,
            parts=[partial(self._make, plan, item, encoder) for item, encoder in items],
            num_bytes=plan.num_pixel_rows * self._row_bytes
            + plan.num_tokens * TOKEN_BYTES
            + plan.num_audio_tokens * AUDIO_TOKEN_BYTES,
        )

    def step(self, plan: StepPlan, batches: list[MicroBatch]) -> StepBatches:
        """The step of the results of `work`; moved to the device, on the caller's current
        stream.
        """
        if self._device is not None:
            batches = [batch.to(self._device, non_blocking=self._pin) for batch in batches]
        remaining = iter(batches)
        own = [next(remaining) for _ in plan.micro_batches]
        encoders = {name: [next(remaining) for _ in items] for name, items in plan.encoders.items()}
        return StepBatches(own, encoders, plan.note)

    def _make(self, plan: StepPlan, item: Selection, encoder: str | None) -> MicroBatch:
        """Read and collate one part; in any thread."""
        begun = time.perf_counter()
        raw = self._reader.read(item)
        read = time.perf_counter()
        if raw is not None and encoder is not None:
            raw = only_media(raw, encoder)
        elif raw is not None and plan.encoders:
            raw = without_media(raw, plan.encoders)
        num_bytes = 0 if raw is None else stored_bytes(raw)
        batch = collate(raw, self._rule, self._pixel_dtype, plan.totals, self._media)
        if self._media.decode_images:
            self._reader.release(item)
        if self._pin:
            batch = batch.pin_memory()
        self._meter.add_part(read - begun, time.perf_counter() - read, num_bytes)
        return batch
