"""Sizes that a part of a record asks for, next to what the rule makes. Pure.

For `counting._file_counter`. qwen_vl_utils reads `min_pixels`, `max_pixels`, `resized_height`,
`resized_width`, `fps`, `nframes` and others of a part of a message. A build has one rule for all
images, so a part may ask for what that makes anyway, and is refused else.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from isobatch.common.errors import MediaRejected
from isobatch.counting.records.media import SampleProblem
from isobatch.models.image_rules.base import ImagePlan
from isobatch.models.image_rules.native import NativeRule, nearest_size
from isobatch.models.video_rules import VideoRule
from isobatch.models.video_rules.base import VideoFacts, VideoPlan
from isobatch.models.video_rules.native import NativeVideoRule

_WHERE = "give it for all: in the model folder's preprocessor config, or in a preset (--model)"
_OF_VIDEOS = {"fps": "frames_per_second", "min_frames": "min_frames", "max_frames": "max_frames"}
"""Key of a part -> field of the rule."""
_PIXELS = ("min_pixels", "max_pixels")


def require_image(
    rule: NativeRule, asked: Mapping[str, Any], size: tuple[int, int], plan: ImagePlan
) -> None:
    """SampleProblem (`asked_size`) unless `plan`, of an image of this size, is as asked."""
    wanted = _numbers(asked)
    unit = rule.vit_patch_size * rule.merge_size
    if "resized_height" in wanted and "resized_width" in wanted:
        near = wanted["resized_width"], wanted["resized_height"]
        limits = rule.min_pixels, rule.max_pixels
        resized = nearest_size((int(near[0]), int(near[1])), unit, limits)
        _require(asked, resized == (plan.resized_width, plan.resized_height), plan)
    pixels: dict[str, Any] = {key: int(wanted[key]) for key in _PIXELS if key in wanted}
    if pixels:
        try:
            other = replace(rule, **pixels).plan(*size)
        except MediaRejected:
            other = None
        _require(asked, other == plan, plan)
    known = {*_PIXELS, "resized_height", "resized_width"}
    _require(asked, wanted.keys() <= known, plan)


def require_video(
    rule: VideoRule, asked: Mapping[str, Any], facts: VideoFacts, plan: VideoPlan
) -> None:
    """SampleProblem (`asked_size`) unless `plan`, of this video, is as asked."""
    wanted = _numbers(asked)
    frames = {_OF_VIDEOS[key]: wanted[key] for key in _OF_VIDEOS if key in wanted}
    fits = all(wanted[key] == getattr(rule, key) for key in _PIXELS if key in wanted)
    if "nframes" in wanted:
        fits &= wanted["nframes"] == len(plan.frame_indices)
    if frames:
        fits &= isinstance(rule, NativeVideoRule) and _same_frames(rule, frames, facts, plan)
    _require(asked, fits and wanted.keys() <= {*_OF_VIDEOS, *_PIXELS, "nframes"}, plan)


def _same_frames(
    rule: NativeVideoRule, asked: Mapping[str, float], facts: VideoFacts, plan: VideoPlan
) -> bool:
    """Whether the rule chooses the same frames with these fields."""
    values: dict[str, Any] = {key: int(number) for key, number in asked.items()}
    if "frames_per_second" in asked:
        values["frames_per_second"] = float(asked["frames_per_second"])
    try:
        return replace(rule, **values).plan(facts).frame_indices == plan.frame_indices
    except MediaRejected:
        return False


def _numbers(asked: Mapping[str, Any]) -> dict[str, float]:
    for key, value in asked.items():
        known = isinstance(value, int | float) and not isinstance(value, bool)
        if not known or not 0 < value < 2**31:
            raise SampleProblem("asked_size", f"`{key}` is {value!r:.40}, no number of pixels")
    return dict(asked)


def _require(asked: Mapping[str, Any], fits: bool, plan: ImagePlan | VideoPlan) -> None:
    if fits:
        return
    said = ", ".join(f"{key}={value!r:.20}" for key, value in asked.items())
    planned = ""
    if not isinstance(plan, VideoPlan):
        planned = f" makes {plan.resized_width} x {plan.resized_height} pixels of it and"
    what = f"{said} in a part; the model's rule{planned} is another"
    raise SampleProblem("asked_size", f"{what}: {_WHERE}")
