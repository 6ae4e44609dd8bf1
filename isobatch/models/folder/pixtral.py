"""Pixtral 12B and Mistral 3: native resolution, a break after each row. Pure."""

from isobatch.models.folder.files import ModelFiles
from isobatch.models.folder.pixels import HARMLESS, longest_edge, pixels_of
from isobatch.models.folder.shapes import llm_shape, part_of, vit_shape
from isobatch.models.image_rules.pixtral import PixtralRule
from isobatch.models.presets import MediaMarkup, ModelPreset

_PATCH_SIZE, _MERGE_SIZE = 16, 1
"""`patch_size` and `spatial_merge_size` of PixtralProcessor."""


def read_pixtral(files: ModelFiles) -> ModelPreset:
    """Pixtral (of `model_type` llava, with Pixtral's encoder) and Mistral 3."""
    images = files.image_table("PixtralImageProcessor")
    longest_side = longest_edge(images)
    pixels = pixels_of(images)
    # the processor's patch size wins; padding is of the batch
    images.require_read((*HARMLESS, "default_to_square", "do_pad", "patch_size"))
    processor = files.processor_table()
    patch = processor.count_or("patch_size", _PATCH_SIZE)
    merge = processor.count_or("spatial_merge_size", _MERGE_SIZE)
    names = {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]"}
    names["image_end_token"] = "[IMG_END]"
    image, row_break, end = (
        processor.text(key) if key in processor else default for key, default in names.items()
    )
    parts = (("row", f"{image}{row_break}"), ("last_row", f"{image}{end}"))
    processor.require_read(("processor_class", "auto_map"))
    vision, text = part_of(files, "vision_config"), part_of(files, "text_config")
    encoder, width = vision.count("hidden_size"), text.count("hidden_size")
    merger = (encoder * merge**2, encoder) if merge > 1 else (encoder,)
    return ModelPreset(
        name=files.model_type if files.model_type != "llava" else "pixtral",
        description="Pixtral's encoder: native resolution in rows, from the model's own files",
        context_len=text.count("max_position_embeddings"),
        image_markup=MediaMarkup(token=image, placeholder=image, parts=parts),
        vision=PixtralRule(
            **pixels, vit_patch_size=patch, merge_size=merge, longest_side=longest_side
        ),
        vit=vit_shape(vision, (*merger, width, width)),
        llm=llm_shape(text),
    )
