"""LLaVA's and LLaVA-NeXT's records are learned as these learn them.

https://github.com/haotian-liu/LLaVA (records: Finetune_Custom_Data.md of its documentation),
https://github.com/LLaVA-VL/LLaVA-NeXT/blob/main/llava/train/train.py (LazySupervisedDataset) and
https://github.com/LLaVA-VL/LLaVA-NeXT/blob/main/scripts/train/onevision.yaml (mixtures).
"""

import json

import yaml

from support.frameworks.tool_records import IMAGE, Case, check, said, system, user


def human(text):
    return {"from": "human", "value": text}


def gpt(text):
    return {"from": "gpt", "value": text}


ASK = [human(f"{IMAGE}\nWhat is it?"), gpt("A dog.")]
MEANT = [user(f"{IMAGE}\nWhat is it?"), said("A dog.")]
CASES = {
    "image": Case({"image": "a.png", "conversations": ASK}, MEANT),
    "text": Case({"conversations": [human("Hi"), gpt("Hello.")]}, [user("Hi"), said("Hello.")]),
    "several turns": Case(
        {"image": "a.png", "conversations": [*ASK, human("Which?"), gpt("A poodle.")]},
        [*MEANT, user("Which?"), said("A poodle.")],
    ),
    "mark at the end": Case(
        {"image": "a.png", "conversations": [human(f"What is it?\n{IMAGE}"), gpt("A dog.")]},
        [user(f"What is it?\n{IMAGE}"), said("A dog.")],
    ),
    "interleaved": Case(
        {"image": ["a.png", "b.png"],
         "conversations": [human(f"{IMAGE} and {IMAGE}?"), gpt("Dogs.")]},
        [user(f"{IMAGE} and {IMAGE}?"), said("Dogs.")],
    ),
    "no mark": Case(
        {"image": "a.png", "conversations": [human("What is it?"), gpt("A dog.")]}, MEANT
    ),
    "system": Case(
        {"conversations": [{"from": "system", "value": "S"}, human("Hi"), gpt("Hello.")]},
        [system("S"), user("Hi"), said("Hello.")],
    ),
    "gpt first": Case({"conversations": [gpt("Hello."), human("Hi"), gpt("Yes?")]},
                      [said("Hello."), user("Hi"), said("Yes?")]),
    "weights of LLaVA-NeXT's data": Case(
        {"image": "a.png", "conversations": ASK, "data_source": "coco"},
        MEANT,
        unread=("data_source",),
    ),
    "more marks than images": Case(
        {"image": "a.png", "conversations": [human(IMAGE * 2), gpt("A dog.")]},
        reason="marker_without_image",
    ),
    "missing image": Case(
        {"image": "none.png", "conversations": ASK}, reason="missing_image"
    ),
    "no answer": Case({"image": "a.png", "conversations": ASK[:1]}, reason="no_answer"),
}  # fmt: skip


def test_records_mean_what_llava_makes_of_them(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    check(tmp_path, CASES)


def test_a_mixture_takes_what_its_sampling_strategy_says(tmp_path, monkeypatch):
    """A YAML with JSON and JSON lines: the first two, the last quarter, and all of another."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    names = list(CASES)[:8]
    kept = [*names[:2], *names[6:8], "other"]
    other = Case({"conversations": [human("Hi"), gpt("Yes.")]}, [user("Hi"), said("Yes.")])
    cases = {name: CASES[name] for name in names} | {"other": other}

    def write(folder, rows):
        (folder / "a.json").write_text(json.dumps(rows[:4]))
        (folder / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:8]))
        (folder / "c.json").write_text(json.dumps(rows[8:]))
        entries = [("a.json", "first:2"), ("b.jsonl", "end:25%"), ("c.json", "all")]
        datasets = [{"json_path": path, "sampling_strategy": text} for path, text in entries]
        (folder / "mix.yaml").write_text(yaml.safe_dump({"datasets": datasets}))
        return folder / "mix.yaml"

    taken = {name: cases[name] for name in kept}
    rows = [{"id": name, **case.record} for name, case in cases.items()]
    check(tmp_path, taken, lambda folder, _: write(folder, rows), is_in_memory=False)
