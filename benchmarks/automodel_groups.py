"""NeMo Automodel's own packing of VLM samples: a peer of `benchmarks/online.py`.

The package is installed where it is wanted; its knapsack, its estimates and torch's sampler run
unmodified. What its dataset leaves out of a pack is computed as there, from exact lengths.
"""

from __future__ import annotations

import importlib
import logging
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from odb_groups import Steps
from order import Data
from torch.utils.data import DistributedSampler

HERE = Path(__file__).parent
MEAN_TILES = 7
"""Of an image, where the data do not say how many images a sample has."""


def open_automodel(folder: Path) -> Any:
    """Automodel's module of VLM packs, installed into a folder if it is not there."""
    if not (folder / "nemo_automodel").exists():
        wanted = ["--no-deps", "--target", str(folder), "-r", str(HERE / "peers-automodel.txt")]
        subprocess.run([sys.executable, "-m", "pip", "install", "-q", *wanted], check=True)
    sys.path.insert(0, str(folder))
    logging.getLogger("nemo_automodel").setLevel(logging.ERROR)
    return importlib.import_module("nemo_automodel.components.datasets.vlm.neat_packing_vlm")


def automodel_steps(
    data: Data, dp: int, packing: Any, *, estimates: bool = False, shuffle: bool = True
) -> tuple[Steps, float]:
    """Micro-steps of an epoch and the time that packing takes.

    `estimates`: lengths as its dataset estimates them without metadata of images: 500 tokens for
    each. Text is counted exactly, which its data may bring (`_text_tokens`); else it is a third
    of the characters. Samples that then do not fit their pack are in no step.
    """
    vision, tokens = data.loads
    begun = time.thread_time()
    if estimates:
        examples = examples_of(data)
        begun = time.thread_time()
        packs = packing.neat_pack_dataset_vlm(None, data.limits.max_seq_len, ds_raw=examples).bins
    else:
        packs = packing.greedy_knapsack_vt_balanced(
            tokens.tolist(), data.limits.max_seq_len, vision.tolist()
        )
    taken_s = time.thread_time() - begun
    packs = [within(pack, tokens, data.limits.max_seq_len) for pack in packs]
    samplers = [DistributedSampler(packs, dp, rank, shuffle=shuffle) for rank in range(dp)]
    order = np.array([list(sampler) for sampler in samplers]).T
    steps: Steps = [[packs[number] for number in step] for step in order]
    for rank in range(len(packs) % dp, dp) if len(packs) % dp else ():
        steps[-1][rank] = []  # a pack that fills up the last step once more
    return steps, taken_s


def examples_of(data: Data) -> list[dict[str, Any]]:
    """Raw samples, as far as its estimates look at them."""
    image = {"type": "image"}
    examples = []
    rows = zip(data.counts.num_image_patches, data.counts.num_text_tokens, strict=True)
    is_mixture = data.name.startswith("mixture")
    for number, (tiles, text) in enumerate(rows):
        several = is_mixture and data.sources[number] == 2
        count = int(np.clip(round(tiles / MEAN_TILES), 2, 5)) if several else int(tiles > 0)
        turns = [{"content": [image] * count}]
        examples.append({"conversation": turns, "_text_tokens": int(text)})
    return examples


def within(pack: list[int], tokens: Any, max_tokens: int) -> list[int]:
    """The samples that fit, in order, as `PackedDatasetWrapper` takes them."""
    kept, total = [], 0
    for sample in pack:
        if total + tokens[sample] <= max_tokens:
            kept.append(sample)
            total += int(tokens[sample])
    return kept
