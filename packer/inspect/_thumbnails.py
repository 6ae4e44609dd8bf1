"""Image file -> a small upright picture for a page, or why there is none. Pure.

Damaged files are what a person looks for in a build, so an error is a value here.
"""

import base64
import io
import warnings
from dataclasses import dataclass

from PIL import Image, ImageOps, UnidentifiedImageError

from balance.errors import first_line
from packer.media.image_header import PILLOW_ERRORS

MOST_PIXELS = 160
"""Longer side of a thumbnail."""
JPEG_QUALITY = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class Thumbnail:
    """A picture of at most MOST_PIXELS per side, as a `data:` URI."""

    uri: str
    width: int
    height: int
    full_width: int
    """Width of the decoded image, upright."""
    full_height: int


def make_thumbnail(data: bytes) -> Thumbnail | str:
    """The thumbnail of an image file, or in one line why Pillow cannot decode it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            return _decode(data)
    except UnidentifiedImageError:
        return "not an image that Pillow knows" if data else "the file is empty"
    except (Image.DecompressionBombError, *PILLOW_ERRORS) as error:
        return first_line(error)


def _decode(data: bytes) -> Thumbnail:
    with Image.open(io.BytesIO(data)) as image:
        upright = ImageOps.exif_transpose(image)
    full_width, full_height = upright.size
    has_alpha = upright.has_transparency_data
    picture = upright.convert("RGBA" if has_alpha else "RGB")
    picture.thumbnail((MOST_PIXELS, MOST_PIXELS))
    buffer = io.BytesIO()
    kind = "png" if has_alpha else "jpeg"
    picture.save(buffer, kind, **({} if has_alpha else {"quality": JPEG_QUALITY}))
    return Thumbnail(
        uri=f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}",
        width=picture.width,
        height=picture.height,
        full_width=full_width,
        full_height=full_height,
    )
