"""Files of records in other places: the `aux` of an Energon metadataset.

Records name a file by the name of its member (`KEY.jpg`) in the shards of an auxiliary dataset, or
by its path in a folder. Which user's code looks up which name nobody knows here, so a name under a
key of media is looked up in all of them, in their order, shards first. The members are found
through the SQLite index that `energon prepare` writes, so that no list of them is in memory.
"""

import re
import sqlite3
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from isobatch.common.errors import DataError, first_line
from isobatch.counting.records.media import FILE_KEYS, Media, is_relative_path, marked_files
from isobatch.counting.records.places.marks import NUMBERED_KEYS
from isobatch.counting.records.record import Chunk, RawRecord
from isobatch.packer.sources.base import has_file
from isobatch.packer.sources.trainers.energon import INDEX_NAME, META, shard_counts
from isobatch.shards.folders import join, on_disk, open_folder

MEDIA_KEYS = frozenset(
    {*NUMBERED_KEYS, "image_url", "video_url", "audio_url", "input_image", "image_info"}
    | {key for keys in FILE_KEYS.values() for key in keys}
)
"""Keys under which a text is the name of a file."""
PATH_KEYS = MEDIA_KEYS | {"url", "path", "image_name"}
"""Keys under which it is one in an object of media: under such a key, or of such a `type`."""
_ENTRY = re.compile(r"((?:.*/)?[^.]+)\.([^/]*)", re.DOTALL)
QUERY_S = 5.0
"""Time of the processor that finding a name may take: it takes microseconds."""
_OPERATIONS = 100_000
"""Operations of SQLite's machine between two looks at the time."""
_QUERY = """
SELECT samples.tar_file_id, parts.content_byte_offset, parts.content_byte_size
FROM samples JOIN sample_parts AS parts
ON parts.tar_file_id = samples.tar_file_id AND parts.sample_index = samples.sample_index
WHERE samples.sample_key = ? AND parts.part_name = ?
"""


@dataclass(frozen=True, slots=True)
class AuxPlace:
    """An auxiliary dataset, or a folder of files."""

    name: str
    place: str = field(repr=False)
    """Folder or URI; it is a path of this machine, so a build is not told apart by it."""
    prefix: str
    """Path from the data root to it, empty or with a slash at the end."""
    is_files: bool


class _Members:
    """The members of a prepared dataset's shards, by name."""

    def __init__(self, place: str) -> None:
        folder = open_folder(place, follow_links=True)
        self._where = join(place, f"{META}/{INDEX_NAME}")
        self._shards = list(shard_counts(folder))
        try:
            # a copy of one in an object store; what is open outlives its name
            with on_disk(place, [f"{META}/{INDEX_NAME}"]) as copy:
                index = (copy / META / INDEX_NAME).absolute()
                uri = f"{index.as_uri()}?mode=ro&immutable=1"
                # threads of a process ask one after the other
                self._index = sqlite3.connect(uri, uri=True, check_same_thread=False)
                self._index.execute("PRAGMA trusted_schema = OFF")
                # a view in place of a table could count for ever
                self._index.set_progress_handler(self._is_late, _OPERATIONS)
                self._row_of("", "")
        except sqlite3.Error as error:
            raise self._damaged(error) from None

    def find(self, name: str, prefix: str) -> Media | None:
        """A member by its full name, in the shards under a prefix; None if there is none."""
        match = _ENTRY.fullmatch(name)
        if match is None:
            return None
        try:
            row = self._row_of(*match.groups())
            if row is None:
                return None
            shard, offset, size = row
            return Media(name, container=prefix + self._shards[shard], offset=offset, size=size)
        except (sqlite3.Error, IndexError, TypeError) as error:
            raise self._damaged(error) from None

    def _row_of(self, key: str, part: str) -> Any:
        self._end = time.thread_time() + QUERY_S
        return self._index.execute(_QUERY, (key, part)).fetchone()

    def _is_late(self) -> bool:
        return time.thread_time() > self._end

    def _damaged(self, error: Exception) -> DataError:
        again = "run `energon prepare` there again"
        return DataError(f"{self._where}: cannot be read: {first_line(error)}; {again}")


# each is an open file; one that is opened again is a download, if it is in a bucket
@lru_cache(maxsize=256)
def _members(place: str) -> _Members:
    return _Members(place)


class _Files:
    """All auxiliary places of a dataset."""

    def __init__(self, places: tuple[AuxPlace, ...]) -> None:
        shards = [one for one in places if not one.is_files]
        self._members = [(_members(one.place), one.prefix) for one in shards]
        self._folders = [one for one in places if one.is_files]

    def placed(self, value: Any, *, is_media: bool) -> Any:
        """A value of a record with the files that it names in their places."""
        if isinstance(value, Mapping):
            is_part = isinstance(kind := value.get("type"), str) and kind in MEDIA_KEYS
            keys: Collection[str] = PATH_KEYS if is_media or is_part else MEDIA_KEYS
            if is_media and (marks := marked_files(value)):
                keys = marks.values()
            return {key: self.placed(item, is_media=key in keys) for key, item in value.items()}
        if isinstance(value, list):
            return [self.placed(item, is_media=is_media) for item in value]
        if is_media and isinstance(value, str) and is_relative_path(value):
            return self._find(value) or value
        return value

    def _find(self, name: str) -> Media | None:
        for members, prefix in self._members:
            if media := members.find(name, prefix):
                return media
        for number, folder in enumerate(self._folders, 1):
            # the last one is not asked: its reader says what is missing there
            is_last = number == len(self._folders)
            if is_last or has_file(open_folder(folder.place, follow_links=True), name):
                return Media(folder.prefix + name)
        return None


@dataclass(frozen=True, slots=True)
class AuxChunk:
    """Records of a chunk, with the places of their files."""

    chunk: Chunk
    places: tuple[AuxPlace, ...]

    def records(self) -> Iterator[RawRecord]:
        """The records, in order."""
        files = _Files(self.places)
        for record in self.chunk.records():
            yield replace(record, value=files.placed(record.value, is_media=False))
