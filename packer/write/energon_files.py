"""What Energon reads next to the shards: `.nv-meta` and an index of each tar.

As megatron-energon 7 reads them: `.info.json` has the number of samples in each shard,
`split.yaml` the shards of each split, `dataset.yaml` the kind of the samples, and `NAME.tar.idx`
where each sample begins. A sample is a whole group. `loads.npy` is ours: what the order of groups
goes by. The user may change splits and the dataset's kind, so the manifest does not list the files
of `.nv-meta`.
"""

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import yaml

from isobatch.common.errors import first_line
from isobatch.common.plain_values import write_text
from isobatch.common.types import IntArray
from isobatch.shards.folders import Folder
from isobatch.shards.index import GroupIndex
from isobatch.shards.manifest import Manifest

META = ".nv-meta"
INFO_NAME, SPLIT_NAME, DATASET_NAME, STORED_NAME, LOADS_NAME = (
    f"{META}/{name}"
    for name in (".info.json", "split.yaml", "dataset.yaml", "stored_order.yaml", "loads.npy")
)
META_NAMES = (INFO_NAME, SPLIT_NAME, DATASET_NAME, STORED_NAME, LOADS_NAME)
_KINDS = {
    DATASET_NAME: ("isobatch.loaders.integrations.energon_dataset", "BalancedGroups"),
    STORED_NAME: ("megatron.energon", "CrudeWebdataset"),
}
"""Module and class: in the order of our loader, and in Energon's own. Both give the members by
suffix, of which the training's task encoder makes tensors (`PackedTaskEncoder`).
"""
_OFFSET = np.dtype("<u8")
_TOKENS = ("image", "text", "audio")
_ADVICE = "copy or build it again"


def tar_index_name(shard: str) -> str:
    """Path of a tar's index under the build.

    >>> tar_index_name("shards/shard-00002.tar")
    'shards/shard-00002.tar.idx'
    """
    return f"{shard}.idx"


def write_energon_files(
    out: Path, shards: list[str], index: pa.Table, vision_unit: str
) -> list[str]:
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
    for name, (module, kind) in _KINDS.items():
        about = {"__module__": module, "__class__": kind}
        write_text(out / name, yaml.safe_dump(about, sort_keys=False))
    columns = {name: index.column(name).to_numpy() for name in index.column_names}
    np.save(out / LOADS_NAME, _loads(columns.__getitem__, vision_unit), allow_pickle=False)
    return [tar_index_name(name) for name in counts]


def _loads(column: Callable[[str], IntArray], vision_unit: str) -> IntArray:
    """Vision load and LLM tokens of each group, int64, (groups, 2)."""
    tokens = sum(column(f"num_{kind}_tokens").astype(np.int64) for kind in _TOKENS)
    return np.stack([column(f"num_{vision_unit}").astype(np.int64), tokens], axis=1)


def check_energon_files(root: Folder, manifest: Manifest, index: GroupIndex) -> Iterator[str]:
    """What does not fit the index of the build, file by file."""
    values = {}
    for name in META_NAMES[:-1]:
        try:
            values[name] = yaml.safe_load(root.read(name))  # JSON is YAML
        except (OSError, yaml.YAMLError, ValueError) as error:
            yield f"{name}: cannot be read: {first_line(error)}; {_ADVICE}"
    numbers = np.bincount(index.column("shard"), minlength=len(manifest.shards)).tolist()
    info = values.get(INFO_NAME, {})
    counts = info.get("shard_counts", {}) if isinstance(info, dict) else {}
    for file, number in zip(manifest.shards, numbers, strict=True):
        if INFO_NAME in values and counts.get(file.name, 0) != number:
            said = f"{counts.get(file.name, 0)} samples, the index {number} groups"
            yield f"{INFO_NAME}: {file.name} has {said}; {_ADVICE}"
    try:
        loads = np.load(io.BytesIO(root.read(LOADS_NAME)), allow_pickle=False)
    except (OSError, ValueError) as error:
        yield f"{LOADS_NAME}: cannot be read: {first_line(error)}; {_ADVICE}"
    else:
        if not np.array_equal(loads, _loads(index.column, manifest.limits.vision_unit)):
            yield f"{LOADS_NAME}: is not of these groups; {_ADVICE}"
