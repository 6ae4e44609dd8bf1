"""Keys that nothing reads are known: of records, turns, parts and files, in every schema."""

import pytest

from isobatch.counting.records.fields import NO_MEANING, Fields, add_never_read, never_read_line
from isobatch.counting.records.record import RawRecord, RawSample
from support.builds.raw_data import parse_record
from support.cases import for_each

ASK, ANSWER = {"role": "user", "content": "What?"}, {"role": "assistant", "content": "That."}
WITH_PART = {"role": "user", "content": [{"type": "image", "image": "a.jpg"}]}
INFO = {"image_name": "a.jpg", "matched_text_index": 0}
TOOLS = [{"name": "f", "parameters": {}}]
SCHEMAS = {
    "conversations": {"conversations": [{"from": "human", "value": "?"}, ANSWER], "image": "a"},
    "messages": {"messages": [ASK, ANSWER], "system": "Be kind.", "tools": TOOLS},
    "parts": {"messages": [WITH_PART, ANSWER]},
    "struct of a file": {"messages": [ASK, ANSWER], "images": [{"path": "a.jpg", "bytes": None}]},
    "pairs": {"texts": [{"user": "?", "assistant": "!"}], "images": [b"x"]},
    "question": {"question": "?", "answer": "!", "image": {"path": "a.jpg"}},
    "instruction": {"instruction": "?", "input": "1", "output": "!"},
    "query": {"query": "?", "response": "!", "history": [["a", "b"]], "system_prompt": "S"},
    "caption": {"caption": "A dog.", "image": "a.jpg"},
    "MMC4": {"text_list": ["One.", "Two."], "image_info": [INFO]},
    "OBELICS": {"texts": ["One.", None], "images": [None, "a.jpg"]},
    "text": {"text": "One."},
}


def objects_in(value, path=""):
    """(object, its path) of every object in a value, but for what a chat template is given."""
    if isinstance(value, dict):
        yield value, path
        for key, each in value.items():
            if key not in ("tools", "image_url"):
                yield from objects_in(each, f"{path}.{key}".lstrip("."))
    if isinstance(value, list):
        for each in value:
            yield from objects_in(each, f"{path}[]")


def copied(value):
    if isinstance(value, dict):
        return {key: copied(each) for key, each in value.items()}
    return [copied(each) for each in value] if isinstance(value, list) else value


@for_each(("name", "value"), SCHEMAS.items())
def test_schemas_read_all_that_they_have(name, value):
    sample = parse_record(RawRecord(0, value), "set")
    assert isinstance(sample, RawSample), sample
    assert not sample.unread


@for_each(("name", "value"), SCHEMAS.items())
def test_a_key_that_no_schema_has_is_reported_wherever_it_is(name, value):
    for number in range(len(list(objects_in(value)))):
        other = copied(value)
        inside, path = list(objects_in(other))[number]
        inside["zzz"] = [1, 2]
        sample = parse_record(RawRecord(0, other), "set")
        is_turn = path in ("messages[]", "conversations[]")
        if is_turn:  # a chat template may read it, which is known when it has rendered
            assert any("zzz" in turn.more for turn in sample.turns)
        else:
            assert sample.unread == ((f"{path}.zzz".lstrip("."), "[1, 2]"),)


def test_an_unread_system_prompt_is_reported_and_an_equal_one_is_not():
    turns = [{"role": "system", "content": "Yes."}, ASK, ANSWER]
    for system, unread in (("No.", (("system", '"No."'),)), ("Yes.", ())):
        sample = parse_record(RawRecord(0, {"messages": turns, "system": system}), "set")
        assert sample.unread == unread


def test_keys_without_meaning_and_without_a_value_are_not_reported():
    values = {**dict.fromkeys(NO_MEANING, "x"), "a": None, "b": "", "c": [], "d": {}}
    assert not list(Fields(values).unread())
    assert [path for path, _ in Fields({"a": 0, "b": False}).unread()] == ["a", "b"]


def test_only_reading_counts():
    fields = Fields({"a": 1, "b": 2, "c": 3})
    assert "a" in fields
    assert fields.peek("b") == 2
    assert fields.get("c") == 3
    assert [path for path, _ in fields.unread()] == ["a", "b"]


def test_records_whose_keys_are_data_keep_the_table_small():
    found = {}
    for number in range(1000):
        add_never_read(found, {f"key {number}": (1, "x")})
    assert len(found) == 201
    assert sum(number for number, _ in found.values()) == 1000


@pytest.mark.parametrize("most", [1, 4, None])
def test_the_line_names_the_most_frequent_and_counts_the_others(most):
    paths = {f"k{number}": (number, "1") for number in range(1, 9)}
    line = never_read_line({"a": paths, "b": {"k8": (1, "2")}}, most)
    assert line.startswith("never read: k8 (9 records, e.g. 1)")
    assert ("k1 (1 record" in line) is (most is None)
    assert most is None or f"and {8 - most} more" in line


def test_values_of_any_kind_have_a_short_example():
    values = [b"x" * 99, {"a": object()}, "\ud800", float("nan"), "word " * 99, [[[]]] * 99]
    for value in values:
        ((_, example),) = Fields({"key": value}).unread()
        assert len(example) <= 60
        example.encode()
