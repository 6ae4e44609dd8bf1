"""Micro-batches to profile with: a step's, and parts of its largest.

Sizes then differ, so that costs can be fitted. For packed micro-batches with the fields of
`loaders.MicroBatch`; ranks after the first, which have no pixels, make the same parts.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import torch

from isobatch.common.errors import ConfigError
from isobatch.engine.cost_model.loads import Loads
from isobatch.engine.cost_model.profile_table import PHASES
from isobatch.engine.runtime.stage_io import Batch, samples_text

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
