"""Question columns of the Hub: which of several answers or captions a sample has."""

import random
from collections import Counter

from isobatch.counting.records.fields import Fields
from isobatch.counting.records.reading import Reading
from isobatch.counting.records.record import RawRecord, RawSample
from isobatch.counting.records.schemas import parse_records
from support.builds.raw_data import parse_record
from support.cases import for_each

TEN = ["yes"] * 7 + ["no", "maybe", "no"]


def answers_of(record, answers="first", seed=0, place=0):
    """Id -> the text that is learned, or the reason against it."""
    found = parse_records(RawRecord(place, record), "set", Reading(answers=answers, seed=seed))
    return {
        sample.sample_id: sample.turns[-1].text if isinstance(sample, RawSample) else sample.reason
        for sample in found
    }


SEVERAL = {
    "ChartQA": {"query": "?", "label": ["a", "b"]},
    "DocVQA": {"question": "?", "answers": ["a", "b"]},
    "VQAv2": {"question": "?", "answers": [{"answer": "a", "answer_id": 1}, {"answer": "b"}]},
    "TextVQA, as datasets has it": {"question": "?", "answers": {"answer": ["a", "b"]}},
    "SQuAD": {"question": "?", "answers": {"text": ["a", "b"], "answer_start": [3, 4]}},
    "a list of answers": {"question": "?", "answer": ["a", "b"]},
    "nulls of a table": {"question": "?", "answers": ["a", "b"], "messages": None, "answer": None},
}


@for_each("form", SEVERAL)
def test_a_question_has_one_of_its_answers_or_a_sample_for_each(form):
    record = {"id": "x", **SEVERAL[form]}
    assert answers_of(record) == {"x": "a"}
    assert answers_of(record, "all") == {"x#a1": "a", "x#a2": "b"}
    assert parse_record(RawRecord(0, record), "set").turns[0].text == "?"
    drawn = Counter(answers_of(record, "drawn", seed)["x"] for seed in range(200))
    assert sum(drawn.values()) == drawn["a"] + drawn["b"]
    assert min(drawn["a"], drawn["b"]) > 60


def test_captions_are_documents_of_their_image():
    for key in ("captions", "caption"):
        record = {"id": "x", "image": "a.jpg", key: ["one", "two", "one"]}
        assert answers_of(record) == {"x": "<image>one"}
        assert answers_of(record, "all") == {"x#a1": "<image>one", "x#a2": "<image>two"}
    assert answers_of({"id": "x", "image": "a.jpg", "captions": [{"raw": "r"}]}) == {
        "x": "<image>r"
    }


def test_equal_answers_are_one_sample_and_a_likelier_draw():
    record = {"id": "x", "question": "?", "answers": TEN}
    assert list(answers_of(record, "all").values()) == ["yes", "no", "maybe"]
    drawn = Counter(answers_of(record | {"id": str(k)}, "drawn")[str(k)] for k in range(600))
    assert drawn["yes"] > drawn["no"] > drawn["maybe"] > 0
    assert abs(drawn["yes"] - 420) < 60


def test_a_draw_depends_on_the_seed_and_the_id_alone():
    rng = random.Random(0)
    records = [{"id": str(k), "query": "?", "label": list("abcdef")} for k in range(50)]
    drawn = [answers_of(record, "drawn", 3, place) for place, record in enumerate(records)]
    order = rng.sample(range(50), 50)
    assert [answers_of(records[k], "drawn", 3, 99) for k in order] == [drawn[k] for k in order]
    assert drawn != [answers_of(record, "drawn", 4) for record in records]


UNTOUCHED = {
    "one answer": {"question": "?", "answer": "a", "answers": ["b", "c"]},
    "a conversation": {
        "messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "a"}],
        "captions": ["b", "c"],
    },
    "an instruction": {"instruction": "?", "output": "a", "captions": ["b", "c"]},
    "parts": {"question": "?", "answer": [{"type": "text", "text": "a"}]},
}


@for_each("form", UNTOUCHED)
def test_other_schemas_are_read_as_before(form):
    for answers in ("first", "drawn", "all"):
        assert list(answers_of(UNTOUCHED[form], answers).values()) == ["a"]


DAMAGED = {
    "none": ({"query": "?", "label": []}, "no_answer"),
    "null": ({"query": "?", "label": [None]}, "bad_turn"),
    "a truth": ({"question": "?", "answers": [True]}, "bad_turn"),
    "an object without a text": ({"question": "?", "answers": [{"answer_id": 1}]}, "bad_turn"),
    "a list in a list": ({"question": "?", "answers": [["a"]]}, "bad_turn"),
}


@for_each("form", DAMAGED)
def test_answers_that_are_no_texts_reject_the_sample(form):
    record, reason = DAMAGED[form]
    for answers in ("first", "drawn", "all"):
        assert list(answers_of(record, answers).values()) == [reason]


def test_an_overlaid_record_notes_what_is_read_in_the_record():
    record = Fields({"b": 0, "c": 3, "d": 4})
    other = record.overlaid({"a": 1, "b": 2})
    assert (other["a"], other["b"], other["c"]) == (1, 2, 3)
    assert (sorted(other), [path for path, _ in record.unread()]) == (list("abcd"), ["d"])
