"""What OmniBal's tables of whole training steps are simulated with: data, and models cut in some
way.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from isobatch.balance.baseline_samplers import as_groups, random_batches
from isobatch.balance.grouping.best_fit import group_best_fit
from isobatch.balance.metrics import dist_ratio, longest, pad_ratio
from isobatch.balance.order.step_order import epoch_steps
from isobatch.common.types import Counts, Groups, IntArray, Limits
from isobatch.engine.cost_model.analytical import layer_costs
from isobatch.engine.cost_model.costs import Costs
from isobatch.engine.cost_model.layer_list import layers_of
from isobatch.engine.cost_model.loads import Loads, PhaseLoads
from isobatch.engine.cost_model.parallel import Training, reduction_ns
from isobatch.engine.planning.search.partition_search import search_partition
from isobatch.engine.simulator.evaluate import evaluate
from isobatch.engine.simulator.schedule import make_schedule
from isobatch.models.clusters import Cluster
from isobatch.models.presets import load_model
from papers.omnibal_models import IMAGES, SEQ_LEN, VIT_TOKENS, Pair

BATCH = 4
"""Samples of a micro-batch of the baseline (Table 3)."""
STEPS = 12
"""That are simulated, of each kind."""
MICRO_BATCHES = 16
"""Per step and replica; the paper does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """Micro-batches in the order in which steps take them: step by step, replica by replica."""

    loads: Loads
    dp: int
    micro_batches: int
    """Per step and replica."""
    samples: int
    """In all of them."""
    pad_ratio: float
    dist_vit: float
    dist_llm: float


def random_data(counts: Counts, dp: int, micro_batches: int = MICRO_BATCHES) -> Data:
    """BATCH random samples per micro-batch, padded to the longest; tiles are not padded."""
    groups = as_groups(random_batches(counts.seq_len, dp * micro_batches, BATCH, seed=1)[:STEPS])
    length, sizes = longest(groups, counts.seq_len), groups.sizes
    llm = PhaseLoads(tokens=length * sizes, squares=length**2 * sizes, items=sizes)
    return _data(groups, counts, llm, dp, micro_batches, pad_ratio(groups, counts.seq_len))


def balanced_data(
    counts: Counts,
    dp: int,
    micro_batches: int = MICRO_BATCHES,
    seq_len: int = SEQ_LEN,
    tiles: int = IMAGES,
) -> Data:
    """Groups of at most so many tokens and tiles, as a build holds them, in the loaders' order."""
    limits = Limits(
        max_seq_len=seq_len, max_vision=tiles, min_seq_len=seq_len - 128, min_vision=tiles
    )
    vision, tokens = counts.num_image_patches, counts.seq_len
    groups = group_best_fit(vision, tokens, limits, seed=0)
    num_steps = min(STEPS, len(groups) // (dp * micro_batches))
    loads = groups.sum(vision), groups.sum(tokens)
    steps = epoch_steps(loads, (dp, micro_batches), max_steps=num_steps)
    groups = groups.take(steps.ravel())
    llm = PhaseLoads(tokens=groups.sum(tokens), squares=groups.sum(tokens**2), items=groups.sizes)
    return _data(groups, counts, llm, dp, micro_batches, 0.0)


def _data(
    groups: Groups, counts: Counts, llm: PhaseLoads, dp: int, micro_batches: int, padding: float
) -> Data:
    tiles, vit = groups.sum(counts.num_image_patches), groups.sum(counts.num_vit_tokens)
    per_tile = int(counts.num_vit_tokens.max()) // max(1, int(counts.num_image_patches.max()))
    vision = PhaseLoads(tokens=vit, squares=vit * per_tile, items=tiles)
    # micro-batch m of all replicas, which run it at about the same time
    turns = np.arange(len(groups)).reshape(-1, dp, micro_batches).swapaxes(1, 2).ravel()
    return Data(
        loads=Loads(vision=vision, audio=PhaseLoads.nothing(len(groups)), llm=llm),
        dp=dp,
        micro_batches=micro_batches,
        samples=len(groups.samples),
        pad_ratio=padding,
        dist_vit=dist_ratio(vit[turns], dp),
        dist_llm=dist_ratio(llm.tokens[turns], dp),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """A model on GPUs, cut and recomputed in some way."""

    pair: Pair
    cluster: Cluster
    training: Training
    borders: IntArray
    recompute: NDArray[np.bool_]

    def sample_ms(self, data: Data) -> float:
        """Mean time per sample: every step lasts as long as its slowest replica, and as the
        gradients' reduction.
        """
        parallel = self.pair.parallel
        costs = layer_costs(
            load_model(self.pair.preset), self.cluster, parallel, data.loads, self.training
        )
        schedule = make_schedule("1f1b", parallel.pp, data.micro_batches)
        own = np.arange(data.micro_batches)
        # (steps, dp)
        firsts = np.arange(0, len(data.loads), data.micro_batches).reshape(-1, data.dp)
        times = [
            [
                evaluate(costs.take(first + own), self.borders, self.recompute, schedule).step_ns
                for first in step
            ]
            for step in firsts.tolist()
        ]
        trained = [
            self.training.trains(layer.part)
            for layer in layers_of(load_model(self.pair.preset), parallel)
        ]
        params = np.add.reduceat(costs.param_counts * trained, self.borders[:-1]) // parallel.tp
        reduction = int(reduction_ns(params, self.cluster, parallel, self.training).max())
        return float(sum(max(step) + reduction for step in times)) / data.samples / 1e6


def equal_costs(pair: Pair, cluster: Cluster, training: Training) -> Costs:
    """Costs of equal micro-batches at the caps: what a partition is planned for."""
    loads = Loads.constant(
        MICRO_BATCHES,
        images=IMAGES,
        vit_tokens_per_image=VIT_TOKENS,
        seq_len=SEQ_LEN,
        samples=BATCH,
    )
    return layer_costs(load_model(pair.preset), cluster, pair.parallel, loads, training)


def planned_for(data: Data, pair: Pair, cluster: Cluster, training: Training) -> IntArray:
    """The searched partition for a step of uneven data, nothing recomputed and memory without
    end.
    """
    loads = data.loads.take(np.arange(data.micro_batches))
    costs = layer_costs(load_model(pair.preset), cluster, pair.parallel, loads, training)
    return search_partition(
        costs, make_schedule("1f1b", pair.pp, data.micro_batches), 1 << 50
    ).borders


def encoder_first(costs: Costs, num_stages: int) -> IntArray:
    """The encoder as the first stage, the language model evenly behind: what is assumed of the
    paper's start.
    """
    first = costs.kinds.index("token_embedding")
    return np.array(
        [0, *np.linspace(first, costs.num_layers, num_stages).round().astype(int).tolist()]
    )


def trainers(pair: Pair, cluster: Cluster, training: Training) -> tuple[Trainer, Trainer, Trainer]:
    """Before; with the searched partition, everything recomputed; and with what must be
    recomputed.
    """
    costs = equal_costs(pair, cluster, training)
    found = search_partition(
        costs, make_schedule("1f1b", pair.pp, MICRO_BATCHES), cluster.usable_memory_bytes
    )
    everything = np.ones(costs.num_layers, np.bool_)
    kinds = [
        (encoder_first(costs, pair.pp), everything),
        (found.borders, everything),
        (found.borders, found.recompute),
    ]
    return tuple(  # type: ignore[return-value]
        Trainer(pair=pair, cluster=cluster, training=training, borders=borders, recompute=recompute)
        for borders, recompute in kinds
    )
