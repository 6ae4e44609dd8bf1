"""Image size and the model's rule -> patches, ViT tokens and LLM tokens.

The packer counts with `plan_image` from image headers; the loaders cut pixels by the same plan. The
rules are `models.image_rules`. 5 to 11 us for a new size, .4 us for one seen before. Pure.
"""

from functools import lru_cache

from isobatch.common.errors import ConfigError
from isobatch.models.image_rules import VisionRule
from isobatch.models.image_rules.base import MOST_VALUE, ImagePlan, ImageRejected

__all__ = ["ImagePlan", "ImageRejected", "plan_image"]


def plan_image(rule: VisionRule, width: int, height: int, images_in_sample: int = 1) -> ImagePlan:
    """What an image of `width` x `height` pixels (upright, after EXIF rotation) becomes.

    It is one of `images_in_sample`, which decides with LLaVA-OneVision's rule only.

    Raises ImageRejected where the model's processor would refuse the image: a side without pixels
    (`empty_image`), or a shape too long for the rule (`aspect_ratio`).
    """
    return _plan(rule, width, height, images_in_sample if rule.looks_at_sample else 1)


# Sizes repeat (COCO: mostly 640 x 480), so most images need one lookup; 16,384 plans are 14 MB.
@lru_cache(maxsize=1 << 14)
def _plan(rule: VisionRule, width: int, height: int, images: int) -> ImagePlan:
    if width < 1 or height < 1:
        detail = f"image of {width} x {height} pixels: a side has no pixels; remove it"
        raise ImageRejected("empty_image", detail)
    plan = rule.plan_one_of(images, width, height)
    if max(plan.num_patches, plan.num_vit_tokens, plan.num_image_tokens) > MOST_VALUE:
        problem = f"makes more than {MOST_VALUE:,} tokens of an image of {width} x {height} pixels"
        raise ConfigError(
            f"the model's rule for images {problem}; its preset or its files are wrong"
        )
    return plan
