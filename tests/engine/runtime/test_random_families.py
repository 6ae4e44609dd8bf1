"""Random pipelines of families' models have the losses and gradients of one process.

Families, 2 to 4 ranks, pipelines and replicas, ZeRO 0 and 1, schedules, deferral, recomputation,
frozen parts, micro-batches without images or without anything; float32. Each case runs twice: with
its weights trained, and with LoRA on random parts and all else frozen. `_layers_of` makes the
models of both sides.
"""

import os
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers")
pytest.importorskip("peft")

from isobatch.engine.cost_model.training_mode import TrainingMode
from isobatch.engine.runtime.models.transformers_models import from_transformers
from isobatch.engine.runtime.pipeline import Pipeline, PipelineOptions
from isobatch.engine.simulator.schedule import INTERLEAVED, SCHEDULES, most_deferred
from isobatch.engine.train.models.lora import add_adapters
from isobatch.engine.train.options import PARTS, LoraOptions
from support.models.family_models import FAMILIES, make_family_batch, make_family_model
from support.models.tiny_models import make_batch, make_model
from support.rank_programs.rank_cases import reduced_gradient
from support.ranks import on_ranks

DRAWS = int(os.environ.get("ISOBATCH_TEST_DRAWS", "12"))
"""Random cases: set 200 for a longer test."""
FIRST = int(os.environ.get("ISOBATCH_TEST_FIRST", "0"))
WORLDS = (4, 2, 3)
"""Numbers of ranks: the first twelve cases are of one launch."""
NAMES = ("internvl", "llava", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava_next")
NAMES += ("llava_onevision", "gemma3")
MODES = (None, TrainingMode(precision="fp32", zero_stage=0), TrainingMode(precision="fp32"))
TOLERANCE = 1e-6
"""Of losses, and of gradients by the norm of all; float32."""
STEPS = 2


@dataclass(frozen=True, kw_only=True)
class FamilyCase:
    """A model, a pipeline, and what is drawn for them."""

    seed: int
    name: str
    pp: int
    dp: int
    schedule: str
    stages_per_rank: int
    deferred: tuple[int, ...] | None
    mode: TrainingMode | None
    recompute: float
    """Share of recomputed layers."""
    frozen: str
    """nothing, encoder, language or layers (a third of them)."""
    tied: bool
    lora: LoraOptions
    """Of the second run."""


def random_case(seed: int, world: int) -> FamilyCase:
    """A case on so many ranks."""
    rng = np.random.default_rng(seed)
    name = NAMES[seed // len(SCHEDULES) % len(NAMES)]
    pp = int(rng.choice([count for count in (world, world, 2, 1) if world % count == 0]))
    schedule = SCHEDULES[seed % len(SCHEDULES)]
    limits = most_deferred(schedule, pp)
    is_bound = any(limits) and rng.random() < 0.5
    return FamilyCase(
        seed=seed,
        name=name,
        pp=pp,
        dp=world // pp,
        schedule=schedule,
        stages_per_rank=2 if schedule in INTERLEAVED and pp < 4 else 1,
        deferred=tuple(rng.integers(0, limit + 1) for limit in limits) if is_bound else None,
        mode=MODES[int(rng.integers(len(MODES)))],
        recompute=float(rng.choice([0, 0.5, 1])),
        frozen=str(rng.choice(["nothing", "encoder", "language", "layers"])),
        tied=bool(rng.random() < 0.5),
        lora=_random_lora(rng, name),
    )


def _random_lora(rng: np.random.Generator, name: str) -> LoraOptions:
    """Adapters on one to three parts; only the language model has layers of some names."""
    parts = [part for part in PARTS if rng.random() < 0.5] or [str(rng.choice(["vision", "llm"]))]
    if parts == ["projector"] and name == "gemma3":  # whose projector has no linear layer
        parts.append("llm")
    targets = ("q_proj", "down_proj") if "llm" in parts and rng.random() < 0.5 else ("all-linear",)
    return LoraOptions(
        lora_rank=int(rng.integers(1, 5)),
        lora_alpha=float(rng.choice([1, 16])),
        lora_parts=tuple(parts),
        lora_targets=targets,
    )


def _run_all(cases: list[FamilyCase]) -> None:
    for case in cases:
        for lora in (None, case.lora):
            try:
                _run_case(case, lora)
            except Exception as error:
                raise AssertionError(f"rank {dist.get_rank()}, {lora}, {case}: {error}") from error


def _run_case(case: FamilyCase, lora: LoraOptions | None) -> None:
    rng = np.random.default_rng(1000 + case.seed)
    piped, alone = (_layers_of(case, lora) for _ in range(2))
    count, stages = len(piped.layers), case.pp * case.stages_per_rank
    inner = np.sort(rng.choice(np.arange(1, count), stages - 1, replace=False)).tolist()
    recompute = rng.random(count) < case.recompute
    world = range(case.pp * case.dp)
    pipelines = [list(world[first : first + case.pp]) for first in world[:: case.pp]]
    options = PipelineOptions(
        schedule=case.schedule,
        stages_per_rank=case.stages_per_rank,
        deferred=case.deferred,
        mode=case.mode,
    )
    pipeline = Pipeline(piped, (0, *inner, count), recompute, pipelines, options)
    replica = dist.get_rank() // case.pp
    for step in range(STEPS):
        per_replica = int(rng.integers(1, 6))
        batches = [_batch(case.name, rng) for _ in range(per_replica * case.dp)]
        normalizer = max(1, sum(int((batch.labels >= 0).sum()) for batch in batches))
        expected = sum(_run_alone(alone, batch, normalizer) for batch in batches)
        own = batches[replica * per_replica :][:per_replica]
        loss = torch.tensor(pipeline.step(own, normalizer).loss, dtype=torch.float64)
        if case.dp > 1:
            dist.all_reduce(loss)
            loss /= case.pp
        assert abs(float(loss) - expected) <= TOLERANCE * abs(expected), (
            f"step {step}: loss {float(loss)}, not {expected}"
        )
        pipeline.reduce_gradients()
        _compare(pipeline, alone, f"step {step}")
        pipeline.drop_gradients()
        for layer in alone.layers:
            layer.zero_grad()


def _layers_of(case: FamilyCase, lora: LoraOptions | None):
    """The model's layers, some of them frozen: the same for the pipeline and alone."""
    if case.name in FAMILIES:
        model = make_family_model(case.name, seed=case.seed)
    else:
        model = make_model(case.name, tied=case.tied, seed=case.seed)
    embedding = model.get_input_embeddings().weight
    stack = from_transformers(model)
    layers = stack.layers
    first = next(
        place
        for place, layer in enumerate(layers)
        if any(weight is embedding for weight in layer.parameters())
    )
    if lora is not None:
        _adapt(layers, first, lora, case.seed)
        return stack
    drawn = np.random.default_rng(case.seed).random(len(layers)) < 1 / 3
    frozen = {
        "nothing": [],
        "encoder": layers[:first],
        "language": layers[first:],
        "layers": [layer for layer, is_drawn in zip(layers, drawn, strict=True) if is_drawn],
    }
    for layer in frozen[case.frozen]:
        layer.requires_grad_(False)
    return stack


def _adapt(layers: list, first: int, lora: LoraOptions, seed: int) -> None:
    """Add adapters as the training command does, then draw B: it starts as 0, and so would the
    gradients of A.

    `first`: the embedding's place, after the projector's.
    """
    parts = ["vision"] * (first - 1) + ["projector"] + ["llm"] * (len(layers) - first)
    add_adapters(dict(enumerate(layers)), parts, lora, seed)
    generator = torch.Generator().manual_seed(seed)
    for layer in layers:
        for name, weight in layer.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, std=0.1, generator=generator)


def _batch(name: str, rng: np.random.Generator):
    """A micro-batch of a few samples; a fifth has no images, a tenth nothing at all."""
    counts = tuple(rng.integers(0, 3, int(rng.integers(1, 4))).tolist())
    kind = rng.random()
    counts = () if kind < 0.1 else tuple(0 for _ in counts) if kind < 0.3 else counts
    make = make_family_batch if name in FAMILIES else make_batch
    return make(name, counts, seed=int(rng.integers(1 << 30)))


def _run_alone(stack, batch, normalizer: int) -> float:
    """Passes of a micro-batch through all layers; backward only if it reaches a trained one."""
    carry = {}
    for layer in stack.layers:
        carry = layer(carry, batch)
    loss = carry["loss"] / normalizer
    if loss.requires_grad:
        loss.backward()
    return float(loss.detach())


def _compare(pipeline: Pipeline, alone, where: str) -> None:
    """Gradients of this rank's layers, by the norm of the whole model's."""
    every = {
        id(weight): weight.grad
        for layer in alone.layers
        for weight in layer.parameters()
        if weight.grad is not None
    }
    norm = torch.cat([gradient.flatten() for gradient in every.values()] or [torch.ones(1)]).norm()
    for place, layer in pipeline.layers.items():
        for weight, other in zip(layer.parameters(), alone.layers[place].parameters(), strict=True):
            found = reduced_gradient(weight)
            assert weight.requires_grad == other.requires_grad
            if not weight.requires_grad:
                assert found is None, f"{where}, layer {place}: a frozen weight has a gradient"
                continue
            wanted = torch.zeros_like(found) if other.grad is None else other.grad
            off = float((found - wanted).norm() / norm.clamp(min=1e-6))
            assert off <= TOLERANCE, f"{where}, layer {place}: gradients off by {off:.1e}"


@pytest.mark.parametrize("world", WORLDS)
def test_random_families_have_the_gradients_and_losses_of_one_process(tmp_path, world):
    seeds = [seed for seed in range(FIRST, FIRST + DRAWS) if WORLDS[seed // 12 % 3] == world]
    cases = [random_case(seed, world) for seed in seeds]
    if cases:
        on_ranks(world, str(tmp_path), _run_all, cases)
