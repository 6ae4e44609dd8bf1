"""Rows of the Hub's datasets are learned as their cards describe them.

https://huggingface.co/datasets/HuggingFaceM4/ChartQA, .../facebook/textvqa, .../MMMU/MMMU,
.../Zhiqiang007/MathV360K, .../HuggingFaceM4/the_cauldron, .../lmsys/lmsys-chat-1m,
https://github.com/OpenBMB/MiniCPM-V/blob/main/finetune/readme.md (MiniCPM-V) and
https://github.com/QwenLM/Qwen-VL/blob/master/README.md#finetuning (Qwen-VL).
"""

from support.frameworks.tool_records import IMAGE, Case, check, said, system, user

TALK = [user("a"), said("b"), user("c"), said("d")]
TWO = {"<image_01>": "b.png", "<image_00>": "a.png"}
CASES = {
    "ChartQA": Case(
        {"image": "a.png", "query": "How many?", "label": ["14", "15"]},
        [user(f"{IMAGE}\nHow many?"), said("14")],
    ),
    "TextVQA": Case(
        {"image": "a.png", "question": "Which?", "answers": ["nokia", "no", "nokia"]},
        [user(f"{IMAGE}\nWhich?"), said("nokia")],
    ),
    "MathV360K": Case(
        {"image": "a.png", "question": "In which picture <image1>?", "answer": "D"},
        [user(f"In which picture {IMAGE}?"), said("D")],
    ),
    "MMMU": Case(
        {"question": "<image 2> or <image 1>?", "answer": "B", "image_1": "a.png",
         "image_2": "b.png", "options": "['x', 'y']"},
        [user(f"{IMAGE} or {IMAGE}?"), said("B")],
        unread=("options",),
    ),
    "options next to a conversation": Case(
        {"messages": TALK, "choices": ["x", "y"]}, TALK, unread=("choices",)
    ),
    "Cauldron": Case(
        {"texts": [{"user": "a", "assistant": "b", "source": "x"}], "images": ["a.png"]},
        [user(f"{IMAGE}\na"), said("b")],
    ),
    "LMSYS": Case(
        {"conversation": TALK, "turn": 2, "language": "English"}, TALK, unread=("turn", "language")
    ),
    "conversation next to messages": Case(
        {"messages": TALK, "conversation": "7"}, TALK, unread=("conversation",)
    ),
    "Qwen-VL": Case(
        {"conversations": [user("Picture 1: <img>b.png</img>\nWhat?"), said("b")]},
        [user(f"Picture 1: {IMAGE}\nWhat?"), said("b")],
    ),
    "MiniCPM-V, one image": Case(
        {"image": "a.png", "conversations": [user(f"{IMAGE}\nWhat?"), said("b")]},
        [user(f"{IMAGE}\nWhat?"), said("b")],
    ),
    "MiniCPM-V, several": Case(
        {"image": TWO, "conversations": [user("Compare <image_01> and <image_00>."), said("b")]},
        [user(f"Compare {IMAGE} and {IMAGE}."), said("b")],
    ),
    "MiniCPM-V, one without a mark": Case(
        {"image": TWO, "conversations": [user("What is <image_01>?"), said("b")]},
        [user(f"{IMAGE}\nWhat is {IMAGE}?"), said("b")],
    ),
    "MiniCPM-V, a mark without an image": Case(
        {"image": TWO, "conversations": [user("What is <image_02>?"), said("b")]},
        reason="unknown_mark",
    ),
    "system_prompt": Case({"system_prompt": "S", "messages": TALK}, [system("S"), *TALK]),
    "loss_mask": Case({"messages": TALK, "loss_mask": [0, 1, 0, 0]}, TALK, ["b"]),
}  # fmt: skip
LETTERS = {
    "options": Case(
        {"question": "Which?", "answer": 1, "options": ["cat", "dog"]},
        [user("Which?\nA. cat\nB. dog"), said("B")],
    ),
    "options of a query with a history": Case(
        {"query": "Which?", "response": "B", "history": [["a", "b"]], "choices": ["cat", "dog"]},
        [*TALK[:2], user("Which?\nA. cat\nB. dog"), said("B")],
    ),
    "options of a conversation": Case(
        {"messages": TALK, "choices": ["x", "y"]}, TALK, unread=("choices",)
    ),
}


def test_rows_mean_what_their_cards_say(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found = check(tmp_path, CASES)
    assert found.values["totals"]["num_packed"] == len(CASES) - 1


def test_options_are_appended_to_a_question_and_named_next_to_a_conversation(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    check(tmp_path, LETTERS, choices="letters")
