"""From plans to steps: `plans_ahead` looks ahead, `StepBuilder` makes tensors.

For the loader. A step's groups are a few hundred kilobytes in several places of a store. Requested
step by step, each waits for a round trip. Known many steps ahead, neighbours are fetched together
and all connections are busy. Of builds on disk several steps are planned at a time for speed.
"""

import math
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

import torch

from isobatch.common.visible_text import visible_line
from isobatch.loaders.batch.collate import make_batch
from isobatch.loaders.batch.micro_batch import MicroBatch
from isobatch.loaders.config import LoaderConfig
from isobatch.loaders.decode import pixels
from isobatch.loaders.prefetch import PrefetchTask
from isobatch.loaders.read.reader import SelectionReader, only_media, stored_bytes, without_media
from isobatch.loaders.stats import Meter
from isobatch.loaders.steps.selection import Selection
from isobatch.loaders.steps.step_plan import StepPlan
from isobatch.loaders.steps.steps import Steps
from isobatch.loaders.transforms import SampleSeeds
from isobatch.models.image_rules import NativeSizeRule
from isobatch.models.presets import ModelPreset

AHEAD_BYTES = 64 << 20
"""Bytes requested and not yet taken, at least one step: 16 requests of 4 MB."""
MAX_WINDOW, SLOW_WINDOW = 64, 4
"""Most steps planned at a time; the second with a step planner or in random order."""
TOKEN_BYTES = 3 * 8
"""Bytes of a token in `input_ids`, `labels` and `position_ids`."""
AUDIO_TOKEN_BYTES = 4096
"""Largest size of an audio token's input: 30 s are 750 tokens or more, and 2 MB in any form."""


class StepBatches(list[MicroBatch]):
    """The micro-batches of one step of one rank."""

    encoders: dict[str, list[MicroBatch]]
    """Batches that this rank encodes, by encoder, if a step planner assigns encoders' work."""

    note: object
    """What the step planner tells this rank's trainer (`StepAssignment.notes`); None if nothing."""

    def __init__(
        self, batches: list[MicroBatch], encoders: dict[str, list[MicroBatch]], note: object = None
    ) -> None:
        super().__init__(batches)
        self.encoders, self.note = encoders, note


def plans_ahead(steps: Steps, reader: SelectionReader) -> Iterator[StepPlan]:
    """The rest of the epoch's steps, in order; `reader` is told of each before it is given.

    Windows of 1, 2, 4, ... steps are planned at a time: the first step comes soon.
    """
    planned: deque[tuple[StepPlan, int]] = deque()
    held = 0  # bytes of what is planned
    window = 1
    is_remote = reader.is_remote
    while planned or steps.remaining:
        # two windows at the beginning, so that more is requested than the first step
        for _ in range(2 if window == 1 and is_remote else 1):
            # plan when half empty, so that windows stay large
            if (planned and not (is_remote and 2 * held <= AHEAD_BYTES)) or not steps.remaining:
                break
            added = [
                (plan, reader.remote_bytes(plan.selections) if is_remote else 0)
                for plan in steps.plan(window)
            ]
            if is_remote:
                reader.prefetch([selection for plan, _ in added for selection in plan.selections])
            planned.extend(added)
            num_bytes = sum(num_bytes for _, num_bytes in added)
            held += num_bytes
            fitting = AHEAD_BYTES // 2 * len(added) // num_bytes if num_bytes else MAX_WINDOW
            window = max(1, min(2 * window, fitting, MAX_WINDOW if steps.is_quick else SLOW_WINDOW))
        plan, num_bytes = planned.popleft()
        held -= num_bytes
        yield plan


class StepBuilder:
    """Makes steps of plans."""

    def __init__(
        self,
        reader: SelectionReader,
        model: ModelPreset,
        config: LoaderConfig,
        meter: Meter,
        *,
        are_padded: bool = False,
        make_elsewhere: Callable[..., MicroBatch] | None = None,
    ) -> None:
        """`are_padded`: whether micro-batches are planned to be padded.

        `make_elsewhere` makes those that the user's functions transform, of what `make_batch` takes
        after the config. Decoding alone is as fast in threads, which send no pixels.
        """
        self._are_padded = are_padded
        self._reader = reader
        self._config = config
        self._meter = meter
        self._make_here, self._make_elsewhere = partial(make_batch, model, config), make_elsewhere
        self._device = None if config.device is None else torch.device(config.device)
        is_cuda = self._device is not None and self._device.type == "cuda"
        self._pin = is_cuda and torch.cuda.is_available()
        self._may_be_quick = config.images == "encoded" and not (
            config.batch_transform or self._pin
        )
        rule, dtype = model.vision, config.pixel_dtype
        self._row_bytes = math.prod(pixels.patch_shape(rule)) * dtype.itemsize
        self._frames = rule.num_frames if isinstance(rule, NativeSizeRule) else 1

    def task(self, plan: StepPlan, epoch: int) -> PrefetchTask[StepPlan, MicroBatch]:
        """What there is to do for a step: a part per micro-batch and per encoder's batch."""
        make, reader = self._make, self._reader
        # raw rows have one frame, but for those of micro-batches with a video
        is_whole = self._config.pixel_dtype != torch.uint8 or reader.has_videos
        row_bytes = self._row_bytes * (self._frames if is_whole else 1)
        parts = [partial(make, plan, epoch, selection) for selection in plan.micro_batches]
        for name, batches in plan.encoders.items():
            parts += [partial(make, plan, epoch, selection, name) for selection in batches]
        return PrefetchTask(
            subject=plan,
            parts=parts,
            num_bytes=plan.num_pixel_rows * max(row_bytes, reader.row_bytes)
            + plan.num_tokens * TOKEN_BYTES
            + plan.num_audio_tokens * AUDIO_TOKEN_BYTES,
            is_quick=self._may_be_quick
            and not (plan.num_audio_tokens or plan.encoders)
            and reader.is_quick(plan.micro_batches),
        )

    def step(self, plan: StepPlan, batches: list[MicroBatch]) -> StepBatches:
        """The step of a task's results, moved to the device on the caller's current stream."""
        if self._device is not None:
            batches = [batch.to(self._device, non_blocking=self._pin) for batch in batches]
        if not plan.encoders:
            return StepBatches(batches, {}, plan.note)
        remaining = iter(batches)
        micro_batches = [next(remaining) for _ in plan.micro_batches]
        encoders = {
            name: [next(remaining) for _ in selections]
            for name, selections in plan.encoders.items()
        }
        return StepBatches(micro_batches, encoders, plan.note)

    def _make(
        self, plan: StepPlan, epoch: int, selection: Selection, encoder: str | None = None
    ) -> MicroBatch:
        """Read, collate and transform one part; in any thread."""
        config, reader = self._config, self._reader
        begun = time.perf_counter()
        raw = reader.read(selection)
        read = time.perf_counter()
        if encoder is not None:
            raw = only_media(raw, encoder)
        elif plan.encoders:
            raw = without_media(raw, plan.encoders)
        num_bytes = stored_bytes(raw)
        stored = reader.stored_samples(selection)
        make: Callable[..., MicroBatch] = self._make_here
        is_python = config.batch_transform is not None or (config.image_transform and raw.images)
        if self._make_elsewhere is not None and is_python:
            make = self._make_elsewhere
        seeds = SampleSeeds(config.seed, epoch, stored)
        batch = make(raw, plan.totals, seeds, self._are_padded)
        if batch.skipped:
            self._meter.add_skipped(len(batch.skipped))
            for why in batch.skipped.values():
                warnings.warn(visible_line(f"skipped: {why}"), stacklevel=2)
        if config.images != "encoded":
            reader.release(selection)
        if self._pin:
            batch = batch.pin_memory()
        self._meter.add_part(read - begun, time.perf_counter() - read, num_bytes)
        return batch
