"""The build format: manifest, index, tables and shards, on disk or in an object store; no torch.

packer writes builds through it, loaders and engine read them through it. Public names are imported
when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_EXPORTS = {
    "shards.folders": ("open_folder",),
    "shards.index": ("GroupIndex",),
    "shards.manifest": ("BuildFile", "Manifest", "is_complete", "read_manifest"),
    "shards.stored_group": ("StoredGroup",),
    "shards.tables": ("SampleTable", "read_groups", "read_samples", "read_table"),
}
_MODULES = {name: module for module, names in _EXPORTS.items() for name in names}

__all__ = sorted(_MODULES)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name not in _MODULES:
        raise AttributeError(f"module 'shards' has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
