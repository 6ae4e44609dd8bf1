"""OmniBal's tables 4 and 9 of partitions, simulated with measured layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from papers.omnibal_models import (
    IMAGES,
    INTERNVL,
    MICRO_BATCHES,
    PAIRS,
    SAMPLES,
    SEQ_LEN,
    Pair,
    borders_of,
    first_recomputed,
    is_transformer,
    layers_of,
)
from papers.omnibal_partition import PAPER_TABLE_4

from gpu.presets import rule_of
from isobatch.common.types import IntArray
from isobatch.engine.cost_model.costs import NS_PER_MS, Costs
from isobatch.engine.cost_model.loads import Loads
from isobatch.engine.cost_model.profile_table import Profile, measured_costs
from isobatch.engine.planning.bmp import candidate, search_bmp
from isobatch.engine.planning.partition import METHODS
from isobatch.engine.planning.search.partition_search import search_partition
from isobatch.engine.simulator.evaluate import evaluate
from isobatch.engine.simulator.schedule import make_schedule
from isobatch.models.presets import ModelPreset, load_model

GIB = 1 << 30
MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A row of Table 4."""

    name: str
    layers: list[int]
    """Of each stage."""
    variance_params: float
    """Of stages' parameters, in B²."""
    variance_layers: float
    variance_forward_ms2: float
    """The paper's equation 4."""
    sum_change_mib: float
    """Of what crosses the cuts, against the first row; of one GPU."""
    step_ms: float
    ratio: float
    """Of the step to BMP's."""
    paper: tuple[float, ...] | None
    """Its four figures and GPU days."""
    measured_ratio: float
    """The step on measured layers, to that of BMP on measured layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A row of Table 9."""

    name: str
    tp: int
    paper: list[int]
    """Layers of each stage."""
    modelled: list[int]
    """The search's on the analytical model's costs."""
    measured: list[int]
    """On measured ones."""
    recomputed: list[int]
    """Of the last one's."""
    step_ms: float
    paper_ratio: float | None
    """On measured layers, the paper's choice to the best one; None if it does not fit the published
    model.
    """
    modelled_ratio: float | None
    """The same of the analytical model's choice; None if measured memory does not hold it."""
    paper_fits: bool | None


def full_loads(preset: ModelPreset, *, tiny: bool = False) -> Loads:
    """A step of equal micro-batches at the paper's caps."""
    rule = rule_of(preset)
    seq_len = SEQ_LEN // 256 * rule.llm_tokens_per_patch if tiny else SEQ_LEN
    return Loads.constant(
        MICRO_BATCHES,
        images=IMAGES,
        vit_tokens_per_image=rule.vit_tokens_per_patch,
        seq_len=seq_len,
        samples=SAMPLES,
    )


def table_4(costs: Costs, measured: Costs, memory_bytes: int) -> list[Method]:
    """Partition methods on some costs, everything recomputed; what each makes is also tried on
    measured costs.
    """
    schedule, everything = (
        make_schedule("1f1b", INTERNVL.pp, MICRO_BATCHES),
        np.ones(costs.num_layers, np.bool_),
    )

    def step_ns(of: Costs, borders: IntArray) -> int:
        return evaluate(of, borders, everything, schedule).step_ns

    found = {name: method(costs, INTERNVL.pp) for name, method in METHODS.items()}
    found["BMP"] = search_bmp(
        costs, INTERNVL.pp, lambda borders: step_ns(costs, borders)
    ).best.borders
    found["searched, not recomputed"] = search_partition(costs, schedule, memory_bytes).borders
    best = search_bmp(
        measured, INTERNVL.pp, lambda borders: step_ns(measured, borders)
    ).best.borders
    first, base = candidate(costs, found["parameter-based"]), step_ns(costs, found["BMP"])
    rows = []
    for name, borders in found.items():
        one, layers = candidate(costs, borders), layers_of(costs, borders)
        rows.append(
            Method(
                name=name,
                layers=layers,
                variance_params=float(
                    (np.add.reduceat(costs.param_counts, borders[:-1]) / 1e9).var()
                ),
                variance_layers=float(np.var(layers)),
                variance_forward_ms2=one.variance_ms2,
                sum_change_mib=(one.comm_bytes - first.comm_bytes) / MIB,
                step_ms=step_ns(costs, borders) / NS_PER_MS,
                ratio=step_ns(costs, borders) / base,
                paper=PAPER_TABLE_4.get(name),
                measured_ratio=step_ns(measured, borders) / step_ns(measured, best),
            )
        )
    return rows


def pairs() -> Iterator[tuple[Pair, ModelPreset]]:
    """Table 9's models."""
    for pair in PAIRS:
        yield pair, load_model(pair.preset)


def table_9(pair: Pair, modelled: Costs, measured: Costs, memory_bytes: int) -> Choice:
    """The fastest partition and recomputation by the one and by the other, and the paper's, all on
    measured layers.
    """
    schedule = make_schedule("1f1b", pair.pp, MICRO_BATCHES)
    ours, theirs = (
        search_partition(costs, schedule, memory_bytes) for costs in (measured, modelled)
    )
    carried = evaluate(measured, theirs.borders, theirs.recompute, schedule)
    paper_ratio = paper_fits = None
    if sum(pair.layers) == int(is_transformer(measured).sum()):
        borders = borders_of(measured, pair.layers)
        paper = evaluate(
            measured, borders, first_recomputed(measured, borders, pair.recomputed), schedule
        )
        paper_ratio, paper_fits = paper.step_ns / ours.step_ns, paper.fits(memory_bytes)
    recomputed = np.add.reduceat(
        (ours.recompute & is_transformer(measured)).astype(int), ours.borders[:-1]
    )
    return Choice(
        name=pair.name,
        tp=pair.tp,
        paper=list(pair.layers),
        modelled=layers_of(modelled, theirs.borders),
        measured=layers_of(measured, ours.borders),
        recomputed=recomputed.tolist(),
        step_ms=ours.step_ns / NS_PER_MS,
        paper_ratio=paper_ratio,
        modelled_ratio=carried.step_ns / ours.step_ns if carried.fits(memory_bytes) else None,
        paper_fits=paper_fits,
    )


def measured_step(profile: Profile, place: int) -> Costs:
    """A step of equal micro-batches like that one of those measured; nothing is fitted."""
    return measured_costs(profile, np.full(MICRO_BATCHES, place))
