"""A plan from measurements: layers profiled, the best partitions run.

The steps of OmniBal 4.2 for a model that every rank holds: `profile_step`, then `choose_plan`. A
trial recomputes as few layers as fit if all micro-batches were `request.full`. Trains nothing.

Profiled are a step's micro-batches and parts of its largest. Sizes then differ, so that costs can
be fitted. For packed micro-batches with the fields of `loaders.MicroBatch`; ranks after the first,
which have no pixels, make the same parts.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from isobatch.common.errors import ConfigError
from isobatch.common.types import IntArray
from isobatch.engine.cost_model.analytical import layer_names
from isobatch.engine.cost_model.costs import MEMORY
from isobatch.engine.cost_model.layer_list import layers_of, phases_of
from isobatch.engine.cost_model.loads import Loads
from isobatch.engine.cost_model.profile_table import PHASES, Profile, measured_costs, profiled_costs
from isobatch.engine.planning.bmp import MOST_RUN
from isobatch.engine.planning.partition import even_partition
from isobatch.engine.planning.plan import Plan, PlanRequest
from isobatch.engine.planning.planner import plan_from_profile
from isobatch.engine.planning.recompute import choose_recompute
from isobatch.engine.runtime.batch_loads import batch_loads
from isobatch.engine.runtime.pipeline import Pipeline, PipelineOptions
from isobatch.engine.runtime.profiling.measure_layers import (
    LayerLabels,
    MeasureOptions,
    measure_layers,
)
from isobatch.engine.runtime.profiling.partition_trials import (
    MeasuredPartitions,
    TrialStep,
    measure_partitions,
    temporary_pipelines,
)
from isobatch.engine.runtime.stage_io import Batch, LayerStack, samples_text

REPEATS = 5
"""Runs of every pass; the first warms up."""


def profile_step(
    model: LayerStack,
    request: PlanRequest,
    batches: Sequence[Batch],
    vision_token_ids: Sequence[int],
    options: PipelineOptions,
) -> Profile:
    """Profile of a model's layers, for parts of a step's micro-batches and then for these.

    The same on all ranks of the world, which form one pipeline, cut evenly. The request is for
    `batches` and `model`. ConfigError as `measure_layers` and `first_samples`.
    """
    listed = layers_of(request.model, request.parallel)
    ranks = list(range(dist.get_world_size()))
    schedule = request.make_schedule()
    borders = even_partition(np.ones(len(model.layers), np.int64), schedule.num_stages)
    parts = probe_batches(batches, request.loads, vision_token_ids)
    with temporary_pipelines(model):
        return measure_layers(
            Pipeline(model, borders, [False] * len(model.layers), [ranks], options),
            parts,
            batch_loads(parts, request.model),
            LayerLabels(
                names=layer_names(listed),
                kinds=[layer.kind for layer in listed],
                phases=phases_of(request.model),
            ),
            MeasureOptions(repeats=REPEATS, apart=schedule.splits_backward),
        )


def choose_plan(
    model: LayerStack,
    request: PlanRequest,
    profile: Profile,
    batches: Sequence[Batch],
    options: PipelineOptions,
    most_run: int = MOST_RUN,
) -> tuple[MeasuredPartitions, Plan]:
    """Run the partitions that rank best by `profile`; -> the trials, and the fastest as a plan.

    The same on all ranks. Arguments and profile of `profile_step`; errors of `measure_partitions`.
    """
    places = np.arange(len(profile.loads))[-len(batches) :]
    costs = measured_costs(profile, places)
    full = profiled_costs(profile, request.full.take(np.zeros(len(batches), np.int64)))
    # times of this step; memory of the largest micro-batches, but at least what was measured
    sized = replace(
        costs, **{name: np.maximum(getattr(full, name), getattr(costs, name)) for name in MEMORY}
    )

    def recompute(borders: IntArray) -> NDArray[np.bool_]:
        schedule = request.make_schedule()
        return choose_recompute(sized, borders, schedule, request.memory_bytes)

    step = TrialStep(
        batches=batches,
        normalizer=batches[0].loss_normalizer,
        pipelines=[list(range(dist.get_world_size()))],
        options=options,
        recompute=recompute,
    )
    measured = measure_partitions(model, costs, step, most_run=most_run)
    borders = measured.bmp.best.borders
    return measured, plan_from_profile(request, profile, borders, recompute(borders), places)


SHARES = (0.25, 0.5, 0.75)
"""Shares of a micro-batch's samples in a part."""


def probe_batches(
    batches: Sequence[Batch], loads: Loads, vision_token_ids: Sequence[int]
) -> list[Batch]:
    """Parts of the micro-batches with the most load, then all micro-batches of the step.

    `loads` are those of `batches`. Equal parts are left out. ConfigError as `first_samples`.
    """
    largest = largest_batches(loads)
    parts = []
    seen = {(index, int(batches[index].num_samples)) for index in largest}
    for share, index in itertools.product(SHARES, largest):
        part = index, _num_samples(batches[index], share)
        if part not in seen:
            seen.add(part)
            parts.append(first_samples(batches[index], share, vision_token_ids))
    return [*parts, *batches]


def largest_batches(loads: Loads) -> list[int]:
    """Indices of the micro-batches with the most tokens, or the most squares, of any phase.

    >>> largest_batches(Loads.constant(3, images=2, vit_tokens_per_image=5, seq_len=7))
    [0]
    """
    phases = [getattr(loads, phase) for phase in PHASES]
    columns = [column for phase in phases for column in (phase.tokens, phase.squares)]
    return sorted({int(column.argmax()) for column in columns if column.any()})


def first_samples(batch: Batch, share: float, vision_token_ids: Sequence[int]) -> Batch:
    """The first samples of a micro-batch, at least one if it has any, with their images and videos.

    An image's share of the patches, or of the ViT tokens at native resolution, gives its number of
    tokens of `vision_token_ids`. ConfigError if that does not come out even, or where there is
    audio.
    """
    if getattr(batch, "audio_values", None) is not None:
        raise ConfigError(
            f"a micro-batch with audio ({samples_text(batch)}) cannot be cut: profile without audio"
        )
    count = _num_samples(batch, share)
    borders = batch.cu_seqlens[: count + 1]
    ids = batch.input_ids[: int(borders[-1])]
    sizes = batch.patches_per_image
    if batch.image_grid_thw is not None:
        sizes = batch.image_grid_thw.prod(1)
    # rows that `pixel_values` has, or would have, up to each image's end
    ends = sizes.cumsum(0)
    stand_ins = torch.tensor(vision_token_ids, device=ids.device)
    tokens, all_tokens = (
        int(torch.isin(token_ids, stand_ins).sum()) for token_ids in (ids, batch.input_ids)
    )
    rows = tokens * int(sizes.sum()) // max(1, all_tokens)
    num_images = int((ends <= rows).sum())
    if rows != int(sizes[:num_images].sum()) or bool(all_tokens) != bool(len(sizes)):
        raise ConfigError(
            f"{all_tokens} image tokens (id {' or '.join(map(str, vision_token_ids))}) and"
            f" {len(sizes)} images do not belong together in a micro-batch ({samples_text(batch)}):"
            " give the build's image_token_id and video_token_id"
        )
    weights, seconds = batch.loss_weights, batch.video_seconds
    return replace(
        batch,
        sample_ids=batch.sample_ids[:count],
        input_ids=ids,
        labels=batch.labels[: len(ids)],
        position_ids=batch.position_ids[: len(ids)],
        cu_seqlens=borders,
        pixel_values=batch.pixel_values[:rows],  # empty if images are not decoded
        patches_per_image=batch.patches_per_image[:num_images],
        image_sizes=batch.image_sizes[:num_images],
        image_grid_thw=None if batch.image_grid_thw is None else batch.image_grid_thw[:num_images],
        video_seconds=None if seconds is None else seconds[:num_images],
        images=batch.images[:num_images],
        loss_weights=None if weights is None else weights[: len(ids)],
    )


def _num_samples(batch: Batch, share: float) -> int:
    count = int(batch.num_samples)
    return min(count, max(1, round(share * count)))
