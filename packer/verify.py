"""`packer verify`: whether sizes, checksums and totals are the manifest's.

Of a refs build also whether the files that it points to still are what was counted. Each is read
once per shard, and images are decoded, for a file that is whole by its header may still not decode.
"""

import tarfile
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import pyarrow as pa

from isobatch.common.errors import ConfigError, DamagedShard, MediaRejected, first_line
from isobatch.common.types import COUNT_COLUMNS
from isobatch.counting.headers.audio_header import read_audio_header
from isobatch.counting.headers.image_header import read_header
from isobatch.counting.headers.video_header import read_video_header
from isobatch.counting.records.media import Media, SampleProblem, open_media
from isobatch.models.audio_tokens import resampled_length
from isobatch.packer.changes.sample_names import SampleNames, ids_in_shard
from isobatch.packer.changes.target import leftovers, unfinished_change
from isobatch.packer.format_text import counted
from isobatch.packer.progress import StageProgress
from isobatch.packer.write.energon_files import check_energon_files
from isobatch.shards.folders import Folder, is_uri, on_disk, open_folder
from isobatch.shards.index import IDS_NAME, INDEX_NAME, GroupIndex, open_index
from isobatch.shards.manifest import MANIFEST_NAME, BuildFile, FolderFiles, Manifest, read_manifest
from isobatch.shards.stored_group import frame_paths
from isobatch.shards.tables import COUNTS_NAME, REJECTED_NAME, read_row_groups, row_group_sizes

MOST_SHOWN = 20
"""Problems that an error lists: of a refs build whose files are gone there are millions."""
_NUMBERS = {
    "image": ("image_widths", "image_heights", "image_frames", "image_rates"),
    "audio": ("audio_lengths",),
}
"""Columns of what was counted of each file; a build may be without videos'."""

_File = tuple[str, str, tuple[float, ...]]
"""Kind and name of a file, and its numbers as counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What was checked, and all that is wrong."""

    num_files: int
    num_bytes: int
    num_groups: int
    num_samples: int
    num_media: int
    """Files of a refs build that were checked."""
    problems: list[str]


def verify_build(
    out: Path | str,
    progress: StageProgress,
    *,
    workers: int,
    media: bool = False,
    image_root: str | None = None,
    absent: SampleNames | None = None,
) -> Verification:
    """Check every file of a complete build, each read once; -> problems, file by file.

    `media`: also the files that a refs build points to, under its data root or `image_root`.
    `absent`: samples that must be in no table and no shard.
    ConfigError for `media` of another build, or for an `image_root` without it.
    """
    if image_root is not None and not media:
        raise ConfigError("--image-root is for --media; give that too")
    manifest = read_manifest(out)
    if media and manifest.format != "refs":
        held = f"the shards of this {manifest.format} build hold their files"
        raise ConfigError(f"--media: {held}, and are checked without the option")
    root = open_folder(manifest.place, follow_links=True)
    files = [*manifest.shards, *manifest.files]
    total = sum(file.size for file in files)
    problems = []
    with (
        on_disk(manifest.place, [file.name for file in manifest.files]) as folder,
        progress.stage("verify", total, unit="files") as stage,
        ThreadPoolExecutor(workers) as pool,  # threads are enough: hashing releases the GIL
    ):
        tables = open_folder(str(folder), follow_links=True)
        folders = [root] * len(manifest.shards) + [tables] * len(manifest.files)
        for file, problem in zip(files, pool.map(_check_file, folders, files), strict=True):
            problems += problem
            stage.advance(file.size)
            stage.count(1)
        # without the folder all shards are missing, which is said already
        if root.has_folder("shards"):
            known = {file.name for file in files}
            names = [info.name for info in root.files("shards") if info.name not in known]
            problems += _strangers(names, manifest)
        if "content_hash" not in manifest.values:
            problems.append(f"{MANIFEST_NAME}: has no content_hash: it was edited")
        tables_folder = folder / manifest.tables
        if not problems:
            problems += _check_tables(tables_folder, root, manifest)
        if absent is not None:
            problems += _check_absent(tables_folder, root, manifest, absent, pool)
            names = [name for name in leftovers(root, manifest) if not name.startswith("shards/")]
            what = "is of a change that was not finished, and may have them: run that again"
            problems += [f"{name}: {what}" for name in names]
    num_media = 0
    if media and not problems:
        with (
            progress.stage("media", len(manifest.shards), unit="files") as stage,
            ThreadPoolExecutor(workers) as pool,
        ):
            for number, media_problems in _check_media(manifest, image_root, pool):
                num_media += number
                problems += media_problems
                stage.advance(1)
                stage.count(number)
    return Verification(
        num_files=len(files),
        num_bytes=total,
        num_groups=manifest.num_groups,
        num_samples=manifest.values["totals"]["num_packed"],
        num_media=num_media,
        problems=problems,
    )


def _check_file(folder: Folder, expected: BuildFile) -> list[str]:
    name = expected.name
    try:
        file = BuildFile.of(folder, name)
    except OSError as error:
        return [f"{name}: {error.strerror or error}"]
    if file.size != expected.size:
        return [f"{name}: {file.size:,} bytes, the manifest says {expected.size:,}"]
    if file.checksum != expected.checksum:
        return [f"{name}: its checksum is not the manifest's: the content is damaged"]
    return []


def _strangers(names: list[str], manifest: Manifest) -> list[str]:
    """What is said of files among the shards that the manifest does not list."""
    if names and (change := unfinished_change(manifest)):
        number = counted(len(names), "files")
        left = f"an unfinished `packer {change}` left {number} in shards"
        return [f"{left}: run the same command again, or another change with --discard"]
    return [f"{name}: is not in the manifest" for name in names]


def _check_tables(folder: Path, root: Folder, manifest: Manifest) -> Iterator[str]:
    totals_problems = list(_check_totals(folder, manifest))
    yield from totals_problems
    if manifest.format == "energon" and not totals_problems:
        index = open_index(manifest, FolderFiles(manifest, folder))
        yield from check_energon_files(root, manifest, index)


def _check_totals(folder: Path, manifest: Manifest) -> Iterator[str]:
    totals = manifest.values["totals"]
    wanted = ("num_packed", "num_read", "num_repeated", *COUNT_COLUMNS)
    if missing := [name for name in wanted if name not in totals]:
        yield f"{MANIFEST_NAME}: its totals have no {', '.join(missing)}"
        return
    try:
        index = open_index(manifest, FolderFiles(manifest, folder))
        has_ids = index.num_ids() == index.column("num_samples")
    except DamagedShard as error:  # the manifest does not fit it
        yield str(error)
        return
    if not has_ids.all():
        ids = IDS_NAME if manifest.version > 2 else INDEX_NAME
        yield f"{ids}: group {np.argmin(has_ids)} has not as many ids as samples"
    for column, total in (("num_samples", "num_packed"), *((name, name) for name in COUNT_COLUMNS)):
        column_sum = int(index.column(column).sum())
        if column_sum != totals[total]:
            said = f"the manifest says {totals[total]:,}"
            yield f"{INDEX_NAME}: {column} adds up to {column_sum:,}, {said}"
    num_rejected = sum(row_group_sizes(folder / REJECTED_NAME))
    num_packed = totals["num_packed"]
    expected = totals["num_read"] + totals["num_repeated"]
    if num_packed + num_rejected != expected:
        rows = f"{num_rejected} rows and {num_packed} packed"
        yield f"{REJECTED_NAME}: {rows}, but {expected} read or repeated"
    if sum(row_group_sizes(folder / COUNTS_NAME)) < num_packed:
        yield f"{COUNTS_NAME}: fewer samples than were packed"
    yield from _check_ranges(index, manifest)


def _check_absent(
    folder: Path, root: Folder, manifest: Manifest, names: SampleNames, pool: Executor
) -> Iterator[str]:
    """Tables and shards that have samples which must not be there."""
    for name in (COUNTS_NAME, REJECTED_NAME):
        number = sum(int(names.among(table).sum()) for table in read_row_groups(folder / name))
        if number:
            samples = counted(number, "samples")
            yield f"{manifest.table_path(name)}: has {samples} that must be absent"

    def stored(name: str) -> str:
        try:
            ids = pa.array(ids_in_shard(root, manifest, name), pa.string())
        except (OSError, pa.ArrowException, LookupError, ValueError, tarfile.TarError) as error:
            return f"{name}: cannot be searched: {first_line(error)}"
        nothing = pa.nulls(len(ids), pa.string())
        table = pa.table({"sample_id": ids, "source": nothing})
        number = int(names.among(table).sum())
        return f"{name}: has {counted(number, 'samples')} that must be absent" if number else ""

    yield from filter(None, pool.map(stored, [shard.name for shard in manifest.shards]))


def _check_ranges(index: GroupIndex, manifest: Manifest) -> Iterator[str]:
    """Groups are inside their shards, in order, without overlap."""
    shard, offset, length = (index.column(name) for name in ("shard", "offset", "length"))
    manifest.shard(int(shard.max(initial=0)))
    sizes = np.array([file.size for file in manifest.shards])
    overlaps = (shard[1:] == shard[:-1]) & (offset[1:] < offset[:-1] + length[:-1])
    bad = np.flatnonzero((offset + length > sizes[shard]) | np.concatenate([[False], overlaps]))
    if len(bad):
        name = manifest.shards[shard[bad[0]]].name
        yield f"{INDEX_NAME}: group {bad[0]} is not where shard {name} has room for it"


def require_intact(verification: Verification) -> None:
    """Raise DamagedShard with the first problems and the number of others, if there are any."""
    problems = verification.problems
    if problems:
        more = len(problems) - MOST_SHOWN
        others = [f"and {more:,} more (all: --json)"] if more > 0 else []
        raise DamagedShard("; ".join([*problems[:MOST_SHOWN], *others]))


# --- files that a refs build points to ---


def _check_media(
    manifest: Manifest, image_root: str | None, pool: Executor
) -> Iterator[tuple[int, list[str]]]:
    """(files, problems) of each shard of a refs build."""
    place = image_root or manifest.data_root or ""
    if not is_uri(place) and not Path(place).is_dir():
        raise ConfigError(f"--media: {place}: no such folder; give theirs with --image-root")
    root = open_folder(place, follow_links=True)
    shards = open_folder(manifest.place, follow_links=True)
    for shard in manifest.shards:
        files = _files_of(shards, shard.name)
        problems = pool.map(partial(_media_problem, root, manifest), files, files.values())
        yield len(files), [problem for problem in problems if problem]


def _files_of(shards: Folder, name: str) -> dict[_File, str]:
    """The files of a shard -> the first sample that has it."""
    files: dict[_File, str] = {}
    with shards.open(name) as content, pa.ipc.open_file(content) as reader:
        for number in range(reader.num_record_batches):
            batch = reader.get_batch(number)
            for kind, columns in _NUMBERS.items():
                names = batch.column(f"{kind}_paths").to_pylist()
                there = (column for column in columns if column in batch.schema.names)
                numbers = [batch.column(column).to_pylist() for column in there]
                owners = batch.column("sample_id").to_pylist()
                for owner, paths, *counted in zip(owners, names, *numbers, strict=True):
                    for path, *values in zip(paths, *counted, strict=True):
                        files.setdefault((kind, path, tuple(values)), owner)
    return files


def _media_problem(root: Folder, manifest: Manifest, file: _File, owner: str) -> str:
    """What is wrong with a file, with the sample that has it; empty if nothing is."""
    kind, name, counted = file
    if kind == "image" and len(counted) > 2:
        kind, counted = ("video", counted) if counted[2] else (kind, counted[:2])
    try:
        if frames := frame_paths(name):
            measured = _film_numbers(root, frames)
        else:
            with open_media(root, Media(name), kind) as content:
                measured = _numbers(content, kind, name, manifest)
    except (SampleProblem, MediaRejected) as problem:
        return f"sample {owner!r}: {problem}"
    if measured != counted:
        now, before = (_TEXTS[kind].format(*numbers) for numbers in (measured, counted))
        return f"sample {owner!r}: {name}: {now} now, {before} when it was counted"
    return ""


_TEXTS = {
    "image": "{} x {} pixels",
    "video": "{2} frames of {0} x {1} pixels, {3:.5g} per second",
    "audio": "{} samples",
}


def _film_numbers(root: Folder, frames: list[str]) -> tuple[float, ...]:
    sizes = set()
    for frame in frames:
        with open_media(root, Media(frame), "image") as content:
            header = read_header(content, frame, decode=True)
        sizes.add((header.width, header.height))
    if len(sizes) > 1:
        raise SampleProblem("frame_sizes", f"{frames[0]} and others of its list")
    return (*sizes.pop(), len(frames), 0.0)


def _numbers(content: Any, kind: str, name: str, manifest: Manifest) -> tuple[float, ...]:
    if kind == "video":
        video = read_video_header(content, name, decode=True)
        return video.width, video.height, video.num_frames, video.frames_per_second
    if kind == "image":
        header = read_header(content, name, decode=True)
        return header.width, header.height
    audio = read_audio_header(cast("BinaryIO", content), name)
    if manifest.model.audio is None:
        raise SampleProblem("no_audio_encoder", name)
    return (resampled_length(manifest.model.audio, audio.num_samples, audio.sampling_rate),)
