"""What samples bring to each phase, and micro-batches of samples: from the counts table to `Loads`.
Pure NumPy.

For `engine.planning.build_steps` (plans of a build) and `engine.tuning.tune` (steps). Exact but for
two things that counts do not tell: at native resolution the images of a sample are taken as equally
large, and a sample's audio as one clip.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import numpy as np

from balance.flops import FlopsModel
from balance.presets import ModelPreset
from balance.types import Counts, Groups
from engine.cost_model.loads import Loads, PhaseLoads

PHASES = tuple(f.name for f in fields(Loads))
QUANTITIES = tuple(f.name for f in fields(PhaseLoads))


def sample_loads(counts: Counts, model: ModelPreset) -> Loads:
    """What each sample brings to each phase, (samples,). ConfigError if the preset lacks the
    model's dimensions.
    """
    load = FlopsModel.of(model).loads(counts)
    samples = np.ones(len(counts), np.int64)
    return Loads(
        vision=PhaseLoads(
            tokens=load.vit_tokens, squares=load.vit_squares, items=counts.num_image_patches
        ),
        audio=_audio(counts, model),
        llm=PhaseLoads(tokens=load.llm_tokens, squares=load.llm_squares, items=samples),
    )


def _audio(counts: Counts, model: ModelPreset) -> PhaseLoads:
    """Encoder tokens in windows, of one clip per sample."""
    if model.audio is None:
        return PhaseLoads.nothing(len(counts))
    tokens = counts.num_audio_tokens * model.audio.downsample
    window = model.audio.window_frames // model.audio.conv_stride
    full, rest = np.divmod(tokens, window)
    return PhaseLoads(tokens=tokens, squares=full * window**2 + rest**2, items=full + (rest > 0))


def packed_loads(samples: Loads, groups: Groups) -> Loads:
    """Loads of micro-batches, from those of samples."""
    phases = {phase: getattr(samples, phase) for phase in PHASES}
    return Loads(
        **{
            phase: PhaseLoads(**{name: groups.sum(getattr(own, name)) for name in QUANTITIES})
            for phase, own in phases.items()
        }
    )


def joined_loads(parts: Sequence[Loads]) -> Loads:
    """The micro-batches of several steps, one after the other."""
    return Loads(
        **{
            phase: PhaseLoads(
                **{
                    name: np.concatenate([getattr(getattr(p, phase), name) for p in parts])
                    for name in QUANTITIES
                }
            )
            for phase in PHASES
        }
    )
