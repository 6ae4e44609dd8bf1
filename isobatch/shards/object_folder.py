"""`ObjectFolder`: a folder in an object store, read and written.

A small file costs one request, a large one is read in windows that grow while the reader goes
straight on, so memory stays under 10 MB. Requests are retried with growing pauses; a body that
breaks off in the middle is continued, not repeated.
"""

import errno
import io
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import count
from operator import attrgetter, methodcaller
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, Any, TypeVar, cast

from obstore.exceptions import AlreadyExistsError, BaseError

from isobatch.common.errors import first_line
from isobatch.shards import store_errors
from isobatch.shards.local_folder import FileInfo
from isobatch.shards.object_store import open_store, refuse_fork, split_uri

if TYPE_CHECKING:
    from obstore import GetOptions, ObjectMeta

HEAD_BYTES = 1 << 20
"""First request of an opened file: all of it, for most images."""
LEAST_WINDOW, MOST_WINDOW = 1 << 18, 1 << 23
"""Bytes of a request after a jump, and after reading straight on for a while."""
PART_BYTES = 8 << 20
MOST_PARTS = 9_000
"""S3 takes 10,000 parts of an upload at most."""
UPLOADS_AT_ONCE = 4

_RETRIES, _RETRY_S = 10, 90.0
"""Rides out a restart of the store, or a minute of throttling."""
_FIRST_RETRIES = 3
"""Retries of the first contact: a mistyped endpoint must not take a minute to come out."""
_READ_TIMEOUT_S, _REQUEST_S = 30.0, 300.0
_RENEWAL_S, _RENEWAL_PAUSE_S = 60.0, 0.5
"""How long, and how often, new credentials are looked for when the store refuses those it took."""
Answer = TypeVar("Answer")


class ObjectFolder:
    """A folder in an object store. DataError before anything is read if the place is wrong."""

    def __init__(self, uri: str) -> None:
        self.uri = uri.rstrip("/")
        _, prefix = split_uri(uri)
        self._prefix = str(PurePosixPath(prefix)) if prefix else ""
        self._stores: dict[int, Any] = {}

    def __reduce__(self) -> "tuple[type[ObjectFolder], tuple[str]]":
        return ObjectFolder, (self.uri,)

    @cached_property
    def listable(self) -> bool:
        """Whether the place may be listed, by the first contact; DataError if it is unusable."""
        try:
            next(iter(self._store(_FIRST_RETRIES).list(self._prefix or None, chunk_size=1)), None)
        except BaseError as error:
            if store_errors.is_denied(error):
                return False
            raise store_errors.list_problem(self.uri, error) from None
        return True

    def open(self, name: str) -> IO[bytes]:
        """The file, seekable."""
        with self._reading(name) as key:
            try:
                head, meta = self._get(key, {"range": (0, HEAD_BYTES)})
            except BaseError as error:
                if store_errors.status_of(str(error)) != store_errors.PAST_END:
                    raise
                return io.BytesIO()
        if meta["size"] <= len(head):
            return io.BytesIO(head)
        file = _RangedFile(self, name, meta, head)
        return cast("IO[bytes]", io.BufferedReader(file, LEAST_WINDOW))

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        """Bytes of a file; fewer than `length` where it ends."""
        if length == 0:
            return b""
        options: GetOptions = {"range": {"offset": offset}} if offset else {}
        if length is not None:
            options = {"range": (offset, offset + length)}
        with self._reading(name) as key:
            try:
                return self._get(key, options)[0]
            except BaseError as error:
                if store_errors.status_of(str(error)) != store_errors.PAST_END:
                    raise
                return b""

    def read_into(self, name: str, view: memoryview) -> int:
        """Fill `view` with the beginning of a file; -> the size of the file."""
        data = self.read(name)
        count = min(len(data), len(view))
        view[:count] = data[:count]
        return len(data)

    def read_window(self, name: str, start: int, end: int, version: str | None) -> bytes:
        """Bytes `[start, end)` of a file; OSError if it is not the version that was opened."""
        options: GetOptions = {"range": (start, end)}
        if version is not None:
            options["if_match"] = version
        with self._reading(name) as key:
            return self._get(key, options)[0]

    def info(self, name: str) -> FileInfo:
        """Size and entity tag of a file."""
        with self._reading(name) as key:
            return self._info(self._ask(lambda store: store.head(key)))

    def files(self, folder: str = "") -> Iterator[FileInfo]:
        """All files under a folder, in the order of their names; hidden ones are left out."""
        with self._reading(folder) as key:
            # listed whole: stores promise no order
            metas = self._ask(lambda store: store.list(key or None, chunk_size=1000).collect())
        infos = [self._info(meta) for meta in metas]
        visible = (info for info in infos if "/." not in f"/{info.name}")
        yield from sorted(visible, key=attrgetter("name"))

    def names(self) -> list[str]:
        """Names of the files in the root itself, sorted."""
        with self._reading("") as key:
            listing = self._ask(lambda store: store.list_with_delimiter(key or None))
        return sorted(self._info(meta).name for meta in listing["objects"])

    def has_folder(self, folder: str) -> bool:
        """Whether there is any file under that name."""
        with self._reading(folder) as key:
            return self._ask(lambda store: any(store.list(key or None, chunk_size=1)))

    def put(self, name: str, source: Path | bytes) -> None:
        """Write a file, whole or not at all, in parts if it is large; DataError if it fails."""
        size = len(source) if isinstance(source, bytes) else source.stat().st_size
        part_bytes = max(PART_BYTES, -(-size // MOST_PARTS))
        options = {"chunk_size": part_bytes, "max_concurrency": UPLOADS_AT_ONCE}
        with self._writing(name) as key:
            self._ask(lambda store: store.put(key, source, **options))

    def copy(self, source: str, name: str) -> None:
        """Copy an object of the same bucket, by its URI, without bringing it here."""
        with self._writing(name) as key:
            self._ask(lambda store: store.copy(split_uri(source)[1], key))

    def create(self, name: str, data: bytes) -> bool:
        """Write a small file if there is none of that name; -> whether there was none."""
        with self._writing(name) as key:
            try:
                self._ask(lambda store: store.put(key, data, mode="create"))
            except AlreadyExistsError:
                return False
        return True

    def delete(self, names: Sequence[str]) -> None:
        """Remove files; one that is not there is no error."""
        for name in names:
            with self._writing(name) as key:
                try:
                    self._ask(methodcaller("delete", key))
                except FileNotFoundError as error:
                    if store_errors.place_problem(self.uri, error):
                        raise

    def _store(self, retries: int = _RETRIES) -> Any:
        refuse_fork(self.uri)
        store = self._stores.get(retries)
        if store is None:
            store = self._stores[retries] = open_store(
                self.uri,
                retries=retries,
                retry_s=_RETRY_S,
                read_timeout_s=_READ_TIMEOUT_S,
                request_s=_REQUEST_S,
            )
        return store

    def _ask(self, request: Callable[[Any], Answer]) -> Answer:
        """What the store answers; credentials that it took before and now refuses are renewed."""
        end = time.monotonic() + _RENEWAL_S
        for number in count():
            store = self._store()
            try:
                return request(store)
            except BaseError as error:
                refused = store_errors.is_unknown(error)
                if not number:
                    refused |= store_errors.is_unexplained(error)
                if not refused or time.monotonic() > end:
                    raise
            if self._stores.get(_RETRIES) is store:
                self._stores.pop(_RETRIES, None)
            time.sleep(_RENEWAL_PAUSE_S if number else 0)
        raise AssertionError  # the count has no end

    def _get(self, key: str, options: "GetOptions") -> "tuple[bytes, ObjectMeta]":
        def request(store: Any) -> "tuple[bytes, ObjectMeta]":
            response = store.get(key, options=options)
            return bytes(response.bytes()), response.meta

        return self._ask(request)

    def _key(self, name: str) -> str:
        """Key of a name, without the `.` and `//` that a file system reads over."""
        path = PurePosixPath(name)
        relative = "" if str(path) == "." else str(path)
        return f"{self._prefix}/{relative}".strip("/") if self._prefix else relative

    def _info(self, meta: "ObjectMeta") -> FileInfo:
        name = meta["path"].removeprefix(self._prefix).lstrip("/")
        return FileInfo(name, meta["size"], meta["e_tag"] or meta["last_modified"].isoformat())

    @contextmanager
    def _reading(self, name: str) -> Iterator[str]:
        """The key of a name; errors become OSError, or DataError if they are the place's."""
        listable = self.listable
        try:
            yield self._key(name)
        except FileNotFoundError as error:
            missing = FileNotFoundError(errno.ENOENT, "no such object", name)
            raise store_errors.place_problem(self.uri, error) or missing from None
        except ValueError as error:  # a name that no key can have
            raise OSError(errno.EINVAL, first_line(error), name) from None
        except BaseError as error:
            if store_errors.is_denied(error) and not listable:
                raise store_errors.denied(self.uri, error) from None
            problem = store_errors.place_problem(self.uri, error)
            raise problem or store_errors.object_problem(name, error) from None

    @contextmanager
    def _writing(self, name: str) -> Iterator[str]:
        _ = self.listable
        try:
            yield self._key(name)
        except (FileNotFoundError, ValueError, BaseError) as error:
            raise store_errors.write_problem(self.uri, error) from None


class _RangedFile(io.RawIOBase):
    """A large object, read in windows; its beginning, to which readers return, stays in memory."""

    def __init__(self, root: ObjectFolder, name: str, meta: "ObjectMeta", head: bytes) -> None:
        self._root = root
        self._name = name
        self._size, self._version = meta["size"], meta["e_tag"]
        self._head = head
        self._start = 0
        self._window = head
        self._window_bytes = LEAST_WINDOW
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise OSError(errno.EINVAL, "seek to before the beginning", self._name)
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer from one window; at the end of the file 0."""
        if self._position >= self._size:
            return 0
        if self._position < len(self._head):
            start, data = 0, self._head
        else:
            self._move(len(buffer))
            start, data = self._start, self._window
        piece = memoryview(data)[self._position - start :][: len(buffer)]
        buffer[: len(piece)] = piece
        self._position += len(piece)
        return len(piece)

    def _move(self, wanted: int) -> None:
        """Have a window that covers the position."""
        end = self._start + len(self._window)
        if self._start <= self._position < end:
            return
        straight_on = self._position == end
        grown = min(2 * self._window_bytes, MOST_WINDOW)
        self._window_bytes = grown if straight_on else LEAST_WINDOW
        stop = min(self._position + max(self._window_bytes, wanted), self._size)
        self._window = self._root.read_window(self._name, self._position, stop, self._version)
        self._start = self._position
        if not self._window:
            raise OSError(errno.EIO, "the store sends nothing", self._name)
