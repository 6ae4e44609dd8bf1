"""Tiny models of transformers for builds of the manuals corpus, with random weights, and how they
train alone.
"""

from itertools import islice, pairwise

import torch
import transformers

from isobatch.engine.train.models._transformers_files import make_config
from isobatch.engine.train.step_source import endless
from isobatch.loaders import StreamingLoader

MICRO_BATCHES = 2


def load(build, **options):
    """The steps of a build, for a single pipeline."""
    return StreamingLoader(
        build,
        dp_rank=0,
        dp_world_size=1,
        micro_batches_per_step=MICRO_BATCHES,
        workers=0,
        **options,
    )


def make_model(name, loader, seed=0):
    torch.manual_seed(seed)
    model = transformers.AutoModelForImageTextToText.from_config(make_config(name, loader)).eval()
    with torch.no_grad():  # the usual small weights would hide a sample that sees another
        for weight in model.parameters():
            weight.copy_(
                torch.randn_like(weight) * (0.2 if weight.ndim > 1 else 0.1) + (weight.ndim == 1)
            )
    return model


def make_optimizer(weights):
    """Adam divides by the size of a gradient: with the usual eps, where it is nothing but rounding
    (a key's bias, to which attention is blind) a weight would go anywhere.
    """
    return torch.optim.AdamW(weights, lr=1e-3, eps=1e-5)


def train_alone(name, loader, steps):
    """Transformers alone, each sample by itself; -> the losses, and the model."""
    model = make_model(name, loader)
    optimizer, losses = make_optimizer(model.parameters()), []
    for batches in islice(endless(loader), steps):
        optimizer.zero_grad(set_to_none=False)
        losses.append(sum(loss_alone(model, batch, loader.model.vision) for batch in batches))
        optimizer.step()
    return losses, model


def loss_alone(model, batch, rule):
    """Forward and backward pass of transformers for each sample; -> the sum of their losses."""
    total = 0.0
    for inputs in samples_of(batch, model.config.image_token_id, rule):
        loss = model(**inputs).loss
        loss.backward()
        total += float(loss.detach())
    return total


def samples_of(batch, image_token_id, rule):
    """The samples of a micro-batch as transformers' users run them: no packing, positions left to
    the model.
    """
    native = batch.image_grid_thw is not None
    rows = batch.image_grid_thw.prod(1) if native else batch.patches_per_image
    tokens = rows // rule.merge_size**2 if native else rows * rule.llm_tokens_per_patch
    images = zip(batch.pixel_values.split(rows.tolist()), tokens.tolist(), strict=True)
    grids = iter(batch.image_grid_thw if native else ())
    for start, end in pairwise(batch.cu_seqlens.tolist()):
        ids = batch.input_ids[start:end][None]
        inputs = {
            "input_ids": ids,
            "labels": batch.labels[start:end][None],
            "num_items_in_batch": batch.num_loss_tokens,
        }
        is_image, own = ids == image_token_id, []
        while sum(count for _, count in own) < is_image.sum():
            own.append(next(images))
        if own:
            inputs["pixel_values"] = torch.cat([pixels for pixels, _ in own])
        if own and native:
            inputs |= {
                "image_grid_thw": torch.stack([next(grids) for _ in own]),
                "mm_token_type_ids": is_image.int(),
            }
        yield inputs
