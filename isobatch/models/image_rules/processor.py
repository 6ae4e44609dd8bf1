"""Images as a processor of transformers makes them: families without a rule."""

import math
from dataclasses import dataclass
from typing import ClassVar

from isobatch.common.config import check_positive
from isobatch.common.errors import ConfigError, first_line
from isobatch.models.image_rules.base import ImagePlan, ImageRejected, MarkupPart, NativeSizeRule


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorRule(NativeSizeRule):
    """Counts, text and pixels are the processor's (`models.hf_processor`).

    What its encoder costs is not known: an image counts as many ViT tokens as LLM tokens.
    """

    part_names: ClassVar[tuple[str, ...]] = ("run",)

    mean: tuple[float, float, float] = (0.0, 0.0, 0.0)
    std: tuple[float, float, float] = (1.0, 1.0, 1.0)
    description: str
    """The processor, in the words of `describe_processor`."""
    values_per_token: int
    """Numbers of its outputs for each image token, about."""

    def __post_init__(self) -> None:
        check_positive(self)

    @property
    def patch_side(self) -> int:
        """Side of a square in RGB of as many numbers, at least, as outputs per token."""
        return math.isqrt(self.values_per_token // 3) + 1

    def plan(self, width: int, height: int) -> ImagePlan:
        """What the processor makes of a blank image, which takes as long as a real one.

        Where an image is one run of tokens, what the processor counts, which is quick.
        """
        from isobatch.models.hf_processor import open_processor  # noqa: PLC0415  (an extra)

        try:
            runs = open_processor(self.description).runs_of(width, height)
        except ConfigError:
            raise
        except (ValueError, ArithmeticError, RuntimeError) as error:
            raise ImageRejected(
                "image_processor",
                f"image of {width} x {height} pixels: the model's processor refuses it"
                f" ({first_line(error)}); crop it or remove it",
            ) from None
        tokens = sum(run.tokens for run in runs)
        return ImagePlan(
            num_patches=1,
            num_vit_tokens=tokens,
            num_image_tokens=tokens,
            pictures=(),
            columns=1,
            rows=1,
            parts=tuple(MarkupPart("run", run.tokens, label=run.text) for run in runs),
        )
