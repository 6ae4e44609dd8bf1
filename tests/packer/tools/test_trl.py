"""TRL's rows are learned as TRL learns them.

https://huggingface.co/docs/trl/dataset_formats has all of them. TRL is installed, so the ids are
compared with those of its own `apply_chat_template` too.
"""

import pytest
from transformers import AutoTokenizer
from trl import apply_chat_template
from trl.data_utils import prepare_multimodal_messages

from isobatch.packer.demo.dataset import demo_tokenizer_path
from support.frameworks.tool_records import (
    IMAGE,
    TEMPLATE,
    Case,
    calls,
    check,
    said,
    system,
    tool,
    user,
)

SKY = [user("What color is the sky?"), said("It is blue.")]
LIGHT = {"type": "function", "function": {"name": "light", "parameters": {"type": "object"}}}
ON = calls(("light", {"room": "hall", "state": "on"}))


def picture(text):
    return [{"type": "image"}, {"type": "text", "text": text}]


CASES = {
    "language modeling": Case({"text": "The sky is blue."}, document="The sky is blue."),
    "language modeling of a chat": Case({"messages": SKY}, SKY),
    "several turns": Case({"messages": [system("S"), *SKY, *SKY]}, [system("S"), *SKY, *SKY]),
    "prompt and completion of a chat": Case({"prompt": SKY[:1], "completion": SKY[1:]}, SKY),
    "completion after several turns": Case(
        {"prompt": [*SKY, SKY[0]], "completion": SKY[1:]}, [*SKY, *SKY]
    ),
    "prompt only": Case({"prompt": SKY[:1]}, reason="no_conversation"),
    "preference": Case(
        {"prompt": SKY[:1], "chosen": SKY[1:], "rejected": [said("It is green.")]},
        reason="no_conversation",
    ),
    "unpaired preference": Case(
        {"prompt": SKY[:1], "completion": SKY[1:], "label": False}, SKY, unread=("label",)
    ),
    "stepwise supervision": Case(
        {"prompt": "Which is larger?", "completions": ["9.8"], "labels": [True]},
        reason="no_conversation",
    ),
    "tools": Case(
        {"tools": [LIGHT], "messages": [user("Turn it on."),
                                        {k: v for k, v in ON.items() if k != "content"},
                                        tool("It is on.", name="light"), said("Done!")]},
        [user("Turn it on."), ON, tool("It is on."), said("Done!")],
        [' calls light {"room": "hall", "state": "on"}', "Done!"],
        tools=[LIGHT],
        unread=("messages[].name",),
    ),
    "vision": Case(
        {"messages": [user(picture("What is it?")), said([{"type": "text", "text": "A cat."}])],
         "images": ["a.png"]},
        [user(f"{IMAGE}What is it?"), said("A cat.")],
    ),
    "vision, one image": Case(
        {"prompt": [user("What is it?")], "completion": [said("A cat.")], "image": "a.png"},
        [user(f"{IMAGE}\nWhat is it?"), said("A cat.")],
    ),
    "reasoning_content": Case(
        {"messages": [SKY[0], said("Blue.", reasoning_content="Rayleigh")]},
        [SKY[0], said("Blue.", reasoning_content="Rayleigh")],
        ["Rayleigh; Blue."],
    ),
    "chat_template_kwargs": Case(
        {"messages": SKY, "chat_template_kwargs": {"enable_thinking": False}},
        SKY,
        unread=("chat_template_kwargs",),
    ),
    "masks": Case({"messages": SKY, "assistant_masks": [0, 1]}, SKY, unread=("assistant_masks",)),
    "messages and pretokenised": Case(
        {"messages": SKY, "completion_mask": [0, 1]}, SKY, unread=("completion_mask",)
    ),
}  # fmt: skip
BETTER = {
    "implicit prompt": Case(
        {"chosen": SKY, "rejected": [SKY[0], said("It is green.")]}, SKY, unread=("rejected",)
    )
}


def test_rows_mean_what_trl_makes_of_them(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    check(tmp_path, CASES)


def test_the_better_of_two_answers_is_learned(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    check(tmp_path, BETTER, columns=("messages=chosen",))


# of images TRL leaves the places to the processor
@pytest.mark.parametrize(
    "name",
    [name for name, case in CASES.items() if case.means and "image" not in str(case.record)],
)
def test_trl_renders_what_the_cases_say(name):
    case, tokenizer = CASES[name], AutoTokenizer.from_pretrained(str(demo_tokenizer_path()))
    given = {k: v for k, v in case.record.items() if k in ("messages", "prompt", "completion")}
    tokenizer.chat_template = TEMPLATE
    found = apply_chat_template(given, tokenizer, tools=case.tools)
    text = tokenizer.apply_chat_template(case.means, tools=case.tools, tokenize=False)
    assert "".join(found.values()) == text


def test_trl_puts_images_of_a_column_before_the_first_question():
    made = prepare_multimodal_messages([user("What is it?")], images=["a.png"])
    assert [part["type"] for part in made[0]["content"]] == ["image", "text"]
