"""CPU time of an image: counting a size that is new, and making its pixels, by model.

    python benchmarks/processor_cost.py MODEL [MODEL ...]

A MODEL is a preset, or a folder; those without a rule of their own go through their processor. The
same random sizes for all, one thread, without decoding; ours with the default resize.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
from PIL import Image
from tables import console, new_table

from isobatch.loaders.decode import pixels
from isobatch.models.folder.find_model import find_model
from isobatch.models.hf_processor import open_processor
from isobatch.models.image_rules import ProcessorRule, VisionRule
from isobatch.models.image_tokens import plan_image

SIZES, IMAGES = 60, 20


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", metavar="MODEL")
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    sizes = [(int(w), int(h)) for w, h in rng.integers(200, 1600, (SIZES, 2))]
    images = [rng.integers(0, 255, (h, w, 3), dtype=np.uint8) for w, h in sizes[:IMAGES]]
    table = new_table("", ["model", "rule", "new size, ms", "pixels, ms"])
    for name in parser.parse_args().models:
        model = find_model(name)
        rule, kind = model.vision, type(model.vision).__name__.removesuffix("Rule").lower()
        make = _processed(rule) if isinstance(rule, ProcessorRule) else _cut(rule)
        plan_image(rule, 640, 480)
        make(images[0])
        begun = time.process_time()
        for size in sizes:
            plan_image(rule, *size)
        counted = time.process_time()
        for image in images:
            make(image)
        ended = time.process_time()
        table.add_row(
            model.name,
            kind,
            f"{(counted - begun) / SIZES * 1e3:.3f}",
            f"{(ended - counted) / IMAGES * 1e3:.1f}",
        )
    console.print(table)


def _processed(rule: ProcessorRule) -> Callable[[pixels.Pixels], object]:
    processor = open_processor(rule.description)
    return lambda image: processor.pixels([Image.fromarray(image)], None)


def _cut(rule: VisionRule) -> Callable[[pixels.Pixels], object]:
    def make(image: pixels.Pixels) -> torch.Tensor:
        plan = plan_image(rule, image.shape[1], image.shape[0])
        patches = pixels.empty_patches(rule, pixels.num_rows(rule, plan))
        pixels.write_patches(pixels.patch_memory(rule, patches), rule, image, plan)
        return pixels.normalize(rule, patches)

    return make


if __name__ == "__main__":
    main()
