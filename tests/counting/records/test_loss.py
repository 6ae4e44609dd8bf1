"""What records say about their loss is obeyed, refused or left for the report, in every dialect."""

import pytest

from isobatch.counting.records.reading import Reading
from isobatch.counting.records.record import RawRecord, RawSample
from isobatch.counting.records.reject_reasons import Rejected
from support.builds.raw_data import parse_record
from support.cases import for_each

ASK = {"role": "user", "content": "What?"}
ANSWER = {"role": "assistant", "content": "That is it."}


def parse(value, reading=None):
    return parse_record(RawRecord(0, value), "set", reading or Reading())


def learned(value):
    """Whether each turn is learned: None as its role says."""
    sample = parse(value)
    assert isinstance(sample, RawSample), sample
    assert not [path for path, _ in sample.unread], sample.unread
    return [turn.learned for turn in sample.turns]


OBEYED = {
    # https://platform.openai.com/docs/guides/supervised-fine-tuning: "weight" of assistant messages
    "OpenAI: weight 0": ([ASK, ANSWER | {"weight": 0}], {}, [None, False]),
    "OpenAI: weight 1": ([ASK, ANSWER | {"weight": 1}], {}, [None, None]),
    "OpenAI: weight 1 of a question": ([ASK | {"weight": 1}, ANSWER], {}, [None, None]),
    # https://docs.axolotl.ai/docs/dataset-formats/conversation.html: train, train_detail
    "Axolotl: train": ([ASK | {"train": True}, ANSWER | {"train": False}], {}, [True, False]),
    "Axolotl: training": ([ASK, ANSWER | {"training": False}], {}, [None, False]),
    "Axolotl: train_detail": (
        [
            ASK,
            ANSWER
            | {
                "train_detail": [
                    {"begin_offset": 0, "end_offset": 4, "train": False},
                    {"begin_offset": 8, "end_offset": 9, "train": False},
                ]
            },
        ],
        {},
        [None, ((5, 8), (10, 11))],
    ),
    # https://swift.readthedocs.io/en/latest/Customization/Custom-dataset.html: loss of a message
    "ms-swift: loss": ([ASK, ANSWER | {"loss": False}], {}, [None, False]),
    "ms-swift: loss of a question": ([ASK | {"loss": True}, ANSWER], {}, [None, None]),
    "loss_mask": ([ASK | {"loss_mask": 1}, ANSWER | {"loss_mask": 0}], {}, [True, False]),
    "mask": ([ASK | {"mask": 0}, ANSWER | {"mask": 1.0}], {}, [False, None]),
    "torchtune: masked": ([ASK | {"masked": True}, ANSWER | {"masked": False}], {}, [False, None]),
    "a list for the turns": ([ASK, ANSWER, ASK, ANSWER], {"loss_mask": [0, 0, 1, 1]},
                             [False, False, True, None]),
    "a list without the system turn": ([ASK, ANSWER], {"system": "S", "mask": [0, 1]},
                                       [None, False, None]),
    "a list of weights": ([ASK, ANSWER], {"weight": [1, 0]}, [None, False]),
    # https://docs.nvidia.com/nemo-framework/user-guide/latest: "mask": "User"
    "NeMo: mask of a role": ([ASK, ANSWER], {"mask": "User"}, [False, None]),
    "a record's weight 1": ([ASK, ANSWER], {"weight": 1}, [None, None]),
}  # fmt: skip


@for_each(("name", "case"), OBEYED.items())
def test_loss_keys_are_obeyed(name, case):
    messages, more, expected = case
    assert learned({"messages": messages, **more}) == expected


REFUSED = {
    "a weight between 0 and 1": ({"messages": [ASK, ANSWER | {"weight": 0.5}]}, "bad_loss"),
    "a record's weight between 0 and 1": (
        {"messages": [ASK, ANSWER], "weight": 0.25},
        "bad_loss",
    ),
    "keys that contradict": (
        {"messages": [ASK, ANSWER | {"weight": 0, "train": True}]},
        "bad_loss",
    ),
    "a list of another length": ({"messages": [ASK, ANSWER], "loss_mask": [0] * 7}, "bad_loss"),
    "a list of other numbers": ({"messages": [ASK, ANSWER], "loss_mask": [0, 0.5]}, "bad_loss"),
    "a range outside of the text": (
        {
            "messages": [
                ASK,
                ANSWER | {"train_detail": [{"begin_offset": 0, "end_offset": 99, "train": False}]},
            ]
        },
        "bad_loss",
    ),
    "a record's weight 0": ({"messages": [ASK, ANSWER], "weight": 0}, "not_learned"),
    "a record's train": ({"messages": [ASK, ANSWER], "train": False}, "not_learned"),
    "a record that is masked": ({"question": "?", "answer": "!", "masked": True}, "not_learned"),
}


@for_each(("name", "case"), REFUSED.items())
def test_what_cannot_be_obeyed_is_refused(name, case):
    value, reason = case
    rejected = parse(value)
    assert isinstance(rejected, Rejected)
    assert rejected.reason == reason, rejected.detail


@pytest.mark.parametrize("value", [2.5, -1, "heavy", {"a": 1}])
def test_other_values_are_not_read_and_so_reported(value):
    for key in ("weight", "loss", "mask"):
        sample = parse({"messages": [ASK, ANSWER | {key: value}], key: value})
        assert key in [path for path, _ in sample.unread], key


def test_a_kept_column_is_the_loaders():
    value = {"messages": [ASK, ANSWER], "weight": 0.25}
    sample = parse(value, Reading(keep_columns=("weight",)))
    assert isinstance(sample, RawSample)
    assert not sample.unread
