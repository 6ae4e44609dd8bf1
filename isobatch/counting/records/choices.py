"""Options of a question, as lettered lines after it (`Reading.choices`). Pure.

For `counting.records.schemas`, before it looks for a schema. With "letters", a question column
whose record has `options` or `choices` (a list, an object of letters and texts, or a text that is
such a list in JSON or as Python prints it, as MMMU's) or columns `A`, `B`, ... (MMBench) gets a
line for each: "A. cat". The answer stays as it is, except that a whole number that is the place of
an option (from 0, as ScienceQA's) becomes its letter. With "report" none of these keys is read.
"""

import ast
import json
import string
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from isobatch.counting.records.fields import Fields
from isobatch.counting.records.media import SampleProblem
from isobatch.counting.records.reading import Reading
from isobatch.counting.records.record import is_deep

CHOICE_KEYS = ("options", "choices")
LETTERS = tuple(string.ascii_uppercase)
LETTER_KEYS = LETTERS[:10]
"""Columns of one option each."""
_MOST_CHARACTERS = 100_000
"""Characters of a text that holds a list: Python's reader takes a hundred bytes for each."""


def with_choices(record: Fields, questions: Sequence[tuple[str, str]], reading: Reading) -> Fields:
    """A record whose question has its options; as it is with "report", or if it has none.

    `questions`: keys of a question and its answer. SampleProblem (`bad_turn`) for options that are
    no texts, or an answer that is the number of none.
    """
    if reading.choices == "report":
        return record
    keys = next((keys for keys in questions if _has_texts(record, keys)), None)
    options = _options(record) if keys is not None else {}
    if keys is None or not options:
        return record
    question, answer = keys
    lines = [f"{letter}. {text}" for letter, text in options.items()]
    values = {question: "\n".join([record[question], *lines])}
    value = record[answer]
    if isinstance(value, int) and not isinstance(value, bool):
        if not 0 <= value < len(options):
            bad = f"`{answer}` is {value}, and there are {len(options)} options (from 0)"
            raise SampleProblem("bad_turn", bad)
        values[answer] = list(options)[value]
    return record.overlaid(values)


def _has_texts(record: Fields, keys: tuple[str, str]) -> bool:
    question, answer = keys
    if question not in record or answer not in record:
        return False
    return isinstance(record.peek(question), str) and record.peek(answer) is not None


def _options(record: Fields) -> dict[str, str]:
    """Letter -> text; empty if the record has none."""
    for key in CHOICE_KEYS:
        value = _parsed(record[key], key) if key in record else None
        if value is not None and value not in ([], {}):
            return _lettered(value, key)
    columns = {}
    for letter in LETTER_KEYS:
        if letter not in record or record[letter] is None:
            break
        columns[letter] = record[letter]
    return _lettered(columns, "A") if len(columns) > 1 else {}


def _lettered(value: Any, key: str) -> dict[str, str]:
    if isinstance(value, Mapping):
        # a table's column of objects has nulls where a record has fewer letters
        options = {str(name): text for name, text in value.items() if text is not None}
        if set(options) == {"label", "text"} and all(isinstance(x, list) for x in options.values()):
            value = options["text"]  # ARC's
        else:
            return {name: _text(text, key) for name, text in options.items()}
    if not isinstance(value, list):
        raise SampleProblem("bad_turn", f"`{key}` is a {type(value).__name__}, not a list of texts")
    if len(value) > len(LETTERS):
        raise SampleProblem("bad_turn", f"`{key}` has {len(value)} options; at most {len(LETTERS)}")
    return dict(zip(LETTERS, (_text(text, key) for text in value), strict=False))


def _text(value: Any, key: str) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise SampleProblem("bad_turn", f"`{key}` holds a {type(value).__name__}, not a text")
    return value


def _parsed(raw: Any, key: str) -> Any:
    """A list or an object that is given as a text; other values as they are."""
    if not isinstance(raw, str):
        return raw
    if not raw.strip():
        return None
    bad = SampleProblem("bad_turn", f"`{key}` is the text {raw[:40]!r}, not a list of options")
    if len(raw) > _MOST_CHARACTERS:
        raise bad
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        try:
            with warnings.catch_warnings():  # of escapes that Python does not know
                warnings.simplefilter("ignore")
                value = ast.literal_eval(raw.strip())
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            raise bad from None
    # NumPy prints lists without commas, which Python reads as one text
    if not isinstance(value, list | tuple | dict) or len(value) == 1 or is_deep(value):
        raise bad
    return list(value) if isinstance(value, tuple) else value
