"""Images and audio files of raw samples: where they are, and their bytes.

A file may be in the data root on its own, as a byte range of a container there (a member of a tar),
or come with the record (a cell of a Parquet table). The last kind is copied into the build's
staging folder when it is counted, so that the writers find any file in constant time.
"""

import io
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import IO

from shards.folders import Folder
from shards.local_folder import OutsideFolder

BLOB_SCHEME = "blob:"
"""Prefix of containers in the staging folder."""


class SampleProblem(ValueError):
    """A record or file that cannot be used: a key of `record.REASONS`, and the particulars."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True, slots=True)
class Media:
    """An image or audio file of a raw sample."""

    name: str
    """Path under the data root; in a container, the file's name there."""
    container: str = ""
    """File under the data root of which this is a byte range; empty for a file of its own."""
    offset: int = 0
    size: int = -1
    """Bytes in the container; -1 for a file of its own, whose size is not known yet."""
    data: bytes | None = None
    """Content, if it came with the record."""


def open_media(root: Folder, media: Media, kind: str) -> IO[bytes]:
    """The content of a file, seekable. SampleProblem (`kind`) if missing or outside."""
    if media.data is not None:
        return io.BytesIO(media.data)
    try:
        if media.container:
            return io.BytesIO(root.read(media.container, media.offset, media.size))
        return root.open(_relative(media.name, kind))
    except OutsideFolder as error:
        raise SampleProblem("outside_data_root", str(error)) from None
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise SampleProblem(f"missing_{kind}", media.container or media.name) from None
    except OSError as error:
        detail = f"{media.name}: {error.strerror or error}"
        raise SampleProblem(f"unreadable_{kind}", detail) from None


def read_into(root: Folder, media: Media, blobs: Folder, view: memoryview) -> None:
    """Fill `view` with a counted file of that size; SampleProblem if the file has changed."""
    try:
        if media.container:
            place, name = root, media.container
            if name.startswith(BLOB_SCHEME):
                place, name = blobs, name.removeprefix(BLOB_SCHEME)
            data = place.read(name, media.offset, media.size)
            found = len(data)
            view[:found] = data
        else:
            found = root.read_into(media.name, view)
    except OSError as error:
        raise SampleProblem("media_changed", f"{media.name}: {error.strerror or error}") from None
    if found != media.size:
        changed = f"{media.name}: {media.size} bytes when counted, {found} now"
        raise SampleProblem("media_changed", changed)


def _relative(name: str, kind: str) -> str:
    """The name, if it stays under the data root.

    >>> _relative("coco/1.jpg", "image")
    'coco/1.jpg'
    """
    if "://" in name:
        raise SampleProblem(f"{kind}_url", f"{name[:120]}: download it first and give its path")
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\0" in name:
        raise SampleProblem("outside_data_root", name[:120])
    return name
