"""Packed micro-batches with images cut in each of the three ways, drawn at random; without
transformers.
"""

import torch

from isobatch.loaders.batch.micro_batch import MicroBatch

IMAGE, VOCAB, SIDE = 5, 64, 28
TOKENS_PER_PATCH = {"llava": 16, "internvl": 4}
MERGED = 4
"""Rows of `pixel_values` for one image token, at native resolution."""


def make_batch(name, image_counts, *, seed=0):
    """A sample for each number of images: text around them, labels on half of it."""
    generator = torch.Generator().manual_seed(seed)
    images, samples = [], []
    for count in image_counts:
        own = [_draw_image(name, generator) for _ in range(count)]
        parts = [
            _text(generator),
            *(
                part
                for tokens, *_ in own
                for part in (torch.full((tokens,), IMAGE), _text(generator))
            ),
        ]
        images += own
        samples.append(torch.cat(parts))
    ids = torch.cat([torch.empty(0, dtype=torch.long), *samples])
    is_native = name == "qwen2_vl"
    grids = [[1, 2 * rows, 2 * columns] for _, _, rows, columns in images]
    shape = (0, 3 * 2 * 14 * 14) if is_native else (0, 3, SIDE, SIDE)
    return MicroBatch(
        sample_ids=tuple(f"sample-{place}" for place in range(len(samples))),
        input_ids=ids,
        labels=torch.where(
            (torch.rand(len(ids), generator=generator) < 0.5) & (ids != IMAGE), ids, -100
        ),
        position_ids=torch.cat(
            [torch.empty(0, dtype=torch.long), *(torch.arange(len(own)) for own in samples)]
        ),
        cu_seqlens=torch.tensor([0, *map(len, samples)]).cumsum(0).int(),
        pixel_values=torch.cat(
            [
                torch.zeros(shape),
                *(torch.randn(rows, *shape[1:], generator=generator) for _, rows, *_ in images),
            ]
        ),
        patches_per_image=torch.tensor(
            [1 if is_native else rows for _, rows, *_ in images], dtype=torch.long
        ),
        image_sizes=torch.randint(30, 90, (len(images), 2), generator=generator),
        image_grid_thw=torch.tensor(grids, dtype=torch.long).reshape(-1, 3) if is_native else None,
        num_loss_tokens=1,
        num_step_samples=len(samples),
        loss_normalizer=1.0,
    )


def _text(generator):
    return torch.randint(
        10, VOCAB, (int(torch.randint(1, 7, (), generator=generator)),), generator=generator
    )


def _draw_image(name, generator):
    """(image tokens, rows of `pixel_values`, rows and columns of its squares after merging)."""
    first, second = torch.randint(1, 4, (2,), generator=generator).tolist()
    if name == "qwen2_vl":
        return first * second, MERGED * first * second, first, second
    return first * TOKENS_PER_PATCH[name], first, 0, 0
