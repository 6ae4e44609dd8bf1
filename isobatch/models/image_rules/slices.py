"""The whole image, and slices of a larger picture of it (MiniCPM-V)."""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from isobatch.common.errors import ConfigError
from isobatch.models.image_rules.base import (
    MOST_CROPS,
    ImagePlan,
    MarkupPart,
    NativeSizeRule,
    PicturePlan,
    ResizeTo,
    Size,
)

_MERGED = 4
"""ViT patches per side of one LLM token: two mergers of 2 x 2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicesRule(NativeSizeRule):
    """MiniCPM-V: the whole image near `slice_size`^2 pixels, and a grid of up to `max_slices`."""

    vit_patch_size: int
    slice_size: int
    max_slices: int
    merge_size: int = _MERGED
    """Side of the square of ViT patches that becomes one LLM token; 2 in the mode "4x"."""

    def __post_init__(self) -> None:
        NativeSizeRule.__post_init__(self)
        if self.max_slices > MOST_CROPS:
            raise ConfigError(f"max_slices = {self.max_slices}: give at most {MOST_CROPS:,}")

    part_names: ClassVar[tuple[str, ...]] = ("whole", "slice", "row_break")

    def plan(self, width: int, height: int) -> ImagePlan:
        """Parts in the text: `whole`, then `slice`s row by row, with `row_break` between rows."""
        unit = self.vit_patch_size * self.merge_size
        grid = self._grid(width, height)
        whole = ResizeTo(*self._fitted(width, height, grows=grid is None))
        pictures = [PicturePlan((whole,))]
        sizes = [(whole.width, whole.height)]
        columns, rows = grid or (0, 0)
        if grid is not None:
            near = _near(width, columns) / columns, _near(height, rows) / rows
            across, down = self._fitted(*near, grows=True)
            refined = ResizeTo(across * columns, down * rows)
            pictures.append(PicturePlan((refined,), cell=(across, down)))
            sizes += [(across, down)] * (columns * rows)
        tokens = [across // unit * (down // unit) for across, down in sizes]
        return ImagePlan(
            num_patches=len(sizes),
            num_vit_tokens=sum(tokens) * self.merge_size**2,
            num_image_tokens=sum(tokens),
            pictures=tuple(pictures),
            columns=max(columns, 1),
            rows=max(rows, 1),
            parts=_parts(columns, rows, (tokens[0], tokens[-1])),
        )

    def _fitted(self, width: float, height: float, *, grows: bool) -> Size:
        """Whole merged patches, of about `slice_size`^2 pixels if the image has more or grows."""
        if grows or height * width > self.slice_size * self.slice_size:
            aspect = width / height
            height = int(self.slice_size / math.sqrt(aspect))
            width = int(height * aspect)
        unit = self.vit_patch_size * self.merge_size
        return _near(width, unit), _near(height, unit)

    def _grid(self, width: int, height: int) -> Size | None:
        """Columns and rows of the slices, closest in aspect ratio; None for a small image."""
        log_aspect = math.log(width / height)
        wanted = min(math.ceil(width * height / self.slice_size**2), self.max_slices)
        if wanted <= 1:
            return None
        closest, grid = math.inf, (1, 1)
        for count in (wanted - 1, wanted, wanted + 1):
            if count == 1 or count > self.max_slices:
                continue
            for rows in range(1, count + 1):
                if count % rows:
                    continue
                columns = count // rows
                error = abs(log_aspect - math.log(columns / rows))
                if error < closest or (error == closest and rows > grid[1]):
                    closest, grid = error, (columns, rows)
        return grid


def _near(length: float, divisor: int) -> int:
    """The nearest multiple, halves to the even one, at least one."""
    return max(round(length / divisor) * divisor, divisor)


@lru_cache(maxsize=1024)
def _parts(columns: int, rows: int, tokens: tuple[int, int]) -> tuple[MarkupPart, ...]:
    parts = [MarkupPart("whole", tokens[0])]
    for row in range(1, rows + 1):
        parts += [MarkupPart("row_break")] if row > 1 else []
        parts += [MarkupPart("slice", tokens[-1], row, column) for column in range(1, columns + 1)]
    return tuple(parts)
