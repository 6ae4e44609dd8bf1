"""Tiny models of many families with random weights, and packed micro-batches for them.

Each family says how transformers' processors give its images to a model, for samples that run
alone, and what the same image is in a `MicroBatch`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import transformers
from torch.nn import functional

from isobatch.loaders.batch.micro_batch import MicroBatch

IMAGE, START, END, BREAK, VOCAB, SIDE = 5, 7, 8, 9, 64, 28
AUDIO, HEAR, HEARD, MEL = 4, 3, 2, 8
QWEN3_FRAMES = (100, 350)
"""A chunk at least: fewer frames alone have no padding, which its convolutions see."""
PINPOINTS = [[28, 28], [28, 56], [56, 28], [56, 56], [28, 84], [84, 84]]
TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
ROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10_000.0}
MROPE_TEXT = {**TEXT, "rope_parameters": ROPE}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SIGLIP = {
    "model_type": "siglip_vision_model",
    "image_size": SIDE,
    "patch_size": 7,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
MERGED = {"depth": 3, "num_heads": 2, "patch_size": 4, "hidden_size": 16, "out_hidden_size": 32}
MERGED |= {"intermediate_size": 24}
DEEP = {**MERGED, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": 6,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}
SPECIAL = {"image_token_id": IMAGE, "pad_token_id": 0}


@dataclass(frozen=True)
class TinyImage:
    """An image of a sample."""

    tokens: list[int]
    """Ids between the text before and after it."""
    rows: torch.Tensor
    """Of `MicroBatch.pixel_values`."""
    size: tuple[int, int] = (SIDE, SIDE)
    grid: tuple[int, int, int] | None = None
    slices: tuple[tuple[int, int, int], ...] = ()
    """Grids of further pictures of the image."""


@dataclass(frozen=True, kw_only=True)
class TinyFamily:
    """A family of models."""

    config: Callable[[], object]
    image: Callable[[torch.Generator, int], TinyImage]
    """An image of a sample with so many of them."""
    given: Callable[[list[TinyImage]], dict[str, object]]
    """Images of a sample as the family's processor gives them."""
    types: str | None = "mm_token_type_ids"
    """Argument that says which tokens are an image's."""
    frames: tuple[int, int] | None = None
    """Of a clip of audio: from, to."""
    scale: float = 0.2
    """Of random weights."""
    empty_row: tuple[int, ...] = field(default=(3, SIDE, SIDE))


def make_family_model(name, seed=0):
    torch.manual_seed(seed)
    family = FAMILIES[name]
    # a copy: configs write their own defaults into it, which are not those of the next family
    MROPE_TEXT["rope_parameters"] = dict(ROPE)
    config = family.config()
    if name.endswith("thinker"):
        kind = {"qwen2": "Qwen2_5Omni", "qwen3": "Qwen3OmniMoe"}[name[:5]]
        kind = getattr(transformers, f"{kind}ThinkerForConditionalGeneration")
        model = kind._from_config(config).eval()
    else:
        model = transformers.AutoModelForImageTextToText.from_config(config).eval()
    with torch.no_grad():  # the usual small weights would hide a sample that sees another
        for weight in model.parameters():
            scale = family.scale if weight.ndim > 1 else 0.1
            weight.copy_(torch.randn_like(weight) * scale + (weight.ndim == 1))
    return model


def make_family_batch(name, image_counts, seed=0, num_loss_tokens=1):
    """A sample per number of images; text before, between and after them, then an answer."""
    family, generator = FAMILIES[name], torch.Generator().manual_seed(seed)
    samples = [_make_sample(family, count, generator) for count in image_counts]
    images = [image for sample in samples for image in sample[2]]
    lengths = [len(sample[0]) for sample in samples]
    is_native = len(family.empty_row) == 1
    clips = [clip for sample in samples for clip in sample[3]]
    frames = torch.tensor([len(clip) for clip in clips], dtype=torch.long)
    return MicroBatch(
        sample_ids=tuple(f"sample-{place}" for place in range(len(samples))),
        input_ids=_joined(sample[0] for sample in samples),
        labels=_joined(sample[1] for sample in samples),
        position_ids=_joined(map(torch.arange, lengths)),
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).int(),
        pixel_values=torch.cat(
            [torch.zeros(0, *family.empty_row), *(each.rows for each in images)]
        ),
        patches_per_image=torch.tensor(
            [1 + len(image.slices) if is_native else len(image.rows) for image in images],
            dtype=torch.long,
        ),
        image_sizes=torch.tensor([image.size for image in images]).long().reshape(-1, 2),
        image_grid_thw=torch.tensor(
            [grid for image in images for grid in (image.grid, *image.slices)]
        )
        .long()
        .reshape(-1, 3)
        if is_native
        else None,
        audio_values=torch.cat([torch.zeros(0, MEL), *clips]) if family.frames else None,
        audio_frames=frames if family.frames else None,
        audio_lengths=160 * frames if family.frames else None,
        extras={
            "pictures": [sample[2] for sample in samples],
            "clips": [sample[3] for sample in samples],
        },
        num_loss_tokens=num_loss_tokens,
        num_step_samples=len(samples),
        loss_normalizer=float(num_loss_tokens),
    )


def run_family_alone(name, model, batch, normalizer=1):
    """Loss of each sample as a user of transformers runs it, with their gradients: the sum."""
    total = 0.0
    for place in range(batch.num_samples):
        loss = model(**given_alone(name, batch, place)).loss / normalizer
        loss.backward()
        total += float(loss.detach())
    return total


def given_alone(name, batch, place):
    """Arguments for one sample of a micro-batch: no packing, positions left to the model."""
    family = FAMILIES[name]
    start, end = batch.cu_seqlens[place : place + 2].tolist()
    ids, labels = batch.input_ids[start:end], batch.labels[start:end]
    inputs = {"input_ids": ids[None], "labels": labels[None], "num_items_in_batch": 1}
    images = batch.extras["pictures"][place]
    if images:
        inputs |= family.given(images)
    clips = batch.extras["clips"][place]
    if clips:
        inputs |= clips_given(clips)
    if name == "paligemma":
        inputs["token_type_ids"] = ((labels != -100).cumsum(0) > 0).int()[None]
    elif family.types and (images or family.types == "token_type_ids"):
        inputs[family.types] = (ids == IMAGE).int()[None]
    elif name.endswith("thinker"):
        inputs["attention_mask"] = torch.ones_like(ids)[None]
    return inputs


def clips_given(clips):
    """Clips of a sample as the family's processor gives them, with some silence at their end."""
    longest = max(map(len, clips)) + 5
    features = torch.full((len(clips), MEL, longest), -0.5)
    for own, clip in zip(features, clips, strict=True):
        own[:, : len(clip)] = clip.T
    frames = torch.tensor(list(map(len, clips)))
    mask = (torch.arange(longest) < frames[:, None]).int()
    return {"input_features": features, "feature_attention_mask": mask}


def _joined(parts):
    return torch.cat([torch.empty(0, dtype=torch.long), *parts])


def _make_sample(family, num_images, generator):
    def text(least=1):
        count = int(torch.randint(least, 6, (), generator=generator))
        return torch.randint(10, VOCAB, (count,), generator=generator)

    parts, images = [text()], [family.image(generator, num_images) for _ in range(num_images)]
    clips = _make_clips(family.frames, generator) if family.frames else []
    media = [[START, *image.tokens, END] for image in images]
    at = 0
    for clip in clips:  # in their order, anywhere among the images
        tokens = [HEAR, *[AUDIO] * audio_tokens(len(clip), family.frames), HEARD]
        at = int(torch.randint(at, len(media) + 1, (), generator=generator))
        media.insert(at, tokens)
        at += 1
    for tokens in media:
        parts += [torch.tensor(tokens), text()]
    prompt, answer = torch.cat(parts), text(2)
    labels = torch.cat([torch.full_like(prompt, -100), answer])
    return torch.cat([prompt, answer]), labels, images, clips


def _make_clips(frames, generator):
    lengths = torch.randint(*frames, (3,), generator=generator).tolist()
    count = int(torch.randint(0, 4, (), generator=generator))
    return [torch.randn(length, MEL, generator=generator) for length in lengths[:count]]


def audio_tokens(frames, drawn_from):
    """Of a clip: Qwen3-Omni's have a chunk at least."""
    if drawn_from == QWEN3_FRAMES:
        return frames // 100 * 13 - (-(frames % 100) // 8)
    return -(-frames // 2) // 2


def _merged_image(generator, _, merge=2, values=3 * 2 * 4 * 4):
    rows, columns = torch.randint(1, 6, (2,), generator=generator).tolist()
    pixels = torch.randn(merge**2 * rows * columns, values, generator=generator)
    return TinyImage([IMAGE] * rows * columns, pixels, grid=(1, merge * rows, merge * columns))


def _merged_given(images):
    grids = torch.tensor([image.grid for image in images])
    return {
        "pixel_values": torch.cat([image.rows for image in images]),
        "image_grid_thw": grids,
    }


def _merged(config, **more):
    return TinyFamily(
        config=config, image=_merged_image, given=_merged_given, empty_row=(3 * 2 * 4 * 4,), **more
    )


def _fixed_image(generator, _, tokens=16):
    return TinyImage([IMAGE] * tokens, torch.randn(1, 3, SIDE, SIDE, generator=generator))


def _patches_given(images):
    return {"pixel_values": torch.cat([image.rows for image in images])}


def _onevision_image(generator, num_images, processor=transformers.LlavaOnevisionProcessor):
    if num_images > 1:
        return TinyImage([IMAGE] * 17, torch.randn(1, 3, SIDE, SIDE, generator=generator))
    height, width = torch.randint(10, 120, (2,), generator=generator).tolist()
    sizes = transformers.models.llava_onevision.modeling_llava_onevision
    patches = sizes.image_size_to_num_patches((height, width), PINPOINTS, SIDE)
    counter = object.__new__(processor)
    counter.vision_aspect_ratio = "anyres_max_2"
    rows, columns = sizes.get_anyres_image_grid_shape((height, width), PINPOINTS, SIDE)
    tokens = 16 + sum(counter._get_unpadded_features(height, width, 4, 4, rows, columns))
    pixels = torch.randn(patches, 3, SIDE, SIDE, generator=generator)
    return TinyImage([IMAGE] * tokens, pixels, size=(height, width))


def _onevision_given(images):
    """Padded to the image with most patches."""
    most = max(len(image.rows) for image in images)
    padded = [
        functional.pad(image.rows, (0, 0) * 3 + (0, most - len(image.rows))) for image in images
    ]
    return {
        "pixel_values": torch.stack(padded),
        "image_sizes": torch.tensor([image.size for image in images]),
        "batch_num_images": torch.tensor([len(images)]),
    }


def _anyres_image(generator, _):
    return _onevision_image(generator, 1, processor=transformers.LlavaNextProcessor)


def _anyres_given(images):
    given = _onevision_given(images)
    del given["batch_num_images"]
    return given


def _split_image(generator, _):
    patches = int(torch.randint(1, 5, (), generator=generator))
    tokens = ([BREAK] + [IMAGE] * 4) * patches
    return TinyImage(tokens, torch.randn(patches, 3, SIDE, SIDE, generator=generator))


def _split_given(images):
    pixels = torch.cat([image.rows for image in images])
    mask = torch.ones(pixels[:, 0].shape, dtype=torch.long)
    return {"pixel_values": pixels[None], "pixel_attention_mask": mask[None]}


def _pixtral_image(generator, _, merge=2):
    rows, columns = torch.randint(1, 5, (2,), generator=generator).tolist()
    pixels = torch.randn(merge**2 * rows * columns, 3 * 4 * 4, generator=generator)
    tokens = ([IMAGE] * columns + [BREAK]) * rows
    return TinyImage(tokens, pixels, grid=(1, merge * rows, merge * columns))


def _pixtral_given(images):
    sizes = torch.tensor([image.grid[1:] for image in images]) * 4
    canvas = torch.zeros(len(images), 3, *sizes.max(0).values.tolist())
    for place, image in enumerate(images):
        for number, row in enumerate(image.rows):
            y, x = divmod(number, image.grid[2])
            canvas[place, :, 4 * y : 4 * y + 4, 4 * x : 4 * x + 4] = row.reshape(3, 4, 4)
    return {"pixel_values": canvas, "image_sizes": sizes}


def _budget_image(generator, _):
    rows, columns = torch.randint(1, 4, (2,), generator=generator).tolist()
    pixels = torch.rand(9 * rows * columns, 3 * 4 * 4, generator=generator)
    return TinyImage([IMAGE] * rows * columns, pixels, grid=(1, 3 * rows, 3 * columns))


def _budget_given(images):
    pixels = torch.zeros(len(images), 9 * 12, 3 * 4 * 4)
    places = torch.full((len(images), 9 * 12, 2), -1)
    for number, image in enumerate(images):
        for token, row in enumerate(image.rows):
            pixels[number, token] = row.reshape(3, 16).T.flatten()
            places[number, token] = torch.tensor([token % image.grid[2], token // image.grid[2]])
    return {"pixel_values": pixels, "image_position_ids": places}


def _sliced_image(generator, _):
    grids = [(1, 4 * rows, 4 * columns) for rows, columns in _drawn_sizes(generator)]
    pixels = torch.randn(sum(rows * columns for _, rows, columns in grids), 48, generator=generator)
    counts = [rows * columns // 16 for _, rows, columns in grids]
    tokens = [each for count in counts for each in [BREAK, *[IMAGE] * count]]
    return TinyImage(tokens, pixels, grid=grids[0], slices=tuple(grids[1:]))


def _drawn_sizes(generator):
    number = int(torch.randint(1, 4, (), generator=generator))
    return torch.randint(1, 4, (number, 2), generator=generator).tolist()


def _sliced_given(images):
    """Patches next to each other: (1, 3, side, ViT tokens * side)."""
    grids = [grid for image in images for grid in (image.grid, *image.slices)]
    rows = [row.reshape(3, 4, 4) for image in images for row in image.rows]
    return {
        "pixel_values": torch.cat(rows, dim=2)[None],
        "target_sizes": torch.tensor([grid[1:] for grid in grids], dtype=torch.int32),
    }


def _omni_config(kind, text, vision, audio):
    more = {key: TOKENS[key] for key in ("image_token_id", "video_token_id")}
    made = getattr(transformers, kind)(text_config=text, vision_config=vision, audio_config=audio)
    for key, value in more.items():
        setattr(made, key, value)
    made.audio_token_id, made.audio_start_token_id, made.audio_end_token_id = AUDIO, HEAR, HEARD
    made.vision_start_token_id, made.vision_end_token_id = START, END
    return made


EARS = {"d_model": 16, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 16}
EARS |= {"output_dim": 32, "num_mel_bins": MEL}
LINEAR = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
}
GEMMA_TEXT = {**TEXT, "sliding_window": 6, "query_pre_attn_scalar": 8}
GEMMA_TEXT |= {"layer_types": ["sliding_attention", "full_attention"]}

FAMILIES = {
    "qwen2_5_vl": _merged(
        lambda: transformers.Qwen2_5_VLConfig(
            vision_config={**MERGED, "window_size": 16, "fullatt_block_indexes": [1]},
            text_config=MROPE_TEXT,
            **TOKENS,
        )
    ),
    "qwen3_vl": _merged(
        lambda: transformers.Qwen3VLConfig(vision_config=DEEP, text_config=MROPE_TEXT, **TOKENS)
    ),
    "qwen3_vl_moe": _merged(
        lambda: transformers.Qwen3VLMoeConfig(
            vision_config=DEEP, text_config={**MROPE_TEXT, **EXPERTS}, **TOKENS
        )
    ),
    "qwen3_5": _merged(
        lambda: transformers.Qwen3_5Config(
            vision_config={**MERGED, "num_position_embeddings": 16},
            text_config={**MROPE_TEXT, **LINEAR},
            **TOKENS,
        )
    ),
    "qwen3_5_moe": _merged(
        lambda: transformers.Qwen3_5MoeConfig(
            vision_config={**MERGED, "num_position_embeddings": 16},
            text_config={**MROPE_TEXT, **LINEAR, **EXPERTS, "shared_expert_intermediate_size": 16},
            **TOKENS,
        )
    ),
    "minicpmv4_6": TinyFamily(
        config=lambda: transformers.MiniCPMV4_6Config(
            vision_config={
                **{key: SIGLIP[key] for key in SIGLIP if key != "model_type"},
                "patch_size": 4,
            },
            text_config={"model_type": "qwen3_5_text", **MROPE_TEXT, **LINEAR},
            insert_layer_id=0,
            image_token_id=IMAGE,
            video_token_id=6,
        ),
        image=_sliced_image,
        given=_sliced_given,
        types=None,
        empty_row=(48,),
        scale=0.1,  # at .2 rounding is up to 1.9e-5 of the gradient (5e-9 in float64)
    ),
    "glm4v": _merged(
        lambda: transformers.Glm4vConfig(
            vision_config={**MERGED, "image_size": 16},
            text_config={key: MROPE_TEXT[key] for key in MROPE_TEXT if key != "head_dim"},
            image_start_token_id=START,
            image_end_token_id=END,
            **{key: TOKENS[key] for key in ("image_token_id", "video_token_id")},
        )
    ),
    "qwen2_5_omni_thinker": _merged(
        lambda: _omni_config(
            "Qwen2_5OmniThinkerConfig",
            MROPE_TEXT,
            {**MERGED, "window_size": 16, "fullatt_block_indexes": [1]},
            {**EARS, "n_window": 3},
        ),
        types=None,
        frames=(3, 40),
    ),
    "qwen3_omni_moe_thinker": _merged(
        lambda: _omni_config(
            "Qwen3OmniMoeThinkerConfig",
            {**MROPE_TEXT, **EXPERTS},
            DEEP,
            {**EARS, "downsample_hidden_size": 4, "n_window_infer": 200},
        ),
        types=None,
        frames=QWEN3_FRAMES,
    ),
    "llava_next": TinyFamily(
        config=lambda: transformers.LlavaNextConfig(
            vision_config={**SIGLIP, "model_type": "clip_vision_model"},
            text_config={"model_type": "mistral", **TEXT},
            image_grid_pinpoints=PINPOINTS,
            image_token_index=IMAGE,
        ),
        image=_anyres_image,
        given=_anyres_given,
        types=None,
    ),
    "llava_onevision": TinyFamily(
        config=lambda: transformers.LlavaOnevisionConfig(
            vision_config=SIGLIP,
            text_config={"model_type": "qwen2", **TEXT},
            image_grid_pinpoints=PINPOINTS,
            image_token_index=IMAGE,
            video_token_index=6,
            vision_aspect_ratio="anyres_max_2",
        ),
        image=_onevision_image,
        given=_onevision_given,
        types=None,
    ),
    "idefics3": TinyFamily(
        config=lambda: transformers.Idefics3Config(
            vision_config={**SIGLIP, "model_type": "idefics3_vision"},
            text_config={"model_type": "llama", **TEXT},
            scale_factor=2,
            **SPECIAL,
        ),
        image=_split_image,
        given=_split_given,
        types=None,
    ),
    "smolvlm": TinyFamily(
        config=lambda: transformers.SmolVLMConfig(
            vision_config={**SIGLIP, "model_type": "smolvlm_vision"},
            text_config={"model_type": "llama", **TEXT},
            scale_factor=2,
            **SPECIAL,
        ),
        image=_split_image,
        given=_split_given,
        types=None,
    ),
    "mistral3": TinyFamily(
        config=lambda: transformers.Mistral3Config(
            vision_config={**SIGLIP, "model_type": "pixtral", "patch_size": 4, "head_dim": 8},
            text_config={"model_type": "mistral", **TEXT},
            image_token_index=IMAGE,
            spatial_merge_size=2,
        ),
        image=_pixtral_image,
        given=_pixtral_given,
        types=None,
        empty_row=(48,),
    ),
    "pixtral": TinyFamily(
        config=lambda: transformers.LlavaConfig(
            vision_config={**SIGLIP, "model_type": "pixtral", "patch_size": 4, "head_dim": 8},
            text_config={"model_type": "mistral", **TEXT},
            image_token_index=IMAGE,
            vision_feature_select_strategy="full",
            vision_feature_layer=-1,
        ),
        image=lambda generator, _: _pixtral_image(generator, _, merge=1),
        given=_pixtral_given,
        types=None,
        empty_row=(48,),
    ),
    "gemma3": TinyFamily(
        config=lambda: transformers.Gemma3Config(
            vision_config=SIGLIP,
            text_config=GEMMA_TEXT,
            mm_tokens_per_image=4,
            image_token_id=IMAGE,
        ),
        image=lambda generator, _: _fixed_image(generator, _, tokens=4),
        given=_patches_given,
        types="token_type_ids",
    ),
    "gemma4": TinyFamily(
        config=lambda: transformers.Gemma4Config(
            vision_config={
                **{key: SIGLIP[key] for key in ("hidden_size", "intermediate_size")},
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "head_dim": 8,
                "patch_size": 4,
                "position_embedding_size": 64,
            },
            text_config={
                **GEMMA_TEXT,
                "use_bidirectional_attention": "vision",
                "hidden_size_per_layer_input": 8,
                "vocab_size_per_layer_input": VOCAB,
                "global_head_dim": 8,
            },
            audio_config=None,
            image_token_id=IMAGE,
            video_token_id=6,
            audio_token_id=4,
        ),
        image=_budget_image,
        given=_budget_given,
        empty_row=(48,),
        scale=0.3,  # at .2 rounding is up to 1.3e-5 of the gradient (8e-8 in float64)
    ),
    "paligemma": TinyFamily(
        config=lambda: transformers.PaliGemmaConfig(
            vision_config=SIGLIP,
            text_config={"model_type": "gemma2", **GEMMA_TEXT, "sliding_window": 256},
            image_token_id=IMAGE,
            projection_dim=32,
        ),
        image=_fixed_image,
        given=_patches_given,
    ),
}
