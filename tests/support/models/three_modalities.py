"""A tiny model that sees, hears and reads, its samples, and steps as a loader with a step planner
gives them.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from isobatch.common.types import Counts

IMAGE, CLIP, VOCAB = 0, 1, 23
TOKENS = {"vision": IMAGE, "audio": CLIP}
VIT_TOKENS, PATCH_VALUES, FRAMES, BINS, WIDTH, HIDDEN = 4, 6, 2, 5, 8, 16
"""An image token is made of 4 ViT tokens, an audio token of 2 frames."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    name: str
    input_ids: Tensor
    labels: Tensor
    pixels: Tensor
    frames: Tensor


@dataclass(frozen=True, kw_only=True)
class Batch:
    """As `loaders.MicroBatch`: a micro-batch, or an encoder's batch, without tokens."""

    sample_ids: tuple[str, ...]
    input_ids: Tensor
    labels: Tensor
    cu_seqlens: Tensor
    pixel_values: Tensor
    audio_values: Tensor
    num_loss_tokens: int


class Delivered(list):
    """As `loaders.StepBatches`."""

    def __init__(self, batches, encoders, note):
        super().__init__(batches)
        self.encoders, self.note = encoders, note


def draw(seed: int, count: int, *, text_only: bool = False) -> list[Sample]:
    """Heavy-tailed samples: images, clips, both or neither."""
    generator = torch.Generator().manual_seed(seed)

    def upto(most: int) -> int:
        return int(torch.randint(most, (1,), generator=generator))

    samples = []
    for number in range(count):
        kind = 3 if text_only else upto(4)
        images, clips, texts = (
            (kind in (0, 2)) * (1 + upto(9)),
            (kind in (1, 2)) * (1 + upto(6)),
            2 + upto(12),
        )
        texts_ids = torch.randint(2, VOCAB, (texts,), generator=generator)
        ids = torch.cat([torch.full((images,), IMAGE), torch.full((clips,), CLIP), texts_ids])
        ids = ids[torch.randperm(len(ids), generator=generator)]
        samples.append(
            Sample(
                name=f"{seed}-{number}",
                input_ids=ids,
                labels=torch.where(torch.rand(len(ids), generator=generator) < 0.6, ids, -100),
                pixels=torch.randn(images * VIT_TOKENS, PATCH_VALUES, generator=generator),
                frames=torch.randn(clips * FRAMES, BINS, generator=generator),
            )
        )
    return samples


def counts_of(samples: list[Sample]) -> Counts:
    images = np.array([len(sample.pixels) // VIT_TOKENS for sample in samples])
    audio = np.array([len(sample.frames) // FRAMES for sample in samples])
    return Counts(
        num_image_patches=np.minimum(images, 1),
        num_vit_tokens=images * VIT_TOKENS,
        num_image_tokens=images,
        num_text_tokens=np.array([len(sample.input_ids) for sample in samples]) - images - audio,
        num_audio_tokens=audio,
        num_loss_tokens=np.array([int((sample.labels >= 0).sum()) for sample in samples]),
    )


def collate(samples: list[Sample], total: int, *, media=("vision", "audio"), text=True) -> Batch:
    """Samples one behind the other; `media`: whose inputs come with them; `total`: labels of the
    step.
    """
    none, lengths = (
        torch.empty(0, dtype=torch.int64),
        [len(sample.input_ids) * text for sample in samples],
    )
    pixels = [sample.pixels for sample in samples if "vision" in media]
    frames = [sample.frames for sample in samples if "audio" in media]
    return Batch(
        sample_ids=tuple(sample.name for sample in samples),
        input_ids=torch.cat([none, *(sample.input_ids for sample in samples if text)]),
        labels=torch.cat([none, *(sample.labels for sample in samples if text)]),
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0),
        pixel_values=torch.cat([torch.empty(0, PATCH_VALUES), *pixels]),
        audio_values=torch.cat([torch.empty(0, BINS), *frames]),
        num_loss_tokens=total,
    )


def deliver(samples: list[Sample], work, rank: int) -> Delivered:
    """What a loader gives to a rank of a step whose planner answered `work`."""
    total = sum(int((sample.labels >= 0).sum()) for sample in samples)
    own = {name for name in TOKENS if name not in work.encoders}

    def batches(groups, **options):
        return [
            collate([samples[place] for place in groups[number]], total, **options)
            for number in range(len(groups))
        ]

    return Delivered(
        batches(work.micro_batches[rank], media=own),
        {
            name: batches(ranks[rank], media={name}, text=False)
            for name, ranks in work.encoders.items()
        },
        work.notes[rank] if work.notes else None,
    )


class Vision(nn.Module):
    """Patches -> image tokens; every image by itself, so it does not matter who else is in the
    batch.
    """

    def __init__(self):
        super().__init__()
        self.embed, self.mix, self.out = (
            nn.Linear(PATCH_VALUES, WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(VIT_TOKENS * WIDTH, HIDDEN),
        )

    def forward(self, batch):
        hidden = self.embed(batch.pixel_values)
        hidden = hidden + functional.gelu(self.mix(hidden))
        return self.out(hidden.reshape(-1, VIT_TOKENS * WIDTH))


class Audio(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Linear(FRAMES * BINS, WIDTH), nn.Linear(WIDTH, HIDDEN)

    def forward(self, batch):
        return self.out(functional.gelu(self.embed(batch.audio_values.reshape(-1, FRAMES * BINS))))


class Language(nn.Module):
    """Text, with features put in place of image and audio tokens."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(VOCAB, HIDDEN)
        self.qkv, self.up, self.down = (
            nn.Linear(HIDDEN, 3 * HIDDEN),
            nn.Linear(HIDDEN, 32),
            nn.Linear(32, HIDDEN),
        )

    def forward(self, batch, features):
        """The sum of the losses. Features are touched only where there are some, as many models
        do.
        """
        hidden = self.table(batch.input_ids)
        for name, token in TOKENS.items():
            places = (batch.input_ids == token).nonzero().squeeze(1)
            if len(places):
                hidden = hidden.index_copy(0, places, features[name])
        borders = list(pairwise(batch.cu_seqlens.tolist()))
        if not borders:
            return hidden.sum()
        parts = self.qkv(hidden).reshape(-1, 3, HIDDEN).permute(1, 0, 2)
        mixed = [
            functional.scaled_dot_product_attention(
                *(part[None, start:end] for part in parts), is_causal=True
            )
            for start, end in borders
        ]
        hidden = hidden + torch.cat(mixed, 1)[0]
        hidden = hidden + self.down(functional.gelu(self.up(hidden)))
        return functional.cross_entropy(
            hidden @ self.table.weight.T, batch.labels, ignore_index=-100, reduction="sum"
        )


def make_model(seed: int = 0) -> nn.ModuleDict:
    torch.manual_seed(seed)
    return nn.ModuleDict({"vision": Vision(), "audio": Audio(), "language": Language()})


def run_alone(model: nn.ModuleDict, samples: list[Sample]) -> float:
    """A step in one process, sample by sample; -> the loss."""
    total, loss = sum(int((sample.labels >= 0).sum()) for sample in samples), 0.0
    for sample in samples:
        batch = collate([sample], total)
        own = model["language"](batch, {name: model[name](batch) for name in TOKENS}) / total
        own.backward()
        loss += float(own.detach())
    return loss
