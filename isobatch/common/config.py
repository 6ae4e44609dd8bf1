"""TOML into frozen dataclasses: presets by name, and configs of commands.

With `models.folder.files` all of `balance` that reads files. An unknown key is an error that
lists the known ones, so that a typing mistake never silently becomes a default.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, Field, dataclass, fields
from difflib import get_close_matches
from functools import cache
from math import inf
from os.path import isfile
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from isobatch.common.errors import ConfigError, os_reason
from isobatch.common.plain_values import check_numbers, parse_toml, read_text
from isobatch.common.visible_text import shown

Config = TypeVar("Config")
_hints_of: Callable[..., dict[str, Any]] = cache(get_type_hints)


@dataclass(frozen=True, slots=True)
class Option:
    """What users read of a config's field: `Annotated[int, Option("...", min=1)]`."""

    help: str
    min: float = -inf
    max: float = inf
    flag: str | None = None
    """Option of the command, where it is not the field's name."""


def options_of(kind: type) -> Iterator[tuple[str, Any, Option]]:
    """(name, type, option) of each field of a config dataclass that is an option."""
    for name, hint in _hints_of(kind, include_extras=True).items():
        if get_origin(hint) is Annotated:
            yield name, hint.__origin__, hint.__metadata__[0]


def check_options(config: Any) -> None:
    """ConfigError unless every option of a config dataclass has a value that it may have."""
    for name, hint, option in options_of(type(config)):
        value = getattr(config, name)
        if get_origin(hint) is Literal and value not in get_args(hint):
            raise ConfigError(f"{name} is {shown(value)}: use one of {', '.join(get_args(hint))}")
        if isinstance(value, str) and not _is_a_name(value):
            raise ConfigError(f"{name} is {shown(value)}; no file can have such a name")
        bounds = option.min, option.max
        is_bounded = isinstance(value, int | float) and bounds != (-inf, inf)  # else nan may pass
        if is_bounded and not option.min <= value <= option.max:
            lower, upper = f"{option.min:,}", f"{option.max:,}"
            allowed = f"at least {lower}" if option.max == inf else f"in {lower}..{upper}"
            raise ConfigError(f"{name} is {value}; it must be {allowed}")


def check_positive(config: Any, max_integer: int | None = None) -> None:
    """ConfigError unless a config dataclass has numbers above 0, integers up to `max_integer`."""
    values = {f.name: getattr(config, f.name) for f in fields(config)}
    wrong = [f"{k} = {v}" for k, v in values.items() if type(v) in (int, float) and not v > 0]
    if wrong:
        raise ConfigError(f"{', '.join(wrong)}: must be greater than 0")
    large = [
        f"{k} = {v}"
        for k, v in values.items()
        if type(v) is int and max_integer and v > max_integer
    ]
    if large:
        raise ConfigError(f"{', '.join(large)}: must be at most {max_integer:,}")


def check_types(config: Any) -> None:
    """ConfigError unless every field of a config dataclass has a value of its type."""
    for name, hint in _hints_of(type(config)).items():
        if not _fits(value := getattr(config, name), hint):
            raise ConfigError(f"{name} is {shown(value)}; it must be {_text(hint)}")


def check_names(kind: type, names: Iterable[str], also: Iterable[str] = ()) -> None:
    """ConfigError, with the name that was meant, unless a config dataclass has fields so named.

    `also` are other names that are known.
    """
    known = [*(field.name for field in fields(kind)), *also]
    for name in names:
        if name not in known:
            meant = "".join(
                f"; did you mean {match}?" for match in get_close_matches(name, known, 1, 0.7)
            )
            raise ConfigError(f"there is no option {name}{meant} (options: {', '.join(known)})")


def config_root() -> Path:
    """Folder of the shipped presets."""
    return Path(__file__).parents[1] / "configs"


def preset_names(kind: str) -> list[str]:
    """Names of the shipped presets of a kind (`models`, `datasets`, `clusters`), sorted."""
    return sorted(path.stem for path in (config_root() / kind).glob("*.toml"))


def preset_groups(kind: str) -> list[str]:
    """Names for people: a preset that others are named after, as `qwen3_vl, qwen3_vl_*`."""
    names = preset_names(kind)
    bases = {name for name in names if any(other.startswith(f"{name}_") for other in names)}
    bare = [name for name in names if not any(name.startswith(f"{base}_") for base in bases)]
    return [f"{name}, {name}_*" if name in bases else name for name in bare]


def preset_families(kind: str) -> str:
    """Families for a help text, in one line: beginnings of the names, up to a digit or `_`."""
    return ", ".join(sorted({re.split(r"[\d_]", name)[0] for name in preset_names(kind)}))


def build_config(kind: type[Config], values: Any, *, where: str) -> Config:
    """A config dataclass from a table of plain values; lists become tuples.

    What is no table, unknown keys, missing keys, values of the wrong type and numbers that are not
    finite or have more than 64 bits are errors that name `where`.
    """
    if not isinstance(values, dict):
        raise ConfigError(f"{where}: is {shown(values)}, but should be a table of keys and values")
    known = {f.name: f for f in fields(kind)}  # type: ignore[arg-type]
    frozen = typed_values(kind, values, where)
    if missing := _required(known) - values.keys():
        raise ConfigError(f"{where}: missing key {', '.join(sorted(missing))}")
    try:
        config = kind(**frozen)
    except ConfigError as error:  # a field's own range says more than what numbers may be at all
        raise ConfigError(f"{where}: {error}") from None
    except (ArithmeticError, ValueError):
        check_numbers(values, where)
        raise
    check_numbers(values, where)
    return config


def typed_values(kind: type, values: dict[str, Any], where: str) -> dict[str, Any]:
    """Values as a config dataclass has them: tuples and paths of TOML's lists and texts.

    ConfigError, which names `where`, for an unknown key or a wrong type.
    """
    known = sorted(field.name for field in fields(kind))
    if unknown := sorted(set(values) - set(known)):
        named = ", ".join(key if key.isidentifier() else shown(key) for key in unknown)
        near = get_close_matches(unknown[0], known, 1)
        meant = "".join(f"; did you mean {match}?" for match in near)
        raise ConfigError(f"{where}: unknown key {named}; known: {', '.join(known)}{meant}")
    hints = _hints_of(kind)
    typed = {}
    for name, value in values.items():
        hint = hints[name]
        is_path = isinstance(value, str) and Path in (hint, *get_args(hint))
        typed[name] = Path(value) if is_path else _frozen(value)
        if not _fits(typed[name], hint):
            should = _text(hint)
            raise ConfigError(f"{where}: {name} is {shown(typed[name])}, but should be {should}")
    return typed


def load_config(
    kind: type[Config], file: Path | None, options: dict[str, Any], *, command: str
) -> Config:
    """A command's config: `options` that are not None over the keys of the TOML `file`."""
    values = {} if file is None else read_toml(file, f"--config {file}")
    typed_values(kind, values, str(file))
    values |= {name: value for name, value in options.items() if value is not None}
    known = {f.name: f for f in fields(kind)}  # type: ignore[arg-type]
    if missing := [f"--{name.replace('_', '-')}" for name in _required(known) - values.keys()]:
        raise ConfigError(f"{command}: {' and '.join(sorted(missing))} must be given")
    return build_config(kind, values, where=command)


def _required(known: dict[str, Field[Any]]) -> set[str]:
    """Names of the fields without a default."""
    return {f.name for f in known.values() if f.default is f.default_factory is MISSING}


def read_preset(kind: str, name: str, extended_by: tuple[str, ...] = ()) -> dict[str, Any]:
    """The TOML of a preset of a kind, by name or from a user's file (ends in `.toml`).

    Keys of the preset that it `extends` fill the gaps, one table deep; `extended_by` led here.
    """
    if name in extended_by:
        chain = " -> ".join((*extended_by, name))
        raise ConfigError(f"presets extend each other in a circle: {chain}")
    path = Path(name) if name.endswith(".toml") else _preset_path(kind, name)
    if not isfile(path) and name.endswith(".toml"):
        raise ConfigError(f"no file {name}; give a {kind[:-1]} preset's name, or a .toml file")
    if not isfile(path):
        near = get_close_matches(name, preset_names(kind), 1)
        meant = "".join(f" (did you mean {match}?)" for match in near)
        missing = (
            f"no {kind[:-1]} preset {shown(name)}{meant}; shipped: {', '.join(preset_groups(kind))}"
        )
        other = ", or the folder or Hub id of any model" if kind == "models" else ""
        raise ConfigError(f"{missing}; or give a .toml file of yours{other}")
    values = read_toml(path, str(path))
    values.setdefault("name", path.stem)
    if (base_name := values.pop("extends", None)) is None:
        return values
    if not isinstance(base_name, str):
        raise ConfigError(f"{path}: extends is {shown(base_name)}; give one preset's name")
    base = read_preset(kind, base_name, (*extended_by, name))
    tables = [k for k, v in values.items() if isinstance(v, dict) and isinstance(base.get(k), dict)]
    return base | values | {key: {**base[key], **values[key]} for key in tables}


def _preset_path(kind: str, name: str) -> Path:
    """File of a shipped preset, which need not exist. `qwen2_5_vl_7b` is `qwen2_5_vl`, which is of
    that size by its description.
    """
    folder = config_root() / kind
    path = folder / f"{name}.toml"
    base, _, size = name.rpartition("_")
    family = folder / f"{base}.toml"
    if not size or isfile(path) or not isfile(family):
        return path
    described = str(read_toml(family, str(family)).get("description", "")).partition(":")[0]
    return family if described.endswith(f" {size.upper()}") else path


def read_toml(path: Path, where: str, *, has_inf: bool = False) -> dict[str, Any]:
    """The tables of a TOML file; ConfigError, which names `where`, if it cannot be read.

    Or, unless it `has_inf`, if a number in it is not finite or has more than 64 bits.
    """
    try:
        values = parse_toml(read_text(path), where)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where}: not valid TOML: {error}") from None
    except OSError as error:
        raise ConfigError(f"{where}: {os_reason(error)}") from None
    if not has_inf:
        check_numbers(values, where)
    return values


def _is_a_name(text: str) -> bool:
    """Whether a system call takes a text: no NUL, no half of a surrogate pair."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def _text(hint: Any) -> str:
    """A type as people write it."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join(
            "None" if argument is NoneType else _text(argument) for argument in arguments
        )
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}" if arguments[1:] else repr(arguments[0])
    if origin is Callable or getattr(hint, "_is_protocol", False):
        return "a function"
    return hint.__name__ if isinstance(hint, type) else str(hint)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a plain value has a field's type; an int is a float, a bool is neither."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, option) for option in arguments)
    if origin is Literal:
        return value in arguments
    if origin is tuple and isinstance(value, tuple):
        options = arguments[:1] * len(value) if arguments[-1] is Ellipsis else arguments
        return len(value) == len(options) and all(map(_fits, value, options))
    if getattr(hint, "_is_protocol", False):  # of a function
        return callable(value)
    if hint in (int, float):
        return isinstance(value, (int, hint)) and not isinstance(value, bool)
    return hint is Any or isinstance(value, origin or hint)


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list | tuple) else value
