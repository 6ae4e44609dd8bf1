"""Saved states as folders: names, safe writing, and the newest.

A state is written into `step-20.new` and renamed to `step-20` when it is complete and on disk, so
the states before it stay usable whatever happens. Runs on one rank.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from isobatch.common.errors import ConfigError, DataError, first_line

STATE_VERSION = 1
PROGRESS_NAME = "progress.json"
_NAME = re.compile(r"step-(\d+)(?:-(\d+))?")
_ADVICE = "the states before it are complete; free some space, or give a folder that is writable"
_ADVICE_TO_READ = "remove it to use the state before it"


def newest_state(folder: Path) -> Path | None:
    """The newest complete state in a folder, if there is one."""
    return next((path for *_, path in reversed(_states(folder))), None)


def begin_state(folder: Path, step: int) -> Path:
    """Make an empty folder for a state, and remove what killed runs left. DataError if it fails."""
    unfinished = folder / f"step-{step}.new"
    with _os_errors(unfinished, "made"):
        for old in [*folder.glob("step-*.new"), *folder.glob("step-*.old")]:
            shutil.rmtree(old)
        unfinished.mkdir(parents=True)
    return unfinished


def finish_state(unfinished: Path, step: int, content: Mapping[str, Any]) -> Path:
    """Complete a state whose tensors are written; -> its final folder. DataError if it fails."""
    with _os_errors(unfinished, "written"):
        with (unfinished / PROGRESS_NAME).open("w", encoding="utf-8") as file:
            file.write(json.dumps({"version": STATE_VERSION, **content}, indent=1))
            file.flush()
            os.fsync(file.fileno())
        return give_name(unfinished, step)


def remove_older(folder: Path, max_states: int) -> None:
    """Remove all states but the newest `max_states`. DataError if one cannot be removed."""
    for *_, old in _states(folder)[:-max_states]:
        with _os_errors(old, "removed"):
            shutil.rmtree(old.rename(old.with_name(f"{old.name}.old")))


def read_progress(state: Path) -> dict[str, Any]:
    """Content given to `finish_state`. DataError if unreadable, ConfigError for another version."""
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


def give_name(unfinished: Path, step: int) -> Path:
    """Rename a complete state, with a number if the step was saved before; overwrites nothing."""
    repeats = [repeat for number, repeat, _ in _states(unfinished.parent) if number == step]
    suffix = f"-{max(repeats) + 1}" if repeats else ""
    target = unfinished.with_name(f"step-{step}{suffix}")
    _flush(unfinished)
    unfinished.rename(target)
    _flush(target.parent)
    return target


def cannot(path: Path, action: str, error: Exception, rank: int = 0) -> DataError:
    """Error for a state that cannot be made, written, removed or read."""
    reason = f"{type(error).__name__}: {first_line(error)}"
    if isinstance(error, OSError):
        reason = error.strerror or first_line(error)
    advice = _ADVICE_TO_READ if action == "read" else _ADVICE
    return DataError(f"{path} cannot be {action}: {reason} (rank {rank}); {advice}")


def _states(folder: Path) -> list[tuple[int, int, Path]]:
    """(step, repeat, folder) of complete states, oldest first."""
    matches = ((_NAME.fullmatch(path.name), path) for path in folder.glob("step-*"))
    return sorted((int(match[1]), int(match[2] or 0), path) for match, path in matches if match)


def _flush(folder: Path) -> None:
    """Flush a folder's names to disk."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


@contextmanager
def _os_errors(path: Path, action: str) -> Iterator[None]:
    """Turn the file system's errors into a DataError, one line."""
    try:
        yield
    except OSError as error:
        raise cannot(path, action, error) from error
