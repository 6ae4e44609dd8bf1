"""Images and text for a tiny Qwen2.5-VL, packed, for VeOmni's loaders and trainers."""

import copy
import json
from pathlib import Path

import torch
import transformers
from PIL import Image

from isobatch.shards.manifest import read_manifest
from support.builds.packed import build
from support.models.saved_videos import save_video_folder

VISION = {
    **{"depth": 2, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2},
    **{"out_hidden_size": 32, "fullatt_block_indexes": [1]},
}
TEXT = {
    **{"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "num_key_value_heads": 2},
    **{"layer_types": ["full_attention"] * 2, "max_window_layers": 2},
    "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4},
}


def write_records(folder: Path, count: int) -> list[dict]:
    """Every third record has no image; -> the records, whose images are files of `folder`."""
    folder.mkdir(parents=True)
    records = []
    for number in range(count):
        sizes = [] if number % 3 == 2 else [(56 + 28 * (number % 4), 84)] * (1 + number % 2)
        names = [f"{number}-{place}.png" for place in range(len(sizes))]
        for place, (name, size) in enumerate(zip(names, sizes, strict=True)):
            Image.new("RGB", size, (7 * number, 90 * place, 30)).save(folder / name)
        text = "<image>" * len(names) + f" what is {number}?"
        turns = [("human", text), ("gpt", "it is " + "so " * (number % 5) + str(number))]
        turns = [{"from": role, "value": value} for role, value in turns]
        records.append({"id": f"s{number}", "conversations": turns, "image": names})
    (folder / "annotations.json").write_text(json.dumps(records))
    return records


def write_packed(folder: Path, count: int):
    """`folder`/packed and `folder`/model, with random weights; -> (records, config)."""
    records = write_records(folder / "raw", count)
    saved = save_video_folder("qwen2_5_vl", folder / "saved", {})
    build(folder / "raw", folder / "packed", model=saved, tokenizer=saved, max_seq_len=160)
    Path(saved).rename(folder / "model")
    config = transformers.AutoConfig.from_pretrained(folder / "model")
    manifest = read_manifest(folder / "packed")
    for part, sizes in ((config.vision_config, VISION), (config.text_config, TEXT)):
        for name, value in copy.deepcopy(sizes).items():
            setattr(part, name, value)
    config.tie_word_embeddings = False
    config.text_config.vocab_size = manifest.vocab_size
    config.image_token_id, config.video_token_id = manifest.image_token_id, manifest.video_token_id
    config.text_config.initializer_range = 0.2  # weights by which samples matter to each other
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config)
    # VeOmni does not know the names of older checkpoints, and draws what it does not find
    model.save_pretrained(folder / "model", save_original_format=False)
    return records, model.config
