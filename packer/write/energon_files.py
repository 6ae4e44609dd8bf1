"""What Energon reads next to the shards: `.nv-meta` and an index of each tar.

As megatron-energon 7 reads them: `.info.json` has the number of samples in each shard,
`split.yaml` the shards of each split, `dataset.yaml` the kind of the samples, and `NAME.tar.idx`
where each sample begins. A sample is a whole group. The user may change splits and the dataset's
kind, so the manifest does not list the files of `.nv-meta`.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import yaml

from isobatch.common.plain_values import write_text
from isobatch.shards.folders import Folder
from isobatch.shards.index import GroupIndex
from isobatch.shards.manifest import Manifest

META = ".nv-meta"
INFO_NAME, SPLIT_NAME, DATASET_NAME = (
    f"{META}/{name}" for name in (".info.json", "split.yaml", "dataset.yaml")
)
META_NAMES = (INFO_NAME, SPLIT_NAME, DATASET_NAME)
_DATASET = {"__module__": "megatron.energon", "__class__": "CrudeWebdataset"}
"""Samples as members by suffix, which a cooker of the training reads (`PackedTaskEncoder`)."""
_OFFSET = np.dtype("<u8")


def tar_index_name(shard: str) -> str:
    """Path of a tar's index under the build.

    >>> tar_index_name("shards/shard-00002.tar")
    'shards/shard-00002.tar.idx'
    """
    return f"{shard}.idx"


def write_energon_files(out: Path, shards: list[str], index: pa.Table) -> list[str]:
    """Write `.nv-meta` and the tars' indexes; -> the paths of the indexes under `out`.

    `shards`: paths of all shards; `index`: the rows of their groups, in order. A shard without
    groups has no index and is in no split.
    """
    shard, offset, length = (
        index.column(name).to_numpy() for name in ("shard", "offset", "length")
    )
    counts: dict[str, int] = {}
    for number in np.unique(shard).tolist():
        rows = np.flatnonzero(shard == number)
        begins = [*offset[rows], offset[rows[-1]] + length[rows[-1]]]  # and where the last one ends
        temporary = out / (shards[number] + ".idx.tmp")
        temporary.write_bytes(np.array(begins, _OFFSET).tobytes())
        temporary.replace(out / tar_index_name(shards[number]))
        counts[shards[number]] = len(rows)
    (out / META).mkdir(exist_ok=True)
    write_text(out / INFO_NAME, json.dumps({"shard_counts": counts}, indent=2))
    parts = {"train": list(counts), "val": [], "test": []}
    write_text(out / SPLIT_NAME, yaml.safe_dump({"split_parts": parts, "exclude": []}))
    write_text(out / DATASET_NAME, yaml.safe_dump(_DATASET, sort_keys=False))
    return [tar_index_name(name) for name in counts]


def check_energon_files(root: Folder, manifest: Manifest, index: GroupIndex) -> Iterator[str]:
    """What does not fit the index of the build, file by file."""
    values: dict[str, Any] = {}
    for name in META_NAMES:
        try:
            values[name] = yaml.safe_load(root.read(name))  # JSON is YAML
        except OSError as error:
            yield f"{name}: {error.strerror or error}; build again, or run `energon prepare`"
        except (yaml.YAMLError, ValueError):
            yield f"{name}: is not YAML; build again, or run `energon prepare`"
        else:
            if not isinstance(values[name], dict):
                yield f"{name}: is not an object with keys; build again, or run `energon prepare`"
    numbers = np.bincount(index.column("shard"), minlength=len(manifest.shards)).tolist()
    groups = {file.name: count for file, count in zip(manifest.shards, numbers, strict=True)}
    if isinstance(info := values.get(INFO_NAME), dict):
        counts = info.get("shard_counts")
        counts = counts if isinstance(counts, dict) else {}
        for name, count in groups.items():
            if counts.get(name, 0) != count:
                said = f"{counts.get(name, 0)} samples, the index has {count} groups"
                yield f"{INFO_NAME}: {name} has {said}"
