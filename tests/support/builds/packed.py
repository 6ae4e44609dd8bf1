"""Builds by the packer, in this process, and what is in their files."""

import hashlib
import io

import numpy as np
import pyarrow as pa
from rich.console import Console

from isobatch.packer.build import Builder
from isobatch.packer.config import BuildConfig
from isobatch.packer.progress import StageProgress
from isobatch.shards.checksums import group_checksum
from isobatch.shards.manifest import read_manifest
from support.builds.raw_data import options


def quiet():
    return StageProgress(Console(file=io.StringIO()))


def build(folder, out, **changes):
    return Builder(BuildConfig(**options(folder, out, **changes)), quiet()).build()


def digests(out):
    """Name -> SHA-256 of every file of a build but the report."""
    paths = sorted(path for path in out.rglob("*") if path.is_file())
    return {
        str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths
    }


def read_index(out):
    """The index and, in a column of its own, the sample ids."""
    folder = out / read_manifest(out).tables
    tables = [
        pa.ipc.open_file(str(folder / name)).read_all()
        for name in ("index.arrow", "sample_ids.arrow")
    ]
    return tables[0].append_column("sample_ids", tables[1].column("sample_ids"))


def read_samples(out):
    """All samples of Arrow shards by the index's byte ranges, in order."""
    index, manifest, rows = read_index(out), read_manifest(out).values, []
    for entry in index.to_pylist():
        with (out / manifest["shards"][entry["shard"]]["name"]).open("rb") as file:
            file.seek(entry["offset"])
            message = file.read(entry["length"])
        assert group_checksum(message) == entry["checksum"]
        shard = pa.ipc.open_file(str(out / manifest["shards"][entry["shard"]]["name"]))
        batch = pa.ipc.read_record_batch(pa.py_buffer(message), shard.schema).to_pylist()
        assert [row["sample_id"] for row in batch] == entry["sample_ids"]
        assert sum(len(row["input_ids"]) for row in batch) == sum(
            entry[f"num_{kind}_tokens"] for kind in ("image", "text", "audio")
        )
        assert (
            sum((np.array(row["labels"]) != -100).sum() for row in batch)
            == entry["num_loss_tokens"]
        )
        rows += batch
    return rows
