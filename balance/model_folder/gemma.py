"""Gemma 3 and PaliGemma (one square), Gemma 4 (a budget of tokens). Pure."""

from balance.media.rules.budget import BudgetRule
from balance.media.rules.fixed import FixedRule
from balance.model_folder.files import ModelFiles
from balance.model_folder.json_table import JsonTable
from balance.model_folder.pixels import HARMLESS, pixels_of, square_side
from balance.model_folder.shapes import llm_shape, part_of, vit_shape
from balance.presets import MediaMarkup, ModelPreset

_PAN_AND_SCAN = (
    *("do_pan_and_scan", "pan_and_scan_min_crop_size", "pan_and_scan_max_num_crops"),
    "pan_and_scan_min_ratio_to_activate",
)
"""Gemma3Processor's own settings, off, win over those of the image processor's file."""
_PROCESSOR_HARMLESS = (
    *("processor_class", "auto_map", "audio_seq_length", "audio_ms_per_token"),
    "image_seq_length",
)
_GEMMA3_TOKENS = 256
"""`image_seq_length` of Gemma3Processor."""


def read_gemma3(files: ModelFiles) -> ModelPreset:
    """Gemma 3: every image squashed to one square; markup between empty lines."""
    images = files.image_table("Gemma3ImageProcessor")
    processor = files.processor_table()
    tokens = _GEMMA3_TOKENS
    if "image_seq_length" in processor:
        tokens = processor.count("image_seq_length")
    processor.require_read(_PROCESSOR_HARMLESS)
    start = files.named_token("boi_token", "<start_of_image>")
    markup = MediaMarkup(
        token=files.named_token("image_token", "<image_soft_token>"),
        placeholder=start,
        prefix=f"\n\n{start}",
        suffix=f"{files.named_token('eoi_token', '<end_of_image>')}\n\n",
    )
    return _one_square(files, images, tokens, markup)


def read_paligemma(files: ModelFiles) -> ModelPreset:
    """PaliGemma and PaliGemma 2: every image squashed to one square.

    The processor also puts the begin token after the images and ends the prompt with a line break;
    the chat template that is given (there is none of its own) must write these.
    """
    images = files.image_table("SiglipImageProcessor")
    tokens = images.count("image_seq_length")
    files.processor_table().require_read(_PROCESSOR_HARMLESS)
    markup = MediaMarkup(token=files.named_token("image_token", "<image>"))
    return _one_square(files, images, tokens, markup)


def read_gemma4(files: ModelFiles) -> ModelPreset:
    """Gemma 4: the largest size within a budget of tokens; no dimensions yet."""
    images = files.image_table("Gemma4ImageProcessor")
    rule = BudgetRule(
        **pixels_of(images),
        vit_patch_size=images.count("patch_size"),
        pool_size=images.count("pooling_kernel_size"),
        max_tokens=images.count("max_soft_tokens"),
    )
    images.require_read((*HARMLESS, "default_to_square", "image_seq_length", "size"))
    files.processor_table().require_read(_PROCESSOR_HARMLESS)
    token = files.named_token("image_token")
    return ModelPreset(
        name=files.model_type,
        description=f"{files.model_type}: a budget of tokens, from the model's own files",
        context_len=part_of(files, "text_config").count("max_position_embeddings"),
        image_markup=MediaMarkup(
            token=token,
            placeholder=token,
            prefix=files.named_token("boi_token"),
            suffix=files.named_token("eoi_token"),
        ),
        vision=rule,
    )


def _one_square(
    files: ModelFiles, images: JsonTable, tokens: int, markup: MediaMarkup
) -> ModelPreset:
    side = square_side(images)
    pixels = pixels_of(images)
    images.require_read((*HARMLESS, *_PAN_AND_SCAN, "default_to_square", "image_seq_length"))
    vision, text = part_of(files, "vision_config"), part_of(files, "text_config")
    vit_tokens = (side // vision.count("patch_size")) ** 2
    return ModelPreset(
        name=files.model_type,
        description=f"{files.model_type}: one square per image, from the model's own files",
        context_len=text.count("max_position_embeddings"),
        image_markup=markup,
        vision=FixedRule(
            **pixels,
            image_size=side,
            vit_tokens_per_patch=vit_tokens,
            llm_tokens_per_patch=tokens,
            crop=False,
        ),
        vit=vit_shape(
            vision,
            (vision.count("hidden_size"), text.count("hidden_size")),
            pooled=vit_tokens // tokens,
        ),
        llm=llm_shape(text),
    )
