"""Video rules: header -> frames and counts, and how each frame is cut.

Sampling, rounding and texts follow the reference (transformers' video processors), quirks included.
Pure.
"""

from isobatch.models.video_rules.base import SampledRule
from isobatch.models.video_rules.frames import ClockRule, FramesRule, PooledRule
from isobatch.models.video_rules.native import GlmVideoRule, NativeVideoRule, TimestampsRule

VideoRule = SampledRule

VIDEO_RULES: dict[str, type[VideoRule]] = {
    "native": NativeVideoRule,
    "timestamps": TimestampsRule,
    "glm": GlmVideoRule,
    "frames": FramesRule,
    "pooled": PooledRule,
    "clock": ClockRule,
}
"""Name in TOML and manifests -> rule."""

__all__ = [
    "VIDEO_RULES",
    "ClockRule",
    "FramesRule",
    "GlmVideoRule",
    "NativeVideoRule",
    "PooledRule",
    "SampledRule",
    "TimestampsRule",
    "VideoRule",
]
