"""manifest.json: what a finished build says of itself, and checks of its files.

It is written last and atomically: a build is complete if and only if it exists. It holds no time,
host or path (except the data root of refs builds): the same inputs and seed give the same bytes.
"""

import gc
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal, Protocol, TypeVar, get_args

import pyarrow as pa

from isobatch.common.config import build_config
from isobatch.common.errors import ConfigError, DamagedShard, DataError, IsobatchError, first_line
from isobatch.common.plain_values import parse_json
from isobatch.common.types import Limits
from isobatch.common.visible_text import shown
from isobatch.models.presets import ModelPreset, model_from_dict
from isobatch.shards.checksums import file_checksum, wrong_bytes
from isobatch.shards.folders import Folder, is_uri, join, on_disk, open_folder
from isobatch.shards.stored_group import NO_EXTRAS, ExtraTypes

Value = TypeVar("Value")

FORMAT_VERSION = 3
CHANGED_VERSION = 4
"""Of builds that were changed after they were finished: their tables have a folder."""
READ_VERSIONS = (2, FORMAT_VERSION, CHANGED_VERSION)
"""Version 2 has one checksum for the whole index, and the sample ids in it."""
MANIFEST_NAME = "manifest.json"
TABLES = "tables"
"""Folder of the folders that the tables of changed builds have."""
CHECKED_BYTES = 256 << 20
"""Largest file whose checksum is compared when it is opened as a whole; XXH3 takes some 40 ms."""
ShardFormat = Literal["arrow", "webdataset", "energon", "refs"]
SHARD_FORMATS: tuple[ShardFormat, ...] = get_args(ShardFormat)
TAR_FORMATS: frozenset[ShardFormat] = frozenset({"webdataset", "energon"})
"""Formats whose shards are tars."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRange:
    """A record batch of an Arrow file: the byte range of its message."""

    offset: int
    length: int
    checksum: int
    """XXH3 of 64 bits over that range."""

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> "BatchRange":
        """The record batch of an entry of the manifest."""
        checksum = int(_of_type(entry, "xxh3_64", str), 16)
        offset, length = (_of_type(entry, key, int) for key in ("offset", "length"))
        return cls(offset=offset, length=length, checksum=checksum)

    def to_json(self) -> dict[str, Any]:
        """The entry of the manifest."""
        return {"offset": self.offset, "length": self.length, "xxh3_64": f"{self.checksum:016x}"}


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildFile:
    """A file of a build as the manifest lists it."""

    name: str
    """Path under the build's folder or URI, with slashes."""
    size: int
    """Bytes."""
    checksum: str
    """XXH3 of 128 bits, in hexadecimal digits."""
    batches: tuple[BatchRange, ...] = ()
    """Record batches of the index and of the sample ids, in order; none in version 2."""
    types: dict[str, str] = field(default_factory=dict, hash=False)
    """Type of each column of the index, as Arrow names it; none in version 2."""

    @classmethod
    def of(cls, folder: Folder, name: str) -> "BuildFile":
        """The file as it is now; reads it once. OSError if it cannot be read."""
        with folder.open(name) as file:
            checksum, size = file_checksum(file)
        return cls(name=name, size=size, checksum=checksum)

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> "BuildFile":
        """The file of an entry of the manifest."""
        return cls(
            name=_path_inside(entry, "name"),
            size=_of_type(entry, "size", int),
            checksum=_of_type(entry, "xxh3_128", str),
            batches=tuple(map(BatchRange.from_json, entry.get("batches", ()))),
            types=_of_type(entry, "types", dict) if "types" in entry else {},
        )

    def to_json(self) -> dict[str, Any]:
        """The entry of the manifest."""
        entry = {"name": self.name, "size": self.size, "xxh3_128": self.checksum}
        batches = [batch.to_json() for batch in self.batches]
        types = {"types": dict(self.types)} if self.types else {}
        return entry | types | ({"batches": batches} if batches else {})

    def wrong_size(self, place: str, actual: str) -> DamagedShard:
        """The error for a file of another size, of which `actual` says what it has."""
        said = f"the manifest says {self.size} bytes"
        return DamagedShard(f"{place}: {actual}, {said}; copy or build it again")

    def wrong_checksum(self, place: str) -> DamagedShard:
        """The error for a file of another checksum."""
        advice = "run `packer verify`, and copy or build it again"
        return DamagedShard(f"{place}: its checksum is not the manifest's; {advice}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What manifest.json says."""

    place: str
    """Folder or URI of the build."""
    hash: str
    """SHA-256 of the file: two builds with the same hash have the same bytes."""
    version: int
    """Version of the format, of READ_VERSIONS."""
    format: ShardFormat
    model: ModelPreset
    limits: Limits
    """Caps that the groups keep."""
    num_groups: int
    num_packed: int
    """Samples in groups."""
    shards: tuple[BuildFile, ...]
    files: tuple[BuildFile, ...]
    """The index and the tables."""
    tables: str
    """Folder of the index and the tables under `place`; empty if they are next to the manifest."""
    data_root: str | None
    """Folder or URI that the paths of images and audio files start from; refs only."""
    image_token_id: int
    audio_token_id: int | None
    """Id of the audio token; None for a model without an audio encoder."""
    video_token_id: int | None
    """Id of the video token, of some models the image token's; None for a model without videos."""
    vocab_size: int
    extras: ExtraTypes
    """Columns of the raw data that each sample has, and their types."""
    has_videos: bool
    """Whether some of the images are videos, or may be: of several partitions, whether the model
    takes them, because none knows what is in the others.
    """
    values: dict[str, Any] = field(repr=False, compare=False)
    """The whole file."""

    def file(self, name: str) -> BuildFile:
        """The index or a table. DataError if the manifest does not list it."""
        for file in self.files:
            if file.name == self.table_path(name):
                return file
        raise DataError(f"{join(self.place, MANIFEST_NAME)}: lists no {name}; build again")

    def shard(self, number: int) -> BuildFile:
        """Shard `number`, as the index names it. DataError if the manifest does not list it."""
        if number < len(self.shards):
            return self.shards[number]
        lists = f"lists {len(self.shards)} shards, and the index has groups in shard {number}"
        raise DataError(f"{join(self.place, MANIFEST_NAME)}: {lists}; build again")

    def table_path(self, name: str) -> str:
        """Path of the index or a table under `place`, with slashes."""
        return f"{self.tables}/{name}" if self.tables else name


def _of_type(table: Mapping[str, Any], key: str, kind: type[Value]) -> Value:
    """The value of a key; TypeError if it is of another type, ValueError for a number below 0."""
    value = table[key]
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TypeError(f"{key} is {shown(value)}")
    if isinstance(value, int) and value < 0:
        raise ValueError(f"{key} is {value}")
    return value


def _path_inside(table: Mapping[str, Any], key: str) -> str:
    """A path under the build; ValueError if it leads out of it."""
    path = _of_type(table, key, str)
    if path.startswith("/") or ".." in path.split("/") or "\0" in path:
        raise ValueError(f"{key} {shown(path)} is not in the build")
    return path


def hash_json(value: Any) -> str:
    """SHA-256 of a plain value, independent of the order of its keys."""
    content = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(content.encode()).hexdigest()


def write_manifest(out: Path, values: dict[str, Any]) -> None:
    """Write the manifest, whole or not at all, after everything it names is on disk.

    `content_hash` covers the rest, so that no edit or bad disk silently changes a cap or token id.
    """
    version = CHANGED_VERSION if "tables" in values else FORMAT_VERSION
    values = {"format_version": version, **values}
    values["content_hash"] = hash_json(values)
    # another machine may be completing the same build
    temporary = out / f"{MANIFEST_NAME}-{os.urandom(4).hex()}.tmp"
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(values, file, indent=1, ensure_ascii=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(out / MANIFEST_NAME)
    for other in out.glob(f"{MANIFEST_NAME}-*.tmp"):  # of a run that was killed here
        other.unlink(missing_ok=True)


def is_complete(place: str) -> bool:
    """Whether there is a manifest at a folder or URI."""
    try:
        return open_folder(place, follow_links=True).info(MANIFEST_NAME).size >= 0
    except FileNotFoundError:
        return False


def read_manifest(place: str | Path) -> Manifest:
    """The manifest of the build at a folder or URI; DataError if there is none that can be read."""
    place = str(place)
    if not place.strip():
        raise DataError("an empty path; give the output folder or URI of `packer build`")
    if not is_uri(place) and not Path(place).is_dir():
        what = "a file, no folder" if Path(place).exists() else "no such folder"
        raise DataError(f"{place}: {what}; give the output folder of `packer build`")
    try:
        content = open_folder(place, follow_links=True).read(MANIFEST_NAME)
    except FileNotFoundError:
        raise unfinished(place) from None
    return parse_manifest(content, place)


def unfinished(place: str) -> DataError:
    """The error for a folder or URI without a manifest."""
    advice = "run the same `packer build` again to finish it"
    names = [] if is_uri(place) else sorted(os.listdir(place))
    if not (_has_objects(place) if is_uri(place) else names):
        advice = "nothing is there: give the output folder or URI of `packer build`"
    # every build begins with one of these folders
    if names and not {"staging", "shards"} & set(names):
        contents = f"it holds {', '.join(names[:3])}{', ...' * (len(names) > 3)}"
        advice = f"{contents}: pack raw data with `packer build --dataset {place}`"
    return DataError(f"{place}: no {MANIFEST_NAME}, so no finished build; {advice}")


def _has_objects(uri: str) -> bool:
    try:
        return open_folder(uri).has_folder("")
    except (OSError, DataError, ConfigError):  # not allowed to list, or a web server that cannot
        return True


def parse_manifest(content: bytes, place: str) -> Manifest:
    """The manifest of the build at `place`; DataError if it is another version's, or damaged."""
    path = join(place, MANIFEST_NAME)
    collects = gc.isenabled()
    gc.disable()  # 300,000 shards are a million objects, none of them garbage: a third of the time
    try:
        values = parse_json(content, f"{path}: not a manifest of Isobatch", DataError, exact=True)
        version, shard_format = values["format_version"], values.get("format")
        if version in READ_VERSIONS and shard_format in SHARD_FORMATS:
            rest = {name: value for name, value in values.items() if name != "content_hash"}
            if "content_hash" in values and values["content_hash"] != hash_json(rest):
                what = "its content is not what its content_hash says"
                raise DamagedShard(f"{path}: damaged or edited: {what}")
            return _from_values(place, hashlib.sha256(content).hexdigest(), values)
    except IsobatchError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        problem = f"not a manifest of Isobatch ({type(error).__name__}: {error})"
        raise DataError(f"{path}: {problem}; build again") from None
    finally:
        if collects:
            gc.enable()
    raise DataError(
        f"{path}: format_version {version}, format {shard_format!r}, but this version of Isobatch "
        f"reads format_version {', '.join(map(str, READ_VERSIONS[:-1]))} and {READ_VERSIONS[-1]}, "
        f"{', '.join(SHARD_FORMATS)}; install the version that wrote it, or build again"
    )


def _from_values(place: str, digest: str, values: dict[str, Any]) -> Manifest:
    where = f"{join(place, MANIFEST_NAME)}: not a manifest of Isobatch: limits"
    tokenizer = _of_type(values, "tokenizer", dict)
    totals = _of_type(values, "totals", dict)
    for name in {"num_groups", "num_packed", *totals}:
        _of_type(totals, name, int)
    ids = [key for key in ("audio_token_id", "video_token_id") if tokenizer.get(key) is not None]
    for key in ("image_token_id", "vocab_size", *ids):
        _of_type(tokenizer, key, int)
    # what only some commands look at
    for table, key, kind in (
        (tokenizer, "hash", str),
        (tokenizer, "added_tokens", dict),
        (_of_type({"config": {}} | values, "config", dict), "dataset", str),
    ):
        if key in table:
            _of_type(table, key, kind)
    return Manifest(
        place=place,
        hash=digest,
        version=values["format_version"],
        format=values["format"],
        model=model_from_dict(values["model"]),
        limits=build_config(Limits, values["limits"], where=where),
        num_groups=totals["num_groups"],
        num_packed=totals["num_packed"],
        shards=tuple(map(BuildFile.from_json, values["shards"])),
        files=tuple(map(BuildFile.from_json, values["files"])),
        tables=_path_inside({"tables": ""} | values, "tables"),
        data_root=None if values.get("data_root") is None else _of_type(values, "data_root", str),
        image_token_id=tokenizer["image_token_id"],
        audio_token_id=tokenizer.get("audio_token_id"),
        video_token_id=tokenizer.get("video_token_id"),
        vocab_size=tokenizer["vocab_size"],
        # by name as in the shards, in whatever order JSON has them
        extras=dict(sorted(values.get("extras", NO_EXTRAS).items())),
        has_videos=values.get("has_videos", False),
        values=values,
    )


@contextmanager
def tables_on_disk(manifest: Manifest, names: Sequence[str]) -> Iterator[Path]:
    """A folder with the named tables of a build: its own, or a temporary copy."""
    place = join(manifest.place, manifest.tables) if manifest.tables else manifest.place
    with on_disk(place, names) as folder:
        yield folder


class IndexFiles(Protocol):
    """Place of a build's index and tables: a folder, or a store."""

    at_once: int
    """Record batches to read at a time."""

    def open_file(self, name: str) -> pa.NativeFile:
        """A whole file. DamagedShard if it is not what the manifest says."""

    def read_batch(self, file: BuildFile, number: int) -> pa.Buffer:
        """The message of a record batch. DamagedShard if its checksum is not the manifest's."""


class FolderFiles:
    """The index and the tables in a folder, mapped."""

    at_once = 1

    def __init__(
        self, manifest: Manifest, folder: Path | None = None, *, verify: bool = True
    ) -> None:
        """`folder`: where they are, if not in the build. `verify`: compare checksums."""
        self._manifest = manifest
        self._verify = verify
        self._folder = folder or Path(manifest.place, manifest.tables)
        self._mapped: dict[str, pa.Buffer] = {}

    def open_file(self, name: str) -> pa.NativeFile:
        """The index or a table. One of more than CHECKED_BYTES is compared by its size only."""
        path = self._folder / name
        listed_name = self._manifest.table_path(name)
        listed = next((file for file in self._manifest.files if file.name == listed_name), None)
        try:
            opened = pa.memory_map(str(path))
            if listed is not None:
                self._check(opened, path, listed)
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else first_line(error)
            raise DamagedShard(
                f"{path}: cannot be opened ({reason}); run `packer verify`, or build again"
            ) from None
        return opened

    def read_batch(self, file: BuildFile, number: int) -> pa.Buffer:
        """The message of a record batch, a view into the mapped file."""
        if file.name not in self._mapped:
            with self.open_file(PurePosixPath(file.name).name) as opened:
                self._mapped[file.name] = opened.read_buffer()
        batch = file.batches[number]
        if self._verify:
            self._check_batch(file, number)
        return self._mapped[file.name].slice(batch.offset, batch.length)

    def _check_batch(self, file: BuildFile, number: int) -> None:
        """DamagedShard if a record batch is damaged."""
        batch = file.batches[number]
        path = self._folder / PurePosixPath(file.name).name
        # read, not mapped: so columns that nobody uses take no memory of this process
        with pa.OSFile(str(path)) as opened:
            content = opened.read_at(min(batch.length, opened.size()), batch.offset)
        if problem := wrong_bytes(batch.checksum, "the manifest says", content):
            raise DamagedShard(
                f"{path}: record batch {number}: {problem}; run `packer verify`, and copy or build "
                "it again"
            )

    def _check(self, opened: pa.NativeFile, path: Path, file: BuildFile) -> None:
        size = opened.size()
        if size != file.size:
            raise file.wrong_size(str(path), f"has {size} bytes")
        if not self._verify or file.batches or size > CHECKED_BYTES:
            return
        if file_checksum(opened)[0] != file.checksum:
            raise file.wrong_checksum(str(path))
        opened.seek(0)
