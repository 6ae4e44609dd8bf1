"""What vision rules share: the plan of an image, and how its pixels are cut.

A rule is a frozen dataclass that reads from TOML. Its module holds, side by side, how an image's
size becomes counts and how its pixels are cut. The cut is data (`PicturePlan`), which the loader
executes for any rule. Two kinds: encoders of crops of one size, and of ViT patches of any number.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

from isobatch.common.config import check_positive
from isobatch.common.errors import ConfigError, MediaRejected

Resample = Literal["bicubic", "bilinear", "lanczos"]
"""Filter of a resize."""
Size = tuple[int, int]
"""Width and height in pixels."""
BLACK = (0, 0, 0)


MOST_VALUE = 2**31 - 1
"""Largest number of a rule: counts are int32 in every artefact."""
MOST_CROPS = 4096
"""Crops of an image: those of a grid are listed, and no encoder takes so many."""


class ImageRejected(MediaRejected):
    """The model's processor would refuse an image of this size."""


class ResizeTo(NamedTuple):
    """A step of a cut: the whole picture in another size."""

    width: int
    height: int


class PlaceOn(NamedTuple):
    """A step of a cut: the picture on a canvas of one colour; what hangs over is cropped."""

    width: int
    height: int
    """Size of the canvas."""
    x: int = 0
    y: int = 0
    """Place of the picture's first pixel on the canvas; negative to crop."""
    fill: tuple[int, int, int] = BLACK


class PicturePlan(NamedTuple):
    """A picture made of the image, which is cut into patches row by row."""

    steps: tuple[ResizeTo | PlaceOn, ...]
    """Steps from the image; pictures with the same first steps share them."""
    cell: Size | None = None
    """The picture is cut into cells of this size first, and each of them into patches."""

    @property
    def size(self) -> Size:
        """Width and height before it is cut."""
        return self.steps[-1].width, self.steps[-1].height


class MarkupPart(NamedTuple):
    """A part of an image in the text: its name in the markup, and how often its token stands."""

    name: str
    tokens: int = 0
    row: int = 0
    column: int = 0
    """Row and column of a tile, from 1."""
    label: str = ""
    """What stands for {label} in the part's text: a frame's time, its number, or all of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePlan:
    """What one image becomes: its counts, how to cut it, and its parts in the text."""

    num_patches: int
    """Pictures that the vision encoder looks at by themselves: crops, at native resolution 1."""
    num_vit_tokens: int
    num_image_tokens: int
    """Positions of the LLM sequence that vision features fill, newlines included, wrappers not."""
    pictures: tuple[PicturePlan, ...]
    """What patches are cut from, in the order of the rows of pixels."""
    columns: int
    rows: int
    """The grid: tiles or slices, else ViT patches (rows * columns = num_vit_tokens)."""
    parts: tuple[MarkupPart, ...] = ()
    """The image in the text, for markup that depends on its size; else empty."""

    @property
    def runs(self) -> tuple[int, ...]:
        """Image tokens that stand next to each other in the text, in order."""
        return tuple(part.tokens for part in self.parts if part.tokens) or (self.num_image_tokens,)

    @property
    def main(self) -> PicturePlan:
        """The largest picture, of such the last: the one with the image's details."""
        if len(self.pictures) == 1:
            return self.pictures[0]
        return max(reversed(self.pictures), key=lambda picture: picture.size[0] * picture.size[1])

    @property
    def resized_width(self) -> int:
        """Pixels that the image is first resized to, before padding or cropping."""
        return self.main.steps[0].width

    @property
    def resized_height(self) -> int:
        """Pixels that the image is first resized to, before padding or cropping."""
        return self.main.steps[0].height


@dataclass(frozen=True, slots=True, kw_only=True)
class PixelRule:
    """How pixels become a tensor, for every vision rule; every number of a rule is positive."""

    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    resample: Resample = "bicubic"
    convert_rgb: bool = True
    """transformers' `do_convert_rgb`: a file's one transparent colour is white. False (Gemma 3,
    PaliGemma): it is seen."""

    part_names: ClassVar[tuple[str, ...]] = ()
    """Names of `ImagePlan.parts`, which the model's markup has texts for."""

    def __post_init__(self) -> None:
        check_positive(self, max_integer=MOST_VALUE)
        if min(self.std) <= 0:
            raise ConfigError(f"std = {list(self.std)}: must be greater than 0")

    def plan(self, width: int, height: int) -> ImagePlan:
        """The plan of an upright image; both sides have pixels. ImageRejected if it is refused."""
        raise NotImplementedError

    def plan_one_of(self, images: int, width: int, height: int) -> ImagePlan:
        """The plan of one of so many images of a sample."""
        return self.plan(width, height)

    @property
    def looks_at_sample(self) -> bool:
        """Whether the plan of an image depends on how many images its sample has."""
        return False

    @property
    def patch_side(self) -> int:
        """Side in pixels of what a row of pixels holds: an image patch, or a ViT patch."""
        raise NotImplementedError


class CropsRule(PixelRule):
    """The encoder takes crops of one size as batch items; the vision cap counts these."""

    __slots__ = ()
    image_size: int
    vit_tokens_per_patch: int

    @property
    def patch_side(self) -> int:
        """Side of a crop."""
        return self.image_size


class NativeSizeRule(PixelRule):
    """The encoder takes any number of ViT patches per image; the vision cap counts these."""

    __slots__ = ()
    vit_patch_size: int

    @property
    def patch_side(self) -> int:
        """Side of a ViT patch."""
        return self.vit_patch_size

    @property
    def block_size(self) -> int:
        """Side, in ViT patches, of the blocks that are neighbours in the rows of pixels."""
        return 1

    @property
    def num_frames(self) -> int:
        """Frames that an image is repeated for."""
        return 1

    def grids(self, plan: ImagePlan) -> list[tuple[int, int, int]]:
        """(frames, rows, columns) of ViT patches, for each cell of the plan's pictures."""
        grids = []
        for picture in plan.pictures:
            width, height = picture.size
            across, down = picture.cell or picture.size
            grid = 1, down // self.vit_patch_size, across // self.vit_patch_size
            grids += [grid] * (width // across * (height // down))
        return grids


def native_plan(
    rule: NativeSizeRule, picture: PicturePlan, *, tokens: int, parts: tuple[MarkupPart, ...] = ()
) -> ImagePlan:
    """The plan of an image that is one picture of ViT patches."""
    width, height = picture.size
    columns, rows = width // rule.vit_patch_size, height // rule.vit_patch_size
    return ImagePlan(
        num_patches=1,
        num_vit_tokens=columns * rows,
        num_image_tokens=tokens,
        pictures=(picture,),
        columns=columns,
        rows=rows,
        parts=parts,
    )
