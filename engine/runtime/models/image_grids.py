"""Places of the ViT and LLM tokens of images in Qwen-VL, from the grids of images.

Pure. `grids` is `image_grid_thw`: int64, (images, 3), frames, rows and columns of ViT tokens, of
which `merge` x `merge` become one LLM token and are adjacent (arXiv 2409.12191, section 2.1).
"""

import torch
from torch import Tensor

from isobatch.tensors.rotary_positions import members


def patch_positions(grids: Tensor, merge: int) -> Tensor:
    """Row and column of each ViT token in its image: int64, (ViT tokens, 2); `grids` (images, 3).

    Tokens that are merged into one LLM token are adjacent.

    >>> patch_positions(torch.tensor([[1, 2, 4]]), 2).tolist()
    [[0, 0], [0, 1], [1, 0], [1, 1], [0, 2], [0, 3], [1, 2], [1, 3]]
    """
    image, index = members(grids.prod(1))
    rows, columns = grids[image, 1], grids[image, 2]
    # index of the merged token in its frame, and of the ViT token within it
    block, inner = (index % (rows * columns)) // merge**2, index % merge**2
    across = columns // merge
    row = block // across * merge + inner // merge
    column = block % across * merge + inner % merge
    return torch.stack([row, column], dim=1)


def frame_borders(grids: Tensor) -> Tensor:
    """Borders between the ViT tokens of all images' frames: int32, (frames + 1,).

    >>> frame_borders(torch.tensor([[1, 2, 4], [2, 2, 2]])).tolist()
    [0, 8, 12, 16]
    """
    lengths = torch.repeat_interleave(grids[:, 1] * grids[:, 2], grids[:, 0])
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(torch.int32)


def window_order(grids: Tensor, merge: int, side: int) -> tuple[Tensor, Tensor]:
    """Order of ViT tokens in which windows are adjacent, and the windows' borders (Qwen2.5-VL).

    `side`: of a window, in LLM tokens; those at an image's right and lower edge are smaller. The
    order is int64, (ViT tokens,): numbers of the tokens; borders are int32, (windows + 1,).

    >>> order, borders = window_order(torch.tensor([[1, 4, 4]]), 2, 1)
    >>> borders.tolist()
    [0, 4, 8, 12, 16]
    """
    image, index = members(grids.prod(1) // merge**2)
    rows, columns = grids[image, 1] // merge, grids[image, 2] // merge
    frame, within = index // (rows * columns), index % (rows * columns)
    row, column = within // columns, within % columns
    # number of each LLM token's window in its frame
    window = row // side * ((columns + side - 1) // side) + column // side
    per_side = (grids[:, 1:] // merge + side - 1) // side
    windows = per_side.prod(1)  # of a frame of each image
    before = (grids[:, 0] * windows).cumsum(0) - grids[:, 0] * windows
    window = before[image] + frame * windows[image] + window
    merged = window.argsort(stable=True)
    order = (merged[:, None] * merge**2 + torch.arange(merge**2, device=grids.device)).flatten()
    lengths = window.bincount() * merge**2
    return order, torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(torch.int32)


def interpolated_places(grids: Tensor, merge: int, side: int) -> tuple[Tensor, Tensor]:
    """Four of side x side learnt places for each ViT token, and their weights (Qwen3-VL).

    The learnt square covers each image, corner on corner. int64 and float32, (ViT tokens, 4).

    >>> index, weights = interpolated_places(torch.tensor([[1, 2, 2]]), 2, 3)
    >>> [(each[weight > 0]).tolist() for each, weight in zip(index, weights)]
    [[0], [2], [6], [8]]
    """
    image, _ = members(grids.prod(1))
    sizes = grids[image, 1:]
    source = patch_positions(grids, merge).float() * (side - 1) / (sizes - 1).clamp(min=1)
    low = source.floor()
    taps = low.long()[..., None] + torch.arange(2, device=grids.device)
    weights = 1 - (source - low)[..., None].sub(torch.arange(2, device=grids.device)).abs()
    (rows, columns), (down, across) = taps.clamp(max=side - 1).unbind(1), weights.unbind(1)
    index = rows[:, :, None] * side + columns[:, None, :]
    return index.flatten(1), (down[:, :, None] * across[:, None, :]).flatten(1)
