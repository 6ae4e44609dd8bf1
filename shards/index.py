"""What a finished build says about itself: its manifest (`Manifest`) and where its groups are
(`GroupIndex`).

The index stays on disk, mapped: opening costs nothing per group, a step touches the pages of its
groups, and the ranks of a machine share them. So 100 million groups (about 6 GB of index) need a
few megabytes per process.
"""

from __future__ import annotations

import hashlib
import json
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc
from numpy.typing import NDArray

from balance.errors import ConfigError, DamagedShard, DataError
from balance.order.block_shuffle import OrderConfig
from balance.presets import ModelPreset, model_from_dict
from balance.types import IntArray

FORMAT_VERSION = 2
FORMATS = ("arrow", "webdataset", "refs")
MANIFEST_NAME, INDEX_NAME = "manifest.json", "index.arrow"
BATCH_ROWS = 65_536
"""Rows of a record batch of index.arrow, the last one excepted; docs/design.md."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildFile:
    """A file of a build as the manifest lists it."""

    name: str
    """Path under the build's folder or URI, with slashes."""
    size: int
    """Bytes."""
    checksum: str
    """XXH3 of 128 bits, in hexadecimal digits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The part of manifest.json that loading needs."""

    place: str
    """Folder or URI of the build."""
    hash: str
    """SHA-256 of the file: two builds with the same hash have the same bytes."""
    format: str
    model: ModelPreset
    order: OrderConfig
    num_groups: int
    limits: dict[str, Any]
    """The fields of `balance.types.Limits` that the groups keep."""
    shards: tuple[BuildFile, ...]
    files: tuple[BuildFile, ...]
    """The index and the tables."""
    data_root: str | None
    """Folder or URI that the paths of images and audio files start from; refs only."""
    image_token_id: int
    audio_token_id: int | None
    """None for a model that hears nothing."""
    vocab_size: int

    @property
    def root(self) -> Path:
        """The folder of a build on disk."""
        return Path(self.place)

    def file(self, name: str) -> BuildFile:
        """The index or a table. DataError if the manifest does not list it."""
        for file in self.files:
            if file.name == name:
                return file
        raise DataError(f"{self.place}/{MANIFEST_NAME}: lists no {name}; build again")


def read_manifest(root: Path) -> Manifest:
    """The manifest of the build in `root`. DataError if there is none, or none that this version
    can read.
    """
    if not root.is_dir():
        raise DataError(f"{root}: no such directory; give the output directory of `packer build`")
    path = root / MANIFEST_NAME
    if not path.is_file():
        raise unfinished(str(root))
    return parse_manifest(path.read_bytes(), str(root))


def unfinished(place: str) -> DataError:
    """There is no manifest at a folder or URI."""
    return DataError(
        f"{place}: no {MANIFEST_NAME}, so no finished build; run the same `packer build` again to finish it"
    )


def parse_manifest(content: bytes, place: str) -> Manifest:
    """The manifest of the build at `place`. DataError if this version cannot read it, DamagedShard
    if changed.
    """
    try:
        values = json.loads(content)
        version = values["format_version"]
        if version == FORMAT_VERSION and values["format"] in FORMATS:
            _check_content(place, values)
            return _from_values(place, hashlib.sha256(content).hexdigest(), values)
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise DataError(
            f"{place}/{MANIFEST_NAME}: not a manifest of Isobatch ({type(error).__name__}: {error}); build again"
        ) from None
    raise DataError(
        f"{place}/{MANIFEST_NAME}: format_version {version}, format {values['format']!r}, but this version of Isobatch "
        f"reads format_version {FORMAT_VERSION}, {', '.join(FORMATS)}; install the version that wrote it, or build "
        "again"
    )


def _check_content(place: str, values: dict[str, Any]) -> None:
    """DamagedShard unless the manifest still is what its `content_hash` says, if it has one."""
    rest = {name: value for name, value in values.items() if name != "content_hash"}
    plain = json.dumps(rest, sort_keys=True, ensure_ascii=False).encode()
    if "content_hash" in values and values["content_hash"] != hashlib.sha256(plain).hexdigest():
        raise DamagedShard(
            f"{place}/{MANIFEST_NAME}: damaged or edited: its content is not what its content_hash says"
        )


def _from_values(place: str, digest: str, values: dict[str, Any]) -> Manifest:
    return Manifest(
        place=place,
        hash=digest,
        format=values["format"],
        model=model_from_dict(values["model"]),
        order=OrderConfig(**values["order"]),
        num_groups=values["totals"]["num_groups"],
        limits=values["limits"],
        shards=tuple(_file(shard) for shard in values["shards"]),
        files=tuple(_file(file) for file in values["files"]),
        data_root=values.get("data_root"),
        image_token_id=values["tokenizer"]["image_token_id"],
        audio_token_id=values["tokenizer"].get("audio_token_id"),
        vocab_size=values["tokenizer"]["vocab_size"],
    )


def _file(entry: dict[str, Any]) -> BuildFile:
    return BuildFile(name=entry["name"], size=entry["size"], checksum=entry["xxh3_128"])


class GroupIndex:
    """index.arrow, mapped: columns of chosen groups, without reading the others. Thread-safe."""

    def __init__(self, source: Path | pa.NativeFile, num_groups: int) -> None:
        """`source` is the file's path, or the file, mapped."""
        self._path, self._num_groups = (
            source if isinstance(source, Path) else INDEX_NAME,
            num_groups,
        )
        try:
            self._reader = pa.ipc.open_file(
                pa.memory_map(str(source)) if isinstance(source, Path) else source
            )
        except (OSError, pa.ArrowInvalid) as error:
            raise DamagedShard(
                f"{self._path}: cannot be opened ({error}); run `packer verify`, or build again"
            ) from None
        if self._reader.num_record_batches != -(-num_groups // BATCH_ROWS):
            raise self._damaged(f"{self._reader.num_record_batches} record batches")
        self._batches: dict[int, pa.RecordBatch] = {}
        self._views: dict[tuple[int, str], NDArray[np.integer[Any]]] = {}
        self._cells: dict[tuple[int, tuple[str, ...]], list[memoryview[int]]] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._num_groups

    def column(self, name: str, groups: IntArray) -> IntArray:
        """Values of an integer column for `groups` (rows), int64, same shape.

        E.g. rows 5 and 65,540 come from row 5 of batch 0 and row 4 of batch 1.
        """
        if self._reader.num_record_batches == 1:
            return self._view(0, name)[groups].astype(np.int64)
        values = np.empty(len(groups), dtype=np.int64)
        batches, rows = np.divmod(groups, BATCH_ROWS)
        for batch in np.unique(batches):
            chosen = batches == batch
            values[chosen] = self._view(int(batch), name)[rows[chosen]]
        return values

    def seq_len(self, groups: IntArray) -> IntArray:
        """LLM tokens of `groups`, int64, same shape."""
        image, text, audio = (
            self.column(f"num_{kind}_tokens", groups) for kind in ("image", "text", "audio")
        )
        return image + text + audio

    def row(self, group: int, *names: str) -> tuple[int, ...]:
        """Integer columns of one group."""
        batch, row = divmod(group, BATCH_ROWS)
        cells = self._cells.get((batch, names))
        if cells is None:
            # elements of a memoryview are Python's own numbers, in a third of the time
            cells = self._cells[batch, names] = [
                memoryview(self._view(batch, name))  # type: ignore[arg-type]
                for name in names
            ]
        return tuple([cell[row] for cell in cells])

    def _view(self, batch: int, name: str) -> NDArray[np.integer[Any]]:
        view = self._views.get((batch, name))
        if view is None:
            with self._lock:
                # not `to_numpy`, which imports pandas where it is installed: .2 s and 50 MB
                made: NDArray[Any] = np.from_dlpack(self._batch(batch).column(name))
                view = self._views[batch, name] = made
        return view

    def _batch(self, number: int) -> pa.RecordBatch:
        mapped = self._batches.get(number)
        if mapped is None:
            mapped = self._reader.get_batch(number)
            if mapped.num_rows != min(BATCH_ROWS, self._num_groups - number * BATCH_ROWS):
                raise self._damaged(f"{mapped.num_rows} rows in record batch {number}")
            self._batches[number] = mapped
        return mapped

    def _damaged(self, found: str) -> DamagedShard:
        return DamagedShard(
            f"{self._path}: {found}, which does not fit the manifest's {self._num_groups} groups; "
            "run `packer verify`, or build again"
        )
