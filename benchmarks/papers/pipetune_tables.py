"""PipeTune's Table 2 and figure 8: what each ingredient saves, simulated, and how long the search
takes, clocked.
"""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from isobatch.balance.baseline_samplers import pack_in_order
from isobatch.common.types import Groups, IntArray
from isobatch.engine.cost_model.analytical import layer_costs
from isobatch.engine.cost_model.loads import Loads, packed_loads, sample_loads
from isobatch.engine.cost_model.parallel import Parallelism, Training
from isobatch.engine.simulator.evaluate import evaluate
from isobatch.engine.tuning.tune import PartitionedModel, TuneOptions, tune
from isobatch.models.clusters import load_cluster
from isobatch.models.presets import load_model
from papers.datasets import PIPETUNE_MIXES, SIGLIP_TOKENS, pipetune_samples
from papers.page import Section, percent, table

STEPS, BATCH = 8, 128
"""Steps that are simulated, and the samples of each."""
MAX_SEQ_LEN = 8192
PIPETUNES = TuneOptions(max_seq_len=MAX_SEQ_LEN, sizes="multiples", search="clusters", encode="own")
OURS = TuneOptions(max_seq_len=MAX_SEQ_LEN, sizes="any", search="swaps", encode="any")
PAPER = {
    "DataMix1": (31.5, 32.6, 40.7),
    "DataMix2": (12.1, 17.1, 28.9),
    "DataMix3": (2.5, 7.0, 16.1),
}
"""Table 2: less time than the original with balance, with order and pre-computation too, with sizes
too; percent.
"""
FIGURE_8 = {128: 0.2, 1024: 1.5}
"""Search time at most, s, by samples of a step."""


def table_2() -> Section:
    """The 13B model on the three mixtures."""
    pipeline = make_pipeline()
    size = most_that_fits(pipeline)
    rows, gains, times = [], [], []
    for mix in PIPETUNE_MIXES:
        steps = [_samples(mix, BATCH, seed) for seed in range(STEPS)]
        found, tuned_ns = [], []
        for options in (PIPETUNES, OURS):
            tune(steps[0], _given(steps[0], size), pipeline, options)  # compiles
            started = time.perf_counter()
            tuned = [tune(step, _given(step, size), pipeline, options) for step in steps]
            times.append((time.perf_counter() - started) / STEPS)
            parts = [ingredients(step, _given(step, size), pipeline, options) for step in steps]
            found.append(savings(parts))
            tuned_ns.append(sum(each.step_ns for each in tuned))
        for place, name in enumerate(("balance", "+ order, pre-computation", "+ sizes")):
            rows.append(
                [mix, size, name, *(percent(own[place]) for own in found), f"{PAPER[mix][place]} %"]
            )
        best, fixed = best_fixed(pipeline, steps, size)
        original = fixed[size]
        gains.append(
            [
                *(mix, f"{original / STEPS / 1e6:,.0f}", best, f"{fixed[best] / STEPS / 1e6:,.0f}"),
                *(f"{original / own:.2f}x" for own in tuned_ns),
                *(f"{fixed[best] / own:.2f}x" for own in tuned_ns),
            ]
        )
    heads = ("paper's search", "ours")
    return Section(
        title="PipeTune, Table 2: what each ingredient saves",
        body=(
            f"13B, TP 4, PP 4 on nodes of four A100-80G, {BATCH} samples per step, max_seq_len "
            f"{MAX_SEQ_LEN}; less time per step than packing in random order, means of {STEPS} "
            f"steps. Samples are drawn to match Table 1's means, medians and longest. Assumed: the "
            f"encoder is frozen and lies in the first stage with a quarter of the layers; nothing "
            f"is recomputed; 'mbs' is the largest size that fits, as the paper's original. The "
            f"paper's search: sizes in multiples, orders of clusters, pre-computation on the first "
            f"stage. Ours: also sizes between, exchanges, all ranks' idle time.",
            table(("mixture", "mbs", "less time with", *heads, "paper"), rows),
            "Most of that is the size, which a careful user sets once: the best fixed size is the "
            "one with the fastest of these steps, all packed in random order. Over it tuning gains "
            "what the last two columns say.",
            table(
                (
                    *("mixture", "original, ms", "best fixed mbs", "its step, ms"),
                    *(f"over the original: {head}" for head in heads),
                    *(f"over the best fixed: {head}" for head in heads),
                ),
                gains,
            ),
            f"Search per step: {min(times):.3f} to {max(times):.3f} s on one core (the paper: "
            f"under {FIGURE_8[128]} s).",
        ),
    )


def best_fixed(
    pipeline: PartitionedModel, steps: list[Loads], most: int
) -> tuple[int, dict[int, int]]:
    """The fixed size with the fastest steps, and the time of all steps by size up to `most`."""
    times = {
        size: sum(_fixed_ns(pipeline, step, size) for step in steps) for size in range(1, most + 1)
    }
    return min(times, key=lambda size: times[size]), times


def _fixed_ns(pipeline: PartitionedModel, step: Loads, size: int) -> int:
    costs = pipeline.cost(packed_loads(step, _given(step, size)))
    schedule = pipeline.make_schedule(costs.num_micro_batches)
    return evaluate(costs, pipeline.borders, pipeline.recompute, schedule).step_ns


def figure_8() -> Section:
    """Search time by samples of a step."""
    pipeline, rows = make_pipeline(), []
    for batch in (128, 256, 512, 1024):
        samples = _samples("DataMix3", batch, 0)
        given = _given(samples, most_that_fits(pipeline))
        own = []
        for options in (PIPETUNES, OURS):
            tune(samples, given, pipeline, options)
            started = time.perf_counter()
            tune(samples, given, pipeline, options)
            own.append(f"{time.perf_counter() - started:.3f}")
        rows.append([batch, *own, f"< {FIGURE_8[batch]}" if batch in FIGURE_8 else "-"])
    return Section(
        title="PipeTune, figure 8: search time",
        body=(
            "Seconds per step on DataMix3, on one core; the paper's on its own CPU, simulating in "
            "parallel.",
            table(("samples per step", "paper's search", "ours", "paper"), rows),
        ),
    )


def make_pipeline() -> PartitionedModel:
    """PipeTune's 13B model on its cluster A."""
    model, cluster, parallel = (
        load_model("pipetune_13b"),
        load_cluster("a100_80g_4gpu"),
        Parallelism(tp=4, pp=4),
    )
    training = Training(vision=False, kernels="fused")

    def cost(loads: Loads):  # type: ignore[no-untyped-def]
        return layer_costs(model, cluster, parallel, loads, training)

    kinds = cost(Loads.constant(1, images=1, vit_tokens_per_image=576, seq_len=1024)).kinds
    layers = np.flatnonzero(np.array(kinds) == "llm_layer")
    cuts = layers[len(layers) // parallel.pp :: len(layers) // parallel.pp][: parallel.pp - 1]
    return PartitionedModel(
        cost=cost,
        borders=np.array([0, *cuts.tolist(), len(kinds)]),
        recompute=np.zeros(len(kinds), np.bool_),
        memory_bytes=cluster.usable_memory_bytes,
    )


def most_that_fits(pipeline: PartitionedModel) -> int:
    """The largest micro-batch size of which full micro-batches, all images, fit into memory: fixed
    in the original.
    """
    size = 1
    while _fits(pipeline, size + 1):
        size += 1
    return size


def _fits(pipeline: PartitionedModel, size: int) -> bool:
    images = size * MAX_SEQ_LEN // SIGLIP_TOKENS
    loads = Loads.constant(
        8, images=images, vit_tokens_per_image=SIGLIP_TOKENS, seq_len=size * MAX_SEQ_LEN
    )
    schedule = pipeline.make_schedule(len(loads))
    assert pipeline.memory_bytes is not None
    return evaluate(pipeline.cost(loads), pipeline.borders, pipeline.recompute, schedule).fits(
        pipeline.memory_bytes
    )


def _samples(mix: str, count: int, seed: int) -> Loads:
    samples = pipetune_samples(mix, count, MAX_SEQ_LEN, seed)
    return sample_loads(samples, load_model("pipetune_13b")).all_labelled()


def _given(samples: Loads, size: int) -> Groups:
    lengths: IntArray = samples.llm.tokens
    return pack_in_order(lengths, size * MAX_SEQ_LEN)


def ingredients(
    step: Loads, given: Groups, pipeline: PartitionedModel, options: TuneOptions
) -> list[int]:
    """Times of a step as given, packed to even costs, also reordered, also resized, ns."""
    schedule = pipeline.make_schedule(len(given))
    costs = pipeline.cost(packed_loads(step, given))
    untuned = evaluate(costs, pipeline.borders, pipeline.recompute, schedule).step_ns
    fixed = replace(options, sizes="given")
    ways = replace(fixed, search="none", encode="never"), fixed, options
    return [untuned, *(tune(step, given, pipeline, way).step_ns for way in ways)]


def savings(parts: list[list[int]]) -> list[float]:
    """Share of the original time that is saved with each ingredient and those before."""
    untuned, *others = (sum(times) for times in zip(*parts, strict=True))
    return [1 - time / untuned for time in others]
