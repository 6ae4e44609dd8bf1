"""`packer verify`: is a build what its manifest says? Sizes, checksums, and totals that add up."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from balance.errors import DamagedShard
from balance.types import COUNT_COLUMNS
from packer.progress import StageProgress
from shards.folders import Folder, on_disk, open_folder
from shards.manifest import describe_file, read_manifest
from shards.tables import COUNTS_NAME, REJECTED_NAME, read_table


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What was checked, and all that is wrong."""

    num_files: int
    num_bytes: int
    num_groups: int
    num_samples: int
    problems: list[str]


def verify_build(out: Path | str, progress: StageProgress, *, workers: int) -> Verification:
    """Check every file of a complete build in a folder or at a URI, each read once.

    Problems are listed and name their files; DataError if there is no build.
    """
    place = str(out)
    manifest = read_manifest(place)
    root = open_folder(place, follow_links=True)
    files = [*manifest["shards"], *manifest["files"]]
    total = sum(file["size"] for file in files)
    problems = []
    with (
        on_disk(place, [file["name"] for file in manifest["files"]]) as folder,
        progress.stage("verify", total, unit="files") as stage,
        ThreadPoolExecutor(workers) as pool,  # threads are enough: hashing releases the GIL
    ):
        roots = [root] * len(manifest["shards"]) + [
            open_folder(str(folder), follow_links=True)
        ] * len(manifest["files"])
        for file, problem in zip(files, pool.map(_check_file, roots, files), strict=True):
            problems += problem
            stage.advance(file["size"])
            stage.count(1)
        problems += _strangers(root, manifest["shards"])
        if not problems:
            problems += _check_totals(folder, manifest)
    return Verification(
        num_files=len(files),
        num_bytes=sum(file["size"] for file in files),
        num_groups=manifest["totals"]["num_groups"],
        num_samples=manifest["totals"]["num_packed"],
        problems=problems,
    )


def _strangers(root: Folder, shards: list[dict[str, Any]]) -> list[str]:
    known = {shard["name"] for shard in shards}
    if not root.has_folder("shards"):
        return []  # all are missing, which is said already
    return [
        f"{info.name}: is not in the manifest"
        for info in root.files("shards")
        if info.name not in known
    ]


def _check_file(root: Folder, expected: dict[str, Any]) -> list[str]:
    name = expected["name"]
    try:
        found = describe_file(root, name)
    except OSError as error:
        return [f"{name}: {error.strerror or error}"]
    if found["size"] != expected["size"]:
        return [f"{name}: {found['size']:,} bytes, the manifest says {expected['size']:,}"]
    if found["xxh3_128"] != expected["xxh3_128"]:
        return [f"{name}: its checksum is not the manifest's: the content is damaged"]
    return []


def _check_totals(out: Path, manifest: dict[str, Any]) -> Iterator[str]:
    totals = manifest["totals"]
    with pa.memory_map(str(out / "index.arrow")) as source:
        index = pa.ipc.open_file(source).read_all()
    if len(index) != totals["num_groups"]:
        yield f"index.arrow: {len(index)} groups, the manifest says {totals['num_groups']}"
    for column, total in (("num_samples", "num_packed"), *((name, name) for name in COUNT_COLUMNS)):
        found = int(np.sum(index.column(column).to_numpy(), dtype=np.int64))
        if found != totals[total]:
            yield f"index.arrow: {column} adds up to {found:,}, the manifest says {totals[total]:,}"
    num_rejected = len(read_table(out / REJECTED_NAME))
    found, expected = (
        totals["num_packed"] + num_rejected,
        totals["num_read"] + totals["num_repeated"],
    )
    if found != expected:
        yield f"{REJECTED_NAME}: {num_rejected} rows and {totals['num_packed']} packed, but {expected} read or repeated"
    if len(read_table(out / COUNTS_NAME)) < totals["num_packed"]:
        yield f"{COUNTS_NAME}: fewer samples than were packed"
    yield from _check_ranges(index, manifest["shards"])


def _check_ranges(index: pa.Table, shards: list[dict[str, Any]]) -> Iterator[str]:
    """Groups lie inside their shards, in order, without overlap."""
    shard, offset, length = (
        index.column(name).to_numpy() for name in ("shard", "offset", "length")
    )
    sizes = np.array([entry["size"] for entry in shards])
    overlaps = (shard[1:] == shard[:-1]) & (offset[1:] < offset[:-1] + length[:-1])
    bad = np.flatnonzero((offset + length > sizes[shard]) | np.concatenate([[False], overlaps]))
    if len(bad):
        yield f"index.arrow: group {bad[0]} does not lie where shard {shards[shard[bad[0]]]['name']} has room for it"


def require_intact(verification: Verification) -> None:
    """Raise DamagedShard with all problems, one per line, if there are any."""
    if verification.problems:
        raise DamagedShard("; ".join(verification.problems))
