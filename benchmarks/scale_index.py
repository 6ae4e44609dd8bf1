"""A build of as many groups as asked, for `scale.py`: it repeats the rows of a real one.

The index and the sample ids are written by the packer's own code (`join_parts`, `merge_index`), and
the manifest lists as many shards as such a build has. Groups are read from the shards of the real
build, whose names the manifest repeats, so any group of any step can be read and decoded. What is
not real: the sample ids are empty (no loader reads them), and there are no tables of samples.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
from llava_like import write_llava_like

from isobatch.packer.demo.dataset import demo_tokenizer_path
from isobatch.shards.folders import open_folder
from isobatch.shards.index import (
    IDS_NAME,
    IDS_SCHEMA,
    INDEX_COLUMNS,
    INDEX_NAME,
    GroupIndex,
    find_batches,
    join_parts,
    merge_index,
    open_index,
    read_rows,
)
from isobatch.shards.manifest import MANIFEST_NAME, BuildFile, read_manifest, write_manifest

MODEL = "internvl_1_5"
SAMPLES = 20_000
"""Of the real build: conversations with one image or none, in LLaVA-665K's layout."""
PARTITION_GROUPS = 1_000_000
"""Groups whose rows are merged at a time, about."""
TABLES = (INDEX_NAME, IDS_NAME)


def pack_base(folder: Path, samples: int = SAMPLES) -> Path:
    """A real build, packed by `packer build` of generated conversations and images."""
    write_llava_like(folder / "raw", samples)
    out = folder / "base"
    options = ["--dataset", folder / "raw", "--model", MODEL, "--out", out]
    options += ["--tokenizer", demo_tokenizer_path(), "--json"]
    script = "from isobatch.packer.cli import main; main()"
    command = [sys.executable, "-c", script, "build", *map(str, options)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return out


def repeat_build(base: Path, out: Path, num_groups: int) -> int:
    """Write about `num_groups` groups to `out`, on the disk of `base`; -> how many it has."""
    manifest = read_manifest(base)
    copies = max(1, min(PARTITION_GROUPS, num_groups) // manifest.num_groups)
    out.mkdir(parents=True)
    part = _write_part(open_index(manifest), len(manifest.shards), copies, out / "part.arrow")
    rows = out / "rows.arrow"
    figures = join_parts([part], rows)
    number = max(1, round(num_groups / figures.num_groups))
    num_shards = copies * len(manifest.shards)
    tables = (read_rows(rows) for _ in range(number))
    merge_index(tables, [figures] * number, [num_shards] * number, out)
    part.unlink()
    rows.unlink()
    values = json.loads((base / MANIFEST_NAME).read_text("utf-8"))
    values.pop("content_hash", None)
    for shard in values["shards"]:
        (out / shard["name"]).parent.mkdir(exist_ok=True)
        os.link(base / shard["name"], out / shard["name"])
    values["shards"] *= copies * number
    values["totals"] = {name: of * copies * number for name, of in values["totals"].items()}
    values["files"] = [_describe(out, name) for name in TABLES]
    write_manifest(out, values)
    return figures.num_groups * number


def _write_part(index: GroupIndex, num_shards: int, copies: int, path: Path) -> Path:
    """Index rows of several copies of a build, without sample ids."""
    base = {name: index.column(name) for name in INDEX_COLUMNS if name != "checksum"}
    checksums = [index.row(group, "checksum")[0] for group in range(len(index))]
    base["checksum"] = np.array(checksums, np.uint64)
    columns = {name: np.tile(base[name], copies) for name in INDEX_COLUMNS}
    columns["shard"] += np.repeat(np.arange(copies), len(index)) * num_shards
    types = {"offset": pa.int64(), "length": pa.int64(), "checksum": pa.uint64()}
    arrays = {name: pa.array(of, types.get(name, pa.int32())) for name, of in columns.items()}
    size = copies * len(index)
    ids = pa.ListArray.from_arrays(np.zeros(size + 1, np.int32), pa.array([], pa.string()))
    table = pa.table({**arrays, IDS_SCHEMA.names[0]: ids})
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table)
    return path


def _describe(out: Path, name: str) -> dict[str, object]:
    """A file as the manifest lists it."""
    file = BuildFile.of(open_folder(str(out)), name)
    file = replace(file, batches=find_batches(out / name))
    if name == INDEX_NAME:
        with pa.ipc.open_file(out / name) as index:
            file = replace(file, types={field.name: str(field.type) for field in index.schema})
    return file.to_json()
