"""TOML and JSON that users write or bring, as plain values safe to compute with.

The one place where such files are opened and parsed. A pipe or a device in place of a file would
never end, so it is refused; so is what is no text, no TOML or JSON, nested too deep, or holds half
of a surrogate pair. Numbers of configs and of our own files must be finite and fit 64 bits: NumPy
and Arrow hold no others. JSON of models may hold such numbers under keys that nobody reads.
"""

import json
import os
import stat
import tomllib
from collections.abc import Iterator
from itertools import chain
from math import isfinite
from pathlib import Path
from typing import Any

from isobatch.common.errors import ConfigError, IsobatchError, first_line
from isobatch.common.visible_text import shown

MOST_INTEGER = 2**63 - 1
"""Largest integer of NumPy's and Arrow's int64."""
MOST_DEPTH = 64
"""Tables and lists in one another; `config.json` of any model has fewer than ten."""
MOST_BYTES = 1 << 30
"""Size of a text file that is read whole, at most: many times the largest tokenizer.json."""


def read_text(path: str | Path) -> str:
    """A text file's content in UTF-8.

    OSError as `open` raises it, also for a pipe, a device, or a file above MOST_BYTES;
    UnicodeDecodeError. Pipes under /dev/fd are read: shells write `<(command)` so.
    """
    name = os.fspath(path)
    try:
        state = os.stat(name)
    except ValueError:  # a NUL character
        raise FileNotFoundError(2, "no such file", name) from None
    if stat.S_ISDIR(state.st_mode):
        raise IsADirectoryError(21, "is a folder", name)
    is_given = stat.S_ISFIFO(state.st_mode) and name.startswith(("/dev/", "/proc/"))
    if not stat.S_ISREG(state.st_mode) and not is_given:
        raise OSError(22, "is no file but a pipe, a socket or a device", name)
    if state.st_size > MOST_BYTES:
        raise OSError(27, f"has {state.st_size:,} bytes, too many for a text file", name)
    return Path(name).read_text("utf-8")


def write_text(path: Path, text: str) -> None:
    """Write a text file in UTF-8, whole or not at all, also beside others who write it."""
    temporary = path.with_name(f"{path.name}-{os.urandom(4).hex()}.tmp")
    temporary.write_text(text, "utf-8")
    temporary.replace(path)


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """The tables of a TOML text; ConfigError, which names `where`, for a wrong one."""
    try:
        values = tomllib.loads(text)
        for _ in _leaves(values):
            pass  # for their depth
    except RecursionError:
        raise ConfigError(f"{where}: not valid TOML: nested too deep") from None
    except ValueError as error:  # TOML's own, and of integers with thousands of digits
        raise ConfigError(f"{where}: not valid TOML: {first_line(error)}") from None
    return values


def parse_json(
    text: str | bytes, where: str, kind: type[IsobatchError] = ConfigError, *, exact: bool = False
) -> Any:
    """The value of a JSON text; an error of `kind`, which names `where`, for a wrong one.

    `exact`: numbers must be finite and fit 64 bits, as those of the files that we write do.
    """
    try:
        values = json.loads(text)
        if _is_plain(values, exact=exact):
            return values
        for place, value in _leaves(values):
            if isinstance(value, str) and not _is_unicode(value):
                raise kind(f"{where}: {place} holds half of a surrogate pair: {shown(value)}")
        if exact:
            check_numbers(values, where, kind)
    except RecursionError:
        raise kind(f"{where}: not valid JSON: nested too deep") from None
    except IsobatchError:
        raise
    except ValueError as error:
        raise kind(f"{where}: not valid JSON: {first_line(error)}") from None
    return values


def check_numbers(values: Any, where: str, kind: type[IsobatchError] = ConfigError) -> None:
    """An error of `kind` unless every number in nested tables is finite and fits 64 bits."""
    for place, value in _leaves(values):
        if isinstance(value, float) and not isfinite(value):
            raise kind(f"{where}: {place} is {value}; give a finite number")
        if isinstance(value, int) and not -MOST_INTEGER <= value <= MOST_INTEGER:
            raise kind(f"{where}: {place} is {shown(value)}; give a number of at most 64 bits")


def _is_plain(values: Any, *, exact: bool) -> bool:
    """Whether nothing is wrong with the values of a JSON text, in a tenth of `_leaves`' time.

    A manifest of 300,000 shards has 1.5 million of them.
    """
    level = [values]
    for _ in range(MOST_DEPTH + 1):
        by_type: dict[type, list[Any]] = {}
        for value in level:
            by_type.setdefault(type(value), []).append(value)
        tables = by_type.get(dict, [])
        if not _is_unicode("".join(chain(by_type.get(str, []), *tables))):
            return False
        numbers = chain(by_type.get(int, []), by_type.get(float, []))
        if exact and not all(-MOST_INTEGER <= number <= MOST_INTEGER for number in numbers):
            return False
        level = [*chain(*by_type.get(list, []), *map(dict.values, tables))]
        if not level:
            return True
    return False


def _leaves(values: Any) -> Iterator[tuple[str, Any]]:
    """(place, value) of every key and every value that is no table or list, by their places.

    RecursionError where they are nested deeper than MOST_DEPTH.
    """
    waiting: list[tuple[str, Any, int]] = [("the file", values, 0)]
    while waiting:
        place, value, depth = waiting.pop()
        if depth > MOST_DEPTH:
            raise RecursionError
        if isinstance(value, dict):
            yield from (("a key", key) for key in value)
            parent = "" if depth == 0 else f"{place}."
            waiting += [(f"{parent}{key}", item, depth + 1) for key, item in value.items()]
        elif isinstance(value, list):
            numbered = enumerate(value, 1)
            waiting += [(f"{place}, entry {number}", item, depth + 1) for number, item in numbered]
        else:
            yield place, value


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
