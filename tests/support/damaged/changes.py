"""Damage to the files that users write or bring: values, keys and bytes, drawn by a seed.

For fuzz tests: what reads a damaged file either takes it, or says in one line what is wrong.
"""

import copy
import json
import math
import random

INTEGERS = (-1, 0, 1, 2, 10**9, 2**31, 2**63 - 1, 2**63, 10**30, -(2**63))
NUMBERS = (math.inf, -math.inf, math.nan, 1e308, -1e308, 5e-324, 0.5)
TEXTS = (
    "",
    " ",
    "x",
    "\x00",
    "\x1b[2J\x07",
    "a\nb",
    "\u202e",
    "[bold]",
    "/",
    "9" * 400,
    "\U0001f600",
)
SHAPES = (True, False, [], {}, [[]], [0], [""], {"": 0}, {"x": {}}, [1, "a"])
ONLY_JSON = (None, "\ud800", [None], {"content": None}, {"content": "\udfff"})


class NoDamage(random.Random):
    """Draws as usual, and leaves every file whole."""


def damaged_values(values, rng, extra=()):
    """A copy of nested dicts and lists with one to three changes: another value, a key less, a key
    more, two values exchanged.
    """
    values = copy.deepcopy(values)
    if isinstance(rng, NoDamage):
        return values
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        places = list(_places(values))
        if not places:
            return values
        holder, key = rng.choice(places)
        match rng.randrange(8):
            case 0:
                del holder[key]
            case 1 if isinstance(holder, dict):
                holder[rng.choice(("x", "size", "rule", "name", "extends"))] = holder[key]
            case number:
                holder[key] = copy.deepcopy(_other_value(number, holder[key], places, rng, extra))
    return values


def _other_value(number, value, places, rng, extra):
    match number:
        case 2:
            other, name = rng.choice(places)
            is_there = name in other if isinstance(other, dict) else name < len(other)
            return other[name] if is_there else value
        case 3:
            return [value]
    return rng.choice((*INTEGERS, *NUMBERS, *TEXTS, *SHAPES, *extra))


def damaged_bytes(content, rng):
    """Bytes with a few changed, cut short, repeated or with foreign ones between."""
    if isinstance(rng, NoDamage):
        return content
    content = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 4))):
        place = rng.randrange(len(content) + 1)
        match rng.randrange(5):
            case 0 if place < len(content):
                content[place] ^= 1 << rng.randrange(8)
            case 1:
                del content[place:]
            case 2:
                content[place:place] = rng.choice(
                    (b"\xff\xfe", b"\x00", b"[" * 3000, b"\xed\xa0\x80")
                )
            case 3:
                del content[place : place + rng.randrange(1, 40)]
            case _:
                content[place:place] = content[: rng.randrange(1, 200)]
    return bytes(content)


def damaged_json(text, rng):
    """Bytes of a damaged JSON file."""
    if rng.random() < 0.2:
        return damaged_bytes(text.encode(), rng)
    return json.dumps(damaged_values(json.loads(text), rng, ONLY_JSON)).encode()


def damaged_toml(values, rng):
    """Bytes of a damaged TOML file."""
    if rng.random() < 0.15:
        return damaged_bytes(toml(values).encode(), rng)
    return toml(damaged_values(values, rng)).encode("utf-8", "surrogatepass")


def toml(values):
    """The TOML of a table, its nested ones written inline."""
    return "".join(f"{_quoted(key)} = {_toml(value)}\n" for key, value in values.items())


def _toml(value):
    match value:
        case bool():
            return str(value).lower()
        case int() | float():
            return repr(value)
        case str():
            return _quoted(value)
        case dict():
            return "{" + ", ".join(f"{_quoted(k)} = {_toml(v)}" for k, v in value.items()) + "}"
    return "[" + ", ".join(map(_toml, value)) + "]"


def _quoted(text):
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _places(values):
    keys = list(values) if isinstance(values, dict) else range(len(values))
    for key in keys:
        yield values, key
        if isinstance(values[key], dict | list):
            yield from _places(values[key])
