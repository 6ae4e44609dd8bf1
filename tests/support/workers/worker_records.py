"""Datasets and functions that worker processes import."""

import os
import signal
import time
from dataclasses import replace

import numpy as np
import torch
from PIL import Image

from isobatch.common.errors import ConfigError
from isobatch.loaders import BalancedLoader, Encoded
from support.builds.raw_data import record

ARRAYS = {"max_tokens": 300, "max_vision": 30, "window": 40}


class Pictures(torch.utils.data.Dataset):
    """Records with pictures as PIL gives them, one of which cannot be read."""

    broken = 11

    def __init__(self, count=60):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, number):
        if number == self.broken:
            raise OSError(f"no record {number} today")
        rng = np.random.default_rng(number)
        sizes = rng.integers(20, 120, (number % 3, 2)).tolist()
        pictures = [Image.fromarray(rng.integers(0, 255, (*s, 3), np.uint8)) for s in sizes]
        row = record(number, [], answer="word " * int(rng.integers(1, 120)))
        row["conversations"][0]["value"] = "<image>" * len(pictures) + "what?"
        return row | {"images": pictures}


class Numbers(torch.utils.data.Dataset):
    """What `encode` takes; `slow_s` are spent on each."""

    def __init__(self, count=60, slow_s=0.0):
        self.count, self.slow_s = count, slow_s

    def __len__(self):
        return self.count

    def __getitem__(self, number):
        time.sleep(self.slow_s)
        return {"id": f"s{number}", "number": number}


class Stream(torch.utils.data.IterableDataset):
    """The same, in order."""

    def __iter__(self):
        return map(Numbers().__getitem__, range(63))


class Killed(Numbers):
    """Ends its worker in the middle."""

    def __getitem__(self, number):
        if number == self.count // 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(number)


class Nested(Numbers):
    """Makes a loader with processes in a process that may have none."""

    def __getitem__(self, number):
        try:
            BalancedLoader(Numbers(), encode=encode, processes=1, **ARRAYS)
        except ConfigError as error:
            return str(error)
        return "made"


def encode(row):
    """A sample with arrays, of a row's number."""
    ids = np.arange(5 + row["number"] * 7 % 90) + 3
    pixels = np.full((row["number"] % 4 + 1, 2_000), row["number"], np.float32)
    return Encoded(ids, media={"pixel_values": pixels})


def darken(image, generator):
    """Of an image, by a random amount."""
    return image // generator.integers(1, 4, dtype=np.uint8)


def add_noise(batch, generators):
    """Ids that depend on the samples' generators."""
    extras = {"noise": torch.tensor([rng.random() for rng in generators])}
    return replace(batch, extras={**batch.extras, **extras})
