"""What `train_pipeline.py` tells of a step: figures of all ranks, a line for people and one for
machines.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from balance.errors import DataError
from engine.runtime.errors import peer_errors
from engine.runtime.stage_executor import StepResult
from engine.simulator.schedule import PassKind
from engine.tuning.step_planner import StepNote
from loaders import LoaderStats
from loaders.step_builder import StepBatches

MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one rank knows of a step that it ran."""

    step: int
    batches: StepBatches
    result: StepResult
    seconds: float
    peak_bytes: int | None
    """Of its GPU."""
    before: LoaderStats
    """Of its loader, before the step was taken from it."""
    after: LoaderStats


def gather(own: Measured, num_ranks: int, device: torch.device) -> dict[str, float]:
    """What there is to say of a step, over all ranks; `num_ranks` per pipeline."""
    result, after, before = own.result, own.after, own.before
    columns = {
        "loss": result.loss,
        "busy_ns": int((result.end_ns - result.start_ns).sum()),
        "span_ns": int(result.end_ns.max(initial=0)),
        "tokens": sum(len(batch.input_ids) for batch in own.batches),
        "micro_batches": len(own.batches),
        "data_s": after.waiting_s - before.waiting_s,
        "tuning_s": after.planning_s - before.planning_s,
        "peak_bytes": own.peak_bytes or 0,
    }
    mine = torch.tensor(list(columns.values()), dtype=torch.float64, device=device)
    ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    with peer_errors(range(dist.get_world_size())):
        dist.all_gather(ranks, mine)
    # each (ranks,)
    all_of = dict(zip(columns, torch.stack(ranks).cpu().numpy().T, strict=True))
    found = {
        "step": own.step,
        "loss": float(all_of["loss"].sum()) / num_ranks,
        "seconds": own.seconds,
        "tokens": int(all_of["tokens"].sum()) // num_ranks,
        "micro_batches": int(all_of["micro_batches"].sum()) // num_ranks,
        # from a step's first pass to its last one, on any rank
        "passes_s": float(all_of["span_ns"].max()) / 1e9,
        "waiting": 1 - float(all_of["busy_ns"].mean() / all_of["span_ns"].max()),
        "data_s": float(all_of["data_s"].max()),
        "dist_ratio_vit": after.dist_ratio_vit,
        "dist_ratio_llm": after.dist_ratio_llm,
        "peak_mib": float(all_of["peak_bytes"].max()) / MIB,
    }
    note = own.batches.note
    if isinstance(note, StepNote):
        found |= {
            "tuning_s": float(all_of["tuning_s"].max()),
            "untuned_s": note.untuned_ns / 1e9,
            "tuned_s": note.step_ns / 1e9,
            "encoded_ahead": int((result.schedule.kinds == PassKind.ENCODE).sum()),
        }
    return found


def report(found: dict[str, float], log: Path | None) -> None:
    """A line for people, and one for machines."""
    memory = f"  memory {found['peak_mib']:,.0f} MiB" if found["peak_mib"] else ""
    print(
        f"step {found['step']:4d}  loss {found['loss']:.4f}  tokens {found['tokens']:6d}  "
        f"{1000 * found['seconds']:6.0f} ms  waiting {found['waiting']:5.1%}  "
        f"dist ratio {found['dist_ratio_vit']:.2%} {found['dist_ratio_llm']:.2%}{memory}{tuned(found)}",
        flush=True,
    )
    if log is not None:
        append(log, json.dumps(found))


def tuned(found: dict[str, float]) -> str:
    """What tuning did, and what it took."""
    if "tuned_s" not in found:
        return ""
    return (
        f"  {found['micro_batches']:.0f} micro-batches, predicted {1000 * found['untuned_s']:.1f} -> "
        f"{1000 * found['tuned_s']:.1f} ms, measured {1000 * found['passes_s']:.1f}  "
        f"tuning {1000 * found['tuning_s']:.0f} ms, waited for data {1000 * found['data_s']:.0f}"
    )


def append(path: Path, line: str) -> None:
    """Add a line to a file. DataError if that cannot be."""
    try:
        with path.open("a") as file:
            file.write(f"{line}\n")
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None
