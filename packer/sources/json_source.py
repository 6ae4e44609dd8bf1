"""JSON annotations: a JSON array or JSON lines, in one file or several, images and audio files
beside them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

from packer.sources._json_records import read_json_records
from packer.sources.base import Chunk, cut
from packer.sources.files import file_infos
from shards.folders import FileInfo, Folder, open_folder


class AnnotationSource:
    """Records of JSON files."""

    def __init__(self, name: str, folder: str, names: list[str], data_root: str) -> None:
        self.name = name
        self.data_root = data_root
        self._root: Folder = open_folder(folder, follow_links=True)
        self._names = names

    def files(self) -> list[FileInfo]:
        """The annotation files."""
        return file_infos(self._root, self._names)

    def chunks(self, num_records: int, on_bytes: Callable[[int], None]) -> Iterator[Chunk]:
        """The records, read here: only a parser finds where one ends."""
        for name in self._names:
            yield from cut(read_json_records(self._root, name, on_bytes=on_bytes), num_records)

    def describe(self) -> list[dict[str, Any]]:
        """Name, size and SHA-256 of each file."""
        described = []
        for info in self.files():
            with self._root.open(info.name) as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
            described.append({"name": info.name, "size": info.size, "sha256": digest})
        return described
