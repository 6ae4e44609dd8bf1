"""Vision rules, one module each: size -> counts, and size -> how pixels are cut.

Every rounding and every tie follows the reference (transformers' processors), quirks included: a
cleaner formula would be wrong. Pure.
"""

from balance.media.rules.anyres import AnyresRule
from balance.media.rules.base import CropsRule, NativeSizeRule
from balance.media.rules.budget import BudgetRule
from balance.media.rules.fixed import FixedRule
from balance.media.rules.native import NativeRule
from balance.media.rules.navit import NavitRule
from balance.media.rules.pixtral import PixtralRule
from balance.media.rules.processor import ProcessorRule
from balance.media.rules.slices import SlicesRule
from balance.media.rules.splits import SplitsRule
from balance.media.rules.tiles import TilesRule

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
