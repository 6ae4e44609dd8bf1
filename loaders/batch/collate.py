"""From stored samples to tensors: `collate` makes a `MicroBatch` of a `StoredGroup`.

The image and audio tokens in `input_ids` were counted at build; a file that has changed since would
no longer fill them, so each image's size and each clip's length is compared with what was counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from operator import sub

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from balance.errors import ConfigError, DataError
from balance.media.audio_tokens import AudioRule, plan_audio
from balance.media.image_tokens import ImagePlan, plan_image
from balance.presets import ModelPreset, NativeRule, VisionRule
from loaders.batch.micro_batch import MicroBatch
from loaders.decode import pixels
from loaders.decode.audio import decode_audio
from loaders.decode.image import decode, decode_pixels
from loaders.decode.log_mel import MEL_BINS, log_mel_frames, log_mel_windows
from loaders.decode.resize import Pixels
from loaders.read.shard_reader import StoredGroup


@lru_cache
def _planner(rule: VisionRule) -> Callable[[int, int], ImagePlan]:
    """`plan_image` of a rule, with a memory: images have few sizes, and to find the best grid of
    tiles takes longer than the rest of a small group.
    """
    return lru_cache(maxsize=1 << 14)(partial(plan_image, rule))


AUDIO_FORMS = ("waveform", "features", "windows")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTotals:
    """Sums over all groups of a step, the same on every rank."""

    num_loss_tokens: int
    num_samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaOptions:
    """How images and audio clips become tensors."""

    audio_rule: AudioRule | None = None
    """None for a model that hears nothing."""
    audio: str = "waveform"
    """One of AUDIO_FORMS; `MicroBatch.audio_values` says what each gives."""
    mel_bins: int = MEL_BINS
    """Of the features."""
    exact_resize: bool = False
    """Resize with Pillow, bit by bit as transformers does without torchvision, at an eighth of the
    speed.
    """
    reduced_decode: bool = False
    """Decode large JPEGs at a fraction of their size where `loaders.decode.image.decode` allows
    it.
    """
    decode_images: bool = True
    """False: the files themselves, for those who decode on the GPU."""

    def __post_init__(self) -> None:
        if self.audio not in AUDIO_FORMS:
            raise ConfigError(f"audio is {self.audio!r}; use one of {', '.join(AUDIO_FORMS)}")
        if self.mel_bins < 1:
            raise ConfigError(f"mel_bins is {self.mel_bins}; it must be at least 1")

    @classmethod
    def of(
        cls,
        model: ModelPreset,
        *,
        audio: str = "waveform",
        exact_resize: bool = False,
        reduced_decode: bool = False,
        decode_images: bool = True,
    ) -> MediaOptions:
        """The options for a model: its audio rule and its encoder's mel bins."""
        mel_bins = model.audio_encoder.frame_values if model.audio_encoder else MEL_BINS
        return cls(
            audio_rule=model.audio,
            audio=audio,
            mel_bins=mel_bins,
            exact_resize=exact_resize,
            reduced_decode=reduced_decode,
            decode_images=decode_images,
        )


IMAGES_ONLY = MediaOptions()


def collate(
    raw: StoredGroup | None,
    rule: VisionRule,
    pixel_dtype: torch.dtype,
    totals: StepTotals,
    media: MediaOptions = IMAGES_ONLY,
) -> MicroBatch:
    """The micro-batch of a group, or an empty one for None.

    DataError names the sample whose image or audio clip cannot be used; ConfigError says that there
    are clips, but `media` has no rule for them.
    """
    if raw is None:
        raw = EMPTY_GROUP
    plan_of = _planner(rule)
    plans = [plan_of(width, height) for height, width in raw.image_sizes.tolist()]
    is_native = isinstance(rule, NativeRule)
    grids = [(1, plan.rows, plan.columns) for plan in plans] if is_native else []
    input_ids, labels, position_ids = _tokens(raw)
    return MicroBatch(
        sample_ids=raw.sample_ids,
        input_ids=input_ids,
        labels=labels,
        position_ids=position_ids,
        cu_seqlens=torch.from_numpy(raw.cu_seqlens.copy()),
        pixel_values=_pixel_values(raw, plans, rule, pixel_dtype, media),
        images=() if media.decode_images else raw.images,
        patches_per_image=_int64([plan.num_patches for plan in plans]),
        image_sizes=_int64(raw.image_sizes),
        image_grid_thw=_int64(grids).reshape(-1, 3) if is_native else None,
        **_audio_fields(raw, media),
        num_loss_tokens=totals.num_loss_tokens,
        num_step_samples=totals.num_samples,
    )


def _tokens(raw: StoredGroup) -> tuple[Tensor, ...]:
    """Input ids, labels and each token's place in its sample, int64; rows of one tensor, which is
    made once.
    """
    tokens = np.empty((3, len(raw.input_ids)), np.int64)
    tokens[0], tokens[1] = raw.input_ids, raw.labels
    if raw.sample_ids:
        borders = raw.cu_seqlens.tolist()
        lengths = list(map(sub, borders[1:], borders))
        counted = _count(max(lengths))
        np.concatenate([counted[:length] for length in lengths], out=tokens[2])
    return torch.from_numpy(tokens).unbind()


def _count(longest: int) -> NDArray[np.int64]:
    """0, 1, 2, ...: at least so many, made anew only when more are wanted."""
    global _counted  # noqa: PLW0603
    if len(_counted) < longest:
        _counted = np.arange(2 * longest)
    return _counted


_counted = np.arange(8192)


NO_TOKENS = np.zeros(0, dtype=np.int32)
EMPTY_GROUP = StoredGroup(
    where="the fill of the epoch's last step",
    sample_ids=(),
    input_ids=NO_TOKENS,
    labels=NO_TOKENS,
    cu_seqlens=np.zeros(1, dtype=np.int32),
    images=(),
    image_sizes=NO_TOKENS.reshape(0, 2),
    image_samples=NO_TOKENS,
)


def _pixel_values(
    raw: StoredGroup,
    plans: Sequence[ImagePlan],
    rule: VisionRule,
    dtype: torch.dtype,
    media: MediaOptions,
) -> Tensor:
    """Pixels of all images, in the layout of `MicroBatch.pixel_values`; no rows if there are no
    images.
    """
    # sizes may be known of images that are encoded elsewhere, and not here
    rows = (
        [pixels.num_rows(rule, plan) for plan in plans[: len(raw.images)]]
        if media.decode_images
        else []
    )
    if not rows:
        return _no_pixels(rule, dtype)
    # one tensor for all, because joining one per image would copy every pixel once more
    cut = pixels.empty_rows(rule, sum(rows))
    memory, start = pixels.memory_of(rule, cut), 0
    for place, count in enumerate(rows):
        _cut_image(memory[start : start + count], raw, place, plans[place], rule, media)
        start += count
    return cut if dtype == torch.uint8 else pixels.normalize(rule, cut).to(dtype)


@lru_cache
def _no_pixels(rule: VisionRule, dtype: torch.dtype) -> Tensor:
    empty = pixels.empty_rows(rule, 0)
    return empty if dtype == torch.uint8 else pixels.normalize(rule, empty).to(dtype)


def _cut_image(
    memory: Pixels,
    raw: StoredGroup,
    place: int,
    plan: ImagePlan,
    rule: VisionRule,
    media: MediaOptions,
) -> None:
    """Write the raw patches of one image into `memory`."""
    height, width = (int(side) for side in raw.image_sizes[place])
    try:
        if media.exact_resize or media.reduced_decode:
            reduced = rule if media.reduced_decode else None
            image: Image.Image | Pixels = decode(
                raw.images[place], counted=(width, height), rule=reduced
            )
        else:
            target = pixels.uncut(memory, rule, plan, width, height)
            image = decode_pixels(raw.images[place], counted=(width, height), target=target)
            if target is not None:
                return
    except DataError as error:
        raise DataError(f"{_owner(raw, raw.image_samples[place])}: {error}; {_ADVICE}") from error
    pixels.cut_into(memory, rule, image, plan, exact=media.exact_resize)


def _audio_fields(raw: StoredGroup, media: MediaOptions) -> dict[str, Tensor]:
    """The audio fields of a `MicroBatch`; none for a model that hears nothing."""
    rule = media.audio_rule
    if rule is None:
        if len(raw.audios):
            raise ConfigError(
                f"{raw.where}: {len(raw.audios)} audio clips, but no audio rule to decode them by; use the model "
                "preset of the build"
            )
        return {}
    clips = [_decode_clip(raw, place, rule) for place in range(len(raw.audios))]
    plans = [plan_audio(rule, int(length), rule.sampling_rate) for length in raw.audio_lengths]
    frames = [
        min(rule.window_frames, plan.num_frames - window * rule.window_frames)
        for plan in plans
        for window in range(plan.num_windows)
    ]
    return {
        "audio_values": _audio_values(clips, rule, media),
        "audio_lengths": _int64(raw.audio_lengths),
        "audio_frames": _int64(frames),
    }


def _audio_values(clips: Sequence[Tensor], rule: AudioRule, media: MediaOptions) -> Tensor:
    """All clips, in the layout of `MicroBatch.audio_values`."""
    if media.audio == "features":
        empty = torch.empty((0, media.mel_bins))
        return torch.cat([empty, *(log_mel_frames(rule, clip, media.mel_bins) for clip in clips)])
    if media.audio == "windows":
        empty = torch.empty((0, media.mel_bins, rule.window_frames))
        return torch.cat([empty, *(log_mel_windows(rule, clip, media.mel_bins) for clip in clips)])
    return torch.cat([torch.empty(0), *clips])


def _decode_clip(raw: StoredGroup, place: int, rule: AudioRule) -> Tensor:
    try:
        return decode_audio(rule, raw.audios[place], int(raw.audio_lengths[place]))
    except DataError as error:
        raise DataError(f"{_owner(raw, raw.audio_samples[place])}: {error}; {_ADVICE}") from error


_ADVICE = "restore it, or build again without it"


def _owner(raw: StoredGroup, sample: int) -> str:
    return f"sample {raw.sample_ids[sample]!r} ({raw.where})"


def _int64(values: object) -> Tensor:
    """A copy: stored arrays may be views into a mapped file."""
    return torch.from_numpy(np.array(values, dtype=np.int64))
