"""Energon's samples are learned as their types say.

https://nvidia.github.io/Megatron-Energon/basic/data_prep.html (folders, `field_map`),
https://nvidia.github.io/Megatron-Energon/api/modules_data.html (types of samples) and
https://nvidia.github.io/Megatron-Energon/advanced/crude_datasets.html (crude ones, by suffixes).
Energon gives fields, not texts: a question and an answer become two turns, a caption a document.
"""

import json

import pytest
import yaml

from support.builds.layouts import write_tar
from support.frameworks.tool_records import IMAGE, Case, check, said, user

ASKED = [user(f"{IMAGE}\nWhat?"), said("cat")]
VQA = {"image": "png", "context": "json[q]", "answers": "json[a]"}
CHOICE = {"image": "png", "context": "json[q]", "choices": "json[c]"}
CHOICE |= {"correct_choice_idx": "json[n]"}
PNG = b"the image"
"""Stands for the content of an image."""


def member(**value):
    return json.dumps(value).encode()


FOLDERS = {
    # name -> (sample type or None, field map, samples by the suffixes of their members)
    "vqa": ("VQASample", VQA, {
        "first": Case({"png": PNG, "json": member(q="What?", a=["cat", "dog"])}, ASKED),
        "one": Case({"png": PNG, "json": member(q="What?", a="cat")}, ASKED),
        "none": Case({"png": PNG, "json": member(q="What?", a=[])}, reason="no_answer"),
        "lost": Case({"png": PNG, "json": member(q="What?")}, reason="broken_member"),
    }),
    "vqa of texts": ("VQASample", {"image": "png", "context": "q.txt", "answers": "a.json"}, {
        "texts": Case({"png": PNG, "q.txt": b"What?", "a.json": b'["cat"]'}, ASKED),
    }),
    "vqa with weights": ("VQASample", {**VQA, "answer_weights": "json[w]"}, {
        "weights": Case(
            {"png": PNG, "json": member(q="What?", a=["cat", "dog"], w=[1.0, 0.3])},
            ASKED,
            unread=("answer_weights",),
        ),
    }),
    "captioning": ("CaptioningSample", {"image": "png", "caption": "txt,json[alt]"}, {
        "text": Case({"png": PNG, "txt": b"A cat."}, document=f"{IMAGE}A cat."),
        "alternative": Case({"png": PNG, "json": member(alt="A dog.")},
                            document=f"{IMAGE}A dog."),
        "another member": Case(
            {"png": PNG, "txt": b"A cat.", "npy": b"1234"},
            document=f"{IMAGE}A cat.",
            unread=(".npy",),
        ),
    }),
    "ocr": ("OCRSample", {"image": "png", "text": "txt", "words_boxes": "json[boxes]"}, {
        "words": Case(
            {"png": PNG, "txt": b"STOP", "json": member(boxes=[[1, 2, 3, 4]])},
            document=f"{IMAGE}STOP",
            unread=("words_boxes",),
        ),
    }),
    "text": ("TextSample", {"text": "json[x][0]"}, {
        "text": Case({"json": member(x=["Dogs bark."])}, document="Dogs bark."),
    }),
    "multiple choice": ("MultiChoiceVQASample", CHOICE, {
        "second": Case(
            {"png": PNG, "json": member(q="What?", c=["dog", "cat"], n=1)},
            ASKED,
            unread=("choices",),
        ),
        "none of them": Case(
            {"png": PNG, "json": member(q="What?", c=["dog"], n=3)}, reason="broken_member"
        ),
    }),
    "interleaved texts": ("InterleavedSample", {"sequence": "json[s]"}, {
        "texts": Case({"json": member(s=["Dogs", "bark."])}, document="Dogs\n\nbark."),
        "no texts": Case({"json": member(s=[1, 2])}, reason="broken_member"),
    }),
    "crude": (None, {}, {
        "captions": Case({"png": PNG, "txt": b"A cat."}, document=f"{IMAGE}A cat."),
        "context and answers": Case(
            {"png": PNG, "context.txt": b"What?", "answers.json": b'["cat", "dog"]'}, ASKED
        ),
        "a conversation": Case(
            {"png": PNG, "json": member(messages=[user(f"{IMAGE}\nWhat?"), said("cat")])}, ASKED
        ),
    }),
}  # fmt: skip


def write_folder(name, **about):
    sample_type, fields, _ = FOLDERS[name]

    def write(raw, rows):
        folder, image = raw / "set", (raw / "a.png").read_bytes()
        members = [
            (f"{row['id']}.{end}", image if data is PNG else data)
            for row in rows
            for end, data in row.items()
            if end != "id"
        ]
        folder.mkdir()
        write_tar(folder / "s0.tar", members)
        meta = folder / ".nv-meta"
        meta.mkdir()
        (meta / ".info.json").write_text(json.dumps({"shard_counts": {"s0.tar": len(rows)}}))
        parts = {"train": ["s0.tar"], "val": [], "test": []}
        (meta / "split.yaml").write_text(yaml.safe_dump({"split_parts": parts}))
        if sample_type is not None:
            described = {"sample_type": {"__class__": sample_type}, "field_map": fields, **about}
            (meta / "dataset.yaml").write_text(yaml.safe_dump(described))
        return folder

    return write


@pytest.mark.parametrize("name", FOLDERS)
def test_samples_mean_what_their_type_says(tmp_path, monkeypatch, name):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    check(tmp_path, FOLDERS[name][2], write_folder(name), is_in_memory=False)


def test_keys_of_dataset_yaml_that_nothing_reads_are_named(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    case = FOLDERS["text"][2]["text"]
    named = ("subflavors of dataset.yaml", "auto_decode of dataset.yaml")
    about = {"subflavors": {"kind": "web"}, "auto_decode": False}
    cases = {"text": Case(case.record, document=case.document, unread=named)}
    found = check(tmp_path, cases, write_folder("text", **about), is_in_memory=False)
    (keys,) = found.values["never_read"].values()
    assert dict(keys)[named[0]] == [0, '{"kind": "web"}']
