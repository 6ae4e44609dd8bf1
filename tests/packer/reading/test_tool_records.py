"""Records as other tools document them are learned as those tools learn them.

Each record is packed, and given to `BalancedLoader`. Its ids are those of transformers' own
rendering of the messages that it means, and its labels are on the texts that are listed. From
https://platform.openai.com/docs/guides/supervised-fine-tuning (OpenAI),
https://docs.axolotl.ai/docs/dataset-formats/conversation.html (Axolotl),
https://swift.readthedocs.io/en/latest/Customization/Custom-dataset.html (ms-swift),
https://huggingface.co/docs/trl/dataset_formats (TRL), and dataset cards of the Hub (ChartQA, MMMU,
TextVQA, MathV360K, Cauldron).
"""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoTokenizer

from balance.types import LABEL_IGNORE
from loaders import BalancedLoader, StreamingLoader
from packer.build import Builder
from packer.config import BuildConfig
from packer.demo.dataset import demo_tokenizer_path
from support.builds.packed import quiet
from support.builds.raw_data import options, write_dataset, write_image

IMAGE = "<image>"


def user(text):
    return {"role": "user", "content": text}


def said(text, **more):
    return {"role": "assistant", "content": text, **more}


def system(text):
    return {"role": "system", "content": text}


PHOTO = {"type": "image_url", "image_url": {"url": "b.png", "detail": "low"}}
TEXT = {"type": "text", "text": "What?"}
DETAIL = [{"begin_offset": 0, "end_offset": 4, "train": False}]
TALK = [user("a"), said("b"), user("c"), said("d")]

RECORDS = {
    # name -> (record, the messages that it means, texts with labels)
    "OpenAI: weight": (
        {"messages": [user("hi"), said("yo", weight=0), user("hi2"), said("yo2", weight=1)]},
        [user("hi"), said("yo"), user("hi2"), said("yo2")],
        ["yo2"],
    ),
    "OpenAI: parts": (
        {"messages": [{"role": "user", "content": [TEXT, PHOTO]}, said("That.")]},
        [user(f"What?{IMAGE}"), said("That.")],
        ["That."],
    ),
    "OpenAI: developer": (
        {"messages": [{"role": "developer", "content": "Be brief."}, *TALK]},
        [system("Be brief."), *TALK],
        ["b", "d"],
    ),
    "Axolotl: train": (
        {"conversations": [user("a") | {"train": False}, said("b", train=False), *TALK[2:]]},
        TALK,
        ["d"],
    ),
    "Axolotl: train_detail": (
        {"messages": [user("a"), said("Well, yes.", train_detail=DETAIL)]},
        [user("a"), said("Well, yes.")],
        [" yes."],
    ),
    "ms-swift: query and response": (
        {"query": f"{IMAGE}What?", "response": "A cat.", "images": ["a.png"]},
        [user(f"{IMAGE}What?"), said("A cat.")],
        ["A cat."],
    ),
    "ms-swift: history and system": (
        {"system": "S", "query": "c", "response": "d", "history": [["a", "b"]]},
        [system("S"), *TALK],
        ["b", "d"],
    ),
    "ms-swift: loss": ({"messages": [user("a"), said("b", loss=False), *TALK[2:]]}, TALK, ["d"]),
    "ms-swift: image without a mark": (
        {"query": "What?", "response": "A cat.", "images": ["a.png"]},
        [user(f"{IMAGE}\nWhat?"), said("A cat.")],
        ["A cat."],
    ),
    "TRL: prompt and completion": (
        {"prompt": [user("a")], "completion": [said("b")]},
        TALK[:2],
        ["b"],
    ),
    "TRL: images next to messages": (
        {"messages": [{"role": "user", "content": [{"type": "image"}, TEXT]}, said("b")],
         "images": ["a.png"]},
        [user(f"{IMAGE}What?"), said("b")],
        ["b"],
    ),
    "ChartQA": (
        {"image": "a.png", "query": "How many?", "label": ["14", "15"]},
        [user(f"{IMAGE}\nHow many?"), said("14")],
        ["14"],
    ),
    "TextVQA": (
        {"image": "a.png", "question": "Which?", "answers": ["nokia", "no", "nokia"]},
        [user(f"{IMAGE}\nWhich?"), said("nokia")],
        ["nokia"],
    ),
    "MathV360K": (
        {"image": "a.png", "question": "In which picture <image1>?", "answer": "D"},
        [user(f"In which picture {IMAGE}?"), said("D")],
        ["D"],
    ),
    "MMMU: numbered columns": (
        {"question": "<image 2> or <image 1>?", "answer": "B", "image_1": "a.png",
         "image_2": "b.png"},
        [user(f"{IMAGE} or {IMAGE}?"), said("B")],
        ["B"],
    ),
    "Qwen-VL: Picture 1": (
        {"conversations": [user("Picture 1: <img>b.png</img>\nWhat?"), said("b")]},
        [user(f"Picture 1: {IMAGE}\nWhat?"), said("b")],
        ["b"],
    ),
    "Cauldron": (
        {"texts": [{"user": "a", "assistant": "b", "source": "x"}], "images": ["a.png"]},
        [user(f"{IMAGE}\na"), said("b")],
        ["b"],
    ),
    "ShareGPT: bot": (
        {"conversations": [{"from": "Human", "value": "a"}, {"from": "bot", "value": "b"}]},
        TALK[:2],
        ["b"],
    ),
    "system_prompt": ({"system_prompt": "S", "messages": TALK}, [system("S"), *TALK], ["b", "d"]),
    "loss_mask": ({"messages": TALK, "loss_mask": [0, 1, 0, 0]}, TALK, ["b"]),
}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The samples of both routes: route -> id -> (ids with one token per image, learned ids)."""
    folder = tmp_path_factory.mktemp("tools")
    for name in ("a.png", "b.png"):
        write_image(folder / "raw" / name, 40, 40, ord(name[0]))
    rows = [{"id": name, **record} for name, (record, *_) in RECORDS.items()]
    write_dataset(folder / "raw", rows)
    given = {"max_seq_len": 4096, "max_rejected": 0.0}
    Builder(BuildConfig(**options(folder / "raw", folder / "out", **given)), quiet()).build()
    tokenizer = str(demo_tokenizer_path())
    ranks = {"workers": 0, "dp_rank": 0, "dp_world_size": 1}
    loaders = {
        "packed": StreamingLoader(folder / "out", **ranks),
        "without a build": BalancedLoader(
            rows, model="tiny", tokenizer=tokenizer, data_root=str(folder / "raw"), **ranks
        ),
    }
    found = {name: samples_of(loader) for name, loader in loaders.items()}
    return SimpleNamespace(found=found, tokenizer=AutoTokenizer.from_pretrained(tokenizer))


def samples_of(loader):
    found = {}
    for batch in (batch for step in loader for batch in step):
        cuts = batch.cu_seqlens.diff().tolist()
        pairs = zip(batch.input_ids.split(cuts), batch.labels.split(cuts), strict=True)
        for name, (ids, labels) in zip(batch.sample_ids, pairs, strict=True):
            is_image = ids == loader.image_token_id
            keep = ~is_image | ~torch.roll(is_image, 1)
            found[name] = ids[keep].tolist(), labels[labels != LABEL_IGNORE].tolist()
    loader.close()
    return found


@pytest.mark.parametrize("route", ["packed", "without a build"])
def test_records_are_what_their_tool_means(made, route):
    assert set(made.found[route]) == set(RECORDS)
    for name, (_, messages, learned) in RECORDS.items():
        ids, labels = made.found[route][name]
        text = made.tokenizer.apply_chat_template(messages, tokenize=False)
        without_markup = made.tokenizer.decode(ids)
        for part in text.split(IMAGE):
            assert part in without_markup, (name, part, without_markup)
        if IMAGE not in text:
            assert ids == made.tokenizer(text, add_special_tokens=False)["input_ids"], name
        told = made.tokenizer.decode(labels, skip_special_tokens=True)
        assert [word for word in told.split("\n") if word] == learned, name
