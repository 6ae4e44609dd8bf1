"""Pack raw vision-language data into balanced groups in shards; `packer.cli` is the command.

From Python: `Builder(BuildConfig(dataset="demo", out="packed")).build()`. Public names are imported
when they are first used, so that `import packer` takes no time.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_EXPORTS = {
    "packer.build": ("Builder",),
    "packer.config": ("BuildConfig",),
    "packer.demo.dataset": ("demo_tokenizer_path", "write_demo"),
    "packer.group": ("Grouping", "group_counts"),
    "packer.group_command": ("group_files", "read_lengths"),
    "packer.inspect.html": ("write_group_html",),
    "packer.inspect.view": ("GroupView", "inspect_group"),
    "packer.progress": ("StageProgress",),
    "packer.report.build_summary": ("BuildSummary",),
    "packer.report.figures": ("Report", "make_report"),
    "packer.report.html": ("write_html",),
    "packer.verify": ("Verification", "verify_build"),
}
_MODULES = {name: module for module, names in _EXPORTS.items() for name in names}

__all__ = sorted(_MODULES)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name not in _MODULES:
        raise AttributeError(f"module 'packer' has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
