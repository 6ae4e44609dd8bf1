"""transformers' own processors with the presets' settings: the reference that counts and pixels are
compared with.

The tokenizer knows nothing but the image tokens, which is enough for a processor to write an image
into a text. Without torchvision the `*ImageProcessorPil` classes do the work (the same Pillow
resize as the slow processors).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    InternVLProcessor,
    LlavaNextProcessor,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    Qwen2VLProcessor,
)
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import (
    LlavaNextImageProcessorPil,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from isobatch.models.image_rules import AnyresRule, FixedRule, NativeRule, TilesRule
from isobatch.models.presets import ModelPreset


class _WithoutVideo:
    """No video processor (it needs torchvision, even for the check of its type)."""

    def check_argument_for_proper_class(self, *_: Any) -> None: ...


class _InternVL(_WithoutVideo, InternVLProcessor): ...


class _Qwen2VL(_WithoutVideo, Qwen2VLProcessor): ...


def _tokenizer(**special: str) -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="[UNK]", pad_token="[UNK]", extra_special_tokens=special
    )


def reference_processor(preset: ModelPreset) -> Any:
    """The processor of the model that `preset` describes."""
    rule, markup = preset.vision, preset.image_markup
    pixels = {"image_mean": list(rule.mean), "image_std": list(rule.std)}
    clip = {
        "patch_size": 14,
        "vision_feature_select_strategy": "default",
        "num_additional_image_tokens": 1,
    }
    match rule:
        case FixedRule():
            size = {"size": {"shortest_edge": rule.image_size}, "crop_size": rule.image_size}
            return LlavaProcessor(
                LlavaImageProcessorPil(**size, **pixels),
                _tokenizer(image_token=markup.token),
                **clip,
            )
        case AnyresRule():
            size = {"size": {"shortest_edge": rule.image_size}, "crop_size": rule.image_size}
            grids = [list(pinpoint) for pinpoint in rule.grid_pinpoints]
            images = LlavaNextImageProcessorPil(**size, **pixels, image_grid_pinpoints=grids)
            return LlavaNextProcessor(images, _tokenizer(image_token=markup.token), **clip)
        case TilesRule():
            size = {"size": {"height": rule.image_size, "width": rule.image_size}}
            tiles = {
                "min_patches": rule.min_patches,
                "max_patches": rule.max_patches,
                "crop_to_patches": True,
            }
            tokenizer = _tokenizer(
                start_image_token=markup.prefix,
                end_image_token=markup.suffix,
                context_image_token=markup.token,
                video_token="<video>",
            )
            images = GotOcr2ImageProcessorPil(**size, **pixels, **tiles)
            return _InternVL(images, tokenizer, None, image_seq_length=rule.llm_tokens_per_patch)
        case NativeRule():
            names = ("merge_size", "temporal_patch_size", "min_pixels", "max_pixels")
            squares = {name: getattr(rule, name) for name in names}
            images = Qwen2VLImageProcessorPil(patch_size=rule.vit_patch_size, **squares, **pixels)
            return _Qwen2VL(
                images, _tokenizer(image_token=markup.token, video_token="<|video_pad|>"), None
            )


def random_image(rng: np.random.Generator, width: int, height: int) -> Image.Image:
    """Coarse blobs with fine noise: a flat image would hide a wrong filter, pure noise a wrong
    place.
    """
    coarse = Image.fromarray(rng.integers(0, 256, (5, 7, 3), dtype=np.uint8)).resize(
        (width, height)
    )
    noise: NDArray[np.int64] = rng.integers(-30, 31, (height, width, 3))
    return Image.fromarray(np.clip(np.asarray(coarse) + noise, 0, 255).astype(np.uint8))
