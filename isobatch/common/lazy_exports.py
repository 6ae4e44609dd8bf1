"""Public names of our packages: lazy, and one module under both of its names.

A package lists its public names once, as imports under `if TYPE_CHECKING:` of its `__init__.py`,
where type checkers and editors read them. `lazy_exports` reads the same lines.
"""

import ast
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = "isobatch"


def lazy_exports(
    package: str, file: str
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """`__all__`, `__getattr__` and `__dir__` of a package; `file` is its `__init__.py`.

    Under its short name (`loaders`), a package becomes the canonical one (`isobatch.loaders`).
    """
    if package.partition(".")[0] != ROOT:
        _SHORT_NAMES.add(package)
    module_of = _exports(file)

    def get(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            value = getattr(import_module(module_of[name]), name)
        except ModuleNotFoundError as error:  # of an extra, such as transformers
            if (error.name or ROOT).partition(".")[0] == ROOT:
                raise
            line = f"{name} needs {error.name}: pip install {error.name}"
            raise ModuleNotFoundError(line, name=error.name) from None
        setattr(sys.modules[package], name, value)
        return value

    return sorted(module_of), get, lambda: sorted(module_of)


def _exports(file: str) -> dict[str, str]:
    """Public name -> module, of the imports under `if TYPE_CHECKING:`."""
    body = ast.parse(Path(file).read_text("utf-8")).body
    checked = [node for node in body if isinstance(node, ast.If)]
    imports = [node for block in checked for node in block.body if isinstance(node, ast.ImportFrom)]
    return {node.name: line.module or "" for line in imports for node in line.names}


class _ShortNames(MetaPathFinder, Loader):
    """Finds `loaders.x` as `isobatch.loaders.x`: one module, so classes are the same."""

    def __init__(self) -> None:
        self._tops: set[str] = set()
        self._specs: dict[str, ModuleSpec | None] = {}

    def add(self, top: str) -> None:
        """Let `top` be the canonical module, and find what is below it."""
        if not self._tops:
            sys.meta_path.insert(0, self)
        self._tops.add(top)
        sys.modules[top] = import_module(f"{ROOT}.{top}")

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """A spec of what lies below a short name, but `__main__`, which runs under its own."""
        top, _, below = name.partition(".")
        if top not in self._tops or below.endswith("__main__") or not find_spec(f"{ROOT}.{name}"):
            return None
        return spec_from_loader(name, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The canonical module."""
        module = import_module(f"{ROOT}.{spec.name}")
        self._specs[spec.name] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its own spec back, which the import system has replaced."""
        name = module.__name__.removeprefix(f"{ROOT}.")
        module.__spec__ = self._specs.pop(name, module.__spec__)


_SHORT_NAMES = _ShortNames()
