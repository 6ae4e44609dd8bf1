"""One patch per image, of fixed size (LLaVA-1.5)."""

from dataclasses import dataclass

from balance.media.rules.base import ImagePlan, PixelRule


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedRule(PixelRule):
    """LLaVA-1.5: the shorter edge to `image_size`, centre crop, one patch per image."""

    image_size: int
    vit_tokens_per_patch: int
    llm_tokens_per_patch: int

    def plan(self, width: int, height: int) -> ImagePlan:
        """The resized size of the shorter edge, and the same counts for every image."""
        # the longer edge is cut off to a whole pixel, not rounded
        longer = int(self.image_size * max(width, height) / min(width, height))
        return ImagePlan(
            num_patches=1,
            num_vit_tokens=self.vit_tokens_per_patch,
            num_image_tokens=self.llm_tokens_per_patch,
            resized_width=self.image_size if width <= height else longer,
            resized_height=longer if width <= height else self.image_size,
            columns=1,
            rows=1,
        )
