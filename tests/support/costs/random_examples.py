"""Examples as data-parallel ranks draw them: images, clips or text alone, heavy-tailed."""

import numpy as np

from isobatch.common.types import Counts


def random_counts(rng, count):
    """A third each of images (576 to 4,096 tokens at native size), clips of 1 to 30 s, and text."""
    kind = rng.integers(0, 3, count)
    images = np.where(kind == 0, rng.integers(1, 4, count), 0)
    vit = np.where(kind == 0, np.clip(rng.lognormal(6.8, 0.6, count), 64, 4096).astype(np.int64), 0)
    audio = np.where(
        kind == 1, np.clip(rng.lognormal(5.3, 0.8, count), 25, 750).astype(np.int64), 0
    )
    text = np.clip(rng.lognormal(5, 1.2, count), 3, 8000).astype(np.int64)
    return Counts(
        num_image_patches=images,
        num_vit_tokens=vit,
        num_image_tokens=vit // 4,
        num_text_tokens=text,
        num_audio_tokens=audio,
        num_loss_tokens=text,
    )


def uneven_offsets(rng, count, num_ranks):
    """`count` examples cut into ranks at random places; some ranks may have none."""
    return np.concatenate([[0], np.sort(rng.integers(0, count + 1, num_ranks - 1)), [count]])
