"""InternVL's records and its meta JSON are learned as InternVL learns them.

https://internvl.readthedocs.io/en/latest/get_started/chat_data_format.html (records, meta JSON) and
https://github.com/OpenGVLab/InternVL, internvl_chat/internvl/train/internvl_chat_finetune.py
(LazySupervisedDataset, build_datasets).
"""

import json

import pytest

from isobatch.packer.sources.dataset import find_dataset
from support.frameworks.tool_records import IMAGE, Case, check, said, system, user


def human(text):
    return {"from": "human", "value": text}


def gpt(text):
    return {"from": "gpt", "value": text}


ASK = [human(f"{IMAGE}\nWhat is it?"), gpt("A dog.")]
MEANT = [user(f"{IMAGE}\nWhat is it?"), said("A dog.")]
BOX = "<ref>A dog</ref><box>[[308, 765, 592, 1094]]</box>"
CASES = {
    "text": Case({"conversations": [human("Hi"), gpt("Hello.")]}, [user("Hi"), said("Hello.")]),
    "one image": Case({"image": "a.png", "width": 40, "height": 40, "conversations": ASK}, MEANT),
    "one image, several turns": Case(
        {"image": "a.png", "conversations": [*ASK, human("Which?"), gpt("A poodle.")]},
        [*MEANT, user("Which?"), said("A poodle.")],
    ),
    "several images": Case(
        {"image": ["a.png", "b.png"], "width_list": [40, 40], "height_list": [40, 40],
         "conversations": [human(f"{IMAGE}\n{IMAGE}\nWhich?"), gpt("Both.")]},
        [user(f"{IMAGE}\n{IMAGE}\nWhich?"), said("Both.")],
    ),
    "Image-1": Case(
        {"image": ["a.png", "b.png"],
         "conversations": [human(f"Image-1: {IMAGE}\nImage-2: {IMAGE}\nWhich?"), gpt("Both.")]},
        [user(f"Image-1: {IMAGE}\nImage-2: {IMAGE}\nWhich?"), said("Both.")],
    ),
    "images over several turns": Case(
        {"image": ["b.png", "a.png"],
         "conversations": [*ASK, human(f"{IMAGE}\nAnd it?"), gpt("A cat.")]},
        [*MEANT, user(f"{IMAGE}\nAnd it?"), said("A cat.")],
    ),
    "no mark": Case(
        {"image": "a.png", "conversations": [human("What is it?"), gpt("A dog.")]}, MEANT
    ),
    "grounding": Case(
        {"image": "a.png", "conversations": [human(f"{IMAGE}\nWhere?"), gpt(BOX)]},
        [user(f"{IMAGE}\nWhere?"), said(BOX)],
    ),
    "system": Case(
        {"conversations": [{"from": "system", "value": "S"}, human("Hi"), gpt("Hello.")]},
        [system("S"), user("Hi"), said("Hello.")],
    ),
    "function": Case(
        {"conversations": [human("Hi"), {"from": "function", "value": "1"}, gpt("One.")]},
        [user("Hi"), {"role": "tool", "content": "1"}, said("One.")],
    ),
    "more marks than images": Case(
        {"image": "a.png", "conversations": [human(IMAGE * 2), gpt("A dog.")]},
        reason="marker_without_image",
    ),
    "missing image": Case({"image": "none.png", "conversations": ASK}, reason="missing_image"),
}  # fmt: skip
ENTRY = {"root": "", "annotation": "data.jsonl", "data_augment": False, "repeat_time": 1}


def write_meta(folder, rows, **changes):
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "meta.json").write_text(json.dumps({"mine": {**ENTRY, **changes}}))
    return folder / "meta.json"


def test_records_mean_what_internvl_makes_of_them(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    check(tmp_path, CASES, write_meta, is_in_memory=False)


def test_keys_of_the_meta_json_that_nothing_reads_are_named(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    more = {"length": 2, "max_dynamic_patch": 12, "data_augment": True}
    cases = {name: CASES[name] for name in ("text", "one image")}
    unread = tuple(f"{key} of meta.json" for key in more)
    cases["text"] = Case(cases["text"].record, cases["text"].means, unread=unread)

    def write(folder, rows):
        return write_meta(folder, rows, **more)

    found = check(tmp_path, cases, write, is_in_memory=False)
    (named,) = found.values["never_read"].values()
    assert dict(named)["max_dynamic_patch of meta.json"] == [0, "12"]
    told = "max_dynamic_patch of meta.json (of the dataset, e.g. 12)"
    assert told in capfd.readouterr().err


@pytest.mark.parametrize(("repeat", "part"), [(2, 2.0), (0.3, 0.3)])
def test_repeat_time_and_root_are_those_of_the_mixture(tmp_path, repeat, part):
    (tmp_path / "pictures").mkdir()
    place = write_meta(tmp_path, [], repeat_time=repeat, root="pictures")
    (found,) = find_dataset(str(place), None).parts
    assert (found.name, found.repeat) == ("mine", part)
    assert found.data_root == str(tmp_path / "pictures")
