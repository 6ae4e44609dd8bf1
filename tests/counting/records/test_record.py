from isobatch.counting.records.media import Media
from isobatch.counting.records.record import RawRecord, RawSample
from isobatch.counting.records.reject_reasons import REASONS, Rejected
from isobatch.counting.text.chat_tokenizer import Turn
from support.builds.raw_data import parse_record
from support.cases import for_each

ASK = {"from": "human", "value": "<image>\nWhat?"}
ANSWER = {"from": "gpt", "value": "That."}


def parse(value, position=7):
    return parse_record(RawRecord(position, value), "set")


def test_llava_and_openai_keys_mean_the_same():
    llava = parse({"id": "a", "image": "x.jpg", "conversations": [ASK, ANSWER]})
    other = parse(
        {
            "id": "a",
            "image": ["x.jpg"],
            "conversations": [
                {"role": "user", "content": ASK["value"]},
                {"role": "assistant", "content": "That."},
            ],
        }
    )
    assert llava == other
    turns = (Turn("user", "<image>\nWhat?"), Turn("assistant", "That."))
    assert llava == RawSample("a", "set", turns, (Media("x.jpg"),))


def test_numbers_become_ids_and_a_missing_id_is_the_place_in_the_source():
    assert parse({"id": 12, "conversations": [ANSWER]}).sample_id == "12"
    assert parse({"conversations": [ANSWER]}).sample_id == "set:7"


def test_a_record_may_name_its_own_source():
    assert parse({"source": "coco", "conversations": [ANSWER]}).source == "coco"
    assert parse({"source": 5, "conversations": []}).source == "set"


def test_an_image_without_a_marker_stands_before_the_first_user_turn():
    sample = parse(
        {"image": ["a", "b"], "conversations": [{"from": "system", "value": "S"}, ASK, ANSWER]}
    )
    assert [turn.text for turn in sample.turns] == ["S", "<image>\n<image>\nWhat?", "That."]


@for_each(
    ("value", "reason"),
    [
        ([1, 2], "not_an_object"),
        ("text", "not_an_object"),
        (None, "not_an_object"),
        ({"id": 1}, "no_conversation"),
        ({"conversations": []}, "no_conversation"),
        ({"conversations": "hello"}, "no_conversation"),
        ({"conversations": [ASK]}, "no_answer"),
        ({"conversations": [{"from": "system", "value": "S"}]}, "no_answer"),
        ({"conversations": ["hello"]}, "bad_turn"),
        ({"conversations": [{"from": "narrator", "value": "x"}, ANSWER]}, "bad_turn"),
        ({"conversations": [{"from": "human", "value": 3}, ANSWER]}, "bad_turn"),
        ({"conversations": [{"from": ["human"], "value": "x"}, ANSWER]}, "bad_turn"),
        ({"conversations": [ASK, ANSWER]}, "marker_without_image"),
        ({"image": {"url": "x"}, "conversations": [ASK, ANSWER]}, "bad_image_field"),
        ({"image": ["a", 3], "conversations": [ASK, ANSWER]}, "bad_image_field"),
    ],
)
def test_what_cannot_be_used_is_rejected_with_its_reason(value, reason):
    rejected = parse(value)
    assert isinstance(rejected, Rejected)
    assert (rejected.reason, rejected.source) == (reason, "set")
    assert rejected.reason in REASONS
    assert rejected.detail


def test_a_broken_record_keeps_its_place():
    rejected = parse_record(RawRecord(3, None, "line 9: oops"), "set")
    assert (rejected.reason, rejected.detail, rejected.sample_id) == (
        "broken_json",
        "line 9: oops",
        "set:3",
    )
