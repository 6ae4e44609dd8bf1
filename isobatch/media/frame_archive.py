"""A list of images that is one video, as one file: an uncompressed ZIP archive.

The packer stores a video's bytes as they are in the raw data: a container of a codec. Where the raw
data has a folder of frames or a list of images, it stores this archive instead, the images in order
and each as it is. The loader tells the two apart by their first bytes. Pure.
"""

from collections.abc import Iterable, Sequence
from io import BytesIO
from zipfile import ZIP_STORED, BadZipFile, ZipFile, ZipInfo

from isobatch.common.errors import DataError

_MAGIC = b"PK\x03\x04"
_NAME_BYTES = 8


def pack_frames(images: Iterable[bytes | memoryview]) -> bytes:
    """The archive of image files; equal lists give equal bytes. ValueError for none."""
    content = BytesIO()
    with ZipFile(content, "w", ZIP_STORED) as archive:
        for number, image in enumerate(images):
            archive.writestr(ZipInfo(f"{number:0{_NAME_BYTES}d}"), bytes(image))
        if not archive.namelist():
            raise ValueError("no images; a video has at least one frame")
    return content.getvalue()


def archive_bytes(sizes: Sequence[int]) -> int:
    """Bytes of the archive of images of these sizes.

    >>> archive_bytes([5, 6]) == len(pack_frames([b"first", b"second"]))
    True
    """
    # headers before each image and in the list at the end, with a name each, and the end's own
    return sum(sizes) + len(sizes) * (30 + 46 + 2 * _NAME_BYTES) + 22


def is_frame_archive(content: bytes | memoryview) -> bool:
    """Whether a video's bytes are a list of images."""
    return bytes(content[:4]) == _MAGIC


def unpack_frames(content: bytes | memoryview) -> list[bytes]:
    """The image files of an archive, in order. DataError if it is damaged.

    >>> unpack_frames(pack_frames([b"first", b"second"]))
    [b'first', b'second']
    """
    try:
        with ZipFile(BytesIO(content)) as archive:
            return [archive.read(name) for name in sorted(archive.namelist())]
    except (BadZipFile, OSError, ValueError, EOFError, NotImplementedError) as error:
        size = f"{len(content):,} bytes"
        raise DataError(f"list of frames of {size} cannot be read: {error}") from None
