"""MiniCPM-V 4.6: the whole image, and slices of a larger picture of it. Pure."""

from isobatch.models.folder.files import ModelFiles
from isobatch.models.folder.pixels import HARMLESS, pixels_of
from isobatch.models.folder.shapes import part_of
from isobatch.models.image_rules.slices import SlicesRule
from isobatch.models.presets import MediaMarkup, ModelPreset

_MERGED = {"16x": 4, "4x": 2}
"""`downsample_mode` -> side of the square of ViT patches that becomes one LLM token."""


def read_minicpm(files: ModelFiles) -> ModelPreset:
    """Numbers of images are in the text unless `use_image_id` is off; no dimensions yet."""
    images = files.image_table("MiniCPMV4_6ImageProcessor")
    pixels = pixels_of(images)
    images.require("slice_mode", True)
    images.require("downsample_mode", *_MERGED)
    rule = SlicesRule(
        **pixels,
        vit_patch_size=images.count("patch_size"),
        slice_size=images.count("scale_resolution"),
        max_slices=images.count("max_slice_nums"),
        merge_size=_MERGED[images.text("downsample_mode")],
    )
    numbered = images.value("use_image_id") is not False
    images.require_read((*HARMLESS, "default_to_square", "size"))
    files.processor_table().require_read(("processor_class", "auto_map"))
    context_len = part_of(files, "text_config").count("max_position_embeddings")
    image = files.named_token("image_token")
    names = ("image_start", "image_end", "slice_start", "slice_end", "image_id_start")
    start, end, slice_start, slice_end, id_start = (
        files.named_token(f"{name}_token") for name in names
    )
    id_end = files.named_token("image_id_end_token") if numbered else ""
    return ModelPreset(
        name=files.model_type,
        description=f"{files.model_type}: slices, from the model's own files",
        context_len=context_len,
        image_markup=MediaMarkup(
            token=image,
            placeholder=image,
            prefix=f"{id_start}{{number}}{id_end}" if numbered else "",
            parts=(
                ("whole", f"{start}{image}{end}"),
                ("slice", f"{slice_start}{image}{slice_end}"),
                ("row_break", "\n"),
            ),
        ),
        vision=rule,
    )
