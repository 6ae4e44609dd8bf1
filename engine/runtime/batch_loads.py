"""`Loads` of the micro-batches that a runtime trains on, from the tensors that say how long
everything in them is.

What `engine.cost_model.loads` takes from counts of a build, exactly: images at native
resolution and windows of audio each count with their own length. Any object with the fields of
`loaders.MicroBatch` will do, decoded images or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from balance.errors import ConfigError
from balance.presets import ModelPreset, NativeRule
from balance.types import IntArray
from engine.cost_model.loads import Loads, PhaseLoads
from engine.runtime.stage_io import Batch, ids_text


def batch_loads(batches: Sequence[Batch], model: ModelPreset) -> Loads:
    """What each micro-batch brings to each phase of a model, (micro_batches,). ConfigError if they
    do not tell.

    Read from `cu_seqlens`, `patches_per_image` or, at native resolution, `image_grid_thw`, and
    `audio_frames`.
    """
    return Loads(
        vision=_phase([_vision_lengths(batch, model) for batch in batches]),
        audio=_phase([_audio_lengths(batch, model) for batch in batches]),
        llm=_phase([np.diff(_integers(batch, "cu_seqlens")) for batch in batches]),
    )


def _phase(lengths: Sequence[IntArray]) -> PhaseLoads:
    """Of the lengths of what attends at once, a list per micro-batch."""
    return PhaseLoads(
        tokens=np.array([own.sum() for own in lengths], np.int64),
        squares=np.array([np.square(own).sum() for own in lengths], np.int64),
        items=np.array([len(own) for own in lengths], np.int64),
    )


def _vision_lengths(batch: Batch, model: ModelPreset) -> IntArray:
    rule = model.vision
    if isinstance(rule, NativeRule):
        frames, rows, columns = _integers(batch, "image_grid_thw").reshape(-1, 3).T
        return np.repeat(rows * columns, frames)
    return np.full(
        int(_integers(batch, "patches_per_image").sum()), rule.vit_tokens_per_patch, np.int64
    )


def _audio_lengths(batch: Batch, model: ModelPreset) -> IntArray:
    """Encoder tokens of each window; none where a model hears nothing."""
    if model.audio is None or getattr(batch, "audio_frames", None) is None:
        return np.zeros(0, np.int64)
    return -(-_integers(batch, "audio_frames") // model.audio.conv_stride)


def _integers(batch: Batch, name: str) -> IntArray:
    found: Any = getattr(batch, name, None)
    if found is None:
        raise ConfigError(
            f"a micro-batch ({ids_text(batch)}) has no {name}, which tells what it brings to the model; make the Loads "
            "of such micro-batches yourself"
        )
    return np.asarray(found.cpu().numpy(), np.int64)
