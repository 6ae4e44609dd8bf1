"""Files that a refs build points to: whether they still are what was counted.

For `packer.verify`. Each file is read once per shard, and images are decoded, for a file that is
whole by its header may still not decode.
"""

from collections.abc import Iterator
from concurrent.futures import Executor
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

import pyarrow as pa

from isobatch.common.errors import ConfigError, MediaRejected
from isobatch.counting.headers.audio_header import read_audio_header
from isobatch.counting.headers.image_header import read_header
from isobatch.counting.headers.video_header import read_video_header
from isobatch.counting.records.media import Media, SampleProblem, open_media
from isobatch.models.audio_tokens import resampled_length
from isobatch.shards.folders import Folder, is_uri, open_folder
from isobatch.shards.manifest import Manifest
from isobatch.shards.stored_group import frame_paths

_NUMBERS = {
    "image": ("image_widths", "image_heights", "image_frames", "image_rates"),
    "audio": ("audio_lengths",),
}
"""Columns of what was counted of each file; a build may be without videos'."""

_File = tuple[str, str, tuple[float, ...]]
"""Kind and name of a file, and its numbers as counted."""


def require_refs(manifest: Manifest) -> None:
    """ConfigError if the build is no refs build."""
    if manifest.format != "refs":
        held = f"the shards of this {manifest.format} build hold their files"
        raise ConfigError(f"--media: {held}, and are checked without the option")


def check_media(
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
        problems = pool.map(partial(_problem, root, manifest), files, files.values())
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


def _problem(root: Folder, manifest: Manifest, file: _File, owner: str) -> str:
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
