"""What the files of a sample cost: headers read, and planned by the model's rules.

qwen_vl_utils reads `min_pixels`, `max_pixels`, `resized_height`, `resized_width`, `fps`, `nframes`
and others of a part of a message. A build has one rule for all images, so a part may ask for what
that makes anyway, and is refused else.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, BinaryIO, cast

from isobatch.common.errors import MediaRejected
from isobatch.counting.headers.audio_header import read_audio_header
from isobatch.counting.headers.image_header import read_header
from isobatch.counting.headers.video_header import VideoHeader, read_video_header
from isobatch.counting.records.media import Media, SampleProblem, frames_in_folder, open_media
from isobatch.media.frame_archive import archive_bytes
from isobatch.models.audio_tokens import plan_clip, resampled_length
from isobatch.models.image_rules.native import NativeRule, nearest_size
from isobatch.models.image_tokens import ImagePlan, plan_image
from isobatch.models.presets import ModelPreset
from isobatch.models.video_rules import VideoRule
from isobatch.models.video_rules.native import NativeVideoRule
from isobatch.models.video_tokens import VideoFacts, VideoPlan, plan_video
from isobatch.shards.folders import Folder

_WHERE = "give it for all: in the model folder's preprocessor config, or in a preset (--model)"
_OF_VIDEOS = {"fps": "frames_per_second", "min_frames": "min_frames", "max_frames": "max_frames"}
"""Key of a part -> field of the rule."""
_PIXELS = ("min_pixels", "max_pixels")


@dataclass(frozen=True, slots=True)
class CountedFile:
    """A file with what it costs."""

    media: Media
    num_bytes: int
    numbers: dict[str, int | float]
    """Columns of its row, and what its sample adds up."""
    plan: ImagePlan | None = None
    """Plan of an image or a video."""
    frames: tuple[tuple[Media, int], ...] = ()
    """Images that are the video, and their bytes."""


class FileCounter:
    """Counts files for one model. Every method raises SampleProblem for a file of no use."""

    def __init__(self, model: ModelPreset, *, decode_images: bool) -> None:
        self._model = model
        self._decode_images = decode_images

    def count_image(self, root: Folder, media: Media, images_in_sample: int) -> CountedFile:
        """An image, one of so many of its sample."""
        rule = self._model.vision
        with open_media(root, media, "image") as file:
            header = read_header(file, media.name, decode=self._decode_images)
        try:
            plan = plan_image(rule, header.width, header.height, images_in_sample)
        except MediaRejected as problem:
            raise _named(problem, media) from None
        if media.asked and isinstance(rule, NativeRule):
            _require_image(rule, dict(media.asked), (header.width, header.height), plan)
        return _visual(
            media, VideoHeader(header.width, header.height, 0, 0.0, header.num_bytes), plan
        )

    def count_video(self, root: Folder, media: Media) -> CountedFile:
        """A video file, or a list or a folder of images."""
        if (rule := self._model.video) is None:
            raise SampleProblem("no_video", f"{media.name}: {self._model.name} takes no videos")
        header, frames = self._read_video(root, media)
        facts = VideoFacts(header.width, header.height, header.num_frames, header.frames_per_second)
        try:
            plan = plan_video(rule, facts)
        except MediaRejected as problem:
            raise _named(problem, media) from None
        if media.asked:
            _require_video(rule, dict(media.asked), facts, plan)
        return _visual(media, header, plan, frames)

    def _read_video(
        self, root: Folder, media: Media
    ) -> tuple[VideoHeader, tuple[tuple[Media, int], ...]]:
        """The header of a video, and its images with their bytes if it is a list of them."""
        frames = media.frames
        if not frames:
            try:
                with open_media(root, media, "video") as file:
                    return read_video_header(file, media.name, decode=self._decode_images), ()
            except SampleProblem as problem:
                is_folder = problem.reason == "missing_video" and not media.container
                if not is_folder or not (frames := frames_in_folder(root, media.name)):
                    raise
        headers = []
        for frame in frames:
            with open_media(root, frame, "image") as file:
                headers.append(read_header(file, frame.name, decode=self._decode_images))
        for frame, header in zip(frames, headers, strict=True):
            size, first = (header.width, header.height), (headers[0].width, headers[0].height)
            if size != first:
                has = f"{frame.name} has {size[0]} x {size[1]} pixels"
                others = f"{frames[0].name} {first[0]} x {first[1]}"
                raise SampleProblem("frame_sizes", f"{has}, {others}")
        sizes = [header.num_bytes for header in headers]
        video = VideoHeader(*first, len(frames), 0.0, archive_bytes(sizes))
        return video, tuple(zip(frames, sizes, strict=True))

    def count_audios(self, root: Folder, audios: Sequence[Media]) -> list[CountedFile]:
        """The audio files of a sample."""
        if not audios:
            return []
        if (rule := self._model.audio) is None:
            missing = f"{audios[0].name}: {self._model.name} has no audio encoder"
            raise SampleProblem("no_audio_encoder", missing)
        lengths, sizes = [], []
        for media in audios:
            with open_media(root, media, "audio") as file:
                header = read_audio_header(cast("BinaryIO", file), media.name)
            lengths.append(resampled_length(rule, header.num_samples, header.sampling_rate))
            sizes.append(header.num_bytes)
        counted = []
        for media, num_bytes, length in zip(audios, sizes, lengths, strict=True):
            try:
                plan = plan_clip(rule, length, max(lengths))
            except MediaRejected as problem:
                raise _named(problem, media) from None
            numbers: dict[str, int | float]
            numbers = {"length": plan.num_samples, "tokens": plan.num_audio_tokens}
            counted.append(CountedFile(media, num_bytes, numbers))
        return counted


def _named(problem: MediaRejected, media: Media) -> SampleProblem:
    return SampleProblem(problem.reason, f"{media.name}: {problem.detail}")


def _visual(
    media: Media, header: VideoHeader, plan: ImagePlan, frames: tuple[tuple[Media, int], ...] = ()
) -> CountedFile:
    """An image or a video; an image has no frames."""
    numbers = {
        "width": header.width,
        "height": header.height,
        "num_frames": header.num_frames,
        "rate": header.frames_per_second,
        "tokens": plan.num_image_tokens,
        "num_patches": plan.num_patches,
        "num_vit_tokens": plan.num_vit_tokens,
    }
    return CountedFile(media, header.num_bytes, numbers, plan, frames)


# --- sizes that a part asks for ---


def _require_image(
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


def _require_video(
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
