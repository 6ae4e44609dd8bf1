"""Files of a cache: what is in them, and how much room they take."""

import contextlib
import os
from pathlib import Path

import numpy as np

from isobatch.loaders.read.cache import BLOCK_BYTES


def on_disk(root):
    """Bytes of all files in the folders of a cache, in whole blocks."""
    total = 0
    for folder, _, names in os.walk(root):
        for name in names if Path(folder) != Path(root) else ():
            with contextlib.suppress(FileNotFoundError):
                total += (
                    -(-os.stat(os.path.join(folder, name)).st_size // BLOCK_BYTES) * BLOCK_BYTES
                )
    return total


def content(name, size):
    return np.random.default_rng(int(name)).bytes(size)
