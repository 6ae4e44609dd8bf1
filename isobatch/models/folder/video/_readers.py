"""The settings of a family's video processor -> rule and markup. Pure.

transformers samples frames only if asked to (`do_sample_frames`), and then by the processor's `fps`
or `num_frames`. Where the files of a family say neither, so many are sampled as its makers do.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from isobatch.models.folder.files import ModelFiles
from isobatch.models.folder.json_table import JsonTable
from isobatch.models.folder.pixels import HARMLESS, edges, pixels_of, square_side
from isobatch.models.image_rules.base import CropsRule
from isobatch.models.presets import MediaMarkup, ModelPreset
from isobatch.models.video_rules import (
    ClockRule,
    FramesRule,
    GlmVideoRule,
    NativeVideoRule,
    PooledRule,
    TimestampsRule,
    VideoRule,
)

Reader = Callable[[ModelFiles, ModelPreset, JsonTable], tuple[VideoRule, MediaMarkup] | None]

_HARMLESS = (
    *(*HARMLESS, "default_to_square", "do_sample_frames", "return_metadata", "video_metadata"),
    *("video_processor_type", "image_processor_type", "do_pad", "crop_size"),
)
_FRAMES_PER_SECOND = 2
"""Frames per second of Qwen-VL's and GLM-V's own code."""
_INTERNVL_FRAMES, _ONEVISION_FRAMES, _SMOLVLM_FRAMES = 8, 32, 64
"""Frames by InternVL's model cards, OneVision's paper, SmolVLM2's own files."""


def with_videos(files: ModelFiles, model: ModelPreset) -> ModelPreset:
    """The model with what its files say of videos; as it is where they are not supported.

    That is so for families that are not listed, for another class of video processor, and where
    videos have another mean or std than images. ConfigError for an unknown setting.
    """
    kind, reader = _READERS.get(files.model_type, ("", None))
    table = files.video_table(kind)
    if reader is None or table is None:
        return model
    result = reader(files, model, table)
    if result is None:
        return model
    pixels = pixels_of(table)
    # without a file of their own they have images', whose reader looked at all of it
    table.require_read(_HARMLESS if files.has_video_settings else (*_HARMLESS, *table.file_values))
    if (pixels["mean"], pixels["std"]) != (model.vision.mean, model.vision.std):
        return model
    rule, markup = result
    return replace(model, video=replace(rule, resample=pixels["resample"]), video_markup=markup)


def _native(files: ModelFiles, model: ModelPreset, table: JsonTable) -> dict[str, Any] | None:
    size = edges(table)
    if files.model_type in ("qwen2_vl", "qwen2_5_vl"):
        for key, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
            if table.value(key) is not None:  # of old files, which win
                size[edge] = table.count(key)
    if not {"shortest_edge", "longest_edge"} <= set(size):
        raise table.wrong("size", "give shortest_edge and longest_edge, in pixels of area")
    rule = model.vision
    sizes = {key: table.count(key) for key in ("patch_size", "merge_size", "temporal_patch_size")}
    images = (rule.vit_patch_size, rule.merge_size, rule.temporal_patch_size)  # type: ignore[union-attr]
    if tuple(sizes.values()) != images:
        if not files.has_video_settings:  # images', of another patch than videos' own class has
            return None
        raise table.wrong("patch_size", "patches of videos must be as those of images")
    if table.value("num_frames") is not None and files.model_type != "glm4v":  # GLM ignores it
        raise table.wrong("num_frames", "give fps instead")
    return {
        "vit_patch_size": sizes["patch_size"],
        "merge_size": sizes["merge_size"],
        "temporal_patch_size": sizes["temporal_patch_size"],
        "min_pixels": size["shortest_edge"],
        "max_pixels": size["longest_edge"],
        "max_aspect_ratio": rule.max_aspect_ratio,  # type: ignore[union-attr]
        "frames_per_second": _rate(table, _FRAMES_PER_SECOND),
    }


def _rate(table: JsonTable, otherwise: float) -> float:
    return float(otherwise) if table.value("fps") is None else table.number("fps")


def _qwen(
    files: ModelFiles, model: ModelPreset, table: JsonTable
) -> tuple[VideoRule, MediaMarkup] | None:
    options = _native(files, model, table)
    if options is None:
        return None
    options |= {key: table.count(key) for key in ("min_frames", "max_frames")}
    max_tokens = table.count("max_video_tokens")
    options["max_video_tokens"] = max_tokens if table.value("cap_pixels_per_frame") else None
    token = files.named_token("video_token", "<|video_pad|>")
    start, end = "<|vision_start|>", "<|vision_end|>"
    if files.model_type in ("qwen2_vl", "qwen2_5_vl"):
        return NativeVideoRule(**options), MediaMarkup(token=token, prefix=start, suffix=end)
    start = files.named_token("vision_start_token", start)
    end = files.named_token("vision_end_token", end)
    return TimestampsRule(**options), MediaMarkup(
        token=token,
        prefix=start,
        suffix=end,
        placeholder=f"{start}{token}{end}",
        parts=(("frame", f"<{{label}} seconds>{start}{token}{end}"),),
    )


def _glm(
    files: ModelFiles, model: ModelPreset, table: JsonTable
) -> tuple[VideoRule, MediaMarkup] | None:
    options = _native(files, model, table)
    if options is None:
        return None
    table.value("max_image_size")  # of no use there either
    token = files.named_token("image_token", "<|image|>")
    video = files.named_token("video_token", "<|video|>")
    start, end = "<|begin_of_video|>", "<|end_of_video|>"
    rule = GlmVideoRule(**options, max_seconds=table.number("max_duration"))
    return rule, MediaMarkup(
        token=token,
        prefix=start,
        suffix=end,
        placeholder=f"{start}{video}{end}",
        parts=(("frame", f"<|begin_of_image|>{token}<|end_of_image|>{{label}}"),),
    )


def _crops(model: ModelPreset, table: JsonTable, otherwise: int) -> dict[str, Any]:
    vision = model.vision
    if not isinstance(vision, CropsRule):
        raise TypeError(f"{model.name} has no crops")
    table.require("do_center_crop", False)
    num_frames = table.value("num_frames")
    return {
        "image_size": vision.image_size,
        "vit_tokens_per_frame": vision.vit_tokens_per_patch,
        "num_frames": otherwise if num_frames is None else table.count("num_frames"),
    }


def _squares(model: ModelPreset, table: JsonTable, otherwise: int) -> dict[str, Any] | None:
    """Frames squashed to a crop; None if their size is another."""
    if table.value("fps") is not None:
        raise table.wrong("fps", "give num_frames instead")
    options = _crops(model, table, otherwise)
    return options if square_side(table) == options["image_size"] else None


def _internvl(
    files: ModelFiles, model: ModelPreset, table: JsonTable
) -> tuple[VideoRule, MediaMarkup] | None:
    table.require("initial_shift", True)
    image = model.image_markup
    options = _squares(model, table, _INTERNVL_FRAMES)
    if options is None:
        return None
    tokens = model.vision.llm_tokens_per_patch  # type: ignore[union-attr]
    frame = f"Frame{{label}}: {image.prefix}{image.token}{image.suffix}"
    return FramesRule(**options, llm_tokens_per_frame=tokens), MediaMarkup(
        token=image.token,
        placeholder=files.named_token("video_token", "<video>"),
        parts=(("frame", frame), ("between", "\n")),
    )


def _onevision(
    files: ModelFiles, model: ModelPreset, table: JsonTable
) -> tuple[VideoRule, MediaMarkup] | None:
    options = _squares(model, table, _ONEVISION_FRAMES)
    if options is None:
        return None
    named = files.processor.get("video_token")
    token = files.named_token("video_token", named if isinstance(named, str) else "<video>")
    tokens = options["vit_tokens_per_frame"]
    return PooledRule(**options, llm_tokens_per_frame=tokens), MediaMarkup(token=token)


def _smolvlm(
    files: ModelFiles, model: ModelPreset, table: JsonTable
) -> tuple[VideoRule, MediaMarkup] | None:
    options = _crops(model, table, _SMOLVLM_FRAMES)
    sampling = table.table("video_sampling")
    size = edges(table)
    if sampling.file_values:
        options["num_frames"] = sampling.count("max_frames")
        if "size" not in table.file_values:  # which wins
            size = edges(sampling, "video_size")
        sampling.value("video_size")
    rate = sampling.number("fps") if sampling.file_values else _rate(table, 1.0)
    if edges(table, "max_image_size") != {"longest_edge": options["image_size"]}:
        return None
    if set(size) != {"longest_edge"}:
        raise table.wrong("size", "only longest_edge is supported")
    tokens = model.vision.llm_tokens_per_patch  # type: ignore[union-attr]
    rule = ClockRule(
        **options,
        llm_tokens_per_frame=tokens,
        longest_side=min(size["longest_edge"], 4096),
        frames_per_second=rate,
    )
    whole = dict(model.image_markup.parts)["single"]
    return rule, MediaMarkup(
        token=model.image_markup.token,
        placeholder=files.named_token("video_token", "<video>"),
        parts=(
            ("count", "You are provided the following series of {label} frames from a "),
            ("duration", "{label} [H:MM:SS] video.\n"),
            ("frame", f"\nFrame from {{label}}:{whole}"),
            ("end", "\n\n"),
        ),
    )


_QWEN2, _QWEN3 = ("Qwen2VLVideoProcessor", _qwen), ("Qwen3VLVideoProcessor", _qwen)
_READERS: dict[str, tuple[str, Reader]] = {
    "glm4v": ("Glm4vVideoProcessor", _glm),
    "internvl": ("InternVLVideoProcessor", _internvl),
    "llava_onevision": ("LlavaOnevisionVideoProcessor", _onevision),
    "qwen2_5_vl": _QWEN2,
    "qwen2_vl": _QWEN2,
    "qwen3_5": _QWEN3,
    "qwen3_5_moe": _QWEN3,
    "qwen3_vl": _QWEN3,
    "qwen3_vl_moe": _QWEN3,
    "smolvlm": ("SmolVLMVideoProcessor", _smolvlm),
}
"""`model_type` -> class of the video processor, and its reader."""
