"""Figures of a training step over all ranks: a line for people, and one of JSON."""

import json
from pathlib import Path
from typing import Any

import torch

from isobatch.common.errors import DataError
from isobatch.common.types import LABEL_IGNORE
from isobatch.engine.runtime.communication.collectives import all_gather
from isobatch.engine.runtime.stage_executor import StepResult
from isobatch.engine.runtime.stage_io import Batch
from isobatch.engine.simulator.schedule import PassKind
from isobatch.engine.train.step_source import SourceStep
from isobatch.engine.tuning.step_planner import StepNote

LOGGED = {
    "loss": "loss",
    "lr": "lr",
    "eval_loss": "eval_loss",
    "waiting": "waiting_pipeline",
    "passes_s": "passes_s",
    "peak_mib": "peak_mib",
}
"""Figure of a step that only the trainer knows -> its name in a log."""


def gather_figures(
    known: dict[str, float],
    batches: SourceStep,
    result: StepResult,
    stats: tuple[Any, Any],
    num_ranks: int,
) -> dict[str, float]:
    """Figures of a step over all ranks, which all call it; `num_ranks` per pipeline.

    `known`: step, learning rate, seconds, and the peak of this rank's GPU. `stats`: of its source,
    before the step was taken and after.
    """
    before, after = stats
    note = batches.note
    device = batches[0].input_ids.device
    columns = {
        "loss": result.loss,
        "labels": sum(_label_weights(batch) for batch in batches),
        "busy_ns": int((result.end_ns - result.start_ns).sum()),
        "span_ns": int(result.end_ns.max(initial=0)),
        "tokens": sum(len(batch.input_ids) for batch in batches),
        "micro_batches": len(batches),
        "data_s": after.waiting_s - before.waiting_s,
        "tuning_s": after.planning_s - before.planning_s,
        "tuned_ns": note.step_ns if isinstance(note, StepNote) else 0,
        "peak_mib": known["peak_mib"],
    }
    mine = torch.tensor(list(columns.values()), dtype=torch.float64, device=device)
    # each (ranks,)
    all_of = dict(zip(columns, torch.stack(all_gather(mine)).cpu().numpy().T, strict=True))
    figures = {
        **known,
        # mean over the step's labels, whatever its losses were divided by
        "loss": batches[0].loss_normalizer
        * float(all_of["loss"].sum() / max(1.0, all_of["labels"].sum())),
        "tokens": int(all_of["tokens"].sum()) // num_ranks,
        "micro_batches": int(all_of["micro_batches"].sum()) // num_ranks,
        # from a step's first pass to its last one, on any rank
        "passes_s": float(all_of["span_ns"].max()) / 1e9,
        "waiting": 1 - float(all_of["busy_ns"].mean() / all_of["span_ns"].max()),
        "data_s": float(all_of["data_s"].max()),
        "dist_ratio_vit": after.dist_ratio_vit,
        "dist_ratio_llm": after.dist_ratio_llm,
        "peak_mib": float(all_of["peak_mib"].max()),
    }
    if isinstance(note, StepNote):
        figures |= {
            "tuning_s": float(all_of["tuning_s"].max()),
            "untuned_s": note.untuned_ns / 1e9,
            "tuned_s": float(all_of["tuned_ns"].max()) / 1e9,
            "encoded_ahead": int((result.schedule.kinds == PassKind.ENCODE).sum()),
        }
    return figures


def _label_weights(batch: Batch) -> float:
    """Sum of the weights of a micro-batch's labels; without weights, their number."""
    is_label = batch.labels != LABEL_IGNORE
    return float((is_label if batch.loss_weights is None else batch.loss_weights[is_label]).sum())


def report_step(figures: dict[str, float], log: Path | None) -> None:
    """Print a line, and append one of JSON to `log`. DataError if that fails.

    `figures`: of `gather_figures`; a skipped step has its number and what was evaluated after it.
    """
    evaluated = f"  eval loss {figures['eval_loss']:.4f}" if "eval_loss" in figures else ""
    passes = _passes_text(figures) if "loss" in figures else ""
    loss = f"  loss {figures['loss']:.4f}" if "loss" in figures else ""
    print(f"step {figures['step']:4d}{loss}{evaluated}{passes}", flush=True)
    if log is None:
        return
    try:
        with log.open("a") as file:
            file.write(f"{json.dumps(figures)}\n")
    except OSError as error:
        raise DataError(f"{log}: {error.strerror}") from None


def _passes_text(figures: dict[str, float]) -> str:
    memory = f"  memory {figures['peak_mib']:,.0f} MiB" if figures["peak_mib"] else ""
    return (
        f"  tokens {figures['tokens']:6d}  {1000 * figures['seconds']:6.0f} ms  "
        f"waiting {figures['waiting']:5.1%}  "
        f"dist ratio {figures['dist_ratio_vit']:.2%} {figures['dist_ratio_llm']:.2%}"
        f"{memory}{_tuning_text(figures)}"
    )


def _tuning_text(figures: dict[str, float]) -> str:
    """Effect and cost of tuning, if the step was tuned."""
    if "tuned_s" not in figures:
        return ""
    ms = {name: 1000 * value for name, value in figures.items()}
    return (
        f"  {figures['micro_batches']:.0f} micro-batches, predicted {ms['untuned_s']:.1f} ->"
        f" {ms['tuned_s']:.1f} ms, measured {ms['passes_s']:.1f}"
        f"  tuning {ms['tuning_s']:.0f} ms, waited for data {ms['data_s']:.0f}"
    )
