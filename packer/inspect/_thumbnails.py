"""Image or video -> a small upright picture, or why there is none. Pure.

Damaged files are what a person looks for in a build, so an error is a value here.
"""

import base64
import io
import warnings
from dataclasses import dataclass

from PIL import Image, ImageOps

from isobatch.common.errors import DataError, first_line
from isobatch.counting.headers.video_header import first_frame
from isobatch.counting.records.media import SampleProblem
from isobatch.media.decoder_faults import fault_of, quiet_decoders
from isobatch.media.frame_archive import is_frame_archive, unpack_frames

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


def make_thumbnail(data: bytes, *, is_video: bool = False) -> Thumbnail | str:
    """The thumbnail of an image or a video's first frame, or in one line why there is none."""
    try:
        if is_video and not is_frame_archive(data):
            return _shrunk(first_frame(io.BytesIO(data)))
        if is_video:
            data = unpack_frames(data)[0]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            quiet_decoders()
            with Image.open(io.BytesIO(data)) as image:
                return _shrunk(ImageOps.exif_transpose(image))
    except (SampleProblem, DataError) as error:
        return first_line(error)
    except Exception as error:  # of any type: decoders raise what they like
        return fault_of(error).detail if data else "the file is empty"


def _shrunk(upright: Image.Image) -> Thumbnail:
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
