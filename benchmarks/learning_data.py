"""What benchmarks/learning.py trains on: manuals with pictures, speech and plain text, packed.

Sections of the manuals, with pictures or without, ask for their title, so they have few labels;
clips are transcribed; every other section without pictures is a document instead, all of whose
tokens have labels. Every eighth sample of a source is held out. Samples are decoded once and kept,
because every method runs the same ones.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

from isobatch.common.types import Counts, IntArray, Limits  # noqa: E402
from isobatch.loaders import MicroBatch, StreamingLoader  # noqa: E402
from isobatch.packer.build import Builder  # noqa: E402
from isobatch.packer.config import BuildConfig  # noqa: E402
from isobatch.packer.progress import StageProgress  # noqa: E402
from isobatch.shards.manifest import read_manifest  # noqa: E402

SOURCES = ("manuals", "speech", "text")
MODEL, VOCABULARY = "tiny_audio", 1024
"""Tokens of the tokenizer that are kept: with all, tiny models spend their time on logits."""
CHARACTERS, MOST_IMAGES = 1.5, 4
"""Of a sample at most, the first per token of a group; longer documents are cut at paragraphs,
longer sections are left out."""
HELD_OUT = 8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """One sample, decoded."""

    source: int
    input_ids: Tensor
    labels: Tensor
    pixels: Tensor
    frames: Tensor
    """Log-mel, (frames, mel bins)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """Training samples by id, how they are grouped, and samples held out."""

    builds: list[Path]
    """One of all sources, or one of each."""
    samples: dict[str, Sample]
    stored: list[list[str]]
    """Ids of each stored group's samples."""
    limits: list[Limits]
    """Caps of each build."""
    held_out: list[Sample]
    vocab_size: int
    image_token_id: int
    audio_token_id: int

    @property
    def sources(self) -> IntArray:
        """Number of each sample's source."""
        return np.array([sample.source for sample in self.samples.values()])

    @property
    def num_tokens(self) -> int:
        """LLM tokens of all samples."""
        return sum(len(sample.input_ids) for sample in self.samples.values())

    def counts(self, ids: list[str]) -> Counts:
        """What samples cost."""
        chosen = [self.samples[each] for each in ids]
        patches = np.array([len(each.pixels) for each in chosen], np.int64)
        length = np.array([len(each.input_ids) for each in chosen], np.int64)
        zeros = np.zeros_like(length)
        return Counts(
            num_image_patches=patches,
            num_vit_tokens=17 * patches,
            num_image_tokens=zeros,
            num_text_tokens=length,  # all of the sequence: only the sum is used
            num_audio_tokens=zeros,
            num_loss_tokens=np.array([int((each.labels >= 0).sum()) for each in chosen], np.int64),
        )


def prepare(
    folder: Path, corpora: Path | None, *, max_seq_len: int, limit: int | None, mixed_by: str
) -> Data:
    """Read, pack and decode the corpora; `limit`: samples of each source. `mixed_by`: who mixes."""
    root = corpora / "corpora" if corpora else ROOT / "tests" / "data"
    names = corpora or ROOT / "tests" / "data"
    tokenizer = _cut_tokenizer(
        names / "tokenizers" / ("qwen2_5" if corpora else "byte_level"), folder / "tokenizer"
    )
    rows = {name: own[:limit] for name, own in _rows(root, int(CHARACTERS * max_seq_len)).items()}
    held_out = {name: own[::HELD_OUT] for name, own in rows.items()}
    for own in rows.values():
        del own[::HELD_OUT]
    parts = [rows] if mixed_by == "packer" else [{name: own} for name, own in rows.items()]
    builds = [
        _build(folder / f"train-{number}", part, root, tokenizer, max_seq_len)
        for number, part in enumerate(parts)
    ]
    others = [_build(folder / "held-out", held_out, root, tokenizer, max_seq_len)]
    loader = StreamingLoader(builds[0], dp_rank=0, dp_world_size=1)
    assert loader.audio_token_id is not None
    tokens = loader.image_token_id, loader.audio_token_id
    groups = [list(group) for group in _groups(builds, tokens)]
    return Data(
        builds=builds,
        samples={name: own for group in groups for name, own in group},
        stored=[[name for name, _ in group] for group in groups],
        limits=[read_manifest(build).limits for build in builds],
        held_out=[own for group in _groups(others, tokens) for _, own in group],
        vocab_size=loader.vocab_size,
        image_token_id=tokens[0],
        audio_token_id=tokens[1],
    )


def _groups(builds: list[Path], tokens: tuple[int, int]) -> Iterator[list[tuple[str, Sample]]]:
    """The samples of each group."""
    for build in builds:
        for (batch,) in StreamingLoader(build, dp_rank=0, dp_world_size=1, audio="features"):
            yield _cut(batch, *tokens)


def join(samples: list[Sample], loss_normalizer: float) -> MicroBatch:
    """Samples packed into one micro-batch, as the loader does."""
    lengths = [len(own.input_ids) for own in samples]
    clips = [own.frames for own in samples if len(own.frames)]
    return MicroBatch(
        sample_ids=("",) * len(samples),
        input_ids=torch.cat([own.input_ids for own in samples]),
        labels=torch.cat([own.labels for own in samples]),
        position_ids=torch.cat([torch.arange(length) for length in lengths]),
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).int(),
        pixel_values=torch.cat([own.pixels for own in samples]),
        patches_per_image=torch.zeros(0, dtype=torch.long),
        image_sizes=torch.zeros(0, 2, dtype=torch.long),
        image_grid_thw=None,
        audio_values=torch.cat([samples[0].frames[:0], *clips]),
        audio_frames=torch.tensor([len(clip) for clip in clips], dtype=torch.long),
        num_loss_tokens=sum(int((own.labels >= 0).sum()) for own in samples),
        num_step_samples=len(samples),
        loss_normalizer=loss_normalizer,
    )


def _rows(root: Path, most: int) -> dict[str, list[dict[str, Any]]]:
    """Raw records of each source."""
    sections = json.loads((root / "manuals" / "annotations.json").read_text("utf-8"))
    clips = json.loads((root / "speech" / "annotations.json").read_text("utf-8"))
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in SOURCES}
    for number, section in enumerate(sections):
        images = section.get("image", [])
        images = [images] if isinstance(images, str) else images
        text = section["conversations"][0]["value"]
        if not images and number % 2:
            for place, piece in enumerate(_pieces(text, most)):
                rows["text"].append({"id": f"text/{number}-{place}", "text": piece})
        elif len(images) <= MOST_IMAGES and len(text) <= most:
            row = {"id": f"manuals/{number}", "conversations": section["conversations"]}
            rows["manuals"].append({**row, "image": images})
    for clip in clips:
        row = {"id": f"speech/{clip['id']}", "conversations": clip["conversations"]}
        rows["speech"].append({**row, "audio": clip["audio"]})
    return rows


def _pieces(text: str, most: int) -> list[str]:
    """A document cut at paragraphs, without its closing question."""
    pieces = [""]
    for paragraph in text.split("\n\n")[:-1]:
        if pieces[-1] and len(pieces[-1]) + len(paragraph) > most:
            pieces.append("")
        pieces[-1] += f"\n\n{paragraph[:most]}"
    return [piece.strip() for piece in pieces if piece.strip()]


def _build(
    folder: Path,
    rows: dict[str, list[dict[str, Any]]],
    root: Path,
    tokenizer: Path,
    max_seq_len: int,
) -> Path:
    folder.mkdir(parents=True)
    places = {"manuals": root / "manuals", "speech": root / "speech", "text": folder}
    mixture = ""
    for name, own in rows.items():
        (folder / f"{name}.json").write_text(json.dumps(own))
        mixture += f'[[datasets]]\nname = "{name}"\ndataset = "{name}.json"\n'
        mixture += f'data_root = "{places[name]}"\n'
    (folder / "mixture.toml").write_text(mixture)
    config = BuildConfig(
        dataset=str(folder / "mixture.toml"),
        model=MODEL,
        tokenizer=str(tokenizer),
        max_seq_len=max_seq_len,
        out=str(folder / "build"),
        max_rejected=0.2,  # sections with pictures that are longer than a group
        workers=1,
    )
    Builder(config, StageProgress(Console(file=io.StringIO()))).build()
    return folder / "build"


def _cut(batch: MicroBatch, image_token_id: int, audio_token_id: int) -> list[tuple[str, Sample]]:
    """The samples of a micro-batch, by id."""
    borders = list(zip(batch.cu_seqlens.tolist(), batch.cu_seqlens[1:].tolist(), strict=False))
    ids = [batch.input_ids[start:stop] for start, stop in borders]
    # four LLM tokens per tile, and at most one clip of one window per sample
    pixels = batch.pixel_values.split([int((own == image_token_id).sum()) // 4 for own in ids])
    assert batch.audio_values is not None
    assert batch.audio_frames is not None
    clips = iter(batch.audio_values.split(batch.audio_frames.tolist()))
    none = batch.audio_values[:0]
    found = []
    for number, (start, stop) in enumerate(borders):
        has_clip = bool((ids[number] == audio_token_id).any())
        name = batch.sample_ids[number]
        sample = Sample(
            source=SOURCES.index(name.partition("/")[0]),
            input_ids=ids[number],
            labels=batch.labels[start:stop],
            pixels=pixels[number].contiguous(),
            frames=next(clips) if has_clip else none,
        )
        found.append((name, sample))
    return found


def _cut_tokenizer(whole: Path, folder: Path) -> Path:
    """A tokenizer on bytes with its first tokens only, and its control tokens after them."""
    folder.mkdir(parents=True)
    content, config = (
        json.loads((whole / f"{name}.json").read_text("utf-8"))
        for name in ("tokenizer", "tokenizer_config")
    )
    model, first = content["model"], len(content["model"]["vocab"])
    kept = {token: place for token, place in model["vocab"].items() if place < VOCABULARY}
    merges = [pair.split() if isinstance(pair, str) else pair for pair in model["merges"]]
    model["vocab"], model["merges"] = kept, [pair for pair in merges if "".join(pair) in kept]
    for token in content["added_tokens"]:
        token["id"] += VOCABULARY - first
    config["added_tokens_decoder"] = {
        str(int(place) + VOCABULARY - first): token
        for place, token in config["added_tokens_decoder"].items()
    }
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
