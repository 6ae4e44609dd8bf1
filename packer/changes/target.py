"""The place of a build that is changed: its lock, its new tables, and what goes.

A change writes new shards and, in a folder of their own, new tables. Then the manifest is replaced,
so a reader sees the old build or the new one, and who has opened the old one still reads it.
"""

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any

from isobatch.common.errors import DataError
from isobatch.common.plain_values import write_text
from isobatch.packer.build_dir import (
    BUILDING_NAME,
    REPORT_NAME,
    TABLE_NAMES,
    describe_file,
    locked,
)
from isobatch.packer.partitions.join import BuildPart, join_build
from isobatch.packer.partitions.run import alone_in
from isobatch.packer.report.figures import make_report
from isobatch.packer.upload import Publisher, save_html
from isobatch.shards.folders import (
    Folder,
    is_uri,
    naming_full_disk,
    open_folder,
    open_object_folder,
)
from isobatch.shards.manifest import (
    MANIFEST_NAME,
    TABLES,
    Manifest,
    read_manifest,
    write_manifest,
)

MARKER = "build.json"
"""What is being built or changed in a staging folder."""
KEPT_TABLES = 3
"""Earlier tables that stay for who has opened the build with them."""
_UNSAID = ("format_version", "content_hash")
"""What `write_manifest` says itself."""


class Target:
    """A build at a folder or URI, to be changed by this process or by several."""

    shared: str | None = None
    """What all have in common that work on the same change; None: only one does."""

    def __init__(self, place: str, *, work_dir: str | None = None) -> None:
        self.publisher = Publisher(place, work_dir) if is_uri(place) else None
        self.place = self.publisher.uri if self.publisher else place
        self.folder = self.publisher.folder if self.publisher else Path(place)
        """Folder of this machine where tables and manifest are made."""
        self.staging = self.folder / "staging"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep others of this machine out, but for those who share the change."""
        with (
            locked(self.folder, with_others=self.shared is not None),
            naming_full_disk(self.folder),
        ):
            yield

    def claim(self, base: Manifest, identity: dict[str, Any], *, discard: bool = False) -> None:
        """Begin a change of the build `base`, or go on with it.

        DataError if another one is unfinished; `discard` gives that up. Removes what others left.
        """
        wanted = {**identity, "base": base.hash}
        marker = self.staging / MARKER
        with alone_in(self.staging):
            begun = _begun(marker)
            if begun == wanted and not discard:
                return
            # what was begun on an earlier build is over, and what has staged nothing blocks nobody
            has_work = begun.get("base") == base.hash and any(self.staging.rglob("*.arrow"))
            if has_work and not discard:
                what = f"an unfinished `packer {begun.get('change')}` of other data or options"
                raise DataError(f"{self.place} has {what}: run that again, or add --discard")
            for path in self.staging.iterdir():
                if path.name != BUILDING_NAME or discard:  # by which this machine knows its mark
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            if self.publisher:
                if discard:
                    open_object_folder(self.place).delete([BUILDING_NAME])
                self.publisher.claim(self.shared, "or add --discard")
                if read_manifest(self.place).hash != base.hash:  # by another machine, till now
                    self.publisher.forget()
                    raise changed_meanwhile(self.place)
            self.sweep(base)
            write_text(marker, json.dumps(wanted))

    def write_tables(self, parts: Sequence[BuildPart], tables: str = "") -> list[dict[str, Any]]:
        """Write index and tables of all parts into a folder of the build; -> manifest entries."""
        final = self.folder / tables
        self.staging.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=self.staging) as folder:
            join_build(parts, Path(folder))
            final.mkdir(parents=True, exist_ok=True)
            for name in TABLE_NAMES:
                os.replace(Path(folder, name), final / name)
        prefix = f"{tables}/" if tables else ""
        return [
            entry | {"name": prefix + entry["name"]}
            for entry in (describe_file(final, name) for name in TABLE_NAMES)
        ]

    def finish(self, values: dict[str, Any], others: Sequence[str] = ()) -> Manifest:
        """Make `values` the manifest, and remove what the build has no more; -> the manifest.

        `others`: files to upload that the manifest does not list.
        """
        # it may name samples that go, and nobody writes it again if this process is killed
        (self.folder / REPORT_NAME).unlink(missing_ok=True)
        write_manifest(self.folder, values)
        if self.publisher:
            self.publisher.publish([*(file["name"] for file in values["files"]), *others])
        manifest = read_manifest(self.place)
        self.clean(manifest)
        return manifest

    def clean(self, manifest: Manifest) -> None:
        """Remove what the build does not have (any more), and what a change has staged.

        A run that was killed after its manifest has left no report: it is written.
        """
        self.sweep(manifest)
        if self.publisher:  # not before: another machine may begin the next change then
            self.publisher.forget()
        elif not (self.folder / REPORT_NAME).exists():
            save_html(make_report(self.place), self.place)
        shutil.rmtree(self.staging, ignore_errors=True)

    def sweep(self, manifest: Manifest) -> None:
        """Remove shards and tables that neither this build has nor readers of earlier ones need."""
        unwanted = leftovers(open_folder(self.place, follow_links=True), manifest)
        if self.publisher:
            open_object_folder(self.place).delete(unwanted)
            return
        for name in (name for name in unwanted if not name.startswith("staging/")):
            Path(self.place, name).unlink(missing_ok=True)
        for folder in sorted(Path(self.place, TABLES).glob("*")):
            if not any(folder.iterdir()):
                folder.rmdir()


def unfinished_change(manifest: Manifest) -> str:
    """Name of the command that has begun to change a build in a folder, or empty."""
    begun = _begun(Path(manifest.place, "staging", MARKER))
    return str(begun.get("change")) if begun.get("base") == manifest.hash else ""


def _begun(marker: Path) -> dict[str, Any]:
    """What a change says of itself; empty if there is none."""
    try:
        begun: dict[str, Any] = json.loads(marker.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return begun


def leftovers(root: Folder, manifest: Manifest) -> list[str]:
    """Files of changes that neither the build nor readers of earlier tables need."""
    wanted = {file.name for file in (*manifest.shards, *manifest.files)}
    earlier = manifest.values.get("earlier", [])[-KEPT_TABLES:]
    wanted |= {str(PurePosixPath(of["tables"], name)) for of in earlier for name in TABLE_NAMES}
    folders = (name for name in ("shards", TABLES, "staging") if root.has_folder(name))
    names = [info.name for folder in folders for info in root.files(folder)]
    names += [
        name
        for name in root.names()
        if name in TABLE_NAMES or (name.startswith(f"{MANIFEST_NAME}-") and name.endswith(".tmp"))
    ]
    return [name for name in names if name not in wanted]


def changed_meanwhile(place: str) -> DataError:
    """The error for a build that another machine has changed since it was read."""
    return DataError(f"{place} was changed meanwhile by another machine: run the command again")


def changed_values(base: Manifest, tables: str, **changes: Any) -> dict[str, Any]:
    """The manifest of a changed build: what `base` says, its new tables, and `changes`."""
    values = {name: value for name, value in base.values.items() if name not in _UNSAID}
    return values | {"tables": tables, "generation": generation_of(base) + 1} | changes


def generation_of(manifest: Manifest) -> int:
    """How often a build was changed."""
    return int(manifest.values.get("generation", 0))


def new_tables(base: Manifest) -> str:
    """Folder of the tables after the next change.

    Names are never used again, so that no reader takes new tables for old ones.
    """
    return f"{TABLES}/{generation_of(base) + 1:04d}"


def next_partition(manifest: Manifest) -> int:
    """Number of the next partition of a build: names of its shards are never used again."""
    if (number := manifest.values.get("num_partitions")) is not None:
        return int(number)
    stems = (PurePosixPath(shard.name).stem.split("-") for shard in manifest.shards)
    return 1 + max((int(stem[1]) for stem in stems if len(stem) > 2), default=0)


def sum_totals(totals: Sequence[dict[str, int]]) -> dict[str, int]:
    """The totals of a build of several parts: those that each part has."""
    known = [name for name in totals[0] if all(name in of for of in totals)]
    return {name: sum(of[name] for of in totals) for name in known}
