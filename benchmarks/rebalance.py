"""`rebalance` and `dispatch` in a training step of a loader that knows no balance.

    python benchmarks/rebalance.py [--ranks 2 4] [--steps 6] [--samples 6]

Each rank draws its samples at random (none to eight images, text of 8 to 400 tokens) and trains a
small Qwen2-VL of transformers on them, gloo ranks on this machine. Rows: samples where they were
drawn; `rebalance` of references (a number; pixels are made where they are needed); of samples with
their pixels; an encoder dispatched, samples where they are.

Wait: share of the ranks' computing time that they wait for the slowest, mean over steps; computing
is the CPU time of the training thread, so that ranks may share cores. Predicted: the same of the
costs that `rebalance` was given, which are fitted to samples timed at the start, by phase. Moved:
bytes that travel between ranks per step, counted at the collectives (gradients not among them).
Largest: ViT patches and LLM tokens of the rank that has most of them in its step, mean over steps;
caps are those of `rebalance` without any given: what the fullest rank drew.
Exchange: time of the call, planning included, once all ranks have come. Gradient: largest
difference to one process's, over the largest gradient.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPooling

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from isobatch import dispatch, rebalance  # noqa: E402

IMAGE, START, END, VOCAB = 5, 7, 8, 512
IMAGES = (0, 0, 0, 1, 1, 2, 3, 8)
ROWS = ("as drawn", "references", "pixels", "encoder dispatched")
FITTED = 16
"""Samples that are timed at the start."""
Sample = dict[str, Any]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--samples", type=int, default=6, help="per rank and step")
    options = parser.parse_args(argv)
    table = Table(title=f"{options.samples} samples per rank, {options.steps} steps")
    heads = ("ranks", "", "wait, %", "predicted, vision / LLM, %", "moved, KB", "exchange, ms")
    for head in (*heads, "slowest rank, ms", "largest, patches / tokens", "gradient"):
        table.add_column(head, justify="right" if head else "left")
    for size in options.ranks:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(run_rank, (size, folder, options), size)
            for row in torch.load(f"{folder}/rows.pt"):
                table.add_row(str(size), *row)
    Console(width=160).print(table)


def run_rank(rank: int, size: int, folder: str, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=size)
    costs = fitted_costs()
    rows = []
    for kind in ROWS:
        run(kind, 2, 1, costs, seed=10**6)  # compiles, and measures the link
        figures = run(kind, options.samples, options.steps, costs, seed=0)
        rows.append([kind, *figures])
    if rank == 0:
        torch.save(rows, f"{folder}/rows.pt")
    dist.barrier()
    dist.destroy_process_group()


def run(
    kind: str, samples: int, steps: int, costs: Callable[[Any], tuple[float, float]], *, seed: int
) -> list[str]:
    """Train some steps; the cells of a row."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model, whole = make_model(), make_model()
    table, difference = [], 0.0
    for step in range(steps):
        first = seed + (step * size + rank) * samples
        numbers = list(range(first, first + samples))
        drawn: list[Any] = [draw(n) for n in numbers] if kind == "pixels" else numbers
        moved, exchange = 0, 0.0
        if kind in ("references", "pixels"):
            dist.barrier()
            began = time.perf_counter()
            with Traffic() as traffic:
                (drawn,) = rebalance([drawn], costs=costs, sizes=lengths)
            moved, exchange = traffic.sent, 1e3 * (time.perf_counter() - began)
        batch = [draw(one) if isinstance(one, int) else one for one in drawn]
        labels = torch.tensor(sum(len(one["input_ids"]) - 1 for one in batch))
        dist.all_reduce(labels)
        began = time.thread_time()
        with Traffic() as traffic:
            loss = summed_loss(model, batch, dispatched=kind == "encoder dispatched")
            (loss / labels).backward()
        compute = 1e3 * (time.thread_time() - began)
        if kind == "encoder dispatched":
            moved = traffic.sent
        vision, llm, patches, tokens = np.sum([(*costs(s), *lengths(s)) for s in batch], axis=0)
        table.append([compute, vision, llm, moved, exchange, patches, tokens])
        if step == 0 and steps > 1:
            difference = gradient_difference(model, whole, seed, samples * size)
        model.zero_grad()
    every = [torch.empty(steps, 7, dtype=torch.float64) for _ in range(size)]
    dist.all_gather(every, torch.tensor(table, dtype=torch.float64))
    values = torch.stack(every).numpy()  # (ranks, steps, 7)
    waits = (1 - values.mean(axis=0) / np.maximum(values.max(axis=0), 1e-9)).mean(axis=0)
    predicted = f"{100 * waits[1]:.1f} / {100 * waits[2]:.1f}"
    if kind == "encoder dispatched":
        predicted = f"- / {100 * waits[2]:.1f}"
    cells = [f"{100 * waits[0]:.1f}", predicted, f"{values[:, :, 3].sum(axis=0).mean() / 1e3:,.1f}"]
    cells += [f"{values[:, :, 4].max(axis=0).mean():.1f}"]
    slowest, patches, tokens = values[:, :, [0, 5, 6]].max(axis=0).mean(axis=0)
    encoded = "-" if kind == "encoder dispatched" else f"{patches:,.0f}"
    return [*cells, f"{slowest:.0f}", f"{encoded} / {tokens:,.0f}", f"{difference:.0e}"]


def shape(number: int) -> tuple[Tensor, int, np.random.Generator]:
    """Grids and text length of sample `number` of an endless dataset, and what draws the rest."""
    rng = np.random.default_rng(number)
    count = int(rng.choice(IMAGES))
    grid = torch.from_numpy(2 * rng.integers(3, 8, (count, 2)))
    grid = torch.cat([torch.ones(count, 1, dtype=torch.int64), grid], dim=1)
    return grid, int(np.clip(rng.lognormal(4, 1), 8, 400)), rng


def lengths(sample: Any) -> tuple[int, int]:
    """ViT patches and LLM tokens of a sample, or of its number, without its pixels."""
    if not isinstance(sample, int):
        return len(sample["pixel_values"]), len(sample["input_ids"])
    grid, text, _ = shape(sample)
    patches = int(grid.prod(dim=1).sum())
    return patches, 1 + patches // 4 + 2 * len(grid) + text


def draw(number: int) -> Sample:
    """Sample `number`."""
    grid, text, rng = shape(number)
    ids = [torch.tensor([1])]
    for tokens in (grid.prod(dim=1) // 4).tolist():
        ids += [torch.tensor([START, *[IMAGE] * tokens, END])]
    ids += [torch.from_numpy(rng.integers(10, VOCAB, text))]
    pixels = rng.standard_normal((int(grid.prod(dim=1).sum()), 1176), np.float32)
    return {
        "input_ids": torch.cat(ids),
        "image_grid_thw": grid,
        "pixel_values": torch.from_numpy(pixels),
    }


def make_model() -> torch.nn.Module:
    vision = {"depth": 2, "num_heads": 4, "patch_size": 14, "embed_dim": 128, "hidden_size": 192}
    text = {
        "vocab_size": VOCAB,
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6]},
    }
    config = transformers.Qwen2VLConfig(
        vision_config=vision,
        text_config=text,
        image_token_id=IMAGE,
        video_token_id=6,
        vision_start_token_id=START,
        vision_end_token_id=END,
    )
    torch.manual_seed(0)
    model: torch.nn.Module = transformers.AutoModelForImageTextToText.from_config(config)
    return model


def summed_loss(model: Any, batch: list[Sample], *, dispatched: bool = False) -> Tensor:
    """Sum of the losses of all tokens; the images of all samples in one call of the encoder."""
    total = torch.zeros(())
    parts = iter(())
    if dispatched:
        grids = torch.cat([sample["image_grid_thw"] for sample in batch])
        pixels = torch.cat([sample["pixel_values"] for sample in batch])

        def encode(pixels: Tensor, grids: Tensor) -> Tensor:
            features: Tensor = model.model.visual(pixels, grid_thw=grids).pooler_output
            return features

        inputs, sizes = {"pixels": pixels, "grids": grids}, grids.prod(dim=1)
        features = dispatch(encode, inputs, sizes, merge=4)
        parts = iter(features.split((sizes // 4).tolist()))
        total = features.sum() * 0
    for sample in batch:
        ids, grids = sample["input_ids"][None], sample["image_grid_thw"]
        inputs = {"input_ids": ids, "labels": ids, "num_items_in_batch": 1}
        if len(grids):
            inputs |= {"image_grid_thw": grids, "mm_token_type_ids": (ids == IMAGE).int()}
            if dispatched:
                images = tuple(next(parts) for _ in grids)
                output = BaseModelOutputWithPooling(pooler_output=images)
                inputs["mm_encoder_outputs"] = {"image": output}
            else:
                inputs["pixel_values"] = sample["pixel_values"]
        total = total + model(**inputs).loss
    return total


def fitted_costs() -> Callable[[Any], tuple[float, float]]:
    """(vision, LLM) ms of a sample, or of its number, as this machine takes; equal on all ranks."""
    model, rows = make_model(), []
    samples = [draw(5 * 10**6 + number) for number in range(FITTED)]
    for sample in (samples[0], *samples):  # the first warms up
        began = time.thread_time()
        summed_loss(model, [sample]).backward()
        patches, tokens = lengths(sample)
        rows.append([1e3 * (time.thread_time() - began), 1, patches, tokens])
    times, *features = np.array(rows[1:]).T
    factors = torch.from_numpy(np.linalg.lstsq(np.stack(features, axis=1), times, rcond=None)[0])
    dist.broadcast(factors, src=0)
    base, per_patch, per_token = factors.clamp(min=0).tolist()

    def costs(sample: Any) -> tuple[float, float]:
        patches, tokens = lengths(sample)
        return per_patch * patches, base + per_token * tokens

    return costs


def gradient_difference(model: torch.nn.Module, whole: Any, seed: int, count: int) -> float:
    """Largest difference of the ranks' summed gradients to those of one process."""
    samples = [draw(number) for number in range(seed, seed + count)]
    labels = sum(len(sample["input_ids"]) - 1 for sample in samples)
    (summed_loss(whole, samples) / labels).backward()
    largest = difference = 0.0
    for weight, other in zip(model.parameters(), whole.parameters(), strict=True):
        summed = torch.zeros_like(weight) if weight.grad is None else weight.grad.clone()
        dist.all_reduce(summed)
        largest = max(largest, float(other.grad.abs().max()))
        difference = max(difference, float((summed - other.grad).abs().max()))
    return difference / largest


class Traffic:
    """Counts what `all_to_all_single` sends to other ranks."""

    def __enter__(self) -> Traffic:
        self.sent, self._plain = 0, dist.all_to_all_single

        def counted(output: Tensor, sent: Tensor, *args: Any, **options: Any) -> Any:
            sizes = args[1] if len(args) > 1 else None
            mine = len(sent) // dist.get_world_size() if sizes is None else sizes[dist.get_rank()]
            self.sent += (len(sent) - mine) * (sent.nbytes // max(1, len(sent)))
            return self._plain(output, sent, *args, **options)

        dist.all_to_all_single = counted
        return self

    def __exit__(self, *_: object) -> None:
        dist.all_to_all_single = self._plain


if __name__ == "__main__":
    main()
