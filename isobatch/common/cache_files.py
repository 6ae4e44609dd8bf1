"""Files that are kept for later runs: what they take, and which of them go.

A file counts as used when it is opened (`note_use`), since many disks note no reading. Those used
longest ago go first. One with a lock next to it (`.lock`) goes only while nobody holds that.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

RECORDS = ".arrow"
"""End of the names of cached records, in the user's cache folder."""
LENGTHS = ".lengths"
"""End of the names of cached lengths; their sources are next to them (`.json`)."""
DEMOS = ".demo"
"""End of the names of drawn demos, in the user's cache folder."""
MAX_BYTES = {RECORDS: 100 << 30, LENGTHS: 4 << 30, DEMOS: 64 << 20}
"""Limit of all files of a kind in a folder: of lengths, those of 100 million samples; of demos,
those of five versions.
"""


@dataclass(frozen=True, slots=True)
class KeptFile:
    """A file of a cache."""

    path: Path
    num_bytes: int
    used_ns: int


def kept_files(folder: Path, kind: str) -> list[KeptFile]:
    """The files of a kind, the one used longest ago first; none without the folder."""
    files = []
    for path in folder.glob(f"*{kind}"):
        with suppress(OSError):  # removed meanwhile
            stat = path.stat()
            files.append(KeptFile(path, stat.st_size, stat.st_mtime_ns))
    return sorted(files, key=lambda file: (file.used_ns, file.path))


def note_use(path: Path) -> None:
    """Say that a file is used now; one that belongs to others stays as it is."""
    with suppress(OSError):
        os.utime(path)


def remove_files(folder: Path, kind: str, max_bytes: int, keep: Path | None = None) -> int:
    """Remove files until the rest takes `max_bytes` at most; -> bytes that were freed.

    Without `keep`, and those whose lock is held. Processes that have mapped one go on with it.
    """
    files = kept_files(folder, kind)
    total = sum(file.num_bytes for file in files)
    freed = 0
    for file in files:
        if total - freed <= max_bytes:
            break
        if file.path != keep and _remove(file.path):
            freed += file.num_bytes
    return freed


def _remove(path: Path) -> bool:
    with _unless_held(path.with_suffix(".lock")) as is_free:
        if not is_free:
            return False
        try:
            for suffix in (".tmp", ".json"):
                path.with_suffix(suffix).unlink(missing_ok=True)
            path.unlink()
        except OSError:  # another's, or gone
            return False
    return True


@contextmanager
def _unless_held(lock: Path) -> Iterator[bool]:
    """Hold a lock, if there is one and nobody has it; -> whether nobody has it."""
    try:
        file = lock.open("r+")
    except OSError:
        yield not lock.exists()
        return
    with file:  # the lock's file stays: others may wait for it
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True
