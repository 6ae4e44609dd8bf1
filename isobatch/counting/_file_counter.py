"""What the files of a sample cost: headers read, and planned by the model's rules."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import BinaryIO, cast

from isobatch.common.errors import MediaRejected
from isobatch.counting._asked_sizes import require_image, require_video
from isobatch.counting.headers.audio_header import read_audio_header
from isobatch.counting.headers.image_header import read_header
from isobatch.counting.headers.video_header import VideoHeader, read_video_header
from isobatch.counting.records.media import Media, SampleProblem, frames_in_folder, open_media
from isobatch.media.frame_archive import archive_bytes
from isobatch.models.audio_tokens import plan_clip, resampled_length
from isobatch.models.image_rules.native import NativeRule
from isobatch.models.image_tokens import ImagePlan, plan_image
from isobatch.models.presets import ModelPreset
from isobatch.models.video_tokens import VideoFacts, plan_video
from isobatch.shards.folders import Folder


@dataclass(frozen=True, slots=True)
class CountedFile:
    """A file with what it costs."""

    media: Media
    num_bytes: int
    numbers: dict[str, int | float]
    """Columns of its row, and what its sample adds up."""
    plan: ImagePlan | None = None
    """Of an image or a video."""
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
            require_image(rule, dict(media.asked), (header.width, header.height), plan)
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
            require_video(rule, dict(media.asked), facts, plan)
        return _visual(media, header, plan, frames)

    def _read_video(
        self, root: Folder, media: Media
    ) -> tuple[VideoHeader, tuple[tuple[Media, int], ...]]:
        frames = media.frames
        if not frames:
            try:
                with open_media(root, media, "video") as file:
                    return read_video_header(file, media.name, decode=self._decode_images), ()
            except SampleProblem as problem:
                is_folder = problem.reason == "missing_video" and not media.container
                if not is_folder or not (frames := frames_in_folder(root, media.name)):
                    raise
        return self._read_frames(root, frames)

    def _read_frames(
        self, root: Folder, frames: Sequence[Media]
    ) -> tuple[VideoHeader, tuple[tuple[Media, int], ...]]:
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
