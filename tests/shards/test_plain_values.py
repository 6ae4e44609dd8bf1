"""JSON of our own files: what is wrong in it is named with its place, however deep it is."""

import json
import random

import pytest

from isobatch.common.errors import DataError
from isobatch.common.plain_values import MOST_DEPTH, MOST_INTEGER, parse_json

WRONG = {
    "\ud83d": "half of a surrogate pair",
    MOST_INTEGER + 1: "at most 64 bits",
    -MOST_INTEGER - 1: "at most 64 bits",
    float("nan"): "finite",
    float("-inf"): "finite",
}
RIGHT = [0, -1, MOST_INTEGER, 1.5, 1e300, True, None, "", "word", "\U0001f600", [], {}]


def nested(draw, depth):
    if depth == 0 or draw.random() < 0.2:
        return draw.choice(RIGHT)
    inner = [nested(draw, depth - 1) for _ in range(draw.randrange(1, 5))]
    return inner if draw.random() < 0.5 else {f"key {n}": of for n, of in enumerate(inner)}


def read(value):
    return parse_json(json.dumps(value), "a.json", DataError, exact=True)


def test_what_is_wrong_is_named_wherever_it_is_and_what_is_right_is_given_back():
    draw = random.Random(0)
    for _ in range(60):
        value = nested(draw, 5)
        assert read([value]) == [value]
        for wrong, said in WRONG.items():
            deep = {"x": [value, {"y": [wrong]}]}
            with pytest.raises(DataError, match=rf"x, entry 2\.y, entry 1 (is|holds) .*{said}"):
                read(deep)


def test_halves_in_neighbouring_texts_are_no_pair():
    for value in (["\ud83d", "\ude00"], {"\ud83d": "\ude00"}, {"\ude00": 1}):
        with pytest.raises(DataError, match="half of a surrogate pair"):
            read(value)


def test_the_deepest_value_that_is_taken():
    for depth, is_taken in ((MOST_DEPTH, True), (MOST_DEPTH + 1, False)):
        value = 1
        for _ in range(depth):
            value = [value]
        if is_taken:
            assert read(value) == value
        else:
            with pytest.raises(DataError, match="nested too deep"):
                read(value)


def test_numbers_of_models_may_be_of_any_size():
    assert parse_json("[1e999, 123456789012345678901234567890]", "config.json")[1] > MOST_INTEGER
