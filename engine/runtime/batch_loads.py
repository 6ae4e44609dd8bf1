"""`Loads` of micro-batches at run time, computed from their tensors.

Gives exactly what `engine.cost_model.loads.sample_loads` gives from the counts of a build. Works
with any object that has the fields of `loaders.MicroBatch`, images decoded or not.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from isobatch.common.errors import ConfigError
from isobatch.common.types import LABEL_IGNORE, IntArray
from isobatch.engine.cost_model.loads import Loads, PhaseLoads, labelled
from isobatch.engine.runtime.stage_io import Batch, samples_text
from isobatch.models.audio_tokens import AudioRule
from isobatch.models.image_rules import NativeSizeRule
from isobatch.models.presets import ModelPreset, TransformerShape


def batch_loads(batches: Sequence[Batch], model: ModelPreset) -> Loads:
    """Load of each micro-batch on each phase of a model, arrays of shape (micro_batches,).

    Reads `cu_seqlens`, `labels`, `patches_per_image` or, at native resolution, `image_grid_thw`,
    and `audio_frames`. ConfigError if a field is missing.
    """
    return Loads(
        vision=_phase([_vision_lengths(batch, model) for batch in batches], model.vit),
        audio=_phase([_audio_lengths(batch, model) for batch in batches], model.audio),
        llm=_phase([np.diff(_integers(batch, "cu_seqlens")) for batch in batches], model.llm),
        labels=labelled(
            np.array(
                [(_integers(batch, "labels") != LABEL_IGNORE).sum() for batch in batches], np.int64
            )
        ),
    )


def _phase(lengths: Sequence[IntArray], shape: TransformerShape | AudioRule | None) -> PhaseLoads:
    """Loads from the lengths of attention sequences, or of audio windows; one per micro-batch."""
    squares = [np.square(column) for column in lengths]
    if isinstance(shape, AudioRule):
        squares = [shape.attention_squares(column) for column in lengths]
    elif shape is not None:
        squares = list(map(shape.mean_squares, lengths, squares))
    return PhaseLoads(
        tokens=np.array([column.sum() for column in lengths], np.int64),
        squares=np.array([column.sum() for column in squares], np.int64),
        items=np.array([len(column) for column in lengths], np.int64),
    )


def _vision_lengths(batch: Batch, model: ModelPreset) -> IntArray:
    rule = model.vision
    if isinstance(rule, NativeSizeRule):
        frames, rows, columns = _integers(batch, "image_grid_thw").reshape(-1, 3).T
        return np.repeat(rows * columns, frames)
    count = int(_integers(batch, "patches_per_image").sum())
    return np.full(count, rule.vit_tokens_per_patch, np.int64)


def _audio_lengths(batch: Batch, model: ModelPreset) -> IntArray:
    """Encoder tokens of each audio window; empty if the model has no audio encoder."""
    if model.audio is None or getattr(batch, "audio_frames", None) is None:
        return np.zeros(0, np.int64)
    return model.audio.encoder_tokens(_integers(batch, "audio_frames"))


def _integers(batch: Batch, name: str) -> IntArray:
    value: Any = getattr(batch, name, None)
    if value is None:
        raise ConfigError(
            f"a micro-batch ({samples_text(batch)}) has no {name}, from which its load is computed;"
            " make the Loads of such micro-batches yourself"
        )
    return np.asarray(value.cpu().numpy(), np.int64)
