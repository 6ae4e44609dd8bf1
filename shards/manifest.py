"""manifest.json: the file that makes a build complete.

Written last and atomically. It holds no time, host or path of the machine (but the data root, when
shards refer to it), so that the same inputs and seed give the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from balance.errors import DamagedShard, DataError
from shards.checksums import file_checksum
from shards.folders import Folder, is_uri, join, open_folder

FORMAT_VERSION = 2
MANIFEST_NAME = "manifest.json"


def describe_file(root: Folder, name: str) -> dict[str, Any]:
    """Name, size and checksum of a file of the build, which is read once."""
    with root.open(name) as file:
        checksum, size = file_checksum(file)
    return {"name": name, "size": size, "xxh3_128": checksum}


def hash_json(value: Any) -> str:
    """SHA-256 of a plain value, independent of the order of its keys."""
    return hashlib.sha256(
        json.dumps(value, sort_keys=True, ensure_ascii=False).encode()
    ).hexdigest()


def write_manifest(out: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest, whole or not at all, and only after everything it names is on disk.

    `content_hash` covers the rest of it, so that a hand or a bad disk cannot change a cap or a
    token id unseen.
    """
    manifest = {"format_version": FORMAT_VERSION, **manifest}
    manifest["content_hash"] = hash_json(manifest)
    temporary = out / (MANIFEST_NAME + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(manifest, file, indent=1, ensure_ascii=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(out / MANIFEST_NAME)


def is_complete(place: str) -> bool:
    """Whether there is a manifest at a folder or URI."""
    try:
        return open_folder(place, follow_links=True).info(MANIFEST_NAME).size >= 0
    except FileNotFoundError:
        return False


def read_manifest(out: Path | str) -> dict[str, Any]:
    """The manifest of a complete build at a folder or URI; DataError if there is none or it is of
    another version.
    """
    place = str(out)
    path = join(place, MANIFEST_NAME)
    try:
        manifest = json.loads(
            open_folder(place, follow_links=True).read(MANIFEST_NAME).decode("utf-8")
        )
    except FileNotFoundError:
        is_there = is_uri(place) or Path(place).is_dir()
        state = (
            "the build is not finished: run `packer build` again to continue it"
            if is_there
            else "no such folder"
        )
        raise DataError(f"no {MANIFEST_NAME} in {place}: {state}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: damaged: {error}") from None
    if not isinstance(manifest, dict) or manifest.get("format_version") != FORMAT_VERSION:
        found = manifest.get("format_version") if isinstance(manifest, dict) else None
        raise DataError(
            f"{path}: format version {found}; this isobatch reads version {FORMAT_VERSION}"
        )
    given = manifest.pop("content_hash", None)
    if given != hash_json(manifest):
        raise DamagedShard(
            f"{path}: damaged or edited: its content is not what its content_hash says"
        )
    return manifest
