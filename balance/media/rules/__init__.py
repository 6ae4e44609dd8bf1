"""Vision rules, one module each: size -> counts, and size -> how pixels are cut.

Every rounding and every tie follows the reference (transformers' processors), quirks included: a
cleaner formula would be wrong. Pure.
"""

from balance.media.rules.anyres import AnyresRule
from balance.media.rules.fixed import FixedRule
from balance.media.rules.native import NativeRule
from balance.media.rules.tiles import TilesRule

VisionRule = FixedRule | TilesRule | AnyresRule | NativeRule

VISION_RULES: dict[str, type[VisionRule]] = {
    "fixed": FixedRule,
    "tiles": TilesRule,
    "anyres": AnyresRule,
    "native": NativeRule,
}
"""Name in TOML and manifests -> rule."""

__all__ = ["VISION_RULES", "AnyresRule", "FixedRule", "NativeRule", "TilesRule", "VisionRule"]
