"""Packed partitions of an unfinished build, where all that work on it find them.

Each is a folder below `staging/partitions` of the build, with its tables, its index rows, and
`partition.json`, which says that the rest is there. In a folder it comes whole, by a renaming; in
an object store that file comes last. Who packs a partition again brings the same bytes.
"""

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from socket import gethostname

from isobatch.common.plain_values import write_text
from isobatch.packer.count import remainder
from isobatch.packer.format_text import counted
from isobatch.packer.partitions.partition import ROWS_NAME, CountedPartition, PackedPartition
from isobatch.shards.folders import is_uri, join, on_disk, open_folder, open_object_folder
from isobatch.shards.tables import COUNTS_NAME, GROUPS_NAME, REJECTED_NAME

FIGURES_NAME = "partition.json"
TABLES = (COUNTS_NAME, GROUPS_NAME, REJECTED_NAME)
FOLDER = "staging/partitions"
_MACHINE = "machine-"


class Results:
    """The packed partitions of the build at a folder or URI."""

    def __init__(self, out: str, key: str) -> None:
        """`key`: changes with data and options, so that what is left of others is not used."""
        self.out, self.key = out, key
        self._folder = f"{FOLDER}/{key}"

    def are_others_there(self) -> bool:
        """Whether somebody has packed partitions of other data, or with other options."""
        folder = open_folder(self.out, follow_links=True)
        if not folder.has_folder(FOLDER):
            return False
        names = (info.name for info in folder.files(FOLDER))
        return any(
            name.endswith(FIGURES_NAME) and not name.startswith(self._folder) for name in names
        )

    def read(self, number: int) -> PackedPartition | None:
        """The figures of a partition; None if nobody has finished it."""
        text = self.read_text(f"{number:05d}/{FIGURES_NAME}")
        return None if text is None else PackedPartition.from_json(text)

    def read_counted(self, number: int) -> CountedPartition | None:
        """What was counted of a partition; None if nobody has yet."""
        text = self.read_text(_counted_name(number))
        return None if text is None else CountedPartition(**json.loads(text))

    def save_counted(self, number: int, partition: CountedPartition) -> None:
        """Bring what was counted of a partition."""
        self.save_text(_counted_name(number), json.dumps(asdict(partition)))

    def read_text(self, name: str) -> str | None:
        """A text that all partitions need; None if nobody has saved it."""
        try:
            return open_folder(self.out, follow_links=True).read(f"{self._folder}/{name}").decode()
        except FileNotFoundError:
            return None

    def save_text(self, name: str, text: str) -> None:
        """Save a text, whole or not at all; who saves it again saves the same."""
        if is_uri(self.out):
            open_object_folder(self.out).put(f"{self._folder}/{name}", text.encode())
            return
        folder = Path(self.out, self._folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / name, text)

    def missing(self, numbers: Iterable[int]) -> list[int]:
        """Those of the partitions that nobody has finished yet."""
        names = self._names()
        return [number for number in numbers if self._name(number) not in names]

    def sign(self) -> None:
        """Leave this machine's name, for `seen`."""
        self.save_text(f"{_MACHINE}{gethostname()}", "")

    def seen(self) -> str:
        """What is there of all jobs, as a text: partitions, and machines that have begun."""
        names = self._names()
        done = sum(name.endswith(f"/{FIGURES_NAME}") for name in names)
        machines = sum(name.startswith(f"{self._folder}/{_MACHINE}") for name in names)
        return f"{counted(done, 'partitions')} packed, {counted(machines, 'machines')}"

    def _names(self) -> set[str]:
        folder = open_folder(self.out, follow_links=True)
        if not folder.has_folder(self._folder):
            return set()
        return {info.name for info in folder.files(self._folder)}

    def publish(self, number: int, packed: PackedPartition, work: Path) -> None:
        """Bring a partition that is packed in a work folder, and remove that."""
        files = [(work / name, name) for name in TABLES]
        files.append((work / "staging" / ROWS_NAME, ROWS_NAME))
        files += [(work / name, name) for name in remainder.NAMES if sum(packed.remainder)]
        target = f"{self._folder}/{number:05d}"
        if is_uri(self.out):
            bucket = open_object_folder(self.out)
            for file, name in files:
                bucket.put(f"{target}/{name}", file)
            bucket.put(self._name(number), packed.to_json().encode())
        else:
            whole = Path(self.out, self._folder, f"new-{os.urandom(4).hex()}")
            whole.mkdir(parents=True)
            for file, name in files:
                os.replace(file, whole / name)
            (whole / FIGURES_NAME).write_text(packed.to_json(), "utf-8")
            try:
                whole.rename(Path(self.out, target))
            except OSError:
                if self.read(number) is None:
                    raise
                shutil.rmtree(whole)  # somebody else was first, with the same bytes
        shutil.rmtree(work, ignore_errors=True)

    @contextmanager
    def opened(
        self, number: int, names: Sequence[str], within: Path | None = None
    ) -> Iterator[Path]:
        """A folder of this machine with files of a partition; of a bucket, a copy `within` one."""
        with on_disk(join(self.out, f"{self._folder}/{number:05d}"), names, within) as folder:
            yield folder

    def remove(self) -> None:
        """Remove all of them, also what others have left."""
        if is_uri(self.out):
            bucket = open_object_folder(self.out)
            bucket.delete([info.name for info in bucket.files(FOLDER)])
        else:
            with suppress(FileNotFoundError):
                shutil.rmtree(Path(self.out, FOLDER))

    def _name(self, number: int) -> str:
        return f"{self._folder}/{number:05d}/{FIGURES_NAME}"


def _counted_name(number: int) -> str:
    return f"counted-{number:05d}.json"
