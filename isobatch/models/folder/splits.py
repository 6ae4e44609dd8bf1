"""Idefics3 and SmolVLM: tiles of a fixed longer side, and the whole image. Pure."""

from isobatch.models.folder.files import ModelFiles
from isobatch.models.folder.pixels import HARMLESS, longest_edge, pixels_of
from isobatch.models.folder.shapes import part_of, preset_of, vit_shape
from isobatch.models.image_rules.splits import SplitsRule
from isobatch.models.presets import MediaMarkup, ModelPreset

_DEFAULT_TOKENS = 169
"""`image_seq_len` of both processors."""


def read_splits(files: ModelFiles) -> ModelPreset:
    """Rows and columns of tiles are written in the text."""
    images = files.image_table("Idefics3ImageProcessor", "SmolVLMImageProcessor")
    side, longest = (longest_edge(images, key) for key in ("max_image_size", "size"))
    pixels = pixels_of(images)
    split = images.value("do_image_splitting") is not False
    # padding is of the batch, and the processor asks for rows and columns itself
    images.require_read((*HARMLESS, "default_to_square", "do_pad", "return_row_col_info"))
    processor = files.processor_table()
    tokens = processor.count_or("image_seq_len", _DEFAULT_TOKENS)
    processor.require_read(("processor_class", "auto_map"))
    vision = part_of(files, "vision_config")
    merged = vision.count("hidden_size") * files.config_table().count("scale_factor") ** 2
    image = files.named_token("image_token", "<image>")
    fake = files.named_token("fake_image_token", "<fake_token_around_image>")
    whole = f"{fake}{files.named_token('global_image_token', '<global-img>')}{image}{fake}"
    markup = MediaMarkup(
        token=image,
        placeholder=image,
        parts=(
            ("tile", f"{fake}<row_{{row}}_col_{{column}}>{image}"),
            ("row", "\n"),
            ("whole", f"\n{whole}"),
            ("single", whole),
        ),
    )
    rule = SplitsRule(
        **pixels,
        image_size=side,
        vit_tokens_per_patch=(side // vision.count("patch_size")) ** 2,
        llm_tokens_per_patch=tokens,
        longest_side=longest,
        split=split,
    )
    width = part_of(files, "text_config").count("hidden_size")
    vit = vit_shape(vision, (merged, width))
    return preset_of(files, "tiles and the whole image", markup, rule, vit)
