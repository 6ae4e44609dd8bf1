"""What vision rules share: the plan of an image, and why one is refused.

A rule is a frozen dataclass that reads from TOML. Its module holds, side by side, how an image's
size becomes counts and how its pixels are cut.
"""

from dataclasses import dataclass

from balance.config import check_positive
from balance.errors import ConfigError, MediaRejected


class ImageRejected(MediaRejected):
    """The model's processor would refuse an image of this size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePlan:
    """What one image becomes: its counts, and how to cut it."""

    num_patches: int
    """Crops that go through the vision encoder as batch items; 1 at native resolution."""
    num_vit_tokens: int
    num_image_tokens: int
    """Positions of the LLM sequence that vision features fill, newlines included, wrappers not."""
    resized_width: int
    resized_height: int
    """Size in pixels that the image is resized to, before padding (anyres) or cropping (fixed)."""
    columns: int
    rows: int
    """The grid: tiles, or at native resolution ViT patches (rows * columns = num_vit_tokens)."""
    whole_image: bool = False
    """Another patch has the whole image: the last (tiles: thumbnail) or the first (anyres)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PixelRule:
    """How pixels become a tensor, for every vision rule; every number of a rule is positive."""

    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    def __post_init__(self) -> None:
        check_positive(self)
        if min(self.std) <= 0:
            raise ConfigError(f"std = {list(self.std)}: must be greater than 0")

    def plan(self, width: int, height: int) -> ImagePlan:
        """The plan of an upright image; both sides have pixels. ImageRejected if it is refused."""
        raise NotImplementedError
