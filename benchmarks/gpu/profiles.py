"""Profiles of published shapes measured on one GPU, as of whole models: `measure_shapes`.

A model of 26 B does not fit, but one layer of each kind does, and layers of a kind cost the same.
One tensor-parallel GPU's part of a layer is measured as such; what its group sends over NVLink, and
stages to each other, cannot be measured on one GPU and is the analytical model's. Sequences are not
shared among GPUs (no sequence parallelism).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from gpu.batches import Sequences, make_batch
from gpu.device import Bench
from gpu.layers import make_model
from gpu.presets import gpu_part, one_of_each, rule_of, shapes_of
from isobatch.common.types import IntArray
from isobatch.engine.cost_model.analytical import layer_costs
from isobatch.engine.cost_model.costs import Costs
from isobatch.engine.cost_model.layer_list import phases_of
from isobatch.engine.cost_model.loads import Loads, PhaseLoads
from isobatch.engine.cost_model.parallel import Parallelism, Training
from isobatch.engine.cost_model.profile_table import Profile
from isobatch.engine.cost_model.training_mode import TrainingMode
from isobatch.engine.runtime.pipeline import Pipeline, PipelineOptions
from isobatch.engine.runtime.profiling.measure_layers import (
    ADAM_MOMENTS,
    LayerLabels,
    MeasureOptions,
    measure_layers,
)
from isobatch.models.clusters import Cluster
from isobatch.models.presets import ModelPreset

TRAINING = Training(mode=TrainingMode(gradients="bf16"), kernels="fused")
"""bf16 weights and gradients, Adam in float32, as `gpu.optimizer` has it."""
REPEATS = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A micro-batch to measure layers on."""

    tiles: int
    tokens: tuple[int, ...]
    """Of each packed sample."""


FULL = Size(tiles=9, tokens=(820, 819, 819, 819, 819))
"""OmniBal's Q_v and Q_t: 9 tiles of 1,025 tokens, 4,096 tokens; 5 samples."""
SIZES = (
    Size(tiles=1, tokens=(512,)),
    Size(tiles=2, tokens=(512, 512)),
    Size(tiles=4, tokens=(1024, 1024)),
    Size(tiles=6, tokens=(1024, 1024, 1024)),
    FULL,
    Size(tiles=9, tokens=(4096,)),
    Size(tiles=11, tokens=(1024,) * 5),
)
"""From small to large; one sample's attention besides several samples', so that a fit tells them
apart.
"""


def loads_of(sizes: Sequence[Size], preset: ModelPreset) -> Loads:
    """What micro-batches bring to each phase."""
    vit_tokens = rule_of(preset).vit_tokens_per_patch
    tiles = np.array([size.tiles for size in sizes], np.int64)
    lengths = [np.array(size.tokens, np.int64) for size in sizes]
    return Loads(
        vision=PhaseLoads(tokens=tiles * vit_tokens, squares=tiles * vit_tokens**2, items=tiles),
        audio=PhaseLoads.nothing(len(sizes)),
        llm=PhaseLoads(
            tokens=np.array([own.sum() for own in lengths]),
            squares=np.array([np.square(own).sum() for own in lengths]),
            items=np.array([len(own) for own in lengths]),
        ),
    )


def measure_shapes(
    preset: ModelPreset, parallel: Parallelism, bench: Bench, sizes: Sequence[Size] = SIZES
) -> Profile:
    """The profile of a whole model, each kind of its layers measured as one of `parallel.tp` GPUs
    has it.

    Without sequence parallelism, whatever `parallel` says. Needs `torch.distributed` with one rank.
    """
    bench.release()
    parallel = replace(parallel, sequence_parallel=False)
    part, loads = one_of_each(gpu_part(preset, parallel.tp)), loads_of(sizes, preset)
    model = make_model(part, bench.device, bench.dtype)
    modelled = layer_costs(part, bench.cluster, Parallelism(), loads, TRAINING)
    count = modelled.num_layers
    pipeline = Pipeline(
        model, [0, count], [False] * count, [[0]], PipelineOptions(device=bench.device)
    )
    tile_tokens = rule_of(preset).llm_tokens_per_patch
    batches = [
        make_batch(Sequences.of_sizes(size.tiles, size.tokens, tile_tokens), part, bench.dtype).to(
            bench.device
        )
        for size in sizes
    ]
    found = measure_layers(
        pipeline,
        batches,
        loads,
        LayerLabels(names=modelled.names, kinds=modelled.kinds, phases=phases_of(preset)),
        MeasureOptions(repeats=3 if bench.tiny else REPEATS),
    )
    return whole_model(
        found,
        layer_costs(preset, bench.cluster, parallel, loads, TRAINING),
        sends(preset, parallel, bench, loads),
    )


def modelled_costs(preset: ModelPreset, parallel: Parallelism, bench: Bench, loads: Loads) -> Costs:
    """The analytical model's, for the same way to share layers among GPUs."""
    return layer_costs(
        preset, bench.cluster, replace(parallel, sequence_parallel=False), loads, TRAINING
    )


def sends(
    preset: ModelPreset, parallel: Parallelism, bench: Bench, loads: Loads
) -> tuple[IntArray, IntArray]:
    """What layers send inside a tensor-parallel group in forward and backward passes, ns, (layers,
    micro_batches).
    """
    slow, fast = (
        layer_costs(preset, cluster, parallel, loads, TRAINING)
        for cluster in (bench.cluster, _no_nvlink(bench.cluster))
    )
    return slow.forward_ns - fast.forward_ns, slow.input_grad_ns - fast.input_grad_ns


def _no_nvlink(cluster: Cluster) -> Cluster:
    """A cluster whose GPUs' groups send in no time."""
    return replace(cluster, nvlink_bytes_per_s=1e30, nvlink_latency_us=1e-9)


def whole_model(found: Profile, modelled: Costs, on_top: tuple[IntArray, IntArray]) -> Profile:
    """One layer of each kind as all of a model's layers; `on_top` is added to forward and backward
    times.

    Parameters are those of whole layers; state that of one GPU's part, with Adam in float32.
    """
    kinds = found.costs.kinds
    rows = np.array([modelled.kinds.index(kind) for kind in kinds])
    forward, backward = (own[rows] for own in on_top)
    own = found.costs
    costs = replace(
        own,
        forward_ns=own.forward_ns + forward,
        input_grad_ns=own.input_grad_ns + backward,
        recompute_ns=own.recompute_ns + forward,
        send_ns=modelled.send_ns[rows],
        state_bytes=state_bytes(own),
        param_counts=modelled.param_counts[rows],
    )
    layers = tuple(kinds.index(kind) for kind in modelled.kinds)
    return replace(found, costs=costs, layers=layers, names=modelled.names)


def state_bytes(measured: Costs) -> IntArray:
    """Weights, gradients and what `gpu.optimizer` keeps, (layers,); in a profile, moments are as
    large as weights.
    """
    weights = measured.state_bytes // (2 + ADAM_MOMENTS)
    return np.asarray(2 * weights + TRAINING.mode.optimizer_bytes * measured.param_counts)


def with_masters(found: Profile) -> Profile:
    """A profile as measured, with the state of a training by `gpu.optimizer`."""
    return replace(found, costs=replace(found.costs, state_bytes=state_bytes(found.costs)))


def tiny_sizes(preset: ModelPreset) -> tuple[Size, ...]:
    """As many tiles, and a few tokens, for shapes of `presets.tiny_of`."""
    tile_tokens = rule_of(preset).llm_tokens_per_patch
    return tuple(
        Size(
            tiles=size.tiles,
            tokens=tuple(length // 256 * tile_tokens or 1 for length in size.tokens),
        )
        for size in SIZES
    )


def layer_flops(preset: ModelPreset, loads: Loads) -> dict[str, IntArray]:
    """FLOPs of a forward pass of a layer of each stack, by kind, float64, (micro_batches,); causal
    attention half.
    """
    made = {}
    for kind, shape, phase in zip(
        ("vision_layer", "llm_layer"), shapes_of(preset), ("vision", "llm"), strict=True
    ):
        own, causal = getattr(loads, phase), phase == "llm"
        squares = (2.0 if causal else 4.0) * shape.attention_size * own.squares
        made[kind] = 2.0 * shape.layer_weights * own.tokens + squares
    return made
