"""Packs with text, images and videos for tiny models, and each sample as transformers runs it.

Pixels of a sample alone are made here from all frames of its video, by transformers' own cutting:
the resize of torch that torchvision calls, its normalisation, its `patchify`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from fractions import Fraction
from io import BytesIO
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from PIL import Image
from torch.nn import functional

from isobatch.loaders.batch.collate import collate
from isobatch.loaders.batch.micro_batch import MicroBatch
from isobatch.loaders.config import LoaderConfig
from isobatch.loaders.steps.step_plan import StepTotals
from isobatch.media.frame_archive import pack_frames
from isobatch.models.image_rules import AnyresRule, NativeRule, SplitsRule, TilesRule, VisionRule
from isobatch.models.image_tokens import plan_image
from isobatch.models.video_rules import (
    ClockRule,
    FramesRule,
    GlmVideoRule,
    NativeVideoRule,
    PooledRule,
    TimestampsRule,
    VideoRule,
)
from isobatch.models.video_tokens import VideoFacts, VideoPlan, plan_video
from isobatch.shards.stored_group import StoredGroup
from support.clips import make_clip
from support.models.family_models import (
    END,
    IMAGE,
    PINPOINTS,
    ROPE,
    SIDE,
    START,
    TEXT,
    TOKENS,
    make_family_model,
)
from support.oracles.video_processors import taken

VIDEO, TEXT_IDS = 6, range(10, 64)
PIXELS = {"mean": (0.4, 0.5, 0.6), "std": (0.3, 0.25, 0.2)}
CROPS = {**PIXELS, "image_size": SIDE}
NATIVE = {"vit_patch_size": 4, "merge_size": 2, "temporal_patch_size": 2, "max_aspect_ratio": 200.0}
AREA = {"min_pixels": 64, "max_pixels": 64 * 9}
VOLUME = {"min_pixels": 4 * 64, "max_pixels": 64 * 6 * 8}
FRAMES = {"image_size": SIDE, "vit_tokens_per_frame": 16, "llm_tokens_per_frame": 4}

IMAGES = NativeRule(**PIXELS, **NATIVE, **AREA)  # type: ignore[arg-type]
RULES: dict[str, tuple[VisionRule, VideoRule]] = {
    "qwen2_5_vl": (IMAGES, NativeVideoRule(**NATIVE, **AREA, frames_per_second=8.0)),  # type: ignore[arg-type]
    "qwen3_vl": (IMAGES, TimestampsRule(**NATIVE, **VOLUME, frames_per_second=6.0)),  # type: ignore[arg-type]
    "qwen3_5": (IMAGES, TimestampsRule(**NATIVE, **VOLUME, frames_per_second=6.0)),  # type: ignore[arg-type]
    "glm4v": (IMAGES, GlmVideoRule(**NATIVE, **VOLUME, frames_per_second=6.0)),  # type: ignore[arg-type]
    "internvl": (
        TilesRule(**CROPS, vit_tokens_per_patch=17, llm_tokens_per_patch=4, max_patches=3),  # type: ignore[arg-type]
        FramesRule(**FRAMES, num_frames=4),  # type: ignore[arg-type]
    ),
    "smolvlm": (
        SplitsRule(  # type: ignore[arg-type]
            **CROPS, vit_tokens_per_patch=16, llm_tokens_per_patch=4, longest_side=2 * SIDE
        ),
        ClockRule(**FRAMES, num_frames=5, longest_side=SIDE, frames_per_second=5.0),  # type: ignore[arg-type]
    ),
    "llava_onevision": (
        AnyresRule(  # type: ignore[arg-type]
            **CROPS,
            vit_patch_size=7,
            vit_tokens_per_patch=16,
            grid_pinpoints=tuple(map(tuple, PINPOINTS)),
            anyres_max=2,
        ),
        PooledRule(**{**FRAMES, "llm_tokens_per_frame": 16}, num_frames=4),  # type: ignore[arg-type]
    ),
}
"""Family -> rules of its images and videos."""
RULES["qwen2_vl"] = RULES["qwen2_5_vl"]
OWN_TOKEN = {"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "llava_onevision"}
"""Families whose videos have a token of their own."""


def make_video_model(name: str) -> Any:
    """A tiny model of a family with random weights."""
    if name not in ("internvl", "qwen2_vl"):
        model = make_family_model(name)
        if name == "qwen2_5_vl":
            model.config.vision_config.tokens_per_second = 4
        return model
    torch.manual_seed(0)
    vision: dict[str, Any] = {"num_heads": 2, "embed_dim": 16, "hidden_size": 32, "depth": 2}
    config: Any
    if name == "internvl":
        vision = {"image_size": [SIDE, SIDE], "patch_size": [7, 7], "hidden_size": 16}
        vision |= {"intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
        config = transformers.InternVLConfig(
            vision_config=vision, text_config={"model_type": "qwen2", **TEXT}, image_token_id=IMAGE
        )
    else:
        text = {**TEXT, "rope_parameters": dict(ROPE)}
        config = transformers.Qwen2VLConfig(
            vision_config={**vision, "patch_size": 4}, text_config=text, **TOKENS
        )
    return transformers.AutoModelForImageTextToText.from_config(config).eval()


@dataclass
class Medium:
    """An image or a video of a sample."""

    content: bytes
    frames: list[NDArray[np.uint8]]
    """Upright; all of a video's."""
    facts: VideoFacts | None
    """None for an image."""
    plan: Any = None
    places: list[int] = field(default_factory=list)

    @property
    def size(self) -> tuple[int, int]:
        """(height, width)"""
        height, width = self.frames[0].shape[:2]
        return height, width


@dataclass
class Sample:
    """A sample of a pack."""

    ids: list[int]
    types: list[int]
    """0 text, 1 image, 2 video: `mm_token_type_ids`."""
    media: list[Medium]


def make_samples(name: str, kinds: list[str], seed: int) -> list[Sample]:
    """A sample for each word: `t` text, `i` an image, `v` a video, `l` a list of images."""
    drawn = random.Random(seed)
    return [_make_sample(name, kind, drawn) for kind in kinds]


def _make_sample(name: str, kinds: str, drawn: random.Random) -> Sample:
    vision, video = RULES[name]
    sample, num_images = Sample([], [], []), kinds.count("i")
    _add_text(sample, drawn)
    for kind in kinds.replace("t", ""):
        medium = _make_medium(kind, drawn)
        height, width = medium.size
        if medium.facts is None:
            medium.plan = plan_image(vision, width, height, num_images)
        else:
            medium.plan = plan_video(video, medium.facts)
        is_video = medium.facts is not None
        token = VIDEO if is_video and name in OWN_TOKEN else IMAGE
        for run in medium.plan.runs:  # separators between runs: some text
            sample.ids += [START, *[token] * run, END]
            sample.types += [0, *[1 + is_video] * run, 0]
            _add_text(sample, drawn)
        sample.media.append(medium)
    return sample


def _add_text(sample: Sample, drawn: random.Random) -> None:
    ids = drawn.choices(TEXT_IDS, k=drawn.randint(2, 5))
    sample.ids += ids
    sample.types += [0] * len(ids)


def _make_medium(kind: str, drawn: random.Random) -> Medium:
    width, height = (2 * drawn.randint(10, 40) for _ in range(2))
    seed = drawn.randrange(1000)
    if kind == "v":
        codec, rotation = drawn.choice(["h264", "mjpeg", "vp9"]), drawn.choice([0, 0, 90])
        rate, count = drawn.choice([Fraction(30000, 1001), Fraction(12)]), drawn.randint(5, 30)
        rotation = rotation if codec == "h264" else 0  # of MP4 only
        size = width, height
        clip = make_clip(count, size, codec=codec, rate=rate, rotation=rotation, seed=seed)
        return Medium(clip.content, clip.decoded(), clip.facts)
    count, random_bytes = (4 if kind == "l" else 1), np.random.default_rng(seed)
    frames = list(random_bytes.integers(0, 256, (count, height, width, 3), dtype=np.uint8))
    files = []
    for frame in frames:
        buffer = BytesIO()
        Image.fromarray(frame).save(buffer, "PNG")
        files.append(buffer.getvalue())
    if kind == "l":
        return Medium(pack_frames(files), frames, VideoFacts(width, height, count))
    return Medium(files[0], frames, None)


def stored(samples: list[Sample]) -> StoredGroup:
    """The samples as a build holds them."""
    ids = np.array([each for sample in samples for each in sample.ids], np.int32)
    pairs = [(place, each) for place, sample in enumerate(samples) for each in sample.media]
    facts = [each.facts or VideoFacts(0, 0, 0) for _, each in pairs]
    return StoredGroup(
        where="here",
        sample_ids=tuple(f"sample-{place}" for place in range(len(samples))),
        input_ids=ids,
        labels=np.where((ids == IMAGE) | (ids == VIDEO), -100, ids).astype(np.int32),
        cu_seqlens=np.cumsum([0, *(len(sample.ids) for sample in samples)], dtype=np.int32),
        images=[each.content for _, each in pairs],
        image_sizes=np.array([each.size for _, each in pairs], np.int32).reshape(-1, 2),
        image_samples=np.array([place for place, _ in pairs], np.int32),
        image_frames=np.array([each.num_frames for each in facts], np.int32),
        image_rates=np.array([each.frames_per_second for each in facts], np.float64),
    )


def packed(name: str, samples: list[Sample], **options: Any) -> MicroBatch:
    """The micro-batch that the loader makes of them."""
    vision, video = RULES[name]
    totals = StepTotals(num_loss_tokens=1, num_samples=len(samples), loss_normalizer=1.0)
    model: Any = SimpleNamespace(vision=vision, video=video, audio=None)
    config = LoaderConfig(**{"pixel_dtype": torch.float32, **options})
    return collate(stored(samples), model, config, totals)


# --- alone ---


def alone(name: str, sample: Sample) -> dict[str, Any]:
    """What transformers' processor gives a model for a sample by itself."""
    ids = torch.tensor(sample.ids)
    inputs: dict[str, Any] = {"input_ids": ids[None], "num_items_in_batch": 1}
    inputs["labels"] = torch.where((ids == IMAGE) | (ids == VIDEO), -100, ids)[None]
    if not sample.media:
        return inputs
    if name in ("internvl", "smolvlm"):
        crops = torch.cat([_crops(name, each) for each in sample.media])
        inputs["pixel_values"] = crops if name == "internvl" else crops[None]
        return inputs
    if name == "llava_onevision":
        return inputs | _onevision(sample)
    inputs["mm_token_type_ids"] = torch.tensor(sample.types, dtype=torch.int32)[None]
    for is_video, names in (
        (False, ("pixel_values", "image_grid_thw")),
        (True, ("pixel_values_videos", "video_grid_thw")),
    ):
        chosen = [each for each in sample.media if (each.facts is not None) == is_video]
        if chosen:
            made = [_native(name, each) for each in chosen]
            inputs[names[0]] = torch.cat([rows for rows, _ in made])
            inputs[names[1]] = torch.tensor([grid for _, grid in made])
            if is_video and name == "qwen2_5_vl":
                inputs["second_per_grid_ts"] = [_seconds(each) for each in chosen]
    return inputs


def _seconds(medium: Medium) -> float:
    """2 / `VideoMetadata.sampled_fps`."""
    facts, count = medium.facts, len(medium.plan.frame_indices)
    assert facts is not None
    rate = facts.frames_per_second
    return 2 / (count / facts.num_frames * rate if rate else 24)


def _chosen(medium: Medium) -> torch.Tensor:
    """The frames that are used, uint8 (frames, 3, height, width)."""
    plan = medium.plan
    numbers = plan.frame_indices if isinstance(plan, VideoPlan) else (0,)
    return torch.from_numpy(np.stack([medium.frames[i] for i in numbers])).permute(0, 3, 1, 2)


def _resized(frames: torch.Tensor, size: tuple[int, int], resample: str) -> torch.Tensor:
    """As torchvision resizes uint8 tensors; `size` is (width, height)."""
    if tuple(frames.shape[-2:]) == size[::-1]:
        return frames
    return functional.interpolate(frames, size[::-1], mode=resample, antialias=True)


def _normalized(frames: torch.Tensor) -> torch.Tensor:
    """Rescaling and normalisation in one, as torchvision's processors do."""
    mean, std = (torch.tensor(PIXELS[key]).view(3, 1, 1) * 255 for key in ("mean", "std"))
    return (frames.float() - mean) / std


def _native(name: str, medium: Medium) -> tuple[torch.Tensor, tuple[int, int, int]]:
    """Rows and grid by `patchify` of the video processor; an image is a film of equal frames."""
    frames = _resized(_chosen(medium), medium.plan.pictures[0].size, "bicubic")
    patchify = taken("glm4v" if name == "glm4v" else "qwen2_vl", "patchify")
    rows, *grid = patchify(None, _normalized(frames)[None], 4, 2, 2)
    return rows[0], tuple(grid)


def _crops(name: str, medium: Medium) -> torch.Tensor:
    """Crops of an image, or a video's frames, (crops, 3, side, side)."""
    frames, crops = _chosen(medium), []
    for picture in medium.plan.pictures:
        resized = frames
        for step in picture.steps:
            resized = _resized(resized, (step.width, step.height), "bicubic")
        for top in range(0, resized.shape[2], SIDE):
            for left in range(0, resized.shape[3], SIDE):
                crops.append(resized[:, :, top : top + SIDE, left : left + SIDE])
    return _normalized(torch.cat(crops))


def _onevision(sample: Sample) -> dict[str, Any]:
    """Images by the loader, which other tests compare; videos squashed."""
    inputs: dict[str, Any] = {}
    images = [each for each in sample.media if each.facts is None]
    videos = [_crops("llava_onevision", each) for each in sample.media if each.facts is not None]
    if videos:
        inputs["pixel_values_videos"] = torch.stack(videos)
    if images:
        batch = packed("llava_onevision", [Sample(sample.ids, sample.types, images)])
        pixels = torch.split(batch.pixel_values, batch.patches_per_image.tolist())
        most = max(map(len, pixels))
        padded = [functional.pad(own, (0, 0) * 3 + (0, most - len(own))) for own in pixels]
        inputs |= {"pixel_values": torch.stack(padded), "image_sizes": batch.image_sizes}
        inputs["batch_num_images"] = torch.tensor([len(images)])
    return inputs
