"""What the order of groups and the loss's divisor do to learning, by steps and by simulated time.

    python benchmarks/learning.py [--corpora DIR] [--dp 8] [--steps 240] [--seeds 3] [--plot FILE]

A tiny model that sees and hears (examples/tiny_vlm.py with an audio encoder) learns manuals with
pictures, speech and plain text (`learning_data.py`) with Adam. Methods differ in what a step holds:

- random padded: random samples, as many per micro-batch as groups have on average;
- random packed: groups by best fit in fully random order, what a careful user would do;
- the loader's order, by default and as balanced as it can be (`learning_orders.LOADER`).

A step is a micro-batch on each of `--dp` ranks, run in one process with the gradient that the ranks
together would have. Each method runs with each divisor of the loss (docs/load/loss.md); weights and
initial values depend on the seed alone, so differences are taken seed by seed. Intervals are 95 %
of Student's t over seeds. Losses are means over the labels of held-out samples; `sources` is the
mean of the three sources' losses.

Time is simulated: FLOPs of the tiny model (`models.flops`), each step as long as its slowest rank.
The unit is a step of average work without padding and waiting.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from learning_data import SOURCES, Data, Sample, join, prepare
from learning_orders import (
    LOADER,
    METHODS,
    PACKED,
    PADDED,
    average_time,
    epochs_of,
    groups_of,
    step_time,
)
from numpy.typing import NDArray
from rich.console import Console
from tables import new_table
from tiny_vlm import TinyVLM, token_losses
from torch import Tensor, nn

from isobatch.balance.loss_weights import LossWeights, sample_weights
from isobatch.balance.metrics import gradient_shares, repeated_pairs
from isobatch.common.types import Groups
from isobatch.loaders import MicroBatch
from isobatch.loaders.decode.log_mel import MEL_BINS

DIVISORS = ("step", "epoch", "sample")
"""`loss_normalizer` with weights of tokens; the last is "epoch" with `loss_weights="sample"`."""
RATE, WARM_UP, EVALUATIONS = 3e-3, 0.05, 12
MIXED = "packer: one build of all sources; loader: one of each, mixed by the loader (default)"
STUDENT = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776}
"""97.5 % quantile of Student's t by number of values."""
FRAMES_PER_TOKEN = 4


class TinyListener(TinyVLM):
    """`TinyVLM` with features of sound, of four frames each, in the places of audio tokens."""

    def __init__(self, data: Data) -> None:
        super().__init__(data.vocab_size, data.image_token_id)
        self.audio_token_id = data.audio_token_id
        width = self.embed.embedding_dim
        self.audio = nn.Sequential(
            nn.Linear(MEL_BINS * FRAMES_PER_TOKEN, width), nn.GELU(), nn.Linear(width, width)
        )

    def inputs(self, batch: MicroBatch) -> Tensor:
        x = super().inputs(batch)
        assert batch.audio_values is not None
        assert batch.audio_frames is not None
        parts = [
            nn.functional.pad(clip, (0, 0, 0, 1))[: num_tokens(len(clip)) * FRAMES_PER_TOKEN]
            for clip in batch.audio_values.split(batch.audio_frames.tolist())
        ]
        frames = torch.cat([batch.audio_values[:0], *parts])
        features = self.audio(frames.reshape(-1, MEL_BINS * FRAMES_PER_TOKEN))
        return x.masked_scatter((batch.input_ids == self.audio_token_id)[:, None], features)


def num_tokens(frames: int) -> int:
    """LLM tokens of a clip, as `plan_audio` counts them."""
    return -(-frames // 2) // 2


@dataclass(slots=True, kw_only=True)
class Run:
    """One training: held-out losses along it."""

    steps: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    losses: list[list[float]] = field(default_factory=list)
    """Of all held-out labels, and of each source."""


def main(arguments: list[str] | None = None) -> int:
    """Train, print and draw; -> exit status."""
    summary, _, details = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--corpora", type=Path, help="whole corpora: tests/data/README.md")
    parser.add_argument("--dp", type=int, default=8, help="ranks (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=150, help="0: no training; default: 150")
    parser.add_argument("--seeds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--max-seq-len", type=int, default=256, help="default: %(default)s")
    parser.add_argument("--mixed-by", choices=("packer", "loader"), default="loader", help=MIXED)
    parser.add_argument("--limit", type=int, help="samples of each source, for a quick look")
    parser.add_argument("--divisors", default=",".join(DIVISORS), help="default: %(default)s")
    parser.add_argument("--runs", type=Path, help="JSON file of runs, which are not run again")
    parser.add_argument("--plot", type=Path, help="SVG file; needs matplotlib")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        data = prepare(
            Path(folder),
            options.corpora,
            max_seq_len=options.max_seq_len,
            limit=options.limit,
            mixed_by=options.mixed_by,
        )
        console = Console(width=150)
        console.print(describe(data, options.dp))
        show_orders(data, options, console)
        if not options.steps:
            return 0
        runs = train_all(data, options)
    show_losses(runs, console)
    if options.plot:
        draw(runs, options.plot)
    return 0


def train_all(data: Data, options: argparse.Namespace) -> dict[tuple[str, str], list[Run]]:
    """All runs by method and divisor; kept in `--runs`, as they end."""
    kept: dict[str, Any] = {}
    if options.runs and options.runs.exists():
        kept = json.loads(options.runs.read_text("utf-8"))
    setting = [data.num_tokens, options.dp, options.steps, options.max_seq_len, options.mixed_by]
    runs: dict[tuple[str, str], list[Run]] = {}
    for method in METHODS:
        for divisor in ["step"] if method == PADDED else options.divisors.split(","):
            runs[method, divisor] = []
            for seed in range(options.seeds):
                key = " ".join(map(str, [method, divisor, seed, LOADER.get(method), *setting]))
                if key not in kept:
                    kept[key] = asdict(train(data, method, divisor, seed, options))
                    if options.runs:
                        options.runs.write_text(json.dumps(kept))
                runs[method, divisor].append(Run(**kept[key]))
    return runs


def describe(data: Data, dp: int) -> str:
    """Samples, tokens and labels of each source."""
    parts = []
    for number, name in enumerate(SOURCES):
        own = [sample for sample in data.samples.values() if sample.source == number]
        tokens = sum(len(sample.input_ids) for sample in own)
        labels = sum(int((sample.labels >= 0).sum()) for sample in own)
        parts.append(f"{name} {len(own):,} samples, {tokens:,} tokens, {labels:,} labels")
    return f"{'; '.join(parts)}; {len(data.stored):,} groups, {dp} per step"


def train(data: Data, method: str, divisor: str, seed: int, options: argparse.Namespace) -> Run:
    """One run, evaluated `EVALUATIONS` times."""
    torch.manual_seed(seed)
    model, run = TinyListener(data), Run()
    optimizer = torch.optim.Adam(model.parameters(), RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, options.steps))
    average = divisor_of(data, "sample" if divisor == "sample" else "token", options.dp)
    epochs = epochs_of(data, method, seed, options.dp)
    steps = (step for epoch in epochs for step in epoch)
    elapsed, unit = 0.0, average_time(data, options.dp)
    due = np.linspace(0, options.steps, EVALUATIONS + 1).round().astype(int)[1:]
    for number, step in zip(range(1, options.steps + 1), steps, strict=False):
        own = [data.samples[name] for rank in step for name in rank]
        batch = join(own, average)
        if divisor == "step":
            batch = replace(batch, loss_normalizer=float(max(1, batch.num_loss_tokens)))
        elif divisor == "sample":
            batch = weigh(batch, own)
        optimizer.zero_grad()
        batch.reduce_loss(token_losses(model(batch), batch)).backward()
        optimizer.step()
        schedule.step()
        elapsed += step_time(data, step, padded=method == PADDED) / unit
        if number in due:
            run.steps.append(number)
            run.times.append(elapsed)
            run.losses.append(evaluate(model, data.held_out))
    return run


def rate(step: int, steps: int) -> float:
    """Share of the learning rate: up within `WARM_UP` of the steps, then down to 0."""
    return min((step + 1) / (WARM_UP * steps), (steps - step) / ((1 - WARM_UP) * steps))


def weigh(batch: MicroBatch, samples: list[Sample]) -> MicroBatch:
    """The micro-batch of `samples` with the loader's `loss_weights="sample"`."""
    numbers = [max(1, int((sample.labels >= 0).sum())) for sample in samples]
    parts = [
        torch.full((len(sample.labels),), 1 / number)
        for sample, number in zip(samples, numbers, strict=True)
    ]
    return replace(batch, loss_weights=torch.cat(parts))


def divisor_of(data: Data, weights: LossWeights, step_groups: int) -> float:
    """Divisor of the loader's `loss_normalizer="epoch"`."""
    labels = data.counts(list(data.samples)).num_loss_tokens
    return float(sample_weights(labels, weights).sum()) * step_groups / len(data.stored)


@torch.no_grad()
def evaluate(model: TinyListener, held_out: list[Sample]) -> list[float]:
    """Mean loss of a label: of all, and of each source."""
    sums, counts = np.zeros(len(SOURCES)), np.zeros(len(SOURCES))
    for number in range(len(SOURCES)):
        batch = join([sample for sample in held_out if sample.source == number], 1.0)
        sums[number] = float(token_losses(model(batch), batch).sum())
        counts[number] = batch.num_loss_tokens
    return [float(sums.sum() / counts.sum()), *(sums / counts).tolist()]


def show_orders(data: Data, options: argparse.Namespace, console: Console) -> None:
    """What each method's first two epochs are like."""
    names = [f"gradient\n{name}" for name in SOURCES]
    table = new_table(
        "steps of the first epoch, divisor 'step'",
        ["method", "time per step", *names, "pairs again\n/ chance", "labels of a step\np5, p95"],
    )
    sources = data.sources
    num_labels = data.counts(list(data.samples)).num_loss_tokens
    place = {name: number for number, name in enumerate(data.samples)}
    unit = average_time(data, options.dp)
    for method in METHODS:
        epochs = epochs_of(data, method, 0, options.dp)
        first, second = next(epochs), next(epochs)
        groups, ids = groups_of(data, first)
        stream = Groups(np.array([place[name] for name in ids]), groups.offsets)
        shares = gradient_shares(stream, sources, num_labels, options.dp)
        times = [step_time(data, step, padded=method == PADDED) / unit for step in first]
        sums = [sum(num_labels[place[n]] for rank in step for n in rank) for step in first]
        again = ""
        if method != PADDED:
            # a group is known by any of its samples
            orders = [
                np.array(
                    [min(place[name] for name in rank) for step in epoch for rank in step if rank]
                )
                for epoch in (first, second)
            ]
            again = f"{repeated_pairs(*orders, options.dp):.1f}"
        low, high = np.percentile(sums, [5, 95])
        table.add_row(
            method,
            f"{np.mean(times):.3f}",
            *(f"{share:.1%}" for share in shares),
            again,
            f"{low:,.0f}, {high:,.0f}",
        )
    total = num_labels.sum()
    shares = [num_labels[sources == number].sum() / total for number in range(len(SOURCES))]
    table.add_row("share of labels", "", *(f"{share:.1%}" for share in shares), "", "")
    console.print(table)


def show_losses(runs: dict[tuple[str, str], list[Run]], console: Console) -> None:
    """Final losses and their difference to random packed."""
    table = new_table(
        "held-out loss after the last step",
        ["method", "divisor", "labels", "- random packed", *SOURCES, "sources", "time"],
    )
    for (method, divisor), own in runs.items():
        final = np.array([run.losses[-1] for run in own])  # (seeds, 1 + sources)
        base = runs.get((PACKED, divisor))
        against = ""
        if base is not None and method != PACKED:
            against = interval(final[:, 0] - np.array([run.losses[-1][0] for run in base]), "+")
        table.add_row(
            method,
            divisor,
            interval(final[:, 0]),
            against,
            *(interval(final[:, 1 + number]) for number in range(len(SOURCES))),
            interval(final[:, 1:].mean(axis=1)),
            f"{np.mean([run.times[-1] for run in own]):.0f}",
        )
    console.print(table)


def interval(values: NDArray[np.float64], sign: str = "") -> str:
    """Mean and half the width of its 95 % interval."""
    text = f"{values.mean():{sign}.3f}"
    if len(values) not in STUDENT:
        return text
    half = STUDENT[len(values)] * values.std(ddof=1) / len(values) ** 0.5
    return f"{text} ± {half:.3f}"


def draw(runs: dict[tuple[str, str], list[Run]], path: Path) -> None:
    """Loss by steps and by simulated time: means, with all seeds for the default divisor.

    Divided by the epoch's average, lines are solid; by each step's own labels, dashed.
    """
    import matplotlib.pyplot as plt  # noqa: PLC0415

    plt.rcParams.update({"font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "isobatch"})
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.8), sharey=True)
    for (method, divisor), own in runs.items():
        if divisor == "sample":
            continue
        losses = np.array([[row[0] for row in run.losses] for run in own])
        times = np.mean([run.times for run in own], axis=0)
        is_main = divisor == "epoch" or method == PADDED
        style: dict[str, Any] = {"color": f"C{METHODS.index(method)}", "label": method}
        if not is_main:
            style |= {"linestyle": "--", "linewidth": 0.9, "label": "_"}
        for panel, along in zip(panels, (own[0].steps, times), strict=True):
            panel.plot(along, losses.mean(axis=0), **style)
            if is_main:
                band = losses.min(axis=0), losses.max(axis=0)
                panel.fill_between(along, *band, color=style["color"], alpha=0.15, linewidth=0)
    panels[0].set(xlabel="optimizer steps", ylabel="held-out loss per label")
    panels[1].set(xlabel="simulated time, average steps without waiting")
    for panel in panels:
        panel.spines[["top", "right"]].set_visible(False)
    panels[1].legend(frameon=False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    sys.exit(main())
