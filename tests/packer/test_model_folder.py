"""`packer build --model FOLDER` needs nothing but data and output, and packs what transformers
would feed the model.

`ISOBATCH_TEST_DRAWS=500` asks for 500 samples of each family.
"""

import json
import os
import random
import subprocess
import sys

import pytest
from PIL import Image

from isobatch.common.errors import ConfigError
from isobatch.common.types import LABEL_IGNORE
from isobatch.packer.build import Builder
from isobatch.packer.config import BuildConfig
from isobatch.shards.manifest import read_manifest
from support.builds.packed import quiet, read_samples
from support.builds.raw_data import record, write_dataset, write_image
from support.cases import for_each
from support.cases import record as keep
from support.models.saved_folders import FAMILIES, save_folder

DRAWS = int(os.environ.get("ISOBATCH_TEST_DRAWS", "8"))
WORDS = ("see", "what's", "\n", "\n\n", " ", "Zürich", "表", "12.5", "<row", "x" * 30, "a\tb", ":")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """Conversations of one to three answers, with 0 to 4 images anywhere in the questions."""
    folder, drawn = tmp_path_factory.mktemp("raw"), random.Random(3)
    rows = []
    for number in range(DRAWS):
        images = [f"images/{number}-{k}.jpg" for k in range((number % 8) % 5)]
        for k, image in enumerate(images):
            width, height = (int(10 ** drawn.uniform(1.5, 2.9)) for _ in range(2))
            write_image(folder / image, width, height, seed=10 * number + k)
        rows.append({**record(number, images), "conversations": conversation(drawn, len(images))})
    return write_dataset(folder, rows)


def conversation(drawn, num_images):
    questions = [[] for _ in range(drawn.randint(1, 3))]
    for _ in range(num_images):
        drawn.choice(questions).append("<image>")
    turns = []
    for question in questions:
        for _ in range(drawn.randint(1, 6)):
            question.insert(drawn.randint(0, len(question)), drawn.choice(WORDS))
        answer = "".join(drawn.choices(WORDS, k=drawn.randint(1, 9)))
        turns += [{"from": "human", "value": "".join(question)}, {"from": "gpt", "value": answer}]
    return turns


def build(dataset, out, model, **more):
    options = {"dataset": str(dataset), "out": str(out), "model": str(model), "workers": 1}
    return Builder(BuildConfig(**options, max_seq_len=100_000, **more), quiet()).build()


@for_each("name", [name for name in FAMILIES if name != "paligemma"])
def test_a_folder_is_enough_and_ids_and_labels_are_those_of_transformers(tmp_path, dataset, name):
    folder, out = tmp_path / name / "model", tmp_path / name / "out"
    processor = save_folder(name, folder)
    if name.startswith("llava"):  # four of LLaVA-NeXT's images are more than 4,096 tokens
        path = folder / "config.json"
        values = json.loads(path.read_text())
        values["text_config"]["max_position_embeddings"] = 32768
        path.write_text(json.dumps(values))
    totals = build(dataset, out, folder).totals
    assert totals["num_packed"] == DRAWS
    raw = {row["id"]: row for row in json.loads((dataset / "annotations.json").read_text())}
    for sample in read_samples(out):
        row = raw[sample["sample_id"]]
        paths = row.get("image", [])
        paths = [paths] if isinstance(paths, str) else paths
        images = [Image.open(dataset / path).convert("RGB") for path in paths]
        messages = [
            {
                "role": {"human": "user", "gpt": "assistant"}[turn["from"]],
                "content": turn["value"].replace("<image>", FAMILIES[name].markup),
            }
            for turn in row["conversations"]
        ]
        text = processor.apply_chat_template(messages)
        expected = processor(images=[images] if images else None, text=[text]).input_ids[0]
        assert sample["input_ids"] == list(expected), text
        learned = [label for label in sample["labels"] if label != LABEL_IGNORE]
        assert learned == answers_of(processor, messages, text), text
        pairs = zip(sample["input_ids"], sample["labels"], strict=True)
        assert all(label in (LABEL_IGNORE, token) for token, label in pairs)
    keep("samples", name, DRAWS)
    keep("rule", name, read_manifest(out).values["model"]["vision"]["rule"])


def answers_of(processor, messages, text):
    """Ids of all tokens that have a character of an answer."""
    spans = []
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            before = processor.apply_chat_template(messages[:number], add_generation_prompt=True)
            spans.append((len(before), len(before) + len(message["content"])))
    encoded = processor.tokenizer(text, return_offsets_mapping=True, add_special_tokens=False)
    pairs = zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
    return [
        token
        for token, (first, last) in pairs
        if any(first < end and last > start for start, end in spans)
    ]


def test_the_command_takes_a_folder_and_one_line_says_what_a_wrong_one_lacks(tmp_path, dataset):
    save_folder("llava", tmp_path / "model")
    command = [sys.executable, "-m", "packer", "build", "--dataset", str(dataset), "--json"]
    command += ["--model", str(tmp_path / "model"), "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["totals"]["num_packed"] == DRAWS
    model = read_manifest(tmp_path / "out").values["model"]
    assert model["name"] == "llava"
    assert str(tmp_path) not in json.dumps(model)
    path = tmp_path / "model" / "processor_config.json"
    values = json.loads(path.read_text())
    values["image_processor"]["crop_pct"] = 0.9
    path.write_text(json.dumps(values))
    failed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert failed.returncode == 2
    assert "unknown key crop_pct" in failed.stderr
    assert "Traceback" not in failed.stderr


def test_a_preset_still_needs_a_tokenizer(dataset, tmp_path):
    with pytest.raises(ConfigError, match="--tokenizer is missing: name the tokenizer to train"):
        build(dataset, tmp_path / "out", "llava_1_5")
