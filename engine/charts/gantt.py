"""Gantt charts of steps as an HTML page, with sends, critical path, memory.

The page needs no network and no scripts: its colours follow the reader's light or dark mode,
positions are shares of a chart's width, and radio buttons set that width, so that zooming is CSS.
Several steps share one scale. 16 ranks with 256 micro-batches are 8,192 bars: 4 MB, .2 s.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import numpy as np

from isobatch.common.html_page import page
from isobatch.common.types import IntArray
from isobatch.engine.charts.format_time import round_step, span_text, tick_text, time_text
from isobatch.engine.charts.trace import GIB, KIND_NAMES
from isobatch.engine.simulator.evaluate import SimulatedStep
from isobatch.engine.simulator.schedule import PassKind
from isobatch.engine.simulator.simulate import critical_path, transfers

STYLE = Path(__file__).with_name("gantt.css").read_text("utf-8")
CHART_PX = 900
"""Least width of a chart that is not zoomed; it decides what fits into a bar."""
ZOOMS = (1, 3, 10, 30, 100)
"""Possible zooms; a chart offers those at which more numbers fit than before."""
ROW, BAR_TOP, BAR, SEND_TOP, STRIP = 36, 7, 21, 30, 3
"""A rank's row in pixels: the critical path's strip, bars, the sends' strip."""
AXIS = 22
MEMORY_ROW, HEADROOM = 34, 1.06
"""A rank's memory row in pixels, and the end of the scale over the highest peak."""
DIGIT_PX, NUMBER_MARGIN_PX = 6.2, 5.0
TICKS = 8
"""Approximate number on the visible part of a chart."""
CLASSES = {
    PassKind.FORWARD: "forward",
    PassKind.BACKWARD: "backward",
    PassKind.INPUT_GRAD: "input",
    PassKind.WEIGHT_GRAD: "weight",
    PassKind.ENCODE: "encode",
}
MEMORY_POINTS = 2_000
"""Points of a rank's memory curve; more are grouped and drawn as their maximum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GanttStep:
    """A step's chart: the step, its title and text."""

    title: str
    text: str
    simulated: SimulatedStep
    recompute_ns: IntArray | None = None
    """(stages, micro_batches): recomputation in backward passes, drawn separately."""
    stage_names: Sequence[str] = ()
    """Layers of each stage, for people."""


def write_gantt(
    steps: Sequence[GanttStep], path: Path, *, title: str, memory_bytes: int | None = None
) -> None:
    """Write the page of some steps; `memory_bytes` is what a GPU has."""
    path.write_text(gantt_page(steps, title=title, memory_bytes=memory_bytes), "utf-8")


def gantt_page(steps: Sequence[GanttStep], *, title: str, memory_bytes: int | None = None) -> str:
    """The page of some steps, all on the scale of the longest."""
    longest = max(1, *(step.simulated.step_ns for step in steps))
    peaks = [int(step.simulated.memory.peak_bytes.max()) for step in steps]
    highest = int(HEADROOM * max(1, memory_bytes or 0, *peaks))
    sections = [f"<h1>{escape(title)}</h1>"]
    for number, step in enumerate(steps):
        sections.append(
            f"<section><h2>{escape(step.title)}</h2><p>{escape(step.text)}</p>"
            f"{_cards(step, memory_bytes)}{_legend(step)}"
            f"{_gantt(step, f'chart{number}', longest, memory_bytes)}"
            f"{_memory(step, longest, highest, memory_bytes)}</section>"
        )
    return page(title, "\n".join(sections), style=STYLE + _zoom_style())


def _cards(step: GanttStep, memory_bytes: int | None) -> str:
    simulated = step.simulated
    peak = int(simulated.memory.peak_bytes.max())
    of_limit = "" if memory_bytes is None else f" of {memory_bytes / GIB:.1f} GiB"
    cards = [
        (time_text(simulated.step_ns), "for the step"),
        (f"{simulated.timeline.bubble_ratio.mean():.1%}", "of the ranks' time is waiting"),
        (f"{peak / GIB:.1f} GiB", f"at most on a GPU{of_limit}"),
    ]
    parts = path_parts(step).items()
    cards += [(time_text(spent), f"of the critical path: {name}") for name, spent in parts if spent]
    card = '<div class="card"><b>{}</b><span>{}</span></div>'
    items = "".join(card.format(figure, escape(text)) for figure, text in cards)
    return f'<div class="cards">{items}</div>'


def path_parts(step: GanttStep) -> dict[str, int]:
    """Parts of the critical path, in nanoseconds; they add up to the step."""
    timeline = step.simulated.timeline
    schedule, path = timeline.program.schedule, critical_path(timeline)
    kinds, spent = schedule.kinds[path], (timeline.end_ns - timeline.start_ns)[path]
    parts = {name: int(spent[kinds == kind].sum()) for kind, name in KIND_NAMES.items()}
    if step.recompute_ns is not None:
        goes_back = np.isin(kinds, (PassKind.BACKWARD, PassKind.INPUT_GRAD))
        again = step.recompute_ns[schedule.stages[path], schedule.micro_batches[path]]
        for kind in (PassKind.BACKWARD, PassKind.INPUT_GRAD):
            parts[KIND_NAMES[kind]] -= int(again[kinds == kind].sum())
        parts["recomputation"] = int(again[goes_back].sum())
    parts["sends"] = timeline.step_ns - int(spent.sum())
    return parts


def _legend(step: GanttStep) -> str:
    kinds = np.unique(step.simulated.timeline.program.schedule.kinds).tolist()
    keys = [(CLASSES[PassKind(kind)], KIND_NAMES[PassKind(kind)]) for kind in kinds]
    if step.recompute_ns is not None and step.recompute_ns.any():
        keys.append(("again", "recomputation, part of the backward pass"))
    keys += [("critical", "critical path (above)"), ("send", "sending (below)")]
    items = "".join(f'<span><i class="key {name}"></i>{escape(text)}</span>' for name, text in keys)
    hint = "<span>a number is a micro-batch; point at a bar for its times</span>"
    return f'<div class="legend">{items}{hint}</div>'


def _gantt(step: GanttStep, name: str, longest: int, memory_bytes: int | None) -> str:
    schedule = step.simulated.timeline.program.schedule
    bars = "".join(_bars(step, longest))
    height = AXIS + ROW * schedule.num_ranks
    took = time_text(step.simulated.step_ns)
    label = f"{schedule.num_ranks} ranks, {len(schedule)} passes, {took}"
    return (
        f'{_zoom_buttons(name, bars)}<div class="gantt">{_names(step, memory_bytes)}'
        f'<div class="time scroll"><svg class="zoomed" height="{height}" role="img" '
        f'aria-label="{label}">'
        f"{_ticks(longest, height)}{bars}{_strips(step, longest)}</svg></div></div>"
    )


def _names(step: GanttStep, memory_bytes: int | None) -> str:
    simulated = step.simulated
    schedule, bubbles = simulated.timeline.program.schedule, simulated.timeline.bubble_ratio
    rows = [f'<div style="height:{AXIS}px"></div>']
    for rank in range(schedule.num_ranks):
        stages = range(rank, schedule.num_stages, schedule.num_ranks)
        text = f"stage {', '.join(map(str, stages))}"
        layers = "; ".join(step.stage_names[rank :: schedule.num_ranks])
        peak = int(simulated.memory.peak_bytes[rank])
        size = f"{peak / GIB:.1f} GiB"
        size = f"<i>{size}</i>" if memory_bytes is not None and peak > memory_bytes else size
        rows.append(
            f'<div style="height:{ROW}px" title="{escape(layers or text)}">'
            f"<span><b>rank {rank}</b> {text}</span>"
            f"<span>waits {bubbles[rank]:.1%} &middot; {size}</span></div>"
        )
    return f'<div class="names">{"".join(rows)}</div>'


def _bars(step: GanttStep, longest: int) -> Iterator[str]:
    """Every pass as a rectangle with its title, recomputation and micro-batch number."""
    timeline = step.simulated.timeline
    schedule = timeline.program.schedule
    starts, ends = timeline.start_ns.tolist(), timeline.end_ns.tolist()
    for index, rank in enumerate(schedule.ranks.tolist()):
        start, end = starts[index], ends[index]
        if start == end:
            continue
        kind, stage, number = schedule.action(index)
        at = f'x="{_percent(start, longest)}" y="{AXIS + rank * ROW + BAR_TOP}"'
        again = 0
        if step.recompute_ns is not None and kind in (PassKind.BACKWARD, PassKind.INPUT_GRAD):
            again = int(step.recompute_ns[stage, number])
        text = f"{KIND_NAMES[kind]} of micro-batch {number}, stage {stage}: {span_text(start, end)}"
        text += f", of which recomputation {time_text(again)}" if again else ""
        tone = " odd" if stage // schedule.num_ranks % 2 else ""
        size = f'width="{_percent(end - start, longest)}" height="{BAR}"'
        yield f'<rect class="{CLASSES[kind]}{tone}" {at} {size}><title>{text}</title></rect>'
        if again:
            size = f'width="{_percent(again, longest)}" height="{BAR}" pointer-events="none"'
            yield f'<rect class="again{tone}" {at} {size}/>'
        shown = _zoom_class((end - start) / longest, NUMBER_MARGIN_PX + DIGIT_PX * len(str(number)))
        if shown:
            middle = _percent(start + (end - start) / 2, longest)
            y = AXIS + rank * ROW + BAR_TOP + 14.5
            yield f'<text class="number {shown}" x="{middle}" y="{y}">{number}</text>'


def _strips(step: GanttStep, longest: int) -> str:
    """The critical path above the bars, sends below."""
    timeline = step.simulated.timeline
    schedule, ranks = timeline.program.schedule, timeline.program.schedule.ranks
    strips = []
    for rank, start, end in _path_spans(step):
        at = f'x="{_percent(start, longest)}" y="{AXIS + rank * ROW + 2}"'
        width = _percent(end - start, longest)
        strips.append(f'<rect class="critical" {at} width="{width}" height="{STRIP}"/>')
    sent = transfers(timeline)
    for edge in np.flatnonzero(sent.crosses & (sent.end_ns > sent.start_ns)).tolist():
        start, end = int(sent.start_ns[edge]), int(sent.end_ns[edge])
        source, target = int(sent.sources[edge]), int(sent.targets[edge])
        at = f'x="{_percent(start, longest)}" y="{AXIS + int(ranks[source]) * ROW + SEND_TOP}"'
        text = f"to rank {ranks[target]}, of {schedule.action(source)}: {span_text(start, end)}"
        size = f'width="{_percent(end - start, longest)}" height="{STRIP}"'
        strips.append(f'<rect class="send" {at} {size}><title>{text}</title></rect>')
    return "".join(strips)


def _path_spans(step: GanttStep) -> Iterator[tuple[int, int, int]]:
    """(rank, start, end) of the critical path's spans without a gap on one rank."""
    timeline = step.simulated.timeline
    path = critical_path(timeline)
    ranks = timeline.program.schedule.ranks[path].tolist()
    starts, ends = timeline.start_ns[path].tolist(), timeline.end_ns[path].tolist()
    first = 0
    for last in range(1, len(path) + 1):
        if last == len(path) or ranks[last] != ranks[first] or starts[last] != ends[last - 1]:
            yield ranks[first], starts[first], ends[last - 1]
            first = last


def _memory(step: GanttStep, longest: int, highest: int, memory_bytes: int | None) -> str:
    """Live memory of each rank over time, on one scale."""
    simulated = step.simulated
    timeline, memory = simulated.timeline, simulated.memory
    schedule = timeline.program.schedule
    line = ""
    if memory_bytes is not None:
        y = f"{1000 * (1 - memory_bytes / highest):.1f}"
        at = f'x1="0" x2="1000" y1="{y}" y2="{y}" vector-effect="non-scaling-stroke"'
        line = f'<line class="limit" {at}/>'
    names, rows = [], []
    for rank in range(schedule.num_ranks):
        own = slice(schedule.rank_offsets[rank], schedule.rank_offsets[rank + 1])
        whens = np.stack([timeline.start_ns[own], timeline.end_ns[own]], axis=1).ravel()
        sizes = np.stack([memory.during_bytes[own], memory.after_bytes[own]], axis=1).ravel()
        state = int(memory.state_bytes[rank])
        names.append(
            f'<div style="height:{MEMORY_ROW}px"><span><b>rank {rank}</b> '
            f"peak {memory.peak_bytes[rank] / GIB:.1f} GiB"
            f"</span><span>of it model and optimizer {state / GIB:.1f}</span></div>"
        )
        curve = _curve(whens, sizes, longest, highest, state)
        rows.append(
            f'<svg viewBox="0 0 1000 1000" preserveAspectRatio="none" width="100%" '
            f'height="{MEMORY_ROW - 1}" role="img" aria-label="memory of rank {rank}">'
            f'<path class="live" d="{curve}"/>{line}</svg>'
        )
    has = "" if memory_bytes is None else f"{memory_bytes / GIB:.1f} GiB"
    limit = f" Line: the {has} that a GPU has." if has else ""
    return (
        f'<p class="below">Memory of a GPU of each rank over the step, on one scale.{limit}</p>'
        f'<div class="gantt"><div class="names">{"".join(names)}</div>'
        f'<div class="time memory">{"".join(rows)}</div></div>'
    )


def _curve(whens: IntArray, sizes: IntArray, longest: int, highest: int, state: int) -> str:
    """The path of a step function: the bytes from each time on."""
    group = -(-len(whens) // MEMORY_POINTS)
    if group > 1:
        firsts = np.arange(0, len(whens), group)
        whens, sizes = whens[firsts], np.maximum.reduceat(sizes, firsts)
    parts = [f"M0 1000V{1000 * (1 - state / highest):.1f}"]
    for when, size in zip(whens.tolist(), sizes.tolist(), strict=True):
        parts.append(f"H{1000 * when / longest:.1f}V{1000 * (1 - size / highest):.1f}")
    return "".join([*parts, "H1000V1000z"])


def _ticks(longest: int, height: int) -> str:
    """Lines and times of the axis, closer together at higher zooms."""
    parts = []
    for zoom in ZOOMS:
        spacing = round_step(longest / (TICKS * zoom))
        for number in range(int(0.97 * longest / spacing) + 1):
            x = _percent(number * spacing, longest)
            anchor, text = "middle" if number else "start", tick_text(number * spacing, longest)
            parts.append(
                f'<g class="t{zoom}"><line x1="{x}" x2="{x}" y1="{AXIS - 4}" y2="{height}"/>'
                f'<text class="tick" x="{x}" y="13" text-anchor="{anchor}">{text}</text></g>'
            )
    return "".join(parts)


def _percent(value: float, whole: int) -> str:
    return f"{100 * value / whole:.4f}%"


def _zoom_buttons(chart: str, bars: str) -> str:
    """Radio buttons just before the element of class `gantt` that they zoom; hidden if only one."""
    # 1, and every zoom at which numbers appear that did not fit before
    zooms = [zoom for zoom in ZOOMS if zoom == 1 or f'n{zoom}"' in bars]
    buttons, labels = "", ""
    for zoom in zooms:
        name, text = f"{chart}-{zoom}", f"{zoom}x" if zoom > 1 else "whole step"
        checked = " checked" if zoom == 1 else ""
        buttons += f'<input class="zoom z{zoom}" type="radio" name="{chart}" id="{name}"{checked}>'
        labels += f'<label for="{name}" class="l{zoom}">{text}</label>'
    hidden = " hidden" if len(zooms) == 1 else ""
    return f'{buttons}<div class="zooms"{hidden}>zoom {labels}</div>'


def _zoom_class(width_share: float, needed_px: float) -> str | None:
    """Class of a number that needs `needed_px` in a bar of this share: shown from some zoom on.

    >>> _zoom_class(0.1, 20), _zoom_class(0.01, 20), _zoom_class(1e-6, 20)
    ('n1', 'n3', None)
    """
    return next((f"n{zoom}" for zoom in ZOOMS if width_share * CHART_PX * zoom >= needed_px), None)


def _zoom_style() -> str:
    """CSS for wider charts, more numbers and other ticks by the checked button."""
    rules = [f".time svg.zoomed {{ width: 100%; min-width: {CHART_PX}px; }}"]
    rules += [f".n{zoom}, .t{zoom} {{ display: none; }}" for zoom in ZOOMS]
    for zoom in ZOOMS:
        checked, width = f"input.z{zoom}:checked ~", f"width: {zoom * 100}%"
        shown = ", ".join(f"{checked} .gantt .n{lower}" for lower in ZOOMS if lower <= zoom)
        rules.append(f"{shown}, {checked} .gantt .t{zoom} {{ display: inline; }}")
        rules.append(f"{checked} .zooms .l{zoom} {{ border-color: var(--ink); font-weight: 600; }}")
        size = f"{width}; min-width: {zoom * CHART_PX}px;"
        rules.append(f"{checked} .gantt svg.zoomed {{ {size} }}")
    return "\n".join(rules)
