"""LLaMA-Factory's datasets are learned as LLaMA-Factory learns them.

https://github.com/hiyouga/LLaMA-Factory/blob/main/data/README.md (dataset_info.json and all
formats), https://github.com/hiyouga/LLaMA-Factory/blob/main/src/llamafactory/data/converter.py and
https://github.com/hiyouga/LLaMA-Factory/blob/main/src/llamafactory/data/parser.py (the rules).
"""

import json

import pytest

from support.frameworks.tool_records import IMAGE, Case, calls, check, said, system, tool, user

TALK = [user("a"), said("b"), user("c"), said("d")]
F = {"name": "f", "description": "It does.", "parameters": {"type": "object"}}
ALPACA = {"prompt": "instruction", "query": "input", "response": "output"}
SHAREGPT = {"messages": "conversations", "system": "system", "tools": "tools"}
OPENAI = {"role_tag": "role", "content_tag": "content", "user_tag": "user"}
OPENAI |= {"assistant_tag": "assistant", "system_tag": "system"}


def by(role, text):
    return {"from": role, "value": text}


TURNS = [by("human", "a"), by("gpt", "b"), by("human", "c"), by("gpt", "d")]
CALL = json.dumps({"name": "f", "arguments": {"x": 1}})
DATASETS = {
    # name -> (the entry, cases)
    "alpaca, no columns": (
        {},
        {
            "instruction": Case({"instruction": "a", "input": "", "output": "b"}, TALK[:2]),
            "input": Case(
                {"instruction": "a", "input": "x", "output": "b"}, [user("a\nx"), said("b")]
            ),
            "input alone": Case({"instruction": "", "input": "a", "output": "b"}, TALK[:2]),
            "system that no column names": Case(
                {"instruction": "a", "input": "", "output": "b", "system": "S"},
                TALK[:2],
                unread=(".system",),
            ),
        },
    ),
    "alpaca": (
        {"columns": {**ALPACA, "system": "system", "history": "history"}},
        {
            "history": Case(
                {"instruction": "c", "input": "", "output": "d", "system": "S",
                 "history": [["a", "b"]]},
                [system("S"), *TALK],
            ),
            "empty history": Case(
                {"instruction": "a", "input": "", "output": "b", "system": "", "history": []},
                TALK[:2],
            ),
            "no answer": Case({"instruction": "a", "input": ""}, reason="no_conversation"),
        },
    ),
    "pre-training": (
        {"columns": {"prompt": "text"}},
        {"document": Case({"text": "Dogs bark."}, document="Dogs bark.")},
    ),
    "preference": (
        {"ranking": True, "columns": {**ALPACA, "chosen": "chosen", "rejected": "rejected"}},
        {"chosen": Case(
            {"instruction": "a", "input": "", "chosen": "b", "rejected": "x"},
            TALK[:2],
            unread=("rejected",),
        )},
    ),
    "multimodal alpaca": (
        {"columns": {**ALPACA, "images": "pics"}},
        {"marked": Case(
            {"instruction": f"{IMAGE}a", "input": "", "output": "b", "pics": ["a.png"]},
            [user(f"{IMAGE}a"), said("b")],
        )},
    ),
    "sharegpt, no columns": (
        {"formatting": "sharegpt"},
        {"conversations": Case({"conversations": TURNS}, TALK)},
    ),
    "sharegpt": (
        {"formatting": "sharegpt", "columns": SHAREGPT},
        {
            "system column": Case({"conversations": TURNS, "system": "S"}, [system("S"), *TALK]),
            "system turn first": Case(
                {"conversations": [by("system", "T"), *TURNS], "system": "S"},
                [system("T"), *TALK],
                unread=("system",),
            ),
            "tools": Case(
                {"conversations": [by("human", "a"), by("function_call", CALL),
                                   by("observation", "1"), by("gpt", "b")],
                 "system": "", "tools": json.dumps([F])},
                [user("a"), calls(("f", {"x": 1})), tool("1"), said("b")],
                [' calls f {"x": 1}', "b"],
                tools=[F],
            ),
            "parallel calls": Case(
                {"conversations": [by("human", "a"), by("function_call", f"[{CALL}, {CALL}]"),
                                   by("observation", "1"), by("gpt", "b")]},
                [user("a"), calls(("f", {"x": 1}), ("f", {"x": 1})), tool("1"), said("b")],
                [' calls f {"x": 1} calls f {"x": 1}', "b"],
            ),
        },
    ),
    "sharegpt preference": (
        {"formatting": "sharegpt", "ranking": True,
         "columns": {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"}},
        {"chosen": Case(
            {"conversations": TURNS[:3], "chosen": by("gpt", "d"), "rejected": by("gpt", "x")},
            TALK,
            unread=("rejected",),
        )},
    ),
    "openai tags": (
        {"formatting": "sharegpt", "columns": {"messages": "messages"}, "tags": OPENAI},
        {"messages": Case({"messages": [system("S"), *TALK]}, [system("S"), *TALK])},
    ),
    "openai": (
        {"formatting": "openai", "columns": {"messages": "messages", "tools": "tools"},
         "tags": {**OPENAI, "observation_tag": "tool", "function_tag": "function"}},
        {"tool calls": Case(
            {"messages": [user("a"), calls(("f", {"x": 1})), tool("1"), said("b")], "tools": [F]},
            [user("a"), calls(("f", {"x": 1})), tool("1"), said("b")],
            [' calls f {"x": 1}', "b"],
            tools=[F],
        )},
    ),
    "tags of its own": (
        {"formatting": "sharegpt", "columns": {"messages": "talk", "images": "pics"},
         "tags": {"role_tag": "who", "content_tag": "words", "user_tag": "Q",
                  "assistant_tag": "A"}},
        {
            "two images": Case(
                {"talk": [{"who": "Q", "words": f"{IMAGE}{IMAGE}a"}, {"who": "A", "words": "b"}],
                 "pics": ["b.png", "a.png"]},
                [user(f"{IMAGE}{IMAGE}a"), said("b")],
            ),
            "another role": Case(
                {"talk": [{"who": "Z", "words": "a"}, {"who": "A", "words": "b"}]},
                reason="bad_turn",
            ),
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DATASETS)
def test_datasets_mean_what_llama_factory_makes_of_them(tmp_path, monkeypatch, name):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    entry, cases = DATASETS[name]

    def write(folder, rows):
        (folder / "data.json").write_text(json.dumps(rows))
        info = {"mine": {"file_name": "data.json", **entry}, "other": {"file_name": "none.json"}}
        (folder / "dataset_info.json").write_text(json.dumps(info))
        return f"{folder / 'dataset_info.json'}@mine"

    check(tmp_path, cases, write, is_in_memory=False)
