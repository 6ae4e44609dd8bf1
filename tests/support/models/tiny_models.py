"""Tiny LLaVA, InternVL and Qwen2-VL of transformers with random weights, and packed micro-batches
for them.
"""

from pathlib import Path

import accelerate
import torch
import transformers

from isobatch.engine.train.models.model_weights import LazyWeights
from isobatch.loaders.batch.micro_batch import MicroBatch

IMAGE, VOCAB, SIDE = 5, 64, 28
NAMES = ("llava", "internvl", "qwen2_vl")
LLM = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
VISION = {
    "image_size": SIDE,
    "patch_size": 7,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
}
TOKENS_PER_PATCH = {"llava": 16, "internvl": 4}


def make_config(name, *, tied=False, **more):
    text = dict(LLM, tie_word_embeddings=tied)
    if name == "llava":
        vision = dict(VISION, model_type=more.pop("encoder", "clip_vision_model"))
        kind, text = transformers.LlavaConfig, dict(text, model_type="llama")
    elif name == "internvl":
        vision = VISION | {"image_size": [SIDE, SIDE], "patch_size": [7, 7]}
        kind, text = transformers.InternVLConfig, dict(text, model_type="qwen2")
    else:
        vision = {"depth": 3, "num_heads": 2, "patch_size": 14, "embed_dim": 16, "hidden_size": 32}
        kind = transformers.Qwen2VLConfig
        rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10_000.0}
        text |= {"rope_parameters": rope}
        more |= {"video_token_id": 6, "vision_start_token_id": 7, "vision_end_token_id": 8}
    text |= more.pop("text", {})
    return kind(
        vision_config=vision,
        text_config=text,
        image_token_id=IMAGE,
        tie_word_embeddings=tied,
        **more,
    )


def make_model(name, *, seed=0, **more):
    torch.manual_seed(seed)
    model = transformers.AutoModelForImageTextToText.from_config(make_config(name, **more)).eval()
    with torch.no_grad():  # the usual small weights would hide a sample that sees another
        for weight in model.parameters():
            weight.copy_(
                torch.randn_like(weight) * (0.2 if weight.ndim > 1 else 0.1) + (weight.ndim == 1)
            )
    return model


def lazy_model(model, folder=None, seed=0):
    """Another of its sizes on the meta device, and its weights: those of a folder, or random."""
    with accelerate.init_empty_weights():
        empty = transformers.AutoModelForImageTextToText.from_config(
            model.config, dtype=torch.float32
        )
    empty.tie_weights()
    return empty.eval(), LazyWeights(empty, folder and Path(folder), seed)


def make_batch(name, image_counts, *, seed=0, num_loss_tokens=1):
    """A sample per number of images; text before, between and behind them, labels on some of it."""
    generator = torch.Generator().manual_seed(seed)
    samples = [_make_sample(name, count, generator) for count in image_counts]
    ids = [sample[0] for sample in samples]
    rows = [row for sample in samples for row in sample[1]]
    lengths = [len(own) for own in ids]
    joined = torch.cat([torch.empty(0, dtype=torch.long), *ids])
    keeps = (torch.rand(len(joined), generator=generator) < 0.6) & (joined != IMAGE)
    native = name == "qwen2_vl"
    shape = (0, 3 * 2 * 14 * 14) if native else (0, 3, SIDE, SIDE)
    return MicroBatch(
        sample_ids=tuple(f"sample-{place}" for place in range(len(ids))),
        input_ids=joined,
        labels=torch.where(keeps, joined, -100),
        position_ids=torch.cat([torch.empty(0, dtype=torch.long), *map(torch.arange, lengths)]),
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).int(),
        pixel_values=torch.cat([torch.zeros(shape), *(row[0] for row in rows)]),
        patches_per_image=torch.tensor(
            [1 if native else len(row[0]) for row in rows], dtype=torch.long
        ),
        image_sizes=torch.full((len(rows), 2), SIDE),
        image_grid_thw=torch.tensor([row[1] for row in rows], dtype=torch.long).reshape(-1, 3)
        if native
        else None,
        num_loss_tokens=num_loss_tokens,
        num_step_samples=len(ids),
        loss_normalizer=float(num_loss_tokens),
    )


def cut_sample(name, batch, place):
    """One sample of a micro-batch as transformers' users run it: no packing, positions left to the
    model.
    """
    start, end = batch.cu_seqlens[place : place + 2].tolist()
    ids = batch.input_ids[start:end][None]
    inputs = {"input_ids": ids, "labels": batch.labels[start:end][None], "num_items_in_batch": 1}
    rows_per_image = batch.patches_per_image
    tokens_per_image = rows_per_image * TOKENS_PER_PATCH.get(name, 0)
    if name == "qwen2_vl":
        rows_per_image = batch.image_grid_thw.prod(1)
        tokens_per_image = rows_per_image // 4
    before, own = int((batch.input_ids[:start] == IMAGE).sum()), int((ids == IMAGE).sum())
    ends = tokens_per_image.cumsum(0)
    chosen = (ends > before) & (ends <= before + own)
    if bool(chosen.any()):
        pixels = batch.pixel_values.split(rows_per_image.tolist())
        inputs["pixel_values"] = torch.cat(
            [part for part, mine in zip(pixels, chosen.tolist(), strict=True) if mine]
        )
        if name == "qwen2_vl":
            inputs |= {
                "image_grid_thw": batch.image_grid_thw[chosen],
                "mm_token_type_ids": (ids == IMAGE).int(),
            }
    return inputs


def run_alone(name, model, batch, normalizer=1):
    """Losses and gradients of a micro-batch by transformers alone, each sample by itself; -> the
    loss.
    """
    total = 0.0
    for place in range(batch.num_samples):
        # the loss of a sample without a label is 0 of nothing
        loss = model(**cut_sample(name, batch, place)).loss / normalizer
        loss.backward()
        total += float(loss.detach())
    return total


def _make_sample(name, num_images, generator):
    def text():
        return torch.randint(
            10, VOCAB, (int(torch.randint(1, 6, (), generator=generator)),), generator=generator
        )

    parts, images = [text()], []
    for _ in range(num_images):
        first, second = torch.randint(1, 4, (2,), generator=generator).tolist()
        if name == "qwen2_vl":
            pixels, grid, tokens = (
                (4 * first * second, 3 * 2 * 14 * 14),
                (1, 2 * first, 2 * second),
                first * second,
            )
        else:
            pixels, grid, tokens = (first, 3, SIDE, SIDE), None, first * TOKENS_PER_PATCH[name]
        images.append((torch.randn(pixels, generator=generator), grid))
        parts += [torch.tensor([7]), torch.full((tokens,), IMAGE), torch.tensor([8]), text()]
    return torch.cat([*parts, text()]), images
