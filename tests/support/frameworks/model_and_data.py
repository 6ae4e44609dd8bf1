"""A tiny LLaVA and a dataset with images, in the files that other training frameworks ask for."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import transformers
from datasets import Dataset, Image, List

from support.builds.raw_data import record, write_image
from support.loading.online_data import records
from support.models.saved_folders import FAMILIES, Family, save_family

SIDE, PATCH = 56, 14
LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32}
FFN = {"intermediate_size": 64}
MAX_TOKENS = 200
"""Of `write_records`: two ranks of two micro-batches have some with images next to some of text
alone, and empty ones in the last step.
"""


def write_model(folder: Path) -> None:
    """Random weights, configuration, processor and tokenizer, as `from_pretrained` reads them.

    LLaVA: its processor has no part for videos, for which all versions need torchvision.
    """
    family = tiny_llava()
    tokenizer = save_family("llava", family, folder).tokenizer
    config = transformers.AutoConfig.from_pretrained(folder)
    config.image_token_id = tokenizer.convert_tokens_to_ids("<image>")
    config.text_config.vocab_size = len(tokenizer)
    torch.manual_seed(0)
    transformers.LlavaForConditionalGeneration(config).save_pretrained(folder)


def tiny_llava() -> Family:
    vision = {"model_type": "clip_vision_model", "image_size": SIDE, "patch_size": PATCH}
    text = {"model_type": "qwen2", "num_key_value_heads": 2, "max_position_embeddings": 2048}
    sizes = {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}}
    config = {
        "vision_config": vision | LAYERS | FFN,
        "text_config": text | LAYERS | FFN,
        "image_seq_length": (SIDE // PATCH) ** 2,
        "tie_word_embeddings": False,
    }
    return replace(FAMILIES["llava"], config=config, image_settings=sizes)


def write_dataset(path: Path, count: int) -> list[str]:
    """Conversations with 0 to 3 images each, which are inside of the Parquet file; -> their ids."""
    rows = records(path.parent, count)
    for row in rows:
        names = row.pop("image", [])
        names = [names] if isinstance(names, str) else names
        row["images"] = [{"bytes": (path.parent / name).read_bytes()} for name in names]
    Dataset.from_list(rows).cast_column("images", List(Image())).to_parquet(str(path))
    return [row["id"] for row in rows]


def write_records(folder: Path) -> None:
    """`folder`/model, and records.json, of which every fifth has an image next to it."""
    write_model(folder / "model")
    rng, rows = np.random.default_rng(3), []
    for number in range(44):
        names = [] if number % 5 else [str(folder / f"{number}.png")]
        for name in names:
            write_image(Path(name), 60, 50, seed=number)
        rows.append(record(number, names, answer="word " * int(rng.integers(1, 40))))
    (folder / "records.json").write_text(json.dumps(rows))
