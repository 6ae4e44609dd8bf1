"""Settings that all image processors of transformers share: pixels, sizes. Pure."""

from typing import Any

from isobatch.models.folder.json_table import JsonTable

HARMLESS = (
    *("auto_map", "data_format", "device", "disable_grouping", "do_convert_rgb", "do_normalize"),
    *("feature_extractor_type", "image_processor_type", "image_token", "input_data_format"),
    *("processor_class", "resample", "return_tensors", "_valid_processor_keys"),
)
"""Keys of image processors that change neither counts nor pixels, or that `pixels_of` looks at."""

_FILTERS = {1: "lanczos", 2: "bilinear", 3: "bicubic"}
"""Pillow's number of a filter -> its name in a rule."""


def pixels_of(images: JsonTable) -> dict[str, Any]:
    """Mean, std, filter and colours of a rule; ConfigError for what the loader does not do."""
    images.require("do_resize", True)
    images.require("do_rescale", True)
    images.require("do_convert_rgb", True, False)
    images.require("resample", *_FILTERS)
    if abs(images.number("rescale_factor") * 255 - 1) > 1e-6:
        raise images.wrong("rescale_factor", "only 1/255 is supported")
    pixels: dict[str, Any] = {"resample": _FILTERS[images.count("resample")]}
    if images.value("do_convert_rgb") is False or images.is_null("do_convert_rgb"):
        pixels["convert_rgb"] = False
    for key in ("image_mean", "image_std"):
        images.value(key)  # written even where nothing is normalised
    if images.value("do_normalize") is False:
        return {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0), **pixels}
    mean, std = images.triple("image_mean"), images.triple("image_std")
    return {"mean": mean, "std": std, **pixels}


def edges(images: JsonTable, key: str = "size") -> dict[str, int]:
    """A size as transformers understands it: by edge, or height and width; ints are old style."""
    value = images.value(key)
    if type(value) is int:
        square = key != "size" or bool(images.value("default_to_square"))
        value = {"height": value, "width": value} if square else {"shortest_edge": value}
    if isinstance(value, list) and len(value) == 2:
        value = {"height": value[0], "width": value[1]}
    is_table = isinstance(value, dict) and all(
        type(side) is int and side > 0 for side in value.values() if side is not None
    )
    if not is_table:
        raise images.wrong(key, "give sizes of edges in pixels, all greater than 0")
    return {name: side for name, side in value.items() if side is not None}


def longest_edge(images: JsonTable, key: str = "size") -> int:
    """The longest edge, if the size says no other; ConfigError if it does."""
    size = edges(images, key)
    if set(size) != {"longest_edge"}:
        raise images.wrong(key, "only longest_edge is supported")
    return size["longest_edge"]


def square_side(images: JsonTable, key: str = "size") -> int:
    """The side of a square size; ConfigError if it is none."""
    size = edges(images, key)
    sides = {size.get("height"), size.get("width")}
    if set(size) != {"height", "width"} or len(sides) > 1:
        raise images.wrong(key, "only a square, {height, width}, is supported")
    return size["height"]
