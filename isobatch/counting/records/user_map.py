"""A user's function over raw records (`--map`): loaded, hashed, and applied.

It takes a record as a dict and gives a record, a list of records, or none: None, or a text that
says why. It must depend on the record alone: processes call it in any order, and a stopped build
calls it again. Its file's hash is part of a build's identity; modules that it imports are not.
"""

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from isobatch.common.errors import ConfigError, first_line
from isobatch.counting.records.record import RawRecord

ALL_COLUMNS = "*"
"""Name in `Located.keep` for every column: a function may use any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UserMap:
    """A function over records."""

    name: str
    """Module and function (`module:function`), without folders."""
    sha256: str
    """SHA-256 of the file that it is in."""
    function: Callable[[dict[str, Any]], Any]

    def identity(self) -> dict[str, str]:
        """What a build's manifest says of it."""
        return {"function": self.name, "sha256": self.sha256}

    def records_of(self, record: RawRecord) -> Iterator[RawRecord]:
        """What becomes of a record: one or more; one that is left out says why."""
        if record.broken or not isinstance(record.value, Mapping):
            yield record
            return
        try:
            result = self.function(dict(record.value))
            is_many = isinstance(result, Iterable) and not isinstance(result, Mapping | str)
            several = list(result) if is_many else [result]
        except (Exception, SystemExit) as error:  # of the user's code, about this record
            why = f"{self.name}: {type(error).__name__}: {first_line(error)}"
            yield replace(record, broken=why, reason="map_failed")
            return
        for value in several or [None]:
            if isinstance(value, Mapping):
                yield replace(record, value=value)
            elif value is None or isinstance(value, str):
                yield replace(record, broken=value or f"{self.name} gives none", reason="left_out")
            else:
                what = f"{self.name} gives {type(value).__name__}, not a record"
                yield replace(record, broken=what, reason="map_failed")


def load_map(spec: str) -> UserMap:
    """The function `module:function` or `path/to/file.py:function`; ConfigError if not there.

    Modules are also looked for in the current folder.
    """
    place, colon, name = spec.rpartition(":")
    if not colon or not place or not name:
        raise ConfigError(f"--map {spec}: give module:function or path/to/file.py:function")
    try:
        if place.endswith(".py"):
            module = _load_file(Path(place))
        else:
            here = str(Path.cwd())
            if here not in sys.path:  # a command's path begins with its own folder
                sys.path.append(here)
            module = importlib.import_module(place)
    except (Exception, SystemExit) as error:  # of the user's code, when it is imported
        why = f"{type(error).__name__}: {first_line(error)}"
        raise ConfigError(f"--map {spec}: {place} cannot be loaded: {why}") from None
    function = getattr(module, name, None)
    file = getattr(module, "__file__", None)
    if not callable(function) or file is None:
        raise ConfigError(f"--map {spec}: {place} has no function {name}")
    digest = hashlib.sha256(Path(file).read_bytes()).hexdigest()
    return UserMap(name=f"{Path(place).stem}:{name}", sha256=digest, function=function)


def _load_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"isobatch_map_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ConfigError("not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
