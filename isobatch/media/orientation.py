"""Which side of an image is up, by its EXIF tag, for counting and decoding alike.

As `PIL.ImageOps.exif_transpose` decides, which transformers' image loading calls: a value that is
not the number 2 to 8 (text, bytes, several numbers, not a number) turns nothing. Pure.
"""

ORIENTATION_TAG = 0x0112
_SIDEWAYS = (5, 6, 7, 8)
"""Values that exchange width and height."""
_TURNED_BY_PILLOW = frozenset({"TIFF"})
"""Formats whose size Pillow gives upright before it decodes, and which it turns itself."""


def upright_size(
    size: tuple[int, int], image_format: str | None, orientation: object
) -> tuple[int, int]:
    """(width, height) of the upright image, from what Pillow says of a file before it decodes.

    >>> upright_size((4, 3), "JPEG", 6), upright_size((4, 3), "TIFF", 6)
    ((3, 4), (4, 3))
    >>> upright_size((4, 3), "JPEG", "6")
    (4, 3)
    """
    # compared, not converted: a fraction of 6/1 is a 6, a text is not
    if image_format in _TURNED_BY_PILLOW or orientation not in _SIDEWAYS:
        return size
    return size[1], size[0]
