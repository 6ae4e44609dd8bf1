"""transformers' processors of families whose rules came with version 0.2: counts and pixels.

Each `Family` asks the processor's own code. Where that needs torchvision, the function is taken out
of its file. Sizes are asked with arrays of one byte that claim a shape, so 5,000 take seconds.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import transformers
from numpy.typing import NDArray
from PIL import Image
from transformers.image_transforms import convert_to_rgb
from transformers.image_utils import SizeDict
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.gemma4.processing_gemma4 import Gemma4Processor
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.glm4v.image_processing_pil_glm4v import smart_resize as glm_resize
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
    LlavaOnevisionImageProcessorPil,
)
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor
from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import (
    MiniCPMV4_6ImageProcessorPil,
)
from transformers.models.pixtral.image_processing_pil_pixtral import (
    PixtralImageProcessorPil,
    get_resize_output_image_size,
)
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from isobatch.models.image_rules import (
    AnyresRule,
    BudgetRule,
    FixedRule,
    NativeRule,
    NavitRule,
    PixtralRule,
    SlicesRule,
    SplitsRule,
    VisionRule,
)
from isobatch.models.presets import load_model

Size = tuple[int, int]
"""(width, height)"""
Rows = NDArray[np.float32]
CLIP = {
    "mean": (0.48145466, 0.4578275, 0.40821073),
    "std": (0.26862954, 0.26130258, 0.27577711),
}
HALF = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
PLAIN = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}


@dataclass(frozen=True)
class Family:
    """A rule, and what transformers makes of images with the same settings."""

    rule: VisionRule
    tokens: Callable[[Size], int]
    """Image tokens; ValueError for a size that the processor refuses."""
    pixels: Callable[[list[Image.Image]], list[Rows]]
    """Rows of pixels of each image of one sample, (rows, 3 * side * side)."""
    tokens_of_several: int | None = None
    """Image tokens of each image of a sample with several, if that differs."""


@cache
def _source_of(file: str) -> ast.Module:
    return ast.parse((Path(transformers.__file__).parent / "models" / file).read_text("utf-8"))


def function_of(file: str, name: str, names: dict[str, Any] | None = None) -> Any:
    """A function or method of transformers' source that cannot be imported without torchvision.

    `names` are what it knows besides `math`.
    """
    for node in ast.walk(_source_of(file)):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            node.decorator_list = []
            found: dict[str, Any] = {"math": math, **(names or {})}
            future = ast.parse("from __future__ import annotations").body
            exec(compile(ast.Module([*future, node], []), file, "exec"), found)
            return found[name]
    raise ValueError(f"{file} has no function {name}")


def shape_only(size: Size) -> NDArray[np.uint8]:
    """An image of that size that takes no memory, channels first."""
    return np.broadcast_to(np.uint8(0), (3, size[1], size[0]))


@contextmanager
def resizing_shapes() -> Iterator[None]:
    """Processors resize nothing meanwhile, but give arrays of the new shape."""
    from transformers import image_processing_backends as backends  # noqa: PLC0415

    resize = backends.np_resize
    backends.np_resize = lambda image, size, **_: shape_only((size[1], size[0]))
    try:
        yield
    finally:
        backends.np_resize = resize


def _options(rule: VisionRule) -> dict[str, Any]:
    filters = Image.Resampling
    resample = {"bicubic": filters.BICUBIC, "bilinear": filters.BILINEAR}
    return {
        "image_mean": list(rule.mean),
        "image_std": list(rule.std),
        "resample": resample.get(rule.resample, filters.LANCZOS),
    }


def _flat(pixels: Any) -> Rows:
    """Crops as rows."""
    array = np.asarray(pixels, np.float32)
    return array.reshape(len(array), -1)


def _patches(image: Any, side: int) -> Rows:
    """ViT patches of an image (3, height, width), row by row, channels first in each."""
    array = np.asarray(image, np.float32)
    rows, columns = array.shape[1] // side, array.shape[2] // side
    blocks = array.reshape(3, rows, side, columns, side).transpose(1, 3, 0, 2, 4)
    return blocks.reshape(rows * columns, -1)


def fixed(rule: FixedRule, kind: Any) -> Family:
    size = {"height": rule.image_size, "width": rule.image_size}
    # null in the files of Gemma 3 and PaliGemma
    processor = kind(size=size, do_convert_rgb=rule.convert_rgb or None, **_options(rule))

    def pixels(images: list[Image.Image]) -> list[Rows]:
        made = processor(images, return_tensors="np")["pixel_values"]
        return [_flat(made[i : i + 1]) for i in range(len(images))]

    return Family(rule, lambda _: rule.llm_tokens_per_patch, pixels)


def onevision(rule: AnyresRule) -> Family:
    grids = [list(pinpoint) for pinpoint in rule.grid_pinpoints]
    size = {"height": rule.image_size, "width": rule.image_size}
    images = LlavaOnevisionImageProcessorPil(
        size=size, image_grid_pinpoints=grids, **_options(rule)
    )
    fake = SimpleNamespace(
        image_processor=images,
        num_image_tokens=(rule.image_size // rule.vit_patch_size) ** 2,
        vision_aspect_ratio=f"anyres_max_{rule.anyres_max}",
    )
    unpadded = LlavaOnevisionProcessor._get_unpadded_features
    fake._get_unpadded_features = lambda *args: unpadded(fake, *args)

    def tokens(size: Size) -> int:
        side = rule.image_size
        count = LlavaOnevisionProcessor._get_number_of_features(fake, size[1], size[0], side, side)
        return int(count)

    def pixels(sample: list[Image.Image]) -> list[Rows]:
        made = images([sample], return_tensors="np", do_pad=False)["pixel_values"]
        return [_flat(crops) for crops in made]

    return Family(rule, tokens, pixels, tokens_of_several=fake.num_image_tokens + 1)


def splits(rule: SplitsRule, kind: Any = Idefics3ImageProcessorPil) -> Family:
    options = {
        "size": {"longest_edge": rule.longest_side},
        "max_image_size": {"longest_edge": rule.image_size},
        "do_image_splitting": rule.split,
    }
    processor = kind(**options, **_options(rule))

    def tokens(size: Size) -> int:
        with resizing_shapes():
            image = processor.resize(shape_only(size), SizeDict(longest_edge=rule.longest_side))
            image = processor.resize_for_vision_encoder(image, rule.image_size)
            crops, _, _ = processor.split_images(image, {"longest_edge": rule.image_size})
        return len(crops) * rule.llm_tokens_per_patch

    def pixels(sample: list[Image.Image]) -> list[Rows]:
        return [
            _flat(processor([[image]], return_tensors="np")["pixel_values"][0]) for image in sample
        ]

    return Family(rule, tokens, pixels)


def gemma4(rule: BudgetRule) -> Family:
    processor = Gemma4ImageProcessorPil(
        patch_size=rule.vit_patch_size,
        max_soft_tokens=rule.max_tokens,
        pooling_kernel_size=rule.pool_size,
    )
    fake = SimpleNamespace(image_processor=processor, _merge_kwargs=lambda: {"images_kwargs": {}})

    def tokens(size: Size) -> int:
        made = Gemma4Processor._get_num_multimodal_tokens(fake, [(size[1], size[0])])
        return int(made.num_image_tokens[0])

    def pixels(sample: list[Image.Image]) -> list[Rows]:
        side, rows = rule.vit_patch_size, []
        for image in sample:
            made = processor([image], return_tensors="np")
            count = int((made["image_position_ids"][0, :, 0] >= 0).sum())
            patches = made["pixel_values"][0, :count].reshape(count, side, side, 3)
            rows.append(_flat(patches.transpose(0, 3, 1, 2)))
        return rows

    return Family(rule, tokens, pixels)


def pixtral(rule: PixtralRule) -> Family:
    unit = rule.vit_patch_size * rule.merge_size
    size = {"longest_edge": rule.longest_side}
    processor = PixtralImageProcessorPil(size=size, patch_size=unit, **_options(rule))

    def tokens(size: Size) -> int:
        longest = (rule.longest_side, rule.longest_side)
        height, width = get_resize_output_image_size(shape_only(size), longest, (unit, unit))
        if not height * width:
            raise ValueError("nothing is left, and Pillow refuses to resize to it")
        return height // unit * (width // unit)

    def pixels(sample: list[Image.Image]) -> list[Rows]:
        made = (processor([image], return_tensors="np") for image in sample)
        return [_patches(one["pixel_values"][0], rule.vit_patch_size) for one in made]

    return Family(rule, tokens, pixels)


def kimi(rule: NavitRule) -> Family:
    navit_resize = function_of("kimi_k25/image_processing_kimi_k25.py", "navit_resize")

    def sizes(size: Size) -> tuple[Size, Size]:
        (height, width), (padded_height, padded_width) = navit_resize(
            size[1], size[0], rule.vit_patch_size, rule.merge_size, rule.max_patches, rule.max_side
        )
        return (width, height), (padded_width, padded_height)

    def tokens(size: Size) -> int:
        width, height = sizes(size)[1]
        return width * height // (rule.vit_patch_size * rule.merge_size) ** 2

    def pixels(sample: list[Image.Image]) -> list[Rows]:
        rows = []
        for image in sample:
            resized, padded = sizes(image.size)
            canvas = Image.new("RGB", padded)
            rgb = Image.fromarray(convert_to_rgb(image, return_numpy=True))
            canvas.paste(rgb.resize(resized, Image.Resampling.BICUBIC))
            values = (np.asarray(canvas) / 255 - rule.mean) / rule.std
            rows.append(_patches(values.transpose(2, 0, 1), rule.vit_patch_size))
        return rows

    return Family(rule, tokens, pixels)


def minicpm(rule: SlicesRule) -> Family:
    processor = MiniCPMV4_6ImageProcessorPil(
        max_slice_nums=rule.max_slices,
        scale_resolution=rule.slice_size,
        patch_size=rule.vit_patch_size,
        downsample_mode="16x" if rule.merge_size == 4 else "4x",
        **_options(rule),
    )
    # the counts need no pixels
    processor_of_shapes = MiniCPMV4_6ImageProcessorPil(**processor.to_dict())
    processor_of_shapes.reshape_by_patch = lambda *_: np.zeros((3, 1, 1), np.uint8)

    def tokens(size: Size) -> int:
        plain = {"do_rescale": False, "do_normalize": False, "return_tensors": "np"}
        with resizing_shapes():
            made = processor_of_shapes(
                shape_only(size), input_data_format="channels_first", **plain
            )
        return int((made["target_sizes"].prod(-1) // rule.merge_size**2).sum())

    def pixels(sample: list[Image.Image]) -> list[Rows]:
        side, rows = rule.vit_patch_size, []
        for image in sample:
            made = processor([image], return_tensors="np")["pixel_values"][0]
            rows.append(_patches(made, side))  # one row of patches after another
        return rows

    return Family(rule, tokens, pixels)


def glm(rule: NativeRule) -> Family:
    unit = rule.vit_patch_size * rule.merge_size
    size = {"shortest_edge": rule.min_pixels, "longest_edge": rule.max_pixels}
    processor = Glm4vImageProcessorPil(
        size=size, patch_size=rule.vit_patch_size, merge_size=rule.merge_size, **_options(rule)
    )

    def tokens(size: Size) -> int:
        frames = rule.temporal_patch_size
        limits = {"min_pixels": rule.min_pixels, "max_pixels": rule.max_pixels}
        height, width = glm_resize(frames, size[1], size[0], frames, unit, **limits)
        return height * width // unit**2

    def pixels(sample: list[Image.Image]) -> list[Rows]:
        return [_flat(processor([one], return_tensors="np")["pixel_values"]) for one in sample]

    return Family(rule, tokens, pixels)


_IDEFICS: dict[str, Any] = {"vit_tokens_per_patch": 676, "resample": "lanczos", **HALF}
_GLM: dict[str, Any] = {
    "merge_size": 2,
    "temporal_patch_size": 2,
    "max_aspect_ratio": 200.0,
    "frames_in_area": 2,
    "scales_up": True,
    **CLIP,
}
_MINICPM: dict[str, Any] = {"vit_patch_size": 14, "slice_size": 448, "max_slices": 9, **HALF}
_GEMMA4: dict[str, Any] = {"vit_patch_size": 16, "pool_size": 3, **PLAIN}
_SIGLIP: dict[str, Any] = {"vit_tokens_per_patch": 4096, "crop": False, **HALF}


def families() -> dict[str, Family]:
    """Each family with its released settings, and some with others."""
    shipped = {
        name: load_model(name).vision
        for name in ("gemma3", "llava_onevision", "smolvlm2", "idefics3", "pixtral", "mistral3")
    }
    return {
        "gemma3": fixed(shipped["gemma3"], Gemma3ImageProcessorPil),
        "paligemma2": fixed(
            FixedRule(image_size=224, llm_tokens_per_patch=256, **_SIGLIP), SiglipImageProcessorPil
        ),
        "llava_onevision": onevision(shipped["llava_onevision"]),
        "smolvlm2": splits(shipped["smolvlm2"]),
        "idefics3": splits(shipped["idefics3"]),
        "idefics3 of odd sides": splits(
            SplitsRule(image_size=224, llm_tokens_per_patch=3, longest_side=5000, **_IDEFICS)
        ),
        "idefics3 of one tile": splits(
            SplitsRule(image_size=364, llm_tokens_per_patch=9, longest_side=300, **_IDEFICS)
        ),
        "gemma4": gemma4(BudgetRule(max_tokens=280, **_GEMMA4)),
        "gemma4 of 70": gemma4(BudgetRule(max_tokens=70, **_GEMMA4)),
        "glm4v": glm(
            NativeRule(vit_patch_size=14, min_pixels=12_544, max_pixels=11_760_000, **_GLM)
        ),
        "minicpm_v": minicpm(SlicesRule(**_MINICPM)),
        "minicpm_v 4x": minicpm(SlicesRule(merge_size=2, **_MINICPM)),
        "kimi_vl": kimi(
            NavitRule(vit_patch_size=14, merge_size=2, max_patches=16384, max_side=512, **HALF)
        ),
        "kimi_vl of 1024": kimi(
            NavitRule(vit_patch_size=14, merge_size=2, max_patches=1024, max_side=40, **HALF)
        ),
        "pixtral": pixtral(shipped["pixtral"]),
        "mistral3": pixtral(shipped["mistral3"]),
    }
