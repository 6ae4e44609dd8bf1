"""Records in memory with images, and loaders without a build of them."""

import numpy as np
import torch

from isobatch.loaders import BalancedLoader, StreamingLoader
from support.builds.raw_data import record, write_image

IMAGE_PATCH_TOKENS = 4
"""LLM tokens of an image patch of the model `tiny`."""
OPTIONS = {"model": "tiny", "max_tokens": 1024, "max_vision": 24, "window": 40}


def records(folder, count=90, *, images=True):
    """Records with 0 to 3 small images and texts of very different length."""
    rng = np.random.default_rng(3)
    rows = []
    for number in range(count):
        names = []
        for place in range(int(rng.integers(0, 4)) if images and number % 3 else 0):
            names.append(f"images/{number}-{place}.{'png' if place else 'jpg'}")
            write_image(folder / names[-1], *rng.integers(20, 120, 2).tolist(), seed=number)
        rows.append(record(number, names, answer="word " * int(rng.integers(1, 150))))
    return rows


def open_ranks(rows, world, folder, *, state=None, **options):
    """The loaders of all ranks, in this process: each measures all records."""
    ranks = [
        BalancedLoader(
            rows,
            **OPTIONS
            | {"data_root": str(folder), "dp_rank": rank, "dp_world_size": world}
            | options,
        )
        for rank in range(world)
    ]
    for loader in ranks:
        if state is not None:
            loader.load_state_dict(state)
    return ranks


def samples_of(batches, image_token_id):
    """Sample id -> all that a model sees of it, comparable."""
    found = {}
    for batch in batches:
        sizes = batch.cu_seqlens.diff().tolist()
        ids = batch.input_ids.split(sizes)
        rows = [int((each == image_token_id).sum()) // IMAGE_PATCH_TOKENS for each in ids]
        parts = zip(
            *(batch.sample_ids, ids, batch.labels.split(sizes), batch.position_ids.split(sizes)),
            batch.pixel_values.split(rows),
            strict=True,
        )
        for name, *tensors in parts:
            assert name not in found
            found[name] = [each.tolist() for each in tensors]
    return found


def built_samples(build):
    """The samples of a build, as `samples_of`."""
    loader = StreamingLoader(build, workers=0, pixel_dtype=torch.uint8)
    return samples_of((batch for step in loader for batch in step), loader.image_token_id)
