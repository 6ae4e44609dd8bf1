"""`gpu_training.py profile`: layers of published models next to the analytical model."""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict, replace

from papers.omnibal_models import INTERNVL as INTERNVL_PAIR
from papers.page import listed

from gpu.device import Bench, matmul_flops, one_rank
from gpu.partitions import MIB, Choice, Method, full_loads, measured_step, pairs, table_4, table_9
from gpu.presets import INTERNVL, tiny_of
from gpu.profiles import FULL, SIZES, Size, layer_flops, measure_shapes, modelled_costs, tiny_sizes
from gpu.report import Report
from isobatch.engine.cost_model.costs import NS_PER_MS, Costs
from isobatch.engine.cost_model.parallel import Parallelism
from isobatch.engine.cost_model.profile_table import Profile, misfit, profile_to_dict, write_profile
from isobatch.models.presets import ModelPreset, load_model

LAYER_HEADINGS = (
    *(
        "layer",
        "forward ms",
        "model",
        "ratio",
        "backward ms",
        "model",
        "ratio",
        "saved MiB",
        "model",
        "kept MiB",
    ),
    *("working MiB", "model", "TFLOP/s"),
)
METHOD_HEADINGS = (
    *(
        "method",
        "layers",
        "VAR(param)",
        "VAR(layers)",
        "VAR(fwd) ms²",
        "change in SUM MiB",
        "step ms",
        "x BMP",
    ),
    *("paper", "on measured"),
)
CHOICE_HEADINGS = (
    *(
        "model",
        "TP",
        "paper's layers",
        "by the model",
        "by measurement",
        "recomputed",
        "step ms",
        "x paper's",
    ),
    "x model's",
)

AT = SIZES.index(FULL)
"""Which micro-batch tables are about."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command's own."""
    parser.add_argument(
        "--models", type=int, default=9, help="of Table 9 (default: all %(default)s)"
    )


def run(bench: Bench, report: Report, options: argparse.Namespace) -> None:
    """Measure, print and note; writes the profile beside the report."""
    begun = time.perf_counter()
    with one_rank(bench.device):
        limit = matmul_flops(bench)
        report.figures["matmul_flops_per_s"] = limit
        report.line(
            f"Large matrix products: {limit / 1e12:.3g} TFLOP/s; data sheet: "
            f"{_peak(bench) / 1e12:.3g}"
        )
        preset = _shaped(load_model(INTERNVL), bench)
        sizes = _sizes(preset, bench)
        whole = measure_shapes(preset, Parallelism(), bench, sizes)
        _note_layers(bench, report, preset, whole, sizes)
        write_profile(whole, report.path("profile.json"))
        report.figures["profile"] = report.path("profile.json").name
        _note_table_4(bench, report, preset, whole)
        _note_table_9(bench, report, options.models)
    report.figures["seconds"] = time.perf_counter() - begun
    report.line(f"{report.figures['seconds']:.0f} s")


def _peak(bench: Bench) -> float:
    return bench.cluster.peak_flops_per_s


def _shaped(preset: ModelPreset, bench: Bench) -> ModelPreset:
    return tiny_of(preset) if bench.tiny else preset


def _sizes(preset: ModelPreset, bench: Bench) -> tuple[Size, ...]:
    return tiny_sizes(preset) if bench.tiny else SIZES


def _note_layers(
    bench: Bench, report: Report, preset: ModelPreset, whole: Profile, sizes: tuple[Size, ...]
) -> None:
    """Each kind of layer at the full micro-batch, measured and modelled."""
    modelled = modelled_costs(preset, Parallelism(), bench, whole.loads)
    at, own = AT, whole.costs
    flops = layer_flops(preset, whole.loads)
    rows, figures = [], []
    for row, kind in enumerate(own.kinds):
        place = modelled.kinds.index(kind)
        speed = flops[kind][at] / own.forward_ns[row, at] / 1e3 if kind in flops else None
        rows.append(
            [kind, *_cells(own, row, modelled, place, at), "-" if speed is None else f"{speed:.3g}"]
        )
        figures.append(
            {"kind": kind, "measured": _columns(own, row), "modelled": _columns(modelled, place)}
        )
    size = sizes[at]
    what = f"{size.tiles} tiles and {sum(size.tokens):,} tokens"
    title = f"{preset.name}, one GPU, {what}; 'model': analytical"
    report.table(title, LAYER_HEADINGS, rows)
    report.line(f"Forward and backward times of a kind are fitted to {misfit(whole):.1%} at worst.")
    report.figures |= {
        "misfit": misfit(whole),
        "sizes": [asdict(size) for size in sizes],
        "layers": figures,
    }


def _cells(own: Costs, row: int, modelled: Costs, place: int, at: int) -> list[str]:
    cells = []
    for name in ("forward_ns", "backward_ns"):
        one, two = (
            float(getattr(costs, name)[r, at]) for costs, r in ((own, row), (modelled, place))
        )
        cells += [
            f"{one / NS_PER_MS:.3f}",
            f"{two / NS_PER_MS:.3f}",
            f"{one / two:.2f}" if two else "-",
        ]
    pairs = {
        name: (getattr(own, name)[row, at], getattr(modelled, name)[place, at])
        for name in ("saved_bytes", "kept_bytes", "working_bytes")
    }
    mib = {name: [f"{value / MIB:,.1f}" for value in values] for name, values in pairs.items()}
    return [*cells, *mib["saved_bytes"], mib["kept_bytes"][0], *mib["working_bytes"]]


def _columns(costs: Costs, row: int) -> dict[str, list[int]]:
    """Of each micro-batch."""
    names = (
        "forward_ns",
        "input_grad_ns",
        "weight_grad_ns",
        "saved_bytes",
        "kept_bytes",
        "working_bytes",
    )
    return {name: getattr(costs, name)[row].tolist() for name in names}


def _note_table_4(bench: Bench, report: Report, preset: ModelPreset, whole: Profile) -> None:
    """InternVL on 4 stages, TP 1: by measured layers, and by the analytical model."""
    parallel = replace(INTERNVL_PAIR.parallel, tp=1)
    memory = bench.cluster.usable_memory_bytes
    modelled = modelled_costs(preset, parallel, bench, full_loads(preset, tiny=bench.tiny))
    # stages send over the cluster's network, which one GPU does not have
    measured = replace(measured_step(whole, AT), send_ns=modelled.send_ns)
    for name, costs in (("measured layers", measured), ("the analytical model", modelled)):
        found = table_4(costs, measured, memory)
        report.table(
            f"OmniBal, Table 4, by {name} (4 stages, TP 1)", METHOD_HEADINGS, map(_method, found)
        )
        report.figures[f"table_4, {name}"] = [asdict(row) for row in found]
    report.save()


def _method(row: Method) -> list[str]:
    paper = "-" if row.paper is None else f"{listed(row.paper[:4])}, {row.paper[4]} days"
    return [
        *(row.name, listed(row.layers), f"{row.variance_params:.2f}", f"{row.variance_layers:.2f}"),
        *(
            f"{row.variance_forward_ms2:,.3g}",
            f"{row.sum_change_mib:+.1f}",
            f"{row.step_ms:,.1f}",
            f"{row.ratio:.3f}",
        ),
        *(paper, f"{row.measured_ratio:.3f}"),
    ]


def _note_table_9(bench: Bench, report: Report, count: int) -> None:
    """Nine models, each kind of layer measured as one tensor-parallel GPU has it."""
    found = []
    for pair, published in list(pairs())[:count]:
        preset = _shaped(published, bench)
        profile = measure_shapes(preset, pair.parallel, bench, _sizes(preset, bench))
        modelled = modelled_costs(preset, pair.parallel, bench, full_loads(preset, tiny=bench.tiny))
        measured = measured_step(profile, AT)
        found.append(table_9(pair, modelled, measured, bench.cluster.usable_memory_bytes))
        report.figures.setdefault("table_9", []).append(
            {
                **asdict(found[-1]),
                "misfit": misfit(profile),
                "profile": profile_to_dict(profile)["kinds"],
            }
        )
        report.save()
    report.table(
        "OmniBal, Table 9: the fastest partitions of nine models, and others' steps on measured "
        "layers",
        CHOICE_HEADINGS,
        map(_choice, found),
    )


def _choice(row: Choice) -> list[str]:
    paper = (
        "-"
        if row.paper_ratio is None
        else f"{row.paper_ratio:.3f}{'' if row.paper_fits else ', too large'}"
    )
    return [
        *(row.name, str(row.tp), listed(row.paper), listed(row.modelled), listed(row.measured)),
        *(listed(row.recomputed), f"{row.step_ms:,.1f}", paper),
        "too large" if row.modelled_ratio is None else f"{row.modelled_ratio:.3f}",
    ]
