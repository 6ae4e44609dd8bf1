"""Rollouts to ranks and micro-batches: ours next to verl's and VeOmni's algorithms, and the bound.

    python benchmarks/rollouts.py [--prompts 128] [--each 8] [--ranks 8] [--max-tokens 16384]

Needs verl (0.9.1 was measured) and veomni (0.1.12), of which this imports the modules that balance:
tests/support/frameworks/packages/verl.txt lists what they need. Their functions are called as they
are. Without verl there are only our rows.

Prompts: a third text, a third one image (AI2D and ChartQA, drawn from the published lengths), a
third two to eight images, in InternVL's tiles; the answers are drawn here, log-normal of median
500 tokens, at most 8,192. Times are predicted from FLOPs (InternVL2.5-8B on A100s).

vision, LLM, attention: share of the ranks' time that they wait for the slowest, per step; the LLM's
with its attention, and attention alone. step / bound: sum over micro-batches of the slowest rank's
vision and LLM, over the mean of ranks. pixels: of rollouts that train on another rank than rolled
them out, as float32; verl sends all pixels through its driver, ours none (numbers travel, and
pixels are read where they are needed). prompts cut: ranks of all prompts beyond one each. plan: to
ranks and micro-batches; of verl it includes taking tensors apart.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import order  # noqa: E402

from isobatch.balance.dispatching.even_ranks import bound_ms, slot_loads  # noqa: E402
from isobatch.balance.dispatching.rollouts import assign_rollouts  # noqa: E402
from isobatch.common.types import Counts, FloatArray, Groups, IntArray  # noqa: E402
from isobatch.models.flops import FlopsModel  # noqa: E402
from isobatch.models.presets import load_model  # noqa: E402

MODEL, TILE_TOKENS, TILE_BYTES = "internvl2_5", 256, 3 * 448 * 448 * 4
MEDIAN_ANSWER, LONGEST_ANSWER, MOST_TILES = 500, 8_192, 28


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollouts:
    """Rollouts of a step, those of a prompt in a row."""

    counts: Counts
    prompts: IntArray
    costs: FloatArray
    """ms of vision, the LLM, its attention, (rollouts, 3)."""


Plan = tuple[Groups, ...]
"""Micro-batches of each rank."""


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--each", type=int, default=8, help="rollouts of a prompt")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=16_384, help="of a micro-batch")
    parser.add_argument("--steps", type=int, default=5, help="of which the mean is printed")
    options = parser.parse_args(argv)
    title = (
        f"{options.prompts} prompts x {options.each} rollouts, {options.ranks} ranks, "
        f"{options.max_tokens:,} tokens; mean of {options.steps} steps"
    )
    table = Table(title=title)
    for head in ("", "vision, %", "LLM, %", "attention, %", "micro-batches", "step / bound"):
        table.add_column(head, justify="right" if head else "left")
    for head in ("pixels, MB", "prompts cut", "plan, ms"):
        table.add_column(head, justify="right")
    figures: dict[str, list[list[float]]] = {}
    for seed in range(-1, options.steps):
        rollouts = draw(options.prompts, options.each, seed + 1)
        for name, method in methods(options):
            began = time.perf_counter()
            plan = method(rollouts)
            plan_ms = 1e3 * (time.perf_counter() - began)
            if seed >= 0:  # the first step compiles
                figures.setdefault(name, []).append([*measure(rollouts, plan), plan_ms])
    for name, rows in figures.items():
        vision, llm, attention, batches, step, pixels, cut, plan_ms = np.mean(rows, axis=0)
        waits = [f"{100 * wait:.2f}" for wait in (vision, llm, attention)]
        counts = [f"{batches:.1f}", f"{step:.3f}", f"{pixels:,.0f}", f"{cut:.0f}"]
        table.add_row(name, *waits, *counts, f"{plan_ms:.1f}")
    Console(width=130).print(table)


def draw(num_prompts: int, each: int, seed: int) -> Rollouts:
    rng = np.random.default_rng(seed)
    tiles, tokens, _ = order.published(None)
    kinds = rng.permutation(np.arange(num_prompts) % 3)
    drawn = rng.integers(0, len(tokens), num_prompts)
    several = np.array([rng.integers(1, 7, rng.integers(2, 9)).sum() for _ in kinds])
    several = np.minimum(several, MOST_TILES)  # verl asserts that every rollout fits
    crops = np.select([kinds == 1, kinds == 2], [tiles[drawn], several])
    text = np.select([kinds == 1], [tokens[drawn] - tiles[drawn] * TILE_TOKENS])
    text = np.where(kinds == 1, text, rng.integers(30, 600, num_prompts))
    prompts = np.repeat(np.arange(num_prompts), each)
    answers = MEDIAN_ANSWER * np.exp(rng.normal(0, 0.9, len(prompts)))
    nothing = np.zeros(len(prompts), np.int64)
    counts = Counts(
        num_image_patches=crops[prompts],
        num_vit_tokens=crops[prompts] * 1025,
        num_image_tokens=crops[prompts] * TILE_TOKENS,
        num_text_tokens=text[prompts] + np.minimum(answers, LONGEST_ANSWER).astype(np.int64),
        num_audio_tokens=nothing,
        num_loss_tokens=nothing,
    )
    costs = FlopsModel.of(load_model(MODEL)).phase_ms(counts)
    return Rollouts(counts=counts, prompts=prompts, costs=costs)


# --- methods ---


def methods(options: argparse.Namespace) -> Iterator[tuple[str, Callable[[Rollouts], Plan]]]:
    def ours(together: str, *, equal_sizes: bool) -> Callable[[Rollouts], Plan]:
        return lambda rollouts: (
            assign_rollouts(
                rollouts.costs,
                rollouts.counts.seq_len,
                num_ranks=options.ranks,
                max_tokens=options.max_tokens,
                prompts=rollouts.prompts.tolist(),
                together=together,  # type: ignore[arg-type]
                equal_sizes=equal_sizes,
            ).micro_batches
        )

    if importlib.util.find_spec("verl"):
        yield from peers(options)
    else:
        print("verl is not installed: only our rows", file=sys.stderr)
    yield "Isobatch, equal numbers", ours("nothing", equal_sizes=True)
    yield "Isobatch", ours("nothing", equal_sizes=False)
    yield "Isobatch, prompts together", ours("rank", equal_sizes=False)
    yield "Isobatch, together, equal numbers", ours("rank", equal_sizes=True)


def peers(options: argparse.Namespace) -> Iterator[tuple[str, Callable[[Rollouts], Plan]]]:
    """verl's and VeOmni's functions; micro-batches by verl's `rearrange_micro_batches`."""
    from tensordict import TensorDict  # noqa: PLC0415 - may not be installed
    from verl.utils import seqlen_balancing as verl  # noqa: PLC0415

    def batches(rollouts: Rollouts, ranks: list[list[int]]) -> Plan:
        """verl's micro-batches, as many on each rank as on the one that needs most."""
        lengths = torch.from_numpy(rollouts.counts.seq_len)
        count, made = 1, []
        while not made or len({len(parts) for parts in made}) > 1:
            count = max([count, *map(len, made)])
            made = []
            for rows in ranks:
                mask = torch.arange(int(lengths.max())) < lengths[rows, None]
                batch = TensorDict({"input_ids": mask.long(), "attention_mask": mask}, len(rows))
                _, parts = verl.rearrange_micro_batches(
                    batch, options.max_tokens, min_num_micro_batch=count
                )
                made.append([[rows[place] for place in part] for part in parts])
        return tuple(
            Groups(np.concatenate(parts), np.cumsum([0, *map(len, parts)])) for parts in made
        )

    def arriving(rollouts: Rollouts) -> Plan:
        rows = np.array_split(np.arange(len(rollouts.prompts)), options.ranks)
        return batches(rollouts, [part.tolist() for part in rows])

    def partitions(rollouts: Rollouts) -> Plan:
        work = verl.calculate_workload(torch.from_numpy(rollouts.counts.seq_len)).tolist()
        made = verl.get_seqlen_balanced_partitions(work, options.ranks, equal_size=True)
        return batches(rollouts, made)

    def grouped(rollouts: Rollouts) -> Plan:
        lengths, prompts = rollouts.counts.seq_len.tolist(), rollouts.prompts.tolist()
        made = verl.get_group_balanced_partitions(lengths, prompts, options.ranks)
        return batches(rollouts, made)

    greedy = veomni_algorithm()

    def by_squares(rollouts: Rollouts) -> Plan:
        lengths = torch.from_numpy(rollouts.counts.seq_len)
        table = torch.stack([torch.zeros_like(lengths), torch.arange(len(lengths)), lengths], dim=1)
        made = greedy(table, options.ranks, dim=2)
        return batches(rollouts, [rows[:, 1].tolist() for rows in made])

    yield "as they were rolled out", arriving
    yield "verl, balance_batch", partitions
    yield "verl, prompts together", grouped
    yield "VeOmni, squared lengths", by_squares


def veomni_algorithm() -> Callable[..., list[torch.Tensor]]:
    """VeOmni's module alone: its package imports what only older transformers have."""
    spec = importlib.util.find_spec("veomni")
    assert spec is not None
    assert spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0]) / "utils" / "data_balance"
    path = folder / "balance_sorting_algo.py"
    one = importlib.util.spec_from_file_location("balance_sorting_algo", path)
    assert one is not None
    assert one.loader is not None
    module = importlib.util.module_from_spec(one)
    one.loader.exec_module(module)
    algorithm: Callable[..., list[torch.Tensor]] = module.SORTING_ALGO_FUNC[
        "post_mbs_balancing_greedy_without_pad"
    ]
    return algorithm


# --- figures ---


def measure(rollouts: Rollouts, plan: Plan) -> list[float]:
    """Waits of the step in vision, LLM and attention; micro-batches; time; MB; prompts cut."""
    num_ranks = len(plan)
    slots = np.full(len(rollouts.prompts), -1)
    for rank, groups in enumerate(plan):
        for number in range(len(groups)):
            slots[groups[number]] = number * num_ranks + rank
    assert (slots >= 0).all()
    vision, llm, attention = rollouts.costs.T
    phases = np.stack([vision, llm + attention], axis=1)
    every = np.stack([vision, llm + attention, attention], axis=1)
    loads = slot_loads(every, slots % num_ranks, num_ranks)[0]
    waits = 1 - loads.mean(axis=0) / loads.max(axis=0)
    step = slot_loads(phases, slots, num_ranks).max(axis=1).sum() / bound_ms(phases, num_ranks)
    before = np.arange(len(slots)) * num_ranks // len(slots)
    moved = rollouts.counts.num_image_patches[before != slots % num_ranks].sum()
    ranks = slots % num_ranks
    pairs = {(prompt, rank) for prompt, rank in zip(rollouts.prompts, ranks, strict=True)}
    cut = len(pairs) - len(set(rollouts.prompts.tolist()))
    return [*waits, len(plan[0]), step, moved * TILE_BYTES / 1e6, cut]


if __name__ == "__main__":
    main()
