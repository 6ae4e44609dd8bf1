"""A build into an object store: prepared on this machine, then uploaded.

The work folder's name comes from the URI, so the same command continues a stopped build. Shards are
uploaded and removed one by one as they are written; the small files follow, the manifest last.
Until then, `building.json` next to the shards says whose build it is, so that there is only one.
"""

import hashlib
import json
import os
import shutil
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from isobatch.common.errors import DataError
from isobatch.common.plain_values import write_text
from isobatch.packer.build_dir import (
    BUILDING_NAME,
    ELSEWHERE,
    REPORT_NAME,
    require_ours,
)
from isobatch.packer.report.figures import Report, make_report
from isobatch.packer.report.html import write_html
from isobatch.packer.write.energon_files import META_NAMES
from isobatch.shards.folders import cache_folder, naming_full_disk, open_object_folder
from isobatch.shards.manifest import MANIFEST_NAME
from isobatch.shards.tables import COUNTS_NAME, REJECTED_NAME

if TYPE_CHECKING:
    from isobatch.shards.object_folder import ObjectFolder


class Publisher:
    """Brings a build to a URI."""

    def __init__(self, uri: str, work_dir: str | None) -> None:
        self.uri = uri.rstrip("/")
        self.folder = work_folder(self.uri, work_dir)
        self._claim = self.folder / "staging" / BUILDING_NAME

    def claim(self, with_others: str | None = None, otherwise: str = ELSEWHERE) -> None:
        """Mark the place as this build's; DataError if another work folder is building there.

        `with_others`: what all have in common that work on partitions of it. `otherwise`: what else
        to do, for the error.
        """
        if with_others is not None:
            several = {"host": "several machines", "work_folder": "--partitions"}
            self._claim.parent.mkdir(parents=True, exist_ok=True)
            write_text(self._claim, json.dumps(several | {"token": with_others}))
        if not self._claim.exists():
            token = {"host": socket.gethostname(), "work_folder": str(self.folder)}
            token["token"] = os.urandom(16).hex()
            self._claim.parent.mkdir(parents=True, exist_ok=True)
            write_text(self._claim, json.dumps(token))
        mine = self._claim.read_bytes()
        if not self._bucket.create(BUILDING_NAME, mine) and (theirs := self._holder()) != mine:
            there = f"{self.uri} holds the unfinished build of {_who(theirs)}"
            raise DataError(f"{there}: let it finish, continue it there, {otherwise}")

    def clear(self) -> None:
        """Remove what a build made at the URI; ConfigError if there is anything else."""
        names = [info.name for info in self._bucket.files()]
        require_ours(self.uri, names)
        # the manifest first: without it the rest is an unfinished build, whatever happens now
        self._bucket.delete([name for name in names if name == MANIFEST_NAME])
        # a listing leaves out hidden names
        others = [name for name in names if name != MANIFEST_NAME]
        self._bucket.delete([*others, *META_NAMES])

    def upload_tables(self) -> None:
        """Upload the tables that counting alone leaves, and remove the work folder."""
        self._upload(COUNTS_NAME, REJECTED_NAME)
        self.forget()

    def publish(self, names: Sequence[str]) -> None:
        """Upload the files `names`, the report and the manifest; `forget` is the caller's."""
        write_html(make_report(self.folder), self.folder / REPORT_NAME)
        self._upload(*names, REPORT_NAME, MANIFEST_NAME)

    def is_held_by_others(self) -> bool:
        """Whether the mark at the URI is of another work folder: somebody changes the build."""
        holder = self._holder()
        return bool(holder) and not (self._claim.exists() and holder == self._claim.read_bytes())

    def forget(self) -> None:
        """Remove the work folder, and the mark at the URI if it is this build's."""
        if self._claim.exists() and self._holder() == self._claim.read_bytes():
            self._bucket.delete([BUILDING_NAME])
        shutil.rmtree(self.folder, ignore_errors=True)  # another share may do the same

    def _upload(self, *names: str) -> None:
        for name in names:
            self._bucket.put(name, self.folder / name)

    @property
    def _bucket(self) -> "ObjectFolder":
        return open_object_folder(self.uri)

    def _holder(self) -> bytes:
        """What the mark at the URI says; empty if there is none."""
        try:
            return self._bucket.read(BUILDING_NAME)
        except FileNotFoundError:
            return b""


def save_html(report: Report, place: str) -> None:
    """Write report.html next to a build in a folder."""
    with naming_full_disk(place):
        write_html(report, Path(place, REPORT_NAME))


def work_folder(uri: str, work_dir: str | None) -> Path:
    """A folder for the build to a URI alone, under `work_dir` or the user's cache."""
    parent = Path(work_dir) if work_dir else cache_folder("builds")
    return parent / hashlib.sha256(uri.encode()).hexdigest()[:16]


def _who(holder: bytes) -> str:
    try:
        values = json.loads(holder)
        return f"{values['host']} (work folder {values['work_folder']})"
    except (ValueError, KeyError, TypeError):
        return "another machine"
