"""A small build of the manuals corpus: real samples with text alone, one image, and several
images.
"""

import io
import json
import math
from functools import cache

from PIL import Image
from rich.console import Console

from isobatch.packer.build import Builder
from isobatch.packer.config import BuildConfig
from isobatch.packer.progress import StageProgress
from support.corpora import BYTE_LEVEL, MANUALS, TOKENIZERS

PRESETS = {
    "llava": "llava_1_5",
    "internvl": "internvl_1_5_max4",
    "qwen2_vl": "qwen2_vl",
    "qwen2_5_vl": "qwen2_5_vl",
}

SAMPLES = {0: 6, 1: 6, 2: 2, 3: 1}
"""Samples of the corpus by their number of images."""
MOST_CHARACTERS, MOST_PIXELS = 1000, 250_000
"""Of the samples taken, so that the tests are quick: text of a sample, pixels of an image."""
NUM_TOKENS = 4096
"""Of the tokenizer's: with all of its 151,643, the tiny models would spend their time with
logits.
"""
MAX_SEQ_LEN = {"llava": 2048, "internvl": 2048, "qwen2_vl": 1280, "qwen2_5_vl": 1280}
"""Short enough that there are several groups."""


def build_manuals(folder, name):
    """Pack some samples of the corpus for a model; -> where the build is."""
    chosen = folder / "annotations.json"
    chosen.write_text(json.dumps(choose_samples()))
    config = BuildConfig(
        dataset=str(chosen),
        data_root=str(MANUALS),
        model=PRESETS[name],
        tokenizer=str(cut_tokenizer(folder / "tokenizer")),
        max_seq_len=MAX_SEQ_LEN[name],
        out=str(folder / "build"),
        workers=1,
    )
    Builder(config, StageProgress(Console(file=io.StringIO()))).build()
    return folder / "build"


def choose_samples():
    """The first ones that are small enough, of other images than those before; single images are
    of different sizes.
    """
    left, seen, chosen = dict(SAMPLES), set(), []
    for sample in json.loads((MANUALS / "annotations.json").read_text()):
        images = image_names(sample)
        if not left.get(len(images)) or not is_small(sample, images):
            continue
        new = {*images, *(map(size_of, images) if len(images) == 1 else ())}
        if seen.isdisjoint(new):
            left[len(images)] -= 1
            seen |= new
            chosen.append(sample)
    assert not any(left.values())
    return chosen


def image_names(sample):
    names = sample.get("image", [])
    return [names] if isinstance(names, str) else names


def is_small(sample, images):
    if sum(len(turn["value"]) for turn in sample["conversations"]) > MOST_CHARACTERS:
        return False
    return all(math.prod(size_of(name)) <= MOST_PIXELS for name in images)


@cache
def size_of(name):
    with Image.open(MANUALS / name) as image:
        return image.size


def cut_tokenizer(folder):
    """The shared tokenizer with its first tokens only, and its control tokens after them."""
    folder.mkdir()
    whole, config = (
        json.loads((TOKENIZERS / BYTE_LEVEL / f"{name}.json").read_text())
        for name in ("tokenizer", "tokenizer_config")
    )
    model, first = whole["model"], len(whole["model"]["vocab"])
    model["vocab"] = {token: place for token, place in model["vocab"].items() if place < NUM_TOKENS}
    model["merges"] = [pair for pair in model["merges"] if joined(pair) in model["vocab"]]
    for token in whole["added_tokens"]:
        token["id"] += NUM_TOKENS - first
    config["added_tokens_decoder"] = {
        str(int(place) + NUM_TOKENS - first): token
        for place, token in config["added_tokens_decoder"].items()
    }
    for name, content in (("tokenizer", whole), ("tokenizer_config", config)):
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def joined(pair):
    """What a merge makes; written as two strings, or as one with a space."""
    return "".join(pair.split() if isinstance(pair, str) else pair)
