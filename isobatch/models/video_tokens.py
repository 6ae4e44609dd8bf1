"""A video's header and the model's rule -> frames, ViT tokens and LLM tokens.

The packer counts with `plan_video`; the loader decodes the frames and cuts them by the same plan.
The rules are `models.video_rules`. 50 us for a minute, more for more frames. Pure.
"""

from functools import lru_cache
from math import isfinite

from isobatch.models.video_rules import VideoRule
from isobatch.models.video_rules.base import VideoFacts, VideoPlan, VideoRejected

__all__ = ["VideoFacts", "VideoPlan", "VideoRejected", "plan_video"]


@lru_cache(maxsize=1 << 10)
def plan_video(rule: VideoRule, facts: VideoFacts) -> VideoPlan:
    """What a video becomes under `rule`.

    Raises VideoRejected where the model's processor would refuse the video: no frames or a side
    without pixels (`empty_video`), no rate (`frame_rate`), fewer frames than the model needs
    (`short_video`), or a shape too long for the rule (`aspect_ratio`).
    """
    if min(facts[:3]) < 1:
        size = f"{facts.width} x {facts.height} pixels"
        detail = f"video of {facts.num_frames} frames of {size}: there is nothing; remove it"
        raise VideoRejected("empty_video", detail)
    if not isfinite(facts.frames_per_second) or facts.frames_per_second < 0:
        detail = f"video of {facts.frames_per_second} frames per second: no rate; remove it"
        raise VideoRejected("frame_rate", detail)
    return rule.plan(facts)
