"""Families without a rule of their own: packed, loaded and run as their processor has them."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import pickle
import random
import sys

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from isobatch.common.errors import ConfigError, DataError
from isobatch.loaders import StreamingLoader
from isobatch.loaders.batch.collate import collate
from isobatch.loaders.batch.model_inputs.inputs import model_inputs
from isobatch.loaders.config import LoaderConfig
from isobatch.loaders.steps.step_plan import StepTotals
from isobatch.models import hf_processor
from isobatch.models.folder.find_model import READERS, find_model
from isobatch.models.hf_processor import open_processor
from isobatch.models.image_tokens import plan_image
from isobatch.models.presets import model_from_dict, model_to_dict
from isobatch.packer.build import Builder
from isobatch.packer.config import BuildConfig
from isobatch.packer.demo.dataset import demo_tokenizer_path
from isobatch.shards.stored_group import StoredGroup
from support import ROOT
from support.builds.packed import quiet, read_samples
from support.builds.raw_data import record, write_dataset, write_image
from support.cases import record as keep
from support.models import saved_folders
from support.models.processor_folders import PROCESSOR_FAMILIES, TINY, save_processor_folder

pytestmark = pytest.mark.skipif(
    not hasattr(transformers.AyaVisionProcessor, "replace_image_token"),
    reason="transformers 5.0's processors do not say what an image becomes",
)
torch.set_num_threads(1)

DEMO = demo_tokenizer_path()

DRAWS = int(os.environ.get("ISOBATCH_TEST_DRAWS", "4"))
NAMES = ("aya_vision", "aria", "granite_docling", "lighton_ocr", "gemma3n")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder, sizes = tmp_path_factory.mktemp("raw"), random.Random(3)
    rows = []
    for number in range(DRAWS):
        images = [f"images/{number}-{k}.jpg" for k in range(number % 4)]
        for k, image in enumerate(images):
            width, height = (int(10 ** sizes.uniform(1.5, 3)) for _ in range(2))
            write_image(folder / image, width, height, seed=10 * number + k)
        rows.append(record(number, images))
    return write_dataset(folder, rows)


def build(dataset, out, model):
    options = {"dataset": str(dataset), "out": str(out), "model": str(model), "workers": 1}
    return Builder(BuildConfig(**options, max_seq_len=50_000), quiet()).build()


def raw_of(dataset):
    """Sample id -> images and messages."""
    raw = {}
    for row in json.loads((dataset / "annotations.json").read_text()):
        paths = row.get("image", [])
        paths = [paths] if isinstance(paths, str) else paths
        images = [Image.open(dataset / path).convert("RGB") for path in paths]
        raw[row["id"]] = images, row["conversations"]
    return raw


def text_of(name, processor, conversations):
    markup = PROCESSOR_FAMILIES[name].markup
    roles = {"human": "user", "gpt": "assistant"}
    messages = []
    for turn in conversations:
        first, *rest = turn["value"].split("<image>")
        content = [{"type": "text", "text": first}] if first else []
        for piece in rest:
            content += [{"type": "image"}, {"type": "text", "text": piece}]
        messages.append({"role": roles[turn["from"]], "content": content})
    text = processor.apply_chat_template(messages, tokenize=False)
    assert markup in text or not any("<image>" in turn["value"] for turn in conversations)
    return text


def test_ids_labels_and_pixels_are_those_of_the_processors(tmp_path, dataset):
    raw = raw_of(dataset)
    for name in NAMES:
        folder, out = tmp_path / name, tmp_path / f"{name} packed"
        processor = save_processor_folder(name, folder)
        assert build(dataset, out, folder).totals["num_packed"] == DRAWS
        expected = {}
        for sample, (images, conversations) in raw.items():
            text = text_of(name, processor, conversations)
            expected[sample] = processor(images=images or None, text=[text]).input_ids[0]
        for sample in read_samples(out):
            assert sample["input_ids"] == list(expected[sample["sample_id"]]), name
        loader = StreamingLoader(out, dp_rank=0, dp_world_size=1, shuffle=False, workers=0)
        seen = 0
        for step in loader:
            for batch in step:
                images = [image for sample in batch.sample_ids for image in raw[sample][0]]
                seen += batch.num_samples
                assert_pixels(processor, batch, images, name)
        assert seen == DRAWS
        keep("processor_samples", name, DRAWS)


def assert_pixels(processor, batch, images, name):
    """What the processor gives for all images of a micro-batch."""
    if not images:
        tokens = batch.blank_tokens
        assert tokens > 0
        return
    text = processor.image_token * len(images)
    given = processor(images=images, text=[text], return_tensors="pt")
    assert set(batch.processed) < set(given), name
    for key, value in batch.processed.items():
        assert torch.equal(value, given[key]), (name, key)


# --- packed as alone ---


def tiny_sample(processor, drawn, count):
    """Ids, images, and what the processor gives of a sample with so many images."""
    images = []
    for _ in range(count):
        height, width = drawn.integers(14, 90, 2).tolist()
        pixels = drawn.integers(0, 256, (height, width, 3), dtype=np.uint8)
        images.append(Image.fromarray(pixels))
    words = [" ".join(map(str, drawn.integers(0, 99, 3))) for _ in range(count + 1)]
    text = "".join(word + processor.image_token for word in words[:-1]) + words[-1]
    given = processor(images=images or None, text=[text], return_tensors="pt")
    return given, images


def packed(model, samples, **options):
    """The samples as the loader collates their group; all text has labels."""
    lengths = [len(given["input_ids"][0]) for given, _ in samples]
    ids = np.concatenate([np.zeros(0, np.int32), *(g["input_ids"][0].numpy() for g, _ in samples)])
    images = [(image, place) for place, (_, own) in enumerate(samples) for image in own]
    files = []
    for image, _ in images:
        buffer = io.BytesIO()
        image.save(buffer, "PNG")
        files.append(buffer.getvalue())
    token = open_processor(model.vision.description).token_id
    raw = StoredGroup(
        where="here",
        sample_ids=tuple(map(str, range(len(samples)))),
        input_ids=ids.astype(np.int32),
        labels=np.where(ids == token, -100, ids).astype(np.int32),
        cu_seqlens=np.cumsum([0, *lengths], dtype=np.int32),
        images=files,
        image_sizes=np.array([i.size[::-1] for i, _ in images], np.int32).reshape(-1, 2),
        image_samples=np.array([place for _, place in images], np.int32),
    )
    totals = StepTotals(num_loss_tokens=1, num_samples=len(samples), loss_normalizer=1.0)
    return collate(raw, model, LoaderConfig(**options), totals)


def loaded_without_torchvision(monkeypatch, folder, processor):
    """Give the processor itself where transformers needs torchvision, for videos, to load it."""
    monkeypatch.undo()
    if hasattr(processor, "video_processor"):
        config = transformers.AutoConfig.from_pretrained(folder)
        monkeypatch.setattr(hf_processor, "_load", lambda _: (config, processor))


def tiny_model(folder):
    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(folder)
    model = transformers.AutoModelForImageTextToText.from_config(config).eval()
    with torch.no_grad():  # the usual small weights would hide a sample that sees another
        for weight in model.parameters():
            scale = 0.2 if weight.ndim > 1 else 0.1
            weight.copy_(torch.randn_like(weight) * scale + (weight.ndim == 1))
    return model


def gradients_of(model):
    return {key: own.grad.clone() for key, own in model.named_parameters() if own.grad is not None}


def test_packs_have_the_loss_and_gradients_of_their_samples_alone(tmp_path, monkeypatch):
    for name, family in TINY.items():
        folder = tmp_path / name
        processor = save_processor_folder(name, folder, family)
        model = tiny_model(folder)
        loaded_without_torchvision(monkeypatch, folder, processor)
        preset, drawn = find_model(str(folder)), np.random.default_rng(len(name))
        for draw in range(-(-DRAWS // 3)):
            counts = [(), (1, 0, 2), (0,), (3, 1)][draw % 4]
            samples = [tiny_sample(processor, drawn, count) for count in counts]
            batch = packed(preset, samples)
            model.zero_grad()
            expected = 0.0
            for given, _ in samples:
                ids = given["input_ids"]
                labels = torch.where(ids == model.config.image_token_id, -100, ids)
                kept = {key: value for key, value in given.items() if key != "token_type_ids"}
                loss = model(**kept, labels=labels, num_items_in_batch=1).loss
                loss.backward()
                expected += loss.item()
            wanted = gradients_of(model)
            model.zero_grad()
            loss = model(**model_inputs(batch, model.config)).loss
            loss.backward()
            assert loss.item() == pytest.approx(expected, rel=1e-5), name
            found = gradients_of(model)
            if wanted:
                norm = torch.cat([each.flatten() for each in wanted.values()]).norm()
                off = max(float((found[key] - each).norm() / norm) for key, each in wanted.items())
                assert off <= 1e-5, f"{name}: gradients off by {off:.1e}"
        keep("processor_packs", name, -(-DRAWS // 3))


# --- counts, and what is refused ---


def test_counts_of_random_sizes_are_those_of_a_real_image(tmp_path, monkeypatch):
    for name in PROCESSOR_FAMILIES:
        processor = save_processor_folder(name, tmp_path / name)
        loaded_without_torchvision(monkeypatch, tmp_path / name, processor)
        if name in REFUSED:
            with pytest.raises(ConfigError, match=rf"^model [^\n]* {REFUSED[name]}[^\n]*$"):
                find_model(str(tmp_path / name))
            keep("refused", name, REFUSED[name])
            continue
        model = find_model(str(tmp_path / name))
        assert model_from_dict(json.loads(json.dumps(model_to_dict(model)))) == model
        assert model.vision_unit == "vit_tokens"
        drawn = np.random.default_rng(len(name))
        for draw in range(-(-DRAWS // 3)):
            height, width = (10 ** drawn.uniform(1.3, 2.7 + draw % 2 / 2, 2)).astype(int).tolist()
            pixels = drawn.integers(0, 256, (height, width, 3), dtype=np.uint8)
            text = [PROCESSOR_FAMILIES[name].markup.replace("<image>", processor.image_token)]
            given = processor(images=[Image.fromarray(pixels)], text=text, return_tensors="np")
            ids = given["input_ids"][0]
            plan = plan_image(model.vision, width, height)
            token = open_processor(model.vision.description).token_id
            assert plan.num_image_tokens == (ids == token).sum(), (name, width, height)
        keep("processor_sizes", name, -(-DRAWS // 3))


REFUSED = {
    "cohere_compass": "CohereCompassProcessor cannot be used for packing",
    "florence2": "an encoder and a decoder have two sequences",
    "qianfan_ocr": "QianfanOCRProcessor cannot be used for packing",
}


def test_what_a_processor_cannot_do_is_one_line(tmp_path, dataset, monkeypatch):
    folder = tmp_path / "aya"
    save_processor_folder("aya_vision", folder)
    path = folder / "config.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps(values | {"image_token_id": 3, "image_token_index": 3}))
    with pytest.raises(ConfigError, match=r"give ids \[3, \d+\] for the image token"):
        find_model(str(folder))
    path.write_text(json.dumps(values | {"model_type": "nobodys"}))
    with pytest.raises(ConfigError, match=r"nobodys has no rule of its own, and transformers"):
        find_model(str(folder))
    path.write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=r"--tokenizer gives <\|IMG_PATCH\|> the id \d+, "):
        Builder(BuildConfig(dataset=str(dataset), out="x", model=str(folder), tokenizer=str(DEMO)))
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "transformers", None)
        with pytest.raises(ConfigError, match=r"pip install transformers accelerate"):
            find_model(str(folder))
    (folder / "processor_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="its processor cannot be loaded") as error:
        find_model(str(folder))
    assert "\n" not in str(error.value)


def test_images_that_another_version_counts_otherwise_are_refused(tmp_path):
    processor = save_processor_folder("aya_vision", tmp_path, TINY["aya_vision"])
    model = find_model(str(tmp_path))
    given, images = tiny_sample(processor, np.random.default_rng(0), 1)
    token = open_processor(model.vision.description).token_id
    ids = given["input_ids"][0]
    fewer = torch.cat([ids[ids != token], ids[ids == token][1:]])[None]
    with pytest.raises(DataError, match=r"AyaVisionProcessor makes \d+ image tokens of images"):
        packed(model, [({"input_ids": fewer}, images)])
    for options, message in (
        ({"images": "resized"}, "use 'patches' or 'encoded'"),
        ({"pixel_dtype": torch.uint8}, "which gives no raw pixels"),
        ({"reduced_decode": True}, "must see all"),
    ):
        with pytest.raises(ConfigError, match=message):
            packed(model, [(given, images)], **options)
    batch = packed(model, [(given, images)])
    config = transformers.AutoConfig.for_model("qwen2_vl")
    with pytest.raises(ConfigError, match="does not know how it keeps packed samples apart"):
        model_inputs(batch, config)


def test_a_micro_batch_moves_with_what_was_processed(tmp_path):
    processor = save_processor_folder("aya_vision", tmp_path, TINY["aya_vision"])
    model = find_model(str(tmp_path))
    batch = packed(model, [tiny_sample(processor, np.random.default_rng(0), 2)])
    again = pickle.loads(pickle.dumps(batch.to("cpu")))
    assert torch.equal(again.processed["pixel_values"], batch.processed["pixel_values"])
    assert batch.to("meta").processed["pixel_values"].device.type == "meta"
    half = packed(
        model, [tiny_sample(processor, np.random.default_rng(0), 2)], pixel_dtype=torch.bfloat16
    )
    assert half.processed["pixel_values"].dtype == torch.bfloat16
    encoded = packed(model, [tiny_sample(processor, np.random.default_rng(0), 2)], images="encoded")
    assert len(encoded.images) == 2
    assert encoded.processed is None


def test_the_page_of_families_is_current_and_names_all_that_are_tested():
    spec = importlib.util.spec_from_file_location("families", ROOT / "scripts/list_families.py")
    listing = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(listing)
    assert listing.PAGE.read_text("utf-8") == listing.make_page(), "run scripts/list_families.py"
    found = listing.results()
    assert set(found["rule"]) == set(READERS) == set(found["sizes"]) | set(found["samples"])
    assert set(READERS) == set(saved_folders.FAMILIES)
    assert set(found["processor_sizes"]) | set(found["refused"]) == set(PROCESSOR_FAMILIES)
    assert found["refused"] == REFUSED
    assert set(found["processor_packs"]) == set(TINY)
    assert set(found["processor_samples"]) == set(NAMES)
    assert set(found["layers"]) < set(found["ranks"]) < set(found["packs"])
