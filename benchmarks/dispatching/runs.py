"""All variants of `benchmarks/dispatch_ablation.py` on one rank, in turns per step."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from dispatching.clock import COMPUTING, Clock
from dispatching.data import StepData, draw_step
from dispatching.model import ModelShape, make_model, phase_flops
from dispatching.stand_in import make_standin
from dispatching.step import Variant, plan_samples, run_step
from isobatch.balance.metrics import FloatArray, longest, padded_loads
from isobatch.engine.cost_model.loads import PhaseLoads
from isobatch.engine.dispatching.dispatch import PHASES, DispatchOptions
from isobatch.engine.runtime.cpu_memory import LiveBytes

TAILORED = {"vision": "sums", "audio": "padded", "llm": "sums"}
"""By phase, the algorithm that suits how it batches."""
LEARNING_RATE = 0.01
MATRIX, MATRIX_ROUNDS = 1536, 6
"""Of the matrix products that show a core's peak."""
KINDS = ("planning", "exchange", "waiting", "gradients", *COMPUTING)
NOT_BALANCED = "not balanced"
CAREFUL = "whole samples, by all their FLOPs"
"""What a careful user does before the step: each rank gets samples of as many FLOPs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What to run."""

    ranks: int
    ranks_per_node: int
    per_rank: int
    """Samples that each rank draws for a step."""
    steps: int
    memory_steps: int
    shape: ModelShape
    rate: float | None = None
    """FLOPs per second of stand-in layers; None: real ones."""
    seed: int = 0
    settings: tuple[bool, ...] = (False, True)
    """Whether phases begin together on all ranks; one after the other."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Measured:
    """One variant in one setting, all ranks."""

    seconds: dict[str, FloatArray]
    """By kind, (ranks, steps)."""
    losses: FloatArray
    """(steps,)."""
    sent_bytes: FloatArray
    """(ranks, steps)."""
    abroad_bytes: FloatArray
    """(ranks, steps)."""
    peak_bytes: FloatArray
    """Most that was alive, in steps of their own; (ranks, memory steps)."""

    @property
    def step_s(self) -> float:
        """Mean of steps, each as long as on the rank where it lasted longest."""
        return float(sum(self.seconds.values()).max(axis=0).mean())

    @property
    def computing_s(self) -> float:
        """Mean of ranks and steps."""
        return float(sum(self.seconds[kind] for kind in COMPUTING).mean())

    def share(self, *kinds: str) -> float:
        """Of all ranks' time."""
        return float(
            sum(self.seconds[kind] for kind in kinds).sum() / sum(self.seconds.values()).sum()
        )


def variants(ranks_per_node: int) -> list[Variant]:
    """OrchMLLM, what it is compared with in figures 10 to 13, and what our loader adds: inputs need
    not travel.
    """
    full = DispatchOptions(algorithms=TAILORED, ranks_per_node=ranks_per_node, reads_directly=True)

    def only(**algorithms: Any) -> DispatchOptions:
        return replace(full, algorithms=algorithms)

    return [
        Variant(name=NOT_BALANCED, options=only()),
        Variant(name="LLM only (pre-balancing)", options=only(llm="sums")),
        Variant(name=CAREFUL, options=only(llm="sums"), by_flops=True),
        Variant(name="all as if not padded", options=only(vision="sums", audio="sums", llm="sums")),
        Variant(name="all as if padded", options=only(vision="padded", audio="padded", llm="sums")),
        Variant(name="every phase (OrchMLLM)", options=full),
        Variant(name="- not node-wise", options=replace(full, node_wise=False)),
        Variant(name="- two exchanges, not composed", options=full, way="two exchanges"),
        Variant(name="- all-gather, not all-to-all", options=full, way="all-gather"),
        Variant(name="- inputs travel as well", options=replace(full, reads_directly=False)),
    ]


def run_rank(rank: int, folder: str, options: RunOptions, results: Any) -> None:
    """Run everything on one of the ranks that the benchmark starts; the first puts what all
    measured.
    """
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meet",
        rank=rank,
        world_size=options.ranks,
        timeout=timedelta(minutes=3),
    )
    peak = options.rate or _peak_flops()
    found = _run_all(options, variants(options.ranks_per_node))
    every: list[Any] = [None] * options.ranks
    dist.all_gather_object(every, (peak, found))
    if rank == 0:
        peaks, by_rank = zip(*every, strict=True)
        results.put(
            (float(np.mean(peaks)), {key: _joined([own[key] for own in by_rank]) for key in found})
        )
    dist.barrier()
    dist.destroy_process_group()


def steps_of(options: RunOptions, setting: int) -> list[StepData]:
    """The steps that all variants run in a setting; the first warms up."""
    first = options.seed + 1000 * setting
    return [draw(options, first + number) for number in range(options.steps + 1)]


def draw(options: RunOptions, seed: int) -> StepData:
    """One step of all ranks."""
    flops = partial(phase_flops, options.shape)
    return draw_step(
        options.shape.data, flops, ranks=options.ranks, per_rank=options.per_rank, seed=seed
    )


def phase_loads(step: StepData, variant: Variant) -> dict[str, PhaseLoads]:
    """By phase, what each rank computes, padding included; (ranks,)."""
    plan, examples = plan_samples(step, variant), step.examples
    loads = {}
    for phase in PHASES:
        batches, lengths = plan.batches(phase), examples.lengths[phase]
        tokens, squares = batches.sum(lengths), batches.sum(examples.squares[phase])
        if phase == "audio":
            tokens = padded_loads(batches, lengths)
            squares = tokens * longest(batches, lengths)
        loads[phase] = PhaseLoads(tokens=tokens, squares=squares, items=batches.sizes)
    return loads


def slowest_flops(
    options: RunOptions, step: StepData, variant: Variant, *, together: bool
) -> float:
    """What the ranks that are waited for compute: of each phase if phases begin together, else of
    the whole step.
    """
    loads = phase_loads(step, variant)
    flops = np.stack(
        [phase_flops(options.shape, phase, own) for phase, own in loads.items()]
    )  # (phases, ranks)
    return float(flops.max(axis=1).sum() if together else flops.sum(axis=0).max())


def _run_all(
    options: RunOptions, chosen: list[Variant]
) -> dict[tuple[bool, str], list[dict[str, float]]]:
    """By setting and variant, this rank's figures of each step."""
    shape, rate = options.shape, options.rate
    models = {
        v.name: make_model(shape) if rate is None else make_standin(shape, rate) for v in chosen
    }
    optimizers = {
        name: torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
        for name, model in models.items()
    }
    found: dict[tuple[bool, str], list[dict[str, float]]] = {}
    for number, together in enumerate(options.settings):
        for place, step in enumerate(steps_of(options, number)):
            for variant in chosen:
                model, optimizer = models[variant.name], optimizers[variant.name]
                clock = Clock(together=together, ranks_per_node=options.ranks_per_node)
                loss = run_step(model, optimizer, step, variant, shape.data, clock)
                own = {
                    "loss": loss,
                    "sent": clock.sent_bytes,
                    "abroad": clock.abroad_bytes,
                    "counted": place > 0,
                }
                own |= {kind: clock.spent_ns[kind] / 1e9 for kind in KINDS}
                found.setdefault((together, variant.name), []).append(own)
    for variant in chosen:
        peaks = _peak_bytes(options, variant, models[variant.name], optimizers[variant.name])
        for together in options.settings:
            found[together, variant.name].append({"peaks": peaks})
    return found


def _peak_bytes(
    options: RunOptions, variant: Variant, model: nn.ModuleDict, optimizer: torch.optim.Optimizer
) -> list[int]:
    """Most bytes of tensors alive in the first steps: activations, gradients and what is being
    exchanged.
    """
    peaks = []
    for step in steps_of(options, 0)[: options.memory_steps]:
        clock = Clock(together=False, ranks_per_node=options.ranks_per_node)
        with LiveBytes() as memory:
            run_step(model, optimizer, step, variant, options.shape.data, clock)
        peaks.append(memory.peak_bytes)
    return peaks


def _joined(ranks: list[list[dict[str, Any]]]) -> Measured:
    """One variant's figures of all ranks."""
    peaks = np.array([own[-1]["peaks"] for own in ranks], float)
    every = [[step for step in own[:-1] if step["counted"]] for own in ranks]

    def of(name: str) -> FloatArray:
        return np.array([[step[name] for step in own] for own in every], float)

    return Measured(
        seconds={kind: of(kind) for kind in KINDS},
        losses=of("loss").sum(axis=0),
        sent_bytes=of("sent"),
        abroad_bytes=of("abroad"),
        peak_bytes=peaks,
    )


def _peak_flops() -> float:
    """The most floating-point operations per second that matrix products reach on this rank, all
    ranks at once.
    """
    values = torch.randn(MATRIX, MATRIX)
    rates = []
    for _ in range(MATRIX_ROUNDS):
        dist.barrier()
        begun = time.perf_counter()
        values @ values
        rates.append(2 * MATRIX**3 / (time.perf_counter() - begun))
    return max(rates)
