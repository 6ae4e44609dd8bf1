"""LLaVA families: one square (1.5), tiles of a grid (NeXT, OneVision). Pure."""

from isobatch.models.folder.files import ModelFiles
from isobatch.models.folder.json_table import JsonTable
from isobatch.models.folder.pixels import HARMLESS, edges, pixels_of, square_side
from isobatch.models.folder.shapes import part_of, preset_of, vit_shape
from isobatch.models.image_rules.anyres import AnyresRule
from isobatch.models.image_rules.fixed import FixedRule
from isobatch.models.presets import MediaMarkup, ModelPreset

_PROCESSOR_HARMLESS = ("processor_class", "image_token", "auto_map", "video_token")


def read_llava(files: ModelFiles) -> ModelPreset:
    """LLaVA-1.5: the shorter edge resized, centre crop, one patch."""
    images = files.image_table("CLIPImageProcessor", "LlavaImageProcessor")
    side = _crop_side(images)
    images.require("do_pad", False)
    pixels = pixels_of(images)
    images.require_read((*HARMLESS, "default_to_square"))
    tokens, vit_tokens = _tokens_per_patch(files, side)
    rule = FixedRule(
        **pixels, image_size=side, vit_tokens_per_patch=vit_tokens, llm_tokens_per_patch=tokens
    )
    return _preset(files, rule, "one square per image")


def read_llava_next(files: ModelFiles) -> ModelPreset:
    """LLaVA-NeXT: tiles of the best grid, the whole image, newlines."""
    images = files.image_table("LlavaNextImageProcessor")
    side = _crop_side(images)
    pixels = pixels_of(images)
    pinpoints = _pinpoints(images)
    images.require_read((*HARMLESS, "default_to_square", "do_pad"))
    tokens, vit_tokens = _tokens_per_patch(files, side)
    patch = _patch_size(files)
    if tokens != (side // patch) ** 2:
        raise files.processor_table().wrong(
            "vision_feature_select_strategy", "LLaVA-NeXT keeps no class token"
        )
    rule = AnyresRule(
        **pixels,
        image_size=side,
        vit_patch_size=patch,
        vit_tokens_per_patch=vit_tokens,
        grid_pinpoints=pinpoints,
    )
    return _preset(files, rule, "anyres tiles")


def read_llava_onevision(files: ModelFiles) -> ModelPreset:
    """LLaVA-OneVision: as NeXT, fewer features above nine crops' worth; SigLIP."""
    images = files.image_table("LlavaOnevisionImageProcessor")
    side = square_side(images)
    pixels = pixels_of(images)
    pinpoints = _pinpoints(images)
    images.require_read((*HARMLESS, "default_to_square", "do_pad"))
    patch = part_of(files, "vision_config").count("patch_size")
    tokens = (side // patch) ** 2
    processor = files.processor_table()
    processor.require("num_image_tokens", tokens)
    processor.require("vision_feature_select_strategy", "full")
    aspect = processor.value("vision_aspect_ratio") or "anyres_max_9"
    max_crops = str(aspect).removeprefix("anyres_max_")
    if not max_crops.isdigit():
        raise processor.wrong("vision_aspect_ratio", "only anyres_max_N is supported")
    processor.require_read(_PROCESSOR_HARMLESS)
    rule = AnyresRule(
        **pixels,
        image_size=side,
        vit_patch_size=patch,
        vit_tokens_per_patch=tokens,
        grid_pinpoints=pinpoints,
        anyres_max=int(max_crops),
    )
    return _preset(files, rule, "anyres tiles")


def _preset(files: ModelFiles, rule: AnyresRule | FixedRule, images: str) -> ModelPreset:
    """What the three have in common; `images`: what becomes of one, for people."""
    width = part_of(files, "text_config").count("hidden_size")
    vision = part_of(files, "vision_config")
    layers = files.config_table().value("vision_feature_layer")
    features = vision.count("hidden_size") * (len(layers) if isinstance(layers, list) else 1)
    token = files.processor_table().value("image_token")
    token = files.named_token("image_token", token if isinstance(token, str) else "<image>")
    vit = vit_shape(vision, (features, width, width))
    return preset_of(files, images, MediaMarkup(token=token), rule, vit)


def _pinpoints(images: JsonTable) -> tuple[tuple[int, int], ...]:
    """(height, width) of the grids, in the file's order, which breaks ties."""
    pairs = images.value("image_grid_pinpoints")
    if not isinstance(pairs, list) or any(
        not isinstance(pair, list) or len(pair) != 2 or any(type(side) is not int for side in pair)
        for pair in pairs
    ):
        raise images.wrong("image_grid_pinpoints", "give a list of [height, width]")
    return tuple((height, width) for height, width in pairs)


def _crop_side(images: JsonTable) -> int:
    """The side of the centre crop, which must be what the shorter edge is resized to."""
    images.require("do_center_crop", True)
    side = square_side(images, "crop_size")
    if edges(images) != {"shortest_edge": side}:
        raise images.wrong("size", f"only a shortest_edge of crop_size, {side}, is supported")
    return side


def _patch_size(files: ModelFiles) -> int:
    """Pixels of a ViT patch: the processor's, else the encoder's."""
    processor = files.processor_table()
    if "patch_size" in processor:
        return processor.count("patch_size")
    return part_of(files, "vision_config").count("patch_size")


def _tokens_per_patch(files: ModelFiles, side: int) -> tuple[int, int]:
    """LLM tokens and ViT tokens of a square, as the processor counts them."""
    processor = files.processor_table()
    processor.value("patch_size")
    strategy = processor.value("vision_feature_select_strategy")
    processor.require("vision_feature_select_strategy", "default", "full")
    extra = processor.whole("num_additional_image_tokens")
    processor.require_read(_PROCESSOR_HARMLESS)
    vision = part_of(files, "vision_config")
    has_class_token = vision.text("model_type") == "clip_vision_model"
    if strategy is None:  # processors of 2024 left it to the model, as they do the patches
        strategy = files.config_table().text("vision_feature_select_strategy")
        extra = int(has_class_token)
    patches = (side // _patch_size(files)) ** 2
    return patches + extra - (strategy == "default"), patches + has_class_token
