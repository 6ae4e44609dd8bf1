"""xtuner's records are learned as xtuner learns them.

https://xtuner.readthedocs.io/en/latest/preparation/prepare_dataset.html (`conversation` with
`system`, `input`, `output`), https://xtuner.readthedocs.io/en/latest/get_started/mllm_sft.html
(`messages` with parts), https://github.com/InternLM/xtuner/blob/main/xtuner/dataset/utils.py
(`encode_fn`) and .../xtuner/v1/data_proto/messages/chat.py (`loss`, `thinking`).
"""

from support.frameworks.tool_records import IMAGE, Case, check, said, system, user

TALK = [user("What is it?"), said("A dog."), user("Which?"), said("A poodle.")]
PAIRS = [{"input": "What is it?", "output": "A dog."}, {"input": "Which?", "output": "A poodle."}]


def image(url, **more):
    return {"type": "image_url", "image_url": {"url": url, **more}}


def text(words):
    return {"type": "text", "text": words}


CASES = {
    "single turn": Case({"conversation": PAIRS[:1]}, TALK[:2]),
    "several turns": Case({"conversation": PAIRS}, TALK),
    "system": Case(
        {"conversation": [{"system": "S", **PAIRS[0]}, PAIRS[1]]}, [system("S"), *TALK]
    ),
    "output_with_loss": Case(
        {"conversation": [{**PAIRS[0], "output_with_loss": False}, PAIRS[1]]},
        TALK,
        ["A poodle."],
    ),
    "sep and need_eos_token": Case(
        {"conversation": [{**PAIRS[0], "sep": "\n", "need_eos_token": False}, PAIRS[1]]},
        TALK,
        unread=("conversation[].sep", "conversation[].need_eos_token"),
    ),
    "system of a later turn": Case(
        {"conversation": [PAIRS[0], {"system": "S", **PAIRS[1]}]},
        TALK,
        unread=("conversation[].system",),
    ),
    "pre-training": Case(
        {"conversation": [{"input": "", "output": "Dogs bark."}]}, document="Dogs bark."
    ),
    "messages": Case({"messages": TALK}, TALK),
    "loss": Case({"messages": [TALK[0], said("A dog.", loss=False), *TALK[2:]]}, TALK,
                 ["A poodle."]),
    "instruction": Case(
        {"instruction": "What is it?", "output": "A dog."}, TALK[:2]
    ),
    "LLaVA": Case(
        {"image": "a.png", "conversations": [{"from": "human", "value": f"{IMAGE}\nWhat is it?"},
                                             {"from": "gpt", "value": "A dog."}]},
        [user(f"{IMAGE}\nWhat is it?"), said("A dog.")],
    ),
    "parts": Case(
        {"messages": [user([image("a.png", image_wh=[40, 40]), text("What is it?")]),
                      said("A dog.")]},
        [user(f"{IMAGE}What is it?"), said("A dog.")],
    ),
    "two images": Case(
        {"messages": [user([image("a.png"), image("b.png"), text("Which?")]), said("A poodle.")]},
        [user(f"{IMAGE}{IMAGE}Which?"), said("A poodle.")],
    ),
    "thinking": Case(
        {"messages": [TALK[0], said("A dog.", thinking="It barks")]},
        [TALK[0], said("A dog.", reasoning_content="It barks")],
        ["It barks; A dog."],
    ),
    "assistant first": Case({"messages": [said("Hello."), *TALK]}, [said("Hello."), *TALK]),
    "neither roles nor pairs": Case({"conversation": [{"q": "a", "a": "b"}]}, reason="bad_turn"),
}  # fmt: skip


def test_records_mean_what_xtuner_makes_of_them(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    check(tmp_path, CASES)
