"""One patch per image, of fixed size (LLaVA-1.5, Gemma 3, PaliGemma)."""

from dataclasses import dataclass

from isobatch.models.image_rules.base import CropsRule, ImagePlan, PicturePlan, PlaceOn, ResizeTo


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedRule(CropsRule):
    """One patch per image: the shorter edge to `image_size` and its centre, or squashed to it."""

    image_size: int
    vit_tokens_per_patch: int
    llm_tokens_per_patch: int
    crop: bool = True
    """LLaVA-1.5: the centre, sides in proportion. False (Gemma 3, PaliGemma): the whole image."""

    def plan(self, width: int, height: int) -> ImagePlan:
        """The same counts for every image."""
        side = self.image_size
        picture = PicturePlan((ResizeTo(side, side),))
        if self.crop and width != height:
            # the longer edge is cut off to a whole pixel, not rounded
            longer = int(side * max(width, height) / min(width, height))
            resized = ResizeTo(side, longer) if width <= height else ResizeTo(longer, side)
            x, y = (resized.width - side) // 2, (resized.height - side) // 2
            picture = PicturePlan((resized, PlaceOn(side, side, -x, -y)))
        return ImagePlan(
            num_patches=1,
            num_vit_tokens=self.vit_tokens_per_patch,
            num_image_tokens=self.llm_tokens_per_patch,
            pictures=(picture,),
            columns=1,
            rows=1,
        )
