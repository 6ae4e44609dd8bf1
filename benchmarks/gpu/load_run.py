"""`gpu_training.py load`: a VLM of 2 B fed by DataLoaders and by `BalancedLoader`."""

from __future__ import annotations

import argparse
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from ablation.ranks import GIB

from gpu.device import Bench, matmul_flops
from gpu.load_arms import Arm, Loaded, balanced_loader, run_arm
from gpu.load_data import MODEL, Data, Packed, Padded, open_data
from gpu.load_kernels import Cost, attention_costs, logits_costs, new_shapes_ms
from gpu.load_model import make_vlm
from gpu.packed_attention import NAME as VARLEN
from gpu.packed_attention import set_attention
from gpu.report import Report
from isobatch.loaders.batch.model_inputs.inputs import model_inputs
from isobatch.loaders.config import LoaderConfig
from isobatch.models.presets import load_model

HEADINGS = (
    *("", "attention", "steps", "samples", "tokens/s", "speed-up", "MFU", "of products"),
    *("padding", "waits", "model_inputs", "peak GiB", "reserved", "8 ranks wait"),
)
CAP = 8192
MICRO_BATCHES = 8
PADDED_BATCHES = 16
"""Micro-batches of a step: of `CAP` tokens, and of padded samples."""
LOGIT_TOKENS = 16_384
KERNEL_LENGTHS = ([230] * 71, [1024] * 16, [16_384])
"""Of samples that fill 16,384 tokens, the first as the demo's median."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command's own."""
    parser.add_argument("--samples", type=int, default=1_200, help="default: %(default)s")
    parser.add_argument(
        "--padded-size", type=int, default=4, help="samples of a padded batch (%(default)s)"
    )
    parser.add_argument(
        "--seconds", type=float, default=90, help="of each way at most (%(default)s)"
    )
    parser.add_argument("--arms", nargs="+", help="only those whose names begin so")


def run(bench: Bench, report: Report, options: argparse.Namespace) -> None:
    """Train in every way, print and note."""
    begun = time.perf_counter()
    report.figures["transformers"] = transformers.__version__
    limit = matmul_flops(bench)
    report.figures["matmul_flops_per_s"] = limit
    attempt(report, "kernels", lambda: note_kernels(bench, report))
    with tempfile.TemporaryDirectory() as folder:
        data = open_data(Path(folder), options.samples)
        model = make_vlm(data.counter.model, data.counter.image_token_id, bench)
        note_data(data, model, report)
        attempt(report, "agreement", lambda: note_agreement(data, model, bench, report))
        if not options.arms:
            attempt(report, "loader alone", lambda: note_loader(data, report))
        rows: list[Loaded] = []
        for arm in arms(data, model, options):
            if options.arms and not arm.name.startswith(tuple(options.arms)):
                continue
            set_attention(model, arm.attention)
            attempt(
                report,
                arm.name,
                lambda arm=arm: rows.append(run_arm(arm, model, data, bench, options.seconds)),
            )
            model.zero_grad(set_to_none=True)
            report.line(f"{arm.name}: ended after {time.perf_counter() - begun:.0f} s")
            report.figures["arms"] = [asdict(row) for row in rows]
            report.save()
    peak = bench.cluster.peak_flops_per_s
    title = f"An epoch of the same {options.samples} samples, {WARM_UP_TEXT}"
    report.table(title, HEADINGS, [row_of(row, rows[0], peak, limit) for row in rows])
    report.figures["seconds"] = time.perf_counter() - begun
    report.line(f"{report.figures['seconds']:.0f} s")


def attempt(report: Report, name: str, run: Callable[[], object]) -> None:
    """Run it; what fails is said and kept, and the others run."""
    try:
        run()
    except Exception as error:
        text = "".join(traceback.format_exception(error)[-12:])
        report.line(f"{name}: {text}")
        report.figures.setdefault("failed", {})[name] = text
        report.save()


WARM_UP_TEXT = "without the first two steps"


def arms(data: Data, model: Any, options: argparse.Namespace) -> Iterator[Arm]:
    """From what most users run to ours."""
    packed = {"max_tokens": CAP}
    balanced = Arm(
        name="BalancedLoader", attention=VARLEN, accumulation=MICRO_BATCHES, loader_options=packed
    )
    yield balanced
    set_attention(model, VARLEN)  # of which `model_inputs` of the next arm gives borders
    by_tokens = Packed(data, model.config, CAP)
    yield Arm(
        name="packed by tokens", attention=VARLEN, accumulation=MICRO_BATCHES, batches=by_tokens
    )
    for method in ("random", "grouped"):
        batches = Padded(data, method, options.padded_size)
        for cudnn in (True, False):
            yield Arm(
                name=f"padded, {method}{'' if cudnn else ', without cuDNN'}",
                attention="sdpa",
                accumulation=PADDED_BATCHES,
                batches=batches,
                cudnn=cudnn,
            )
    yield Arm(
        name="BalancedLoader, masks",
        attention="sdpa",
        accumulation=MICRO_BATCHES,
        loader_options=packed,
        max_steps=6,
        cudnn=False,
    )
    yield Arm(
        name="BalancedLoader, 16,384",
        attention=VARLEN,
        accumulation=MICRO_BATCHES // 2,
        loader_options={"max_tokens": 2 * CAP},
    )
    yield Arm(
        name="BalancedLoader, no threads",
        attention=VARLEN,
        accumulation=MICRO_BATCHES,
        loader_options=packed | {"workers": 0},
        max_steps=6,
    )


def note_data(data: Data, model: Any, report: Report) -> None:
    """What the samples are, and the model."""
    counts, tokens = data.counts, data.tokens
    num_params = sum(weight.numel() for weight in model.parameters())
    report.figures["data"] = figures = {
        "samples": len(tokens),
        "tokens": int(tokens.sum()),
        "image_tokens": int(counts.num_image_tokens.sum()),
        "labels": int(counts.num_loss_tokens.sum()),
        "most_tokens": int(tokens.max()),
        "num_params": num_params,
    }
    report.line(
        f"{MODEL}: {num_params / 1e9:.3g} B parameters; {len(tokens):,} samples of the demo, "
        f"{figures['tokens']:,} tokens ({figures['image_tokens']:,} of images), "
        f"{figures['labels']:,} labels, at most {figures['most_tokens']:,} tokens"
    )


def note_agreement(data: Data, model: Any, bench: Bench, report: Report) -> None:
    """The loss of one micro-batch by each attention: the same but for rounding."""
    numbers = np.argsort(data.tokens)[len(data.tokens) // 2 :][:4].tolist()
    batch = data.batch(numbers, LoaderConfig())
    losses = {}
    for name in (VARLEN, "sdpa"):
        set_attention(model, name)
        inputs = model_inputs(batch, model.config)
        for key, value in inputs.items():
            if isinstance(value, torch.Tensor):
                inputs[key] = value.to(bench.device)
        with torch.no_grad():
            losses[name] = float(model(**inputs).loss)
    report.figures["losses"] = losses
    report.line(f"Loss of one micro-batch: {losses}")


def note_loader(data: Data, report: Report) -> None:
    """How fast the loader is where nobody trains."""
    rows = []
    for workers in (None, 1):
        options = {"max_tokens": CAP, "workers": workers}
        begun, first, tokens, samples = time.perf_counter(), 0.0, 0, 0
        loader = balanced_loader(data, MICRO_BATCHES, options)
        for step in loader:
            first = first or time.perf_counter() - begun
            tokens += sum(len(batch.input_ids) for batch in step)
            samples += sum(batch.num_samples for batch in step)
        seconds = time.perf_counter() - begun
        loader.close()
        rows.append({"workers": workers, "first_s": first, "seconds": seconds, "tokens": tokens})
        report.line(
            f"BalancedLoader alone, {workers or 'its'} thread(s): first step after {first:.2f} s, "
            f"{samples / seconds:,.0f} samples/s, {tokens / seconds:,.0f} tokens/s"
        )
    report.figures["loader_alone"] = rows


def note_kernels(bench: Bench, report: Report) -> None:
    """Attention by kernel, and logits by positions."""
    llm = load_model(MODEL).dimensions[1]
    if bench.tiny:
        found = {"attention": [attention_costs(bench, [20, 44])]}
        logits = logits_costs(bench, 64, 32, 512)
    else:
        found = {"attention": [attention_costs(bench, lengths) for lengths in KERNEL_LENGTHS]}
        logits = logits_costs(bench, LOGIT_TOKENS, llm.hidden_size, llm.vocab_size)
    names = ["64 tokens"] if bench.tiny else [f"{len(own)} x {own[0]}" for own in KERNEL_LENGTHS]
    report.table(
        "Causal attention of one LLM layer, forward and backward",
        ("kernel", "samples", "ms", "peak MiB"),
        [
            [cost.name, name, *_cells(cost)]
            for name, costs in zip(names, found["attention"], strict=True)
            for cost in costs
        ],
    )
    report.table(
        f"Head and loss at {logits[0].tokens:,} tokens, forward and backward",
        ("logits at", "ms", "peak MiB"),
        [[cost.name, *_cells(cost)] for cost in logits],
    )
    report.figures["attention"] = {
        name: [asdict(cost) for cost in costs]
        for name, costs in zip(names, found["attention"], strict=True)
    }
    report.figures["logits"] = [asdict(cost) for cost in logits]
    report.figures["new_shapes_ms"] = new_shapes_ms(bench)
    report.line(f"16 samples of new lengths, ms, three times: {report.figures['new_shapes_ms']}")
    report.save()


def _cells(cost: Cost) -> list[str]:
    if cost.ms is None:
        return ["out of memory", "-"]
    return [f"{cost.ms:.2f}", "-" if cost.peak_bytes is None else f"{cost.peak_bytes / 2**20:,.0f}"]


def row_of(row: Loaded, first: Loaded, peak: float, products: float) -> list[str]:
    """A row of the table."""
    if not row.steps:
        return [row.name, row.attention, *["-"] * (len(HEADINGS) - 2)]
    speed, flops = row.tokens / row.seconds, row.flops / row.seconds
    base = first.tokens / first.seconds if first.steps else speed
    gib = [
        "-" if value is None else f"{value / GIB:.1f}"
        for value in (row.peak_bytes, row.reserved_bytes)
    ]
    waiting = row.waiting_ranks
    return [
        *(row.name, row.attention, str(row.steps), f"{row.samples:,}", f"{speed:,.0f}"),
        *(f"{speed / base:.2f}", f"{flops / peak:.1%}", f"{flops / products:.1%}"),
        *(f"{1 - row.tokens / row.positions:.1%}", f"{row.wait_s / row.seconds:.1%}"),
        *(f"{row.inputs_s / row.seconds:.1%}", *gib),
        "-" if waiting is None or "padded" in row.name else f"{waiting:.1%}",
    ]
