"""Rotary positions of Qwen-VL and its like, and runs of image tokens. Pure.

`grids` is `image_grid_thw`: int64, (images, 3), frames, rows and columns of ViT tokens, of which
`merge` x `merge` become one LLM token (arXiv 2409.12191, section 2.1).
"""

from typing import Any

import torch
from torch import Tensor


def rotary_positions(
    is_image: Tensor,
    cu_seqlens: Tensor,
    grids: Tensor | None,
    merge: int,
    intervals: Tensor | None = None,
) -> Tensor:
    """Qwen2-VL's positions (frame, row, column), int64 (3, tokens), from 0 in each sample.

    Text counts on in all three. A token of an image or video (`is_image`) has the position of its
    first one plus its own frame, row and column; text after it continues past the larger side.
    `intervals`: float32, (images,), positions from one frame to the next; None: 1.

    >>> ids, grids = torch.tensor([7, 5, 5, 5, 5, 8, 9, 9]), torch.tensor([[1, 4, 4]])
    >>> rotary_positions(ids == 5, torch.tensor([0, 6, 8]), grids, 2).tolist()
    [[0, 1, 1, 1, 1, 3, 0, 1], [0, 1, 1, 2, 2, 3, 0, 1], [0, 1, 2, 1, 2, 3, 0, 1]]
    """
    # increment to the next token's position, and the token's place within its image
    steps = torch.ones_like(is_image, dtype=torch.int64)
    within = steps.new_zeros(3, len(steps))
    if grids is not None and len(grids):
        frames, rows, columns = (grids // grids.new_tensor([1, merge, merge])).unbind(1)
        image, index = members(frames * rows * columns)
        rows, columns = rows[image], columns[image]
        is_last = index == frames[image] * rows * columns - 1
        steps[is_image] = torch.where(is_last, torch.maximum(rows, columns), 0)
        frame = index // (rows * columns)
        if intervals is not None:
            # in float32, and cut off, as the reference does
            frame = (frame * intervals[image]).long()
        within[:, is_image] = torch.stack([frame, index // columns % rows, index % columns])
    begins = steps.cumsum(0) - steps
    sample, _ = members(cu_seqlens.long().diff())
    return begins - begins[cu_seqlens.long()[sample]] + within


def video_positions(is_vision: Tensor, batch: Any, vision: Any, *, are_stamped: bool) -> Tensor:
    """The same for a micro-batch (`loaders.MicroBatch`) with images and videos.

    `vision`: the encoder's config in transformers. `are_stamped`: the text has the times of frames,
    each of which is a run of tokens by itself (Qwen3-VL, GLM-V). Else they are as many positions
    apart as the config's `tokens_per_second` says (Qwen2.5-VL).
    """
    grids, seconds = batch.image_grid_thw, getattr(batch, "video_seconds", None)
    scale = getattr(vision, "tokens_per_second", None)
    intervals = None
    if seconds is not None and are_stamped:
        grids = grids.repeat_interleave(grids[:, 0], dim=0).clone()
        grids[:, 0] = 1
    elif seconds is not None and scale is not None:
        intervals = (seconds * scale).where(seconds > 0, 1.0).float()
    merge = int(vision.spatial_merge_size)
    return rotary_positions(is_vision, batch.cu_seqlens, grids, merge, intervals)


def image_runs(is_image: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Number of each token's run of image tokens, from 1; 0 for text. A run ends with its sample.

    >>> image_runs(torch.tensor([True, True, False, True, True]), torch.tensor([0, 4, 5])).tolist()
    [1, 1, 0, 2, 3]
    """
    begins = is_image.clone()
    begins[1:] &= ~is_image[:-1]
    starts = cu_seqlens[:-1].long()
    begins[starts] = is_image[starts]
    runs: Tensor = begins.cumsum(0) * is_image
    return runs


def members(counts: Tensor) -> tuple[Tensor, Tensor]:
    """Group and index within it, for every member of groups with these counts."""
    group = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
    begins = counts.cumsum(0) - counts
    return group, torch.arange(len(group), device=counts.device) - begins[group]
