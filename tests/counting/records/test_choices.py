"""Options of a question: lettered lines after it, or never read."""

from isobatch.counting.records.reading import Reading
from isobatch.counting.records.record import RawRecord, RawSample
from support.builds.raw_data import parse_record
from support.cases import for_each

LETTERS = Reading(choices="letters")


def texts_of(record, reading=LETTERS):
    """The question and the answer, or the reason against the sample."""
    sample = parse_record(RawRecord(0, record), "set", reading)
    if not isinstance(sample, RawSample):
        return sample.reason
    return tuple(turn.text for turn in sample.turns)


FORMS = {
    "a list": {"options": ["cat", "dog"]},
    "choices, as ScienceQA's": {"choices": ["cat", "dog"]},
    "letters and texts": {"options": {"A": "cat", "B": "dog", "C": None}},
    "JSON": {"options": '["cat", "dog"]'},
    "a list as Python prints it, as MMMU's": {"options": "['cat', 'dog']"},
    "ARC's": {"choices": {"label": ["A", "B"], "text": ["cat", "dog"]}},
    "columns, as MMBench's": {"A": "cat", "B": "dog", "C": None, "D": None},
    "an empty list next to columns": {"options": [], "A": "cat", "B": "dog"},
}


@for_each("form", FORMS)
def test_options_are_lettered_lines_after_the_question(form):
    record = {"question": "Which?", "answer": "B", **FORMS[form]}
    assert texts_of(record) == ("Which?\nA. cat\nB. dog", "B")
    assert texts_of(record, Reading()) == ("Which?", "B")


def test_a_number_becomes_its_letter_and_other_answers_stay():
    for answer, learned in [(0, "A"), (1, "B"), ("1", "1"), ("dog", "dog"), ("(B)", "(B)")]:
        record = {"question": "Which?", "answer": answer, "choices": ["cat", "dog"]}
        assert texts_of(record) == ("Which?\nA. cat\nB. dog", learned)
    several = {"question": "Which?", "answers": ["B", "A"], "choices": ["cat", "dog"]}
    assert texts_of(several) == ("Which?\nA. cat\nB. dog", "B")


def test_a_mark_in_an_option_is_a_place():
    record = {"question": "Which?", "answer": "A", "options": "['<image 2>', '<image 1>']"}
    sample = parse_record(RawRecord(0, record | {"image_1": "p", "image_2": "q"}), "set", LETTERS)
    assert sample.turns[0].text == "Which?\nA. <image>\nB. <image>"
    assert [image.name for image in sample.images] == ["q", "p"]


def test_a_question_without_options_stays():
    for record in [{}, {"options": None}, {"options": []}, {"choices": ""}, {"A": "only one"}]:
        assert texts_of({"question": "Which?", "answer": "B", **record}) == ("Which?", "B")


DAMAGED = {
    "a text": {"options": "cat or dog"},
    "NumPy's print, which Python reads as one text": {"options": "['cat' 'dog']"},
    "a number": {"options": 3},
    "a list of lists": {"options": [["cat"], ["dog"]]},
    "a null": {"options": ["cat", None]},
    "more than there are letters": {"options": [str(number) for number in range(27)]},
    "nested too deep": {"options": "[" * 5000},
    "an answer without an option": {"options": ["cat", "dog"], "answer": 2},
    "a negative answer": {"options": ["cat", "dog"], "answer": -1},
}


@for_each("form", DAMAGED)
def test_damaged_options_reject_the_sample_or_are_not_read(form):
    record = {"question": "Which?", "answer": "B", **DAMAGED[form]}
    assert texts_of(record) == "bad_turn"
    if isinstance(record["answer"], str):
        assert texts_of(record, Reading()) == ("Which?", "B")
