"""Kept columns: from a record to JSON text, and to one type each. Pure.

A column's type is the first of `_TYPES` that holds all its values, and else `json`. Any value may
be null.
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, NoReturn

from isobatch.counting.records.media import SampleProblem
from isobatch.counting.records.record import is_deep
from isobatch.shards.stored_group import ExtraType, ExtraTypes

Kind = Literal["bool", "int", "long", "double", "string", "ints", "longs", "doubles", "other"]
"""What one value is. A `long` has 64 bits, too many for a double; no number at all is `ints`."""
Kinds = dict[str, list[Kind]]
"""Column -> kinds of its values, sorted."""
_TYPES: dict[ExtraType, set[Kind]] = {
    "bool": {"bool"},
    "int64": {"int", "long"},
    "double": {"int", "double"},
    "string": {"string"},
    "list<int64>": {"ints", "longs"},
    "list<double>": {"ints", "doubles"},
}
_LISTS: dict[Kind, set[Kind]] = {
    "ints": {"int"},
    "longs": {"int", "long"},
    "doubles": {"int", "double"},
}
MOST_DEPTH = 100
"""Nesting of a value at most: loaders copy and pickle it, some frames of the stack per level."""
_SCALARS: dict[type, Kind] = {bool: "bool", float: "double", str: "string"}


def read_extras(
    record: Mapping[str, Any], names: Sequence[str], renamed: Sequence[tuple[str, str]] = ()
) -> str:
    """These columns of a record as one JSON object; null for those that it does not have.

    `renamed`: their name and ours of columns that the record has by ours; both are known. Raises
    SampleProblem if a value is no JSON, such as an image or a date, or not valid Unicode.
    """
    ours = dict(renamed)
    values = {name: record.get(name if name in record else ours.get(name, name)) for name in names}
    if deep := [name for name in names if is_deep(values[name], MOST_DEPTH)]:
        raise SampleProblem("bad_column", f"`{deep[0]}` is nested more than {MOST_DEPTH} deep")
    try:
        text = json.dumps(values, ensure_ascii=False, default=_refuse)
        text.encode()
    except UnicodeEncodeError as error:
        bad = f"a kept column holds a text that is not valid Unicode ({error.reason})"
        raise SampleProblem("invalid_utf8", bad) from None
    return text


def _refuse(value: object) -> NoReturn:
    what = f"a kept column holds a {type(value).__name__}, which is not JSON"
    raise SampleProblem("bad_column", what)


def kinds_in(texts: Iterable[str]) -> Kinds:
    """The kinds of values in the columns of some records, as `read_extras` gives them."""
    records = (json.loads(text).items() for text in texts)
    return _joined(
        (name, [kind_of(value)]) for items in records for name, value in items if value is not None
    )


def joined_kinds(parts: Iterable[Kinds]) -> Kinds:
    """The kinds of all parts."""
    return _joined(pair for part in parts for pair in part.items())


def _joined(pairs: Iterable[tuple[str, list[Kind]]]) -> Kinds:
    columns: dict[str, set[Kind]] = {}
    for name, kinds in pairs:
        columns.setdefault(name, set()).update(kinds)
    return {name: sorted(columns[name]) for name in sorted(columns)}


def types_of(names: Sequence[str], kinds: Kinds) -> ExtraTypes:
    """The type of each of the columns that have a value at all, by name."""
    return {name: common_type(kinds[name]) for name in sorted(kinds) if name in names}


def kind_of(value: Any) -> Kind:
    """The kind of a JSON value that is not null.

    >>> kind_of(True), kind_of(3), kind_of(2**60), kind_of([1, 0.5]), kind_of({"a": 1})
    ('bool', 'int', 'long', 'doubles', 'other')
    """
    if not isinstance(value, list):
        return _scalar_kind(value)
    kinds = {_scalar_kind(item) for item in value}
    return next((kind for kind, inside in _LISTS.items() if kinds <= inside), "other")


def _scalar_kind(value: Any) -> Kind:
    if isinstance(value, int) and not isinstance(value, bool):
        if abs(value) <= 2**53:
            return "int"
        return "long" if -(2**63) <= value < 2**63 else "other"
    return _SCALARS.get(type(value), "other")


def common_type(kinds: Collection[Kind]) -> ExtraType:
    """The type of a column with values of these kinds.

    >>> common_type({"int", "double"}), common_type({"long", "double"})
    ('double', 'json')
    """
    return next((name for name, holds in _TYPES.items() if holds.issuperset(kinds)), "json")


def typed(value: Any, kind: ExtraType) -> Any:
    """A value as every format gives it back: integers in a column of doubles are floats."""
    if value is None:
        return None
    if kind == "double":
        return float(value)
    return [float(number) for number in value] if kind == "list<double>" else value
