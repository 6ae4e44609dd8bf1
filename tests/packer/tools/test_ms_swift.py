"""ms-swift's records are learned as ms-swift learns them.

https://swift.readthedocs.io/en/latest/Customization/Custom-dataset.html (all formats) and
https://github.com/modelscope/ms-swift/blob/main/swift/dataset/preprocessor/core.py (roles, keys).
"""

import json

from support.frameworks.tool_records import IMAGE, Case, calls, check, said, system, tool, user

AQI = {"type": "function", "function": {"name": "aqi", "parameters": {"type": "object"}}}
CALLS = [json.dumps({"name": "aqi", "arguments": {"city": city}}) for city in ("Bonn", "Ulm")]
ASKED = calls(("aqi", {"city": "Bonn"}), ("aqi", {"city": "Ulm"}))
TALK = [user("1 + 1?"), said("It equals 2."), user("Add 1."), said("It equals 3.")]


def turn(role, content, **more):
    return {"role": role, "content": content, **more}


CASES = {
    "messages": Case({"messages": [system("Be kind."), *TALK]}, [system("Be kind."), *TALK]),
    "sharegpt": Case(
        {
            "system": "S",
            "conversation": [
                {"human": "1 + 1?", "assistant": "It equals 2."},
                {"human": "Add 1.", "assistant": "It equals 3."},
            ],
        },
        [system("S"), *TALK],
    ),
    "alpaca": Case(
        {"system": "S", "instruction": "Add.", "input": "1, 2", "output": "3"},
        [system("S"), user("Add.\n1, 2"), said("3")],
    ),
    "query and response": Case(
        {"system": "S", "query": "Add 1.", "response": "It equals 3.",
         "history": [["1 + 1?", "It equals 2."]]},
        [system("S"), *TALK],
    ),
    "pre-training": Case({"messages": [said("I love music")]}, [said("I love music")]),
    "pre-training with images": Case(
        {"messages": [said(f"{IMAGE}is a dog, {IMAGE}is a cat")], "images": ["a.png", "b.png"]},
        [said(f"{IMAGE}is a dog, {IMAGE}is a cat")],
        ["is a dog, is a cat"],
    ),
    "two images": Case(
        {"messages": [user(f"{IMAGE}{IMAGE}Which?"), said("That.")], "images": ["a.png", "b.png"]},
        [user(f"{IMAGE}{IMAGE}Which?"), said("That.")],
    ),
    "image of bytes and path": Case(
        {"messages": [user(f"{IMAGE}?"), said("A.")],
         "images": [{"bytes": None, "path": "a.png"}]},
        [user(f"{IMAGE}?"), said("A.")],
    ),
    "no mark": Case(
        {"query": "What?", "response": "A cat.", "images": "a.png"},
        [user(f"{IMAGE}\nWhat?"), said("A cat.")],
    ),
    "agent, parallel calls": Case(
        {"tools": json.dumps([AQI]),
         "messages": [user("Air?"), *(turn("tool_call", each) for each in CALLS),
                      turn("tool_response", '{"aqi": 10}'), turn("tool_response", '{"aqi": 72}'),
                      said("Good.")]},
        [user("Air?"), ASKED, tool('{"aqi": 10}'), tool('{"aqi": 72}'), said("Good.")],
        [' calls aqi {"city": "Bonn"} calls aqi {"city": "Ulm"}', "Good."],
        tools=[AQI],
    ),
    "agent, said before the call": Case(
        {"messages": [user(f"{IMAGE}Time?"), said("I look."), turn("tool_call", CALLS[0]),
                      turn("tool", IMAGE), said("It is 11.")],
         "images": ["a.png", "b.png"]},
        [user(f"{IMAGE}Time?"), calls(("aqi", {"city": "Bonn"}), text="I look."), tool(IMAGE),
         said("It is 11.")],
        ['I look. calls aqi {"city": "Bonn"}', "It is 11."],
    ),
    "loss": Case(
        {"messages": [*TALK[:1], said("It equals 2.", loss=False), *TALK[2:]]},
        TALK,
        ["It equals 3."],
    ),
    "roles of others": Case(
        {"conversations": [{"from": "human", "value": "Air?"},
                           {"from": "function_call", "value": CALLS[0]},
                           {"from": "observation", "value": "10"},
                           {"from": "gpt", "value": "Good."}]},
        [user("Air?"), calls(("aqi", {"city": "Bonn"})), tool("10"), said("Good.")],
        [' calls aqi {"city": "Bonn"}', "Good."],
    ),
    "DPO": Case(
        {"messages": TALK, "rejected_response": "No."}, TALK, unread=("rejected_response",)
    ),
    "KTO": Case({"messages": TALK, "label": False}, TALK, unread=("label",)),
    "GRPO": Case({"messages": TALK[:1], "solution": "2"}, reason="no_answer"),
    "one step learned in part": Case(
        {"messages": [user("?"), said("I look.", loss=False), turn("tool_call", CALLS[0])]},
        reason="bad_loss",
    ),
}  # fmt: skip


def test_records_mean_what_ms_swift_makes_of_them(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    check(tmp_path, CASES)
