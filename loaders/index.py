"""What a finished build says about itself: its manifest (`Manifest`) and where its groups are (`GroupIndex`).

The index stays on disk, mapped: opening costs nothing per group, a step touches the pages of its groups, and the ranks
of a machine share them. So 100 million groups (about 6 GB of index) need a few megabytes per process.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc
from numpy.typing import NDArray

from balance.errors import ConfigError, DamagedShard, DataError
from balance.order import OrderConfig
from balance.presets import ModelPreset, model_from_dict
from balance.records import IntArray

FORMAT_VERSION = 1
FORMATS = ("arrow", "webdataset", "refs")
BATCH_ROWS = 65_536
"""Rows of a record batch of index.arrow, the last one excepted; docs/design.md."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFile:
    """A shard as the manifest lists it."""

    path: Path
    size: int
    """Bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The part of manifest.json that loading needs."""

    root: Path
    """The build directory."""
    hash: str
    """SHA-256 of the file: two builds with the same hash have the same bytes."""
    format: str
    model: ModelPreset
    order: OrderConfig
    num_groups: int
    shards: tuple[ShardFile, ...]
    data_root: Path | None
    """Folder that image paths start from; refs only."""
    image_token_id: int
    vocab_size: int


def read_manifest(root: Path) -> Manifest:
    """The manifest of the build in `root`. DataError if there is none, or none that this version can read."""
    if not root.is_dir():
        raise DataError(f"{root}: no such directory; give the output directory of `packer build`")
    path = root / "manifest.json"
    if not path.is_file():
        raise DataError(
            f"{root}: no manifest.json, so no finished build; run the same `packer build` again to finish it"
        )
    content = path.read_bytes()
    try:
        values = json.loads(content)
        version = values["format_version"]
        if version == FORMAT_VERSION and values["format"] in FORMATS:
            return _from_values(root, hashlib.sha256(content).hexdigest(), values)
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise DataError(f"{path}: not a manifest of Isobatch ({type(error).__name__}: {error}); build again") from None
    raise DataError(
        f"{path}: format_version {version}, format {values['format']!r}, but this version of Isobatch reads "
        f"format_version {FORMAT_VERSION}, {', '.join(FORMATS)}; install the version that wrote it, or build again"
    )


def _from_values(root: Path, digest: str, values: dict[str, Any]) -> Manifest:
    data_root = values.get("data_root")
    return Manifest(
        root=root,
        hash=digest,
        format=values["format"],
        model=model_from_dict(values["model"]),
        order=OrderConfig(**values["order"]),
        num_groups=values["totals"]["num_groups"],
        shards=tuple(ShardFile(path=root / shard["name"], size=shard["size"]) for shard in values["shards"]),
        data_root=Path(data_root) if data_root is not None else None,
        image_token_id=values["tokenizer"]["image_token_id"],
        vocab_size=values["tokenizer"]["vocab_size"],
    )


class GroupIndex:
    """index.arrow, mapped: columns of chosen groups, without reading the others."""

    def __init__(self, path: Path, num_groups: int) -> None:
        self._path, self._num_groups = path, num_groups
        try:
            self._reader = pa.ipc.open_file(pa.memory_map(str(path)))
        except (OSError, pa.ArrowInvalid) as error:
            raise DamagedShard(f"{path}: cannot be opened ({error}); run `packer verify`, or build again") from None
        if self._reader.num_record_batches != -(-num_groups // BATCH_ROWS):
            raise self._damaged(f"{self._reader.num_record_batches} record batches")
        self._batches: dict[int, pa.RecordBatch] = {}

    def __len__(self) -> int:
        return self._num_groups

    def column(self, name: str, groups: IntArray) -> IntArray:
        """Values of an integer column for `groups` (rows), int64, same shape.

        E.g. rows 5 and 65,540 come from row 5 of batch 0 and row 4 of batch 1.
        """
        values = np.empty(len(groups), dtype=np.int64)
        batches, rows = np.divmod(groups, BATCH_ROWS)
        for batch in np.unique(batches):
            chosen = batches == batch
            values[chosen] = self._view(int(batch), name)[rows[chosen]]
        return values

    def seq_len(self, groups: IntArray) -> IntArray:
        """LLM tokens of `groups`, int64, same shape."""
        image, text, audio = (self.column(f"num_{kind}_tokens", groups) for kind in ("image", "text", "audio"))
        return image + text + audio

    def row(self, group: int, *names: str) -> tuple[int, ...]:
        """Integer columns of one group."""
        batch, row = divmod(group, BATCH_ROWS)
        return tuple(int(self._view(batch, name)[row]) for name in names)

    def _view(self, batch: int, name: str) -> NDArray[np.integer[Any]]:
        mapped = self._batches.get(batch)
        if mapped is None:
            mapped = self._reader.get_batch(batch)
            if mapped.num_rows != min(BATCH_ROWS, self._num_groups - batch * BATCH_ROWS):
                raise self._damaged(f"{mapped.num_rows} rows in record batch {batch}")
            self._batches[batch] = mapped
        view: NDArray[np.integer[Any]] = mapped.column(name).to_numpy(zero_copy_only=True)
        return view

    def _damaged(self, found: str) -> DamagedShard:
        return DamagedShard(
            f"{self._path}: {found}, which does not fit the manifest's {self._num_groups} groups; "
            "run `packer verify`, or build again"
        )
