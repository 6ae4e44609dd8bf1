"""Micro-batches to profile with: those of a step, and before them parts of its largest ones, so
that sizes differ.

For packed micro-batches with the fields of `loaders.MicroBatch`, images decoded or not: ranks
behind the first have no pixels, and come to the same parts.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from balance.errors import ConfigError
from engine.cost_model.loads import Loads
from engine.cost_model.profile_table import PHASES
from engine.runtime.stage_io import Batch, ids_text

SHARES = (0.25, 0.5, 0.75)
"""Of a micro-batch's samples."""


def parts_and_all(
    batches: Sequence[Batch], loads: Loads, image_token_id: int, shares: Sequence[float] = SHARES
) -> list[Batch]:
    """Parts of the micro-batches that have most of anything, then all: the step's own are the last
    ones.

    `loads` are those of `batches`. A part that would be another one or the whole once more is left
    out. ConfigError as `first_samples`.
    """
    places, parts = largest(loads), []
    made = {(place, int(batches[place].num_samples)) for place in places}
    for share, place in itertools.product(shares, places):
        part = place, _num_samples(batches[place], share)
        if part not in made:
            made.add(part)
            parts.append(first_samples(batches[place], share, image_token_id))
    return [*parts, *batches]


def largest(loads: Loads) -> list[int]:
    """Which micro-batches have most tokens, or most squares, of any phase.

    >>> largest(Loads.constant(3, images=2, vit_tokens_per_image=5, seq_len=7))
    [0]
    """
    phases = [getattr(loads, phase) for phase in PHASES]
    return sorted(
        {
            int(each.argmax())
            for phase in phases
            for each in (phase.tokens, phase.squares)
            if each.any()
        }
    )


def first_samples(batch: Batch, share: float, image_token_id: int) -> Batch:
    """The first samples of a micro-batch, at least one if it has any, with their images.

    An image has as many image tokens as its share of the patches, or of the ViT tokens at native
    resolution, says. ConfigError if that does not come out even, or for a micro-batch with sound.
    """
    if getattr(batch, "audio_values", None) is not None:
        raise ConfigError(
            f"a micro-batch with sound ({ids_text(batch)}) cannot be cut: only texts and images can"
        )
    count = _num_samples(batch, share)
    borders = batch.cu_seqlens[: count + 1]
    ids = batch.input_ids[: int(borders[-1])]
    sizes = (
        batch.patches_per_image if batch.image_grid_thw is None else batch.image_grid_thw.prod(1)
    )
    # rows that `pixel_values` has, or would have, behind each image
    ends = sizes.cumsum(0)
    tokens, of_all = (int((own == image_token_id).sum()) for own in (ids, batch.input_ids))
    rows = tokens * int(sizes.sum()) // max(1, of_all)
    num_images = int((ends <= rows).sum())
    if rows != int(sizes[:num_images].sum()) or bool(of_all) != bool(len(sizes)):
        raise ConfigError(
            f"{of_all} image tokens (id {image_token_id}) and {len(sizes)} images do not belong together in a "
            f"micro-batch ({ids_text(batch)}): give the image_token_id of the build"
        )
    return replace(
        batch,
        sample_ids=batch.sample_ids[:count],
        input_ids=ids,
        labels=batch.labels[: len(ids)],
        position_ids=batch.position_ids[: len(ids)],
        cu_seqlens=borders,
        pixel_values=batch.pixel_values[:rows],  # where they are not decoded, there are none
        patches_per_image=batch.patches_per_image[:num_images],
        image_sizes=batch.image_sizes[:num_images],
        image_grid_thw=None if batch.image_grid_thw is None else batch.image_grid_thw[:num_images],
        images=batch.images[:num_images],
    )


def _num_samples(batch: Batch, share: float) -> int:
    count = int(batch.num_samples)
    return min(count, max(1, round(share * count)))
