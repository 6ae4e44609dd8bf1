"""Files of a source, with errors that name them: what all layouts but JSON share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any

from balance.errors import DataError, first_line
from shards.folders import FileInfo, Folder, join


def file_infos(root: Folder, names: Sequence[str]) -> list[FileInfo]:
    """Size and version of files; DataError for one that is not there."""
    return [_info(root, name) for name in names]


def name_and_size(infos: Sequence[FileInfo]) -> list[dict[str, Any]]:
    """Files as the manifest names them; no SHA-256, for that would read a whole dataset."""
    return [{"name": info.name, "size": info.size} for info in infos]


@contextmanager
def opened(root: Folder, name: str) -> Iterator[IO[bytes]]:
    """A file for reading; what goes wrong with it inside the `with` is a DataError that names
    it.
    """
    try:
        with root.open(name) as file:
            yield file
    except OSError as error:
        raise DataError(
            f"{join(root.uri, name)}: cannot be read: {error.strerror or first_line(error)}"
        ) from None


def damaged(root: Folder, name: str, error: Exception) -> DataError:
    """The error for a file that is not what its kind should be."""
    return DataError(f"{join(root.uri, name)}: damaged or cut short: {first_line(error)}")


def _info(root: Folder, name: str) -> FileInfo:
    try:
        return root.info(name)
    except OSError as error:
        raise DataError(
            f"{join(root.uri, name)}: cannot be read: {error.strerror or first_line(error)}"
        ) from None
