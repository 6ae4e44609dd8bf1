"""InternVL in transformers' own form: 2.5, 3 and 3.5 (`InternVL3-8B-hf`). Pure."""

from isobatch.models.folder.files import ModelFiles
from isobatch.models.folder.pixels import HARMLESS, pixels_of, square_side
from isobatch.models.folder.shapes import part_of, preset_of, vit_shape
from isobatch.models.image_rules import TilesRule
from isobatch.models.presets import MediaMarkup, ModelPreset

_DEFAULT_TOKENS = 256
"""`image_seq_length` of InternVLProcessor."""


def read_internvl(files: ModelFiles) -> ModelPreset:
    """Tiles of the closest aspect ratio, and a thumbnail."""
    images = files.image_table("GotOcr2ImageProcessor")
    side = square_side(images)
    pixels = pixels_of(images)
    max_patches = images.count("max_patches")
    # InternVLProcessor cuts tiles whatever the image processor's own file says
    images.require_read((*HARMLESS, "default_to_square", "crop_to_patches", "min_patches"))
    processor = files.processor_table()
    tokens = processor.count_or("image_seq_length", _DEFAULT_TOKENS)
    processor.require_read(("processor_class", "auto_map"))
    vision = part_of(files, "vision_config")
    width = part_of(files, "text_config").count("hidden_size")
    merged = round(1 / files.config_table().number("downsample_ratio"))
    markup = MediaMarkup(
        token=files.named_token("context_image_token", "<IMG_CONTEXT>"),
        prefix=files.named_token("start_image_token", "<img>"),
        suffix=files.named_token("end_image_token", "</img>"),
    )
    rule = TilesRule(
        **pixels,
        image_size=side,
        vit_tokens_per_patch=(side // vision.count("patch_size")) ** 2 + 1,
        llm_tokens_per_patch=tokens,
        min_patches=images.count("min_patches") if max_patches > 1 else 1,
        max_patches=max_patches,
    )
    projector = vision.count("hidden_size") * merged**2, width, width
    vit = vit_shape(vision, projector, layer_scale=True)
    return preset_of(files, "tiles and a thumbnail", markup, rule, vit)
