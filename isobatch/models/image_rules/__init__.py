"""Vision rules, one module each: size -> counts, and size -> how pixels are cut.

Every rounding and every tie follows the reference (transformers' processors), quirks included: a
cleaner formula would be wrong. Pure.
"""

from isobatch.models.image_rules.anyres import AnyresRule
from isobatch.models.image_rules.base import CropsRule, NativeSizeRule
from isobatch.models.image_rules.budget import BudgetRule
from isobatch.models.image_rules.fixed import FixedRule
from isobatch.models.image_rules.native import NativeRule
from isobatch.models.image_rules.navit import NavitRule
from isobatch.models.image_rules.pixtral import PixtralRule
from isobatch.models.image_rules.processor import ProcessorRule
from isobatch.models.image_rules.slices import SlicesRule
from isobatch.models.image_rules.splits import SplitsRule
from isobatch.models.image_rules.tiles import TilesRule

VisionRule = CropsRule | NativeSizeRule

VISION_RULES: dict[str, type[VisionRule]] = {
    "fixed": FixedRule,
    "tiles": TilesRule,
    "anyres": AnyresRule,
    "native": NativeRule,
    "splits": SplitsRule,
    "budget": BudgetRule,
    "pixtral": PixtralRule,
    "navit": NavitRule,
    "slices": SlicesRule,
    "processor": ProcessorRule,
}
"""Name in TOML and manifests -> rule."""

__all__ = [
    "VISION_RULES",
    "AnyresRule",
    "BudgetRule",
    "CropsRule",
    "FixedRule",
    "NativeRule",
    "NativeSizeRule",
    "NavitRule",
    "PixtralRule",
    "ProcessorRule",
    "SlicesRule",
    "SplitsRule",
    "TilesRule",
    "VisionRule",
]
