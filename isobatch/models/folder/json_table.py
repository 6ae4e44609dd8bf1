"""A JSON object of a model's folder, read key by key and checked.

For the readers of the families. transformers takes a key that is null as absent, and an absent one
from its class; so does this. Every mistake is a ConfigError that names the file and the key. Pure.
"""

from collections.abc import Iterable
from math import isfinite
from typing import Any

from isobatch.common.errors import ConfigError
from isobatch.common.plain_values import MOST_INTEGER
from isobatch.common.visible_text import shown

Json = dict[str, Any]


class JsonTable:
    """One JSON object: its values, those that transformers would assume, and which were read."""

    def __init__(self, values: Json, where: str, defaults: Json | None = None) -> None:
        self.where = where
        """File and place in it, for messages."""
        self._nulls = values.keys() - {key for key, value in values.items() if value is not None}
        self._file_values = {key: value for key, value in values.items() if value is not None}
        self._values = {**(defaults or {}), **self._file_values}
        self._read: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return key in self._values

    @property
    def file_values(self) -> Json:
        """What the file itself says, without nulls."""
        return dict(self._file_values)

    def value(self, key: str) -> Any:
        """A value of any type; None if neither the file nor transformers has one."""
        self._read.add(key)
        return self._values.get(key)

    def is_null(self, key: str) -> bool:
        """Whether the file has the key, as null; of a few, transformers makes False of that."""
        self._read.add(key)
        return key in self._nulls

    def count(self, *keys: str) -> int:
        """A positive integer, under the first of several names that the file has."""
        key = self._first(keys)
        value = self.value(key)
        if isinstance(value, list | tuple) and len(value) == 2 and value[0] == value[1]:
            value = value[0]  # (14, 14): a square
        if isinstance(value, dict) and set(value) == {"height", "width"}:
            value = value["height"] if value["height"] == value["width"] else value
        if type(value) is not int or not 1 <= value <= MOST_INTEGER:
            raise self.wrong(key, "give a positive integer of at most 64 bits")
        return value

    def count_or(self, key: str, otherwise: int) -> int:
        """A positive integer; `otherwise` if neither the file nor transformers has one."""
        return self.count(key) if key in self else otherwise

    def whole(self, key: str) -> int:
        """An integer of 0 or more; 0 if there is none."""
        value = self.value(key)
        value = 0 if value is None else value
        if type(value) is not int or not 0 <= value <= MOST_INTEGER:
            raise self.wrong(key, "give 0 or a positive integer of at most 64 bits")
        return value

    def number(self, key: str) -> float:
        """A number greater than 0."""
        value = self.value(key)
        if not _is_finite(value) or value <= 0:
            raise self.wrong(key, "give a number greater than 0 that is finite")
        return float(value)

    def text(self, key: str) -> str:
        """A string."""
        value = self.value(key)
        if not isinstance(value, str):
            raise self.wrong(key, "give a string")
        return value

    def integers(self, key: str) -> list[int]:
        """A list of integers; empty if there is none."""
        value = self.value(key)
        value = [] if value is None else list(value) if isinstance(value, list | tuple) else value
        if not isinstance(value, list) or not all(_is_integer(item) for item in value):
            raise self.wrong(key, "give a list of integers of at most 64 bits")
        return value

    def triple(self, key: str) -> tuple[float, float, float]:
        """Three numbers, one per channel; a single number counts for all."""
        value = self.value(key)
        values = [value] * 3 if type(value) in (int, float) else value
        is_list = isinstance(values, list | tuple) and len(values) == 3
        if not is_list or not all(map(_is_finite, values)):
            raise self.wrong(key, "give three numbers that are finite")
        red, green, blue = map(float, values)
        return red, green, blue

    def table(self, key: str, defaults: Json | None = None) -> "JsonTable":
        """A JSON object inside this one; empty if there is none."""
        value = self.value(key)
        value = {} if value is None else value
        if not isinstance(value, dict):
            raise self.wrong(key, "give a JSON object")
        return JsonTable(value, f"{self.where}, {key}", defaults)

    def require(self, key: str, *allowed: Any) -> None:
        """ConfigError unless the value is absent or one of those that this version knows."""
        value = self.value(key)
        if value is not None and value not in allowed:
            known = " or ".join(repr(option) for option in allowed)
            raise self.wrong(key, f"only {known} is supported")

    def require_read(self, harmless: Iterable[str]) -> None:
        """ConfigError if a key was not looked at that may change counts or pixels."""
        unknown = sorted(set(self._file_values) - self._read - set(harmless))
        if unknown:
            many = "keys" if len(unknown) > 1 else "key"
            raise ConfigError(
                f"{self.where}: unknown {many} {', '.join(unknown)}, which may change what an image"
                " becomes; remove what does not, or give a preset (.toml) with --model"
            )

    def wrong(self, key: str, advice: str) -> ConfigError:
        """The error for a value, to be raised."""
        if key not in self._values:
            return ConfigError(f"{self.where}: has no {key}; {advice}")
        return ConfigError(f"{self.where}: {key} is {shown(self._values[key])}; {advice}")

    def _first(self, keys: tuple[str, ...]) -> str:
        in_file = [key for key in keys if key in self._file_values]
        return next(iter([*in_file, *[key for key in keys if key in self._values], *keys]))


def _is_integer(value: Any) -> bool:
    return type(value) is int and -MOST_INTEGER <= value <= MOST_INTEGER


def _is_finite(value: Any) -> bool:
    return _is_integer(value) or (type(value) is float and isfinite(value))
