"""Saved states as folders: their names, how one begins and gets its name, which one is the newest.

For `engine.runtime.checkpoints.training_state`. A state is written into `step-20.new` and called
`step-20` when it is whole and on disk, so whatever happens meanwhile, the states before it can be
used. All of this runs on one rank.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from balance.errors import ConfigError, DataError, first_line

STATE_VERSION = 1
PROGRESS_NAME = "progress.json"
_NAME = re.compile(r"step-(\d+)(?:-(\d+))?")
_MAKE_ROOM = "the states before it are whole; make room, or give a folder that can be written to"


def newest_state(folder: Path) -> Path | None:
    """The newest whole state in a folder, if there is one."""
    return next(reversed(_states(folder)), None)


def begin_state(folder: Path, step: int) -> Path:
    """An empty folder for a state that is to be written. What killed runs left is removed.
    DataError if that fails.
    """
    unfinished = folder / f"step-{step}.new"
    with _on_disk(unfinished, "made"):
        for left in [*folder.glob("step-*.new"), *folder.glob("step-*.old")]:
            shutil.rmtree(left)
        unfinished.mkdir(parents=True)
    return unfinished


def finish_state(unfinished: Path, step: int, content: Mapping[str, Any]) -> Path:
    """Complete a state whose tensors are written; -> its folder, under its name. DataError if that
    fails.
    """
    with _on_disk(unfinished, "written"):
        write_progress(unfinished / PROGRESS_NAME, {"version": STATE_VERSION, **content})
        return give_name(unfinished, step)


def give_up(unfinished: Path) -> None:
    """Remove what was written of a state that will not be whole, as far as that goes."""
    shutil.rmtree(unfinished, ignore_errors=True)


def remove_older(folder: Path, kept: int) -> None:
    """Remove all states but the newest `kept`. DataError if one cannot be removed."""
    for old in _states(folder)[:-kept]:
        with _on_disk(old, "removed"):
            shutil.rmtree(old.rename(old.with_name(f"{old.name}.old")))


def read_progress(state: Path) -> dict[str, Any]:
    """What `finish_state` was given. DataError if it cannot be read, ConfigError if another version
    wrote it.
    """
    path = state / PROGRESS_NAME
    try:
        content: dict[str, Any] = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path}: {first_line(error)}; remove {state} to use the state before it"
        ) from None
    if content.get("version") != STATE_VERSION:
        raise ConfigError(
            f"{path}: version {content.get('version')}; this isobatch reads version {STATE_VERSION}"
        )
    return content


def write_progress(path: Path, content: Mapping[str, Any]) -> None:
    """Write a file of JSON, and see that it is on the disk."""
    with path.open("w", encoding="utf-8") as file:
        file.write(json.dumps(content, indent=1))
        file.flush()
        os.fsync(file.fileno())


def give_name(unfinished: Path, step: int) -> Path:
    """Give a whole state its name; another one if the step was saved before: nothing is ever
    written over.
    """
    again = [
        int(match[2] or 0)
        for path in _states(unfinished.parent)
        if (match := _NAME.fullmatch(path.name)) and int(match[1]) == step
    ]
    target = unfinished.with_name(f"step-{step}-{max(again) + 1}" if again else f"step-{step}")
    _flush(unfinished)
    unfinished.rename(target)
    _flush(target.parent)
    return target


def _states(folder: Path) -> list[Path]:
    """Whole states, oldest first."""
    found = [
        (match, path) for path in folder.glob("step-*") if (match := _NAME.fullmatch(path.name))
    ]
    return [
        path
        for _, path in sorted(((int(match[1]), int(match[2] or 0)), path) for match, path in found)
    ]


def _flush(folder: Path) -> None:
    """Put a folder's names on the disk."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


@contextmanager
def _on_disk(path: Path, what: str) -> Iterator[None]:
    """Tell what the file system refuses in one line: DataError."""
    try:
        yield
    except OSError as error:
        raise cannot(path, what, error) from error


def cannot(path: Path, what: str, error: Exception, rank: int = 0) -> DataError:
    """The error for a state that cannot be made, written or removed."""
    return DataError(f"{path} cannot be {what}: {reason_of(error)} (rank {rank}); {_MAKE_ROOM}")


def reason_of(error: Exception) -> str:
    """Why a file could not be read or written, in one line."""
    if isinstance(error, OSError):
        return error.strerror or first_line(error)
    return f"{type(error).__name__}: {first_line(error)}"
