"""Uneven samples of three modalities for `benchmarks/dispatch_ablation.py`.

Tasks differ in what they are made of (OrchMLLM, figure 3): questions about images, speech with its
transcript, plain text, and both at once. Images are all of one size, 0 to 8 per sample; speech and
text have long tails. A sample's clips are one behind the other. Every rank makes all samples of a
step from its seed and so can work on any of them, as ranks can that read inputs where they need
them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from isobatch.balance.metrics import FloatArray
from isobatch.common.types import IntArray
from isobatch.engine.cost_model.loads import PhaseLoads
from isobatch.engine.dispatching.dispatch import Examples

IMAGE_TOKEN, AUDIO_TOKEN, FIRST_TEXT = 0, 1, 2
TOKENS = {"vision": IMAGE_TOKEN, "audio": AUDIO_TOKEN}
TASKS = (0.4, 0.25, 0.15, 0.2)
"""Shares of images, speech, plain text, and images with speech."""
MOST_IMAGES, MOST_SPEECH, MOST_TEXT = 8, 300, 800
"""Per sample: images, LLM tokens of speech and of text."""
SPEECH, TEXT = (3.2, 1.0), (3.9, 1.0)
"""Mean and deviation of the logarithm of LLM tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataShape:
    """What one unit of each input is made of."""

    image_patches: int = 64
    """ViT tokens of an image."""
    patch_values: int = 192
    patches_per_token: int = 4
    """ViT tokens of an image token."""
    frames_per_token: int = 8
    """Of speech per audio token: the convolutions halve them, the connector joins four."""
    frame_values: int = 80
    vocabulary: int = 2048


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    ids: Tensor
    """int64, (LLM tokens,): text, with a token of its own for each image token and audio token."""
    patches: Tensor
    """(ViT tokens, values)."""
    frames: Tensor
    """(frames, values)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepData:
    """A step of all ranks, in the order in which they drew it."""

    samples: Sequence[Sample]
    examples: Examples
    flops: IntArray
    """Of each sample, forward and backward, without padding; (samples,)."""
    num_loss_tokens: int
    """Tokens with a token behind them, of all samples."""

    @property
    def num_tokens(self) -> int:
        """LLM tokens, all ranks."""
        return int(self.examples.lengths["llm"].sum())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PhaseInput:
    """What a rank works on in one phase, sample after sample."""

    rows: Tensor
    """Patches, frames or ids."""
    lengths: list[int]
    """Rows of each sample."""


def draw_step(
    shape: DataShape,
    flops: Callable[[str, PhaseLoads], FloatArray],
    *,
    ranks: int,
    per_rank: int,
    seed: int,
) -> StepData:
    """Samples of one step, `per_rank` for each rank; `flops`: (phase, loads) -> FLOPs."""
    rng = np.random.default_rng(seed)
    images, speech, texts = _sizes(rng, ranks * per_rank)
    image_tokens = images * (shape.image_patches // shape.patches_per_token)
    samples = [
        _sample(shape, rng, *sizes)
        for sizes in zip(images, image_tokens, speech, texts.tolist(), strict=True)
    ]
    lengths: dict[str, IntArray] = {
        "vision": images * shape.image_patches,
        "audio": speech * (shape.frames_per_token // 2),
        "llm": image_tokens + speech + texts,
    }
    squares: dict[str, IntArray] = {
        "vision": images * shape.image_patches**2,
        "audio": np.square(lengths["audio"]),
        "llm": np.square(lengths["llm"]),
    }
    examples = Examples(
        lengths=lengths,
        squares=squares,
        features={"vision": image_tokens, "audio": speech},
        offsets=np.arange(ranks + 1) * per_rank,
    )
    loads = {
        phase: PhaseLoads(
            tokens=lengths[phase], squares=squares[phase], items=np.minimum(lengths[phase], 1)
        )
        for phase in lengths
    }
    return StepData(
        samples=samples,
        examples=examples,
        flops=sum(flops(phase, own) for phase, own in loads.items()).astype(np.int64),
        num_loss_tokens=int(lengths["llm"].sum()) - len(samples),
    )


def phase_input(step: StepData, shape: DataShape, phase: str, chosen: Sequence[int]) -> PhaseInput:
    """Some samples' inputs for a phase."""
    own = [rows_of(step.samples[number], phase) for number in chosen]
    empty = {
        "vision": torch.empty(0, shape.patch_values),
        "audio": torch.empty(0, shape.frame_values),
        "llm": torch.empty(0, dtype=torch.int64),
    }
    return PhaseInput(rows=torch.cat([empty[phase], *own]), lengths=[len(rows) for rows in own])


def rows_of(sample: Sample, phase: str) -> Tensor:
    """A sample's input for a phase."""
    return {"vision": sample.patches, "audio": sample.frames, "llm": sample.ids}[phase]


def _sizes(rng: np.random.Generator, count: int) -> tuple[IntArray, IntArray, IntArray]:
    """Images, LLM tokens of speech, LLM tokens of text; (count,) each."""
    tasks = rng.choice(len(TASKS), count, p=TASKS)
    images = np.where(
        np.isin(tasks, (0, 3)), np.minimum(rng.geometric(0.35, count), MOST_IMAGES), 0
    )
    spoken = np.clip(rng.lognormal(*SPEECH, count), 4, MOST_SPEECH).astype(np.int64)
    texts = np.clip(rng.lognormal(*TEXT, count), 8, MOST_TEXT).astype(np.int64)
    return images.astype(np.int64), np.where(np.isin(tasks, (1, 3)), spoken, 0), texts


def _sample(
    shape: DataShape,
    rng: np.random.Generator,
    images: int,
    image_tokens: int,
    speech: int,
    texts: int,
) -> Sample:
    text = rng.integers(FIRST_TEXT, shape.vocabulary, texts)
    # media come first, then what is said of them
    ids = np.concatenate([np.full(image_tokens, IMAGE_TOKEN), np.full(speech, AUDIO_TOKEN), text])
    patches = rng.standard_normal((images * shape.image_patches, shape.patch_values), np.float32)
    frames = rng.standard_normal((speech * shape.frames_per_token, shape.frame_values), np.float32)
    return Sample(
        ids=torch.from_numpy(ids),
        patches=torch.from_numpy(patches),
        frames=torch.from_numpy(frames),
    )
