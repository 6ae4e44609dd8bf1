"""Two operations of packed training by themselves: attention by kernel, and logits by positions."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from gpu.device import Bench
from gpu.packed_attention import one_by_one, varlen, varlen_attn
from isobatch.common.types import LABEL_IGNORE

REPEATS = 5
HEADS, KV_HEADS, WIDTH = 16, 8, 128
SHARES = (1.0, 0.25, 0.06)
"""Of the positions that have labels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Forward and backward pass."""

    name: str
    tokens: int
    ms: float | None
    """None: out of memory."""
    peak_bytes: int | None


def measure(bench: Bench, name: str, tokens: int, run: Callable[[], object]) -> Cost:
    """Median of some runs, and the most memory beyond what was there."""
    on_gpu = bench.device.type == "cuda"
    times: list[float] = []
    bench.release()
    before = torch.cuda.memory_allocated() if on_gpu else 0
    try:
        for _ in range(REPEATS + 2):
            if on_gpu:
                torch.cuda.reset_peak_memory_stats()
            bench.synchronize()
            begun = time.perf_counter()
            run()
            bench.synchronize()
            times.append(time.perf_counter() - begun)
    except torch.OutOfMemoryError:
        return Cost(name=name, tokens=tokens, ms=None, peak_bytes=None)
    peak = torch.cuda.max_memory_allocated() - before if on_gpu else None
    return Cost(name=name, tokens=tokens, ms=1e3 * sorted(times[2:])[REPEATS // 2], peak_bytes=peak)


def attention_costs(bench: Bench, lengths: list[int]) -> list[Cost]:
    """Causal attention of one LLM layer in samples of these lengths, by kernel."""
    total = sum(lengths)
    query, key, value = (
        torch.randn(1, heads, total, WIDTH, device=bench.device, dtype=bench.dtype).requires_grad_()
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    borders = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    on_device = borders.to(bench.device)
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    mask = (ids[:, None] == ids).tril()[None, None].to(bench.device)

    def masked() -> Tensor:  # as transformers calls it with a mask: keys and values repeated
        times = HEADS // KV_HEADS
        repeated = (part.repeat_interleave(times, dim=1) for part in (key, value))
        return functional.scaled_dot_product_attention(query, *repeated, attn_mask=mask)

    def flash() -> Tensor:
        rows = [part[0].transpose(0, 1) for part in (query, key, value)]
        return varlen(rows, on_device, max(lengths), causal=True, scaling=None)

    ways: dict[str, Callable[[], Tensor]] = {
        "sdpa, mask of tokens x tokens": masked,
        "sdpa, sample by sample": lambda: one_by_one(
            query, key, value, borders, causal=True, scaling=None
        ),
    }
    if bench.device.type == "cuda" and varlen_attn is not None:
        ways["torch's varlen_attn"] = flash
    found = []
    for name, way in ways.items():
        found.append(measure(bench, name, total, lambda way=way: way().sum().backward()))
    return found


def new_shapes_ms(bench: Bench) -> dict[str, list[float]]:
    """One pass over samples of lengths never seen before, and the same again, by backend."""
    generator = torch.Generator().manual_seed(1)
    shortest, longest = (1, 10) if bench.tiny else (100, 1000)
    found: dict[str, list[float]] = {}
    for cudnn in (False, True):
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
        lengths = torch.randint(shortest, longest, (16,), generator=generator).tolist()
        query, key, value = (
            torch.randn(1, heads, sum(lengths), WIDTH, device=bench.device, dtype=bench.dtype)
            for heads in (HEADS, KV_HEADS, KV_HEADS)
        )
        query.requires_grad_()
        borders = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
        times = found["cuDNN" if cudnn else "flash"] = []
        for _ in range(3):
            bench.synchronize()
            begun = time.perf_counter()
            one_by_one(query, key, value, borders, causal=True, scaling=None).sum().backward()
            bench.synchronize()
            times.append(1e3 * (time.perf_counter() - begun))
    return found


def logits_costs(bench: Bench, tokens: int, width: int, vocab_size: int) -> list[Cost]:
    """The head and the loss, as transformers computes them, at all or at some positions."""
    hidden = torch.randn(1, tokens, width, device=bench.device, dtype=bench.dtype)
    hidden.requires_grad_()
    weight = torch.randn(vocab_size, width, device=bench.device, dtype=bench.dtype) * 0.02
    weight.requires_grad_()
    labels = torch.randint(0, vocab_size, (tokens,), device=bench.device)

    def run(kept: Tensor | None) -> None:
        own = hidden if kept is None else hidden[:, kept]
        wanted = labels if kept is None else labels[kept]
        logits = functional.linear(own, weight).float()
        functional.cross_entropy(
            logits.view(-1, vocab_size), wanted, ignore_index=LABEL_IGNORE, reduction="sum"
        ).backward()
        hidden.grad = weight.grad = None

    found = []
    for share in SHARES:
        count = int(share * tokens)
        kept = None if share == 1.0 else torch.randperm(tokens, device=bench.device)[:count]
        name = "all positions" if kept is None else f"{share:.0%} of them"
        found.append(measure(bench, name, tokens, lambda kept=kept: run(kept)))
    return found
