"""Packed inputs of transformers' models: every sample gets the logits and the loss that it gets
alone.
"""

import dataclasses
import inspect
import io
import os
import random
from itertools import pairwise

import numpy as np
import pytest
import torch
from PIL import Image

from isobatch.common.errors import ConfigError
from isobatch.loaders import shift_labels
from isobatch.loaders.batch.collate import collate
from isobatch.loaders.batch.model_inputs.inputs import (
    BLANK_SAMPLE_ID,
    BORDERS_FOR_ENCODERS,
    model_inputs,
)
from isobatch.loaders.config import LoaderConfig
from isobatch.loaders.steps.step_plan import StepTotals
from isobatch.models.image_rules import AnyresRule, FixedRule, NativeRule, TilesRule
from isobatch.models.image_tokens import plan_image
from isobatch.models.presets import load_model
from isobatch.shards.stored_group import StoredGroup

transformers = pytest.importorskip("transformers")
from support.cases import record  # noqa: E402

torch.set_num_threads(1)

DRAWS = int(os.environ.get("ISOBATCH_TEST_DRAWS", "1"))

IMAGE_TOKEN, VOCAB = 5, 64
COLOURS = {"mean": (0.5, 0.5, 0.5), "std": (0.3, 0.3, 0.3)}
SIDE = 28
PINPOINTS = ((28, 56), (56, 28), (56, 56))
NATIVE = NativeRule(
    vit_patch_size=14,
    merge_size=2,
    temporal_patch_size=2,
    min_pixels=784,
    max_pixels=28 * 28 * 12,
    max_aspect_ratio=200.0,
    **COLOURS,
)
RULES = {
    "llava": FixedRule(
        image_size=SIDE, vit_tokens_per_patch=17, llm_tokens_per_patch=16, **COLOURS
    ),
    "llava_next": AnyresRule(
        image_size=SIDE,
        vit_patch_size=7,
        vit_tokens_per_patch=17,
        grid_pinpoints=PINPOINTS,
        **COLOURS,
    ),
    "internvl": TilesRule(
        image_size=SIDE, vit_tokens_per_patch=17, llm_tokens_per_patch=4, max_patches=4, **COLOURS
    ),
    "qwen2_vl": NATIVE,
    "qwen2_5_vl": NATIVE,
}
MODELS = tuple(RULES)
LLM = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
CLIP = {
    "model_type": "clip_vision_model",
    "image_size": SIDE,
    "patch_size": 7,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
}
MROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10_000.0}


def make_config(name):
    if name.startswith("llava"):
        more = (
            {"image_grid_pinpoints": [list(size) for size in PINPOINTS]}
            if name == "llava_next"
            else {}
        )
        kind = transformers.LlavaNextConfig if more else transformers.LlavaConfig
        return kind(
            vision_config=dict(CLIP),
            text_config={"model_type": "llama", **LLM},
            image_token_id=IMAGE_TOKEN,
            **more,
        )
    if name == "internvl":
        vision = {key: value for key, value in CLIP.items() if key != "model_type"}
        vision |= {"image_size": [SIDE, SIDE], "patch_size": [7, 7]}
        text = {"model_type": "qwen2", **LLM}
        return transformers.InternVLConfig(
            vision_config=vision, text_config=text, image_token_id=IMAGE_TOKEN
        )
    text = {**LLM, "rope_parameters": MROPE}
    tokens = {
        "image_token_id": IMAGE_TOKEN,
        "video_token_id": 6,
        "vision_start_token_id": 7,
        "vision_end_token_id": 8,
    }
    shape = {"depth": 2, "num_heads": 2, "patch_size": 14}
    if name == "qwen2_vl":
        vision = {**shape, "embed_dim": 16, "hidden_size": 32}
        return transformers.Qwen2VLConfig(vision_config=vision, text_config=text, **tokens)
    vision = {
        **shape,
        "hidden_size": 16,
        "intermediate_size": 24,
        "out_hidden_size": 32,
        "window_size": 56,
    }
    vision |= {"fullatt_block_indexes": [1]}
    return transformers.Qwen2_5_VLConfig(vision_config=vision, text_config=text, **tokens)


@pytest.fixture(scope="module", params=MODELS)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def model(name):
    torch.manual_seed(0)
    built = transformers.AutoModelForImageTextToText.from_config(make_config(name)).eval()
    with torch.no_grad():  # the usual small weights would hide a sample that sees another
        for weight in built.parameters():
            weight.copy_(
                torch.randn_like(weight) * (0.3 if weight.ndim > 1 else 0.1) + (weight.ndim == 1)
            )
    return built


def make_samples(name, image_counts, seed=0):
    """(ids, labels, [(file, (width, height))]) of each sample; text before, between and behind its
    images.
    """
    rng = np.random.default_rng(seed)
    return [_make_sample(RULES[name], count, rng) for count in image_counts]


def _make_sample(rule, num_images, rng):
    def text():
        return rng.integers(10, VOCAB, size=rng.integers(1, 6)).tolist()

    ids, images = text(), []
    for size in rng.integers(14, 90, size=(num_images, 2)).tolist():
        buffer = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, size=(size[1], size[0], 3), dtype=np.uint8)).save(
            buffer, "PNG"
        )
        images.append((buffer.getvalue(), tuple(size)))
        ids += [7, *[IMAGE_TOKEN] * plan_image(rule, *size).num_image_tokens, 8, *text()]
    answer = text() + text()
    # the first token too may have a label; nothing predicts it
    labels = [ids[0]] + [-100] * (len(ids) - 1) + answer
    return ids + answer, labels, images


def pack(name, samples, num_loss_tokens=1, pixel_dtype=torch.float32):
    images = [(*image, place) for place, sample in enumerate(samples) for image in sample[2]]
    raw = StoredGroup(
        where="here",
        sample_ids=tuple(f"sample-{place}" for place in range(len(samples))),
        input_ids=np.array([i for sample in samples for i in sample[0]], dtype=np.int32),
        labels=np.array([i for sample in samples for i in sample[1]], dtype=np.int32),
        cu_seqlens=np.cumsum([0, *(len(sample[0]) for sample in samples)], dtype=np.int32),
        images=[image[0] for image in images],
        image_sizes=np.array([image[1][::-1] for image in images], dtype=np.int32).reshape(-1, 2),
        image_samples=np.array([image[2] for image in images], dtype=np.int32),
    )
    totals = StepTotals(
        num_loss_tokens=num_loss_tokens,
        num_samples=len(samples),
        loss_normalizer=float(num_loss_tokens),
    )
    model = dataclasses.replace(load_model("tiny"), vision=RULES[name])
    return collate(raw, model, LoaderConfig(pixel_dtype=pixel_dtype), totals)


def run_alone(name, model, sample):
    """Logits of a sample as a user of transformers would run it: no packing, positions left to the
    model.
    """
    batch = pack(name, [sample])
    inputs = {"input_ids": batch.input_ids[None]}
    if sample[2]:
        inputs["pixel_values"] = batch.pixel_values
        if name == "llava_next":
            inputs["image_sizes"] = batch.image_sizes
        if name.startswith("qwen"):
            inputs["image_grid_thw"] = batch.image_grid_thw
            inputs["mm_token_type_ids"] = (batch.input_ids == IMAGE_TOKEN).int()[None]
    return model(**inputs).logits[0]


@pytest.mark.parametrize("image_counts", [(1, 0, 3, 2, 0, 1), (2,), (0, 0, 0), (0,)])
def test_packed_logits_equal_those_of_each_sample_alone(name, model, image_counts):
    samples = make_samples(name, image_counts)
    with torch.no_grad():
        batch = pack(name, samples)
        packed = model(**model_inputs(batch, model.config)).logits[0]
        for sample, begin, end in zip(
            samples, batch.cu_seqlens, batch.cu_seqlens[1:], strict=False
        ):
            torch.testing.assert_close(
                packed[begin:end], run_alone(name, model, sample), rtol=0, atol=1e-5
            )


def test_loss_and_gradients_equal_those_of_single_samples_over_the_steps_tokens(name, model):
    drawn = random.Random(name)
    for draw in range(DRAWS):
        counts = drawn.choices(range(4), k=drawn.randint(1, 4)) if draw else (2, 0, 1)
        assert_loss_and_gradients_of_single_samples(
            name, model, make_samples(name, counts, draw + 1)
        )
    record("packs", name, DRAWS)


def assert_loss_and_gradients_of_single_samples(name, model, samples):
    num_loss_tokens = 100  # of the whole step: other ranks have the rest
    model.zero_grad()
    loss = model(**model_inputs(pack(name, samples, num_loss_tokens), model.config)).loss
    loss.backward()
    gradients = {
        key: weight.grad.clone()
        for key, weight in model.named_parameters()
        if weight.grad is not None
    }
    model.zero_grad()
    losses = []
    for sample in samples:
        logits, targets = run_alone(name, model, sample)[:-1], torch.tensor(sample[1][1:])
        losses.append(
            torch.nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
        )
    expected = torch.stack(losses).sum() / num_loss_tokens
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for key, weight in model.named_parameters():
        if weight.grad is not None:
            torch.testing.assert_close(gradients[key], weight.grad, rtol=1e-3, atol=1e-5)


def test_weighted_losses_are_the_callers_own(name, model):
    batch = pack(name, make_samples(name, (0, 0), seed=1))
    weighted = dataclasses.replace(batch, loss_weights=torch.rand(len(batch.labels)))
    with pytest.raises(ConfigError, match="with_labels=False"):
        model_inputs(weighted, model.config)
    inputs = model_inputs(weighted, model.config, with_labels=False)
    with torch.no_grad():
        logits = model(**inputs).logits[0, : len(batch.labels)]  # the blank image comes after
        whole = model(**model_inputs(batch, model.config)).loss
    targets = shift_labels(batch.labels, batch.cu_seqlens)
    losses = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    assert batch.reduce_loss(losses).item() == pytest.approx(whole.item(), rel=1e-5)
    expected = (losses * weighted.loss_weights).sum()
    assert weighted.reduce_loss(losses).item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("image_counts", [(), (0, 0)])
def test_a_micro_batch_without_images_has_a_gradient_for_every_parameter_that_an_image_would_reach(
    name, model, image_counts
):
    model.zero_grad()
    model(**model_inputs(pack(name, make_samples(name, (1, 1))), model.config)).loss.backward()
    reached = {key for key, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    loss = model(**model_inputs(pack(name, make_samples(name, image_counts)), model.config)).loss
    loss.backward()
    vision = {
        key: weight.grad for key, weight in model.named_parameters() if weight.grad is not None
    }
    assert set(vision) == reached
    assert (loss.item() == 0) == (not image_counts)
    assert all(
        grad.count_nonzero() == 0
        for key, grad in vision.items()
        if "visual" in key or "vision" in key
    )


def test_without_always_encode_nothing_is_added(name, model):
    samples = make_samples(name, (0, 0))
    inputs = model_inputs(pack(name, samples), model.config, always_encode=False)
    assert "pixel_values" not in inputs
    assert inputs["input_ids"].shape == (1, sum(len(sample[0]) for sample in samples))
    with torch.no_grad():
        assert model(**inputs).loss > 0
    with pytest.raises(ValueError, match="empty micro-batch"):
        model_inputs(pack(name, []), model.config, always_encode=False)


def test_flash_attention_gets_the_borders_of_the_samples(name, model, monkeypatch):
    """A stand-in for flash attention, which needs a GPU: it attends inside the borders that it is
    given, or finds in positions, as transformers does.
    """
    seen = []

    def varlen(
        module, query, key, value, attention_mask, cu_seq_lens_q=None, max_length_q=None, **kwargs
    ):
        length = query.shape[2]
        if cu_seq_lens_q is not None:
            borders = cu_seq_lens_q.tolist()
        elif (positions := kwargs.get("position_ids")) is not None:
            borders = [*(positions[0] == 0).nonzero().flatten().tolist(), length]
        else:
            borders = [0, length]
        seen.append((borders, max_length_q))
        groups = query.shape[1] // key.shape[1]
        key, value = (part.repeat_interleave(groups, dim=1) for part in (key, value))
        parts = [
            torch.nn.functional.scaled_dot_product_attention(
                *(part[:, :, begin:end] for part in (query, key, value)),
                is_causal=kwargs.get("is_causal", getattr(module, "is_causal", False)),
            )
            for begin, end in pairwise(borders)
        ]
        return torch.cat(parts, dim=2).transpose(1, 2), None

    transformers.AttentionInterface.register("flash_stand_in", varlen)
    samples = make_samples(name, (1, 0, 2), seed=2)
    batch = pack(name, samples)
    with torch.no_grad():
        expected = model(**model_inputs(batch, model.config)).logits
        # not by set_attn_implementation, which would look for the real kernels
        parts = (model.config, model.config.get_text_config(), model.config.vision_config)
        for config in parts:
            monkeypatch.setattr(config, "_attn_implementation_internal", "flash_stand_in")
        inputs = model_inputs(batch, model.config)
        logits = model(**inputs).logits
    longest = max(len(sample[0]) for sample in samples)
    first, last = BORDERS_FOR_ENCODERS
    if not first <= tuple(map(int, transformers.__version__.split(".")[:2])) <= last:
        assert inputs["max_length_q"] == longest
        assert (batch.cu_seqlens.tolist(), longest) in seen
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


def test_positions_of_qwen_are_those_of_the_reference():
    config = make_config("qwen2_vl")
    torch.manual_seed(0)
    model = transformers.Qwen2VLForConditionalGeneration(config)
    samples = make_samples("qwen2_vl", (2, 0, 3), seed=3)
    rows = model_inputs(pack("qwen2_vl", samples), config)["position_ids"]
    assert rows.shape == (4, 1, sum(len(sample[0]) for sample in samples))
    place = 0
    for sample in samples:
        ids = torch.tensor(sample[0])
        grids = pack("qwen2_vl", [sample]).image_grid_thw
        reference = model.model.get_rope_index
        kinds = {"mm_token_type_ids": (ids == IMAGE_TOKEN).int()[None]}
        if "mm_token_type_ids" not in inspect.signature(reference).parameters:
            kinds = {}  # transformers 5.0
        expected, _ = reference(ids[None], image_grid_thw=grids, **kinds)
        assert torch.equal(rows[1:, 0, place : place + len(ids)], expected[:, 0])
        assert rows[0, 0, place : place + len(ids)].tolist() == list(range(len(ids)))
        place += len(ids)


def test_images_side_by_side_keep_their_own_places():
    """Without a token between them the reference takes two images for one."""
    sample = make_samples("qwen2_vl", (2,), seed=4)[0]
    ids = [i for i in sample[0] if i not in (7, 8)]
    sizes = [plan_image(NATIVE, *size) for _, size in sample[2]]
    runs = [plan.num_image_tokens for plan in sizes]
    ids = [11, *[IMAGE_TOKEN] * sum(runs), 12]
    batch = pack("qwen2_vl", [(ids, ids, sample[2])])
    rows = model_inputs(batch, make_config("qwen2_vl"))["position_ids"][1:, 0]
    second = 1 + max(sizes[0].rows, sizes[0].columns) // 2
    assert rows[:, 1 + runs[0]].tolist() == [second] * 3
    assert rows[:, -1].tolist() == [second + max(sizes[1].rows, sizes[1].columns) // 2] * 3


def test_what_cannot_be_run_is_refused(name, model):
    samples = make_samples(name, (1,))
    with pytest.raises(ConfigError, match=r"raw.*normalize"):
        model_inputs(pack(name, samples, pixel_dtype=torch.uint8), model.config)
    with pytest.raises(ConfigError, match="'llama'"):
        model_inputs(pack(name, samples), transformers.LlamaConfig())
    other = "llava" if name.startswith("qwen") else "qwen2_vl"
    with pytest.raises(ConfigError, match="not made for"):
        model_inputs(pack(name, samples), make_config(other))
    if name.startswith("qwen"):  # as those of Qwen2.5-VL are for Qwen3-VL
        other = make_config(name)
        other.vision_config.patch_size += 2
        with pytest.raises(ConfigError, match=r"not made for .* give the loader that model"):
            model_inputs(pack(name, samples), other)
    with pytest.raises(ConfigError, match="leave out the loader's images="):
        model_inputs(dataclasses.replace(pack(name, samples), images=[b"file"]), model.config)
    clip = {"audio_values": torch.zeros(1600), "audio_lengths": torch.tensor([1600])}
    with pytest.raises(ConfigError, match="has no audio encoder"):
        model_inputs(dataclasses.replace(pack(name, samples), **clip), model.config)
    # as a step planner leaves it whose images go through another rank's encoder
    without = {
        "pixel_values": torch.zeros(0, 3, SIDE, SIDE),
        "image_sizes": torch.zeros(0, 2, dtype=torch.long),
    }
    with pytest.raises(ConfigError, match="without images"):
        model_inputs(dataclasses.replace(pack(name, samples), **without), model.config)


def test_the_micro_batch_is_not_changed(name, model):
    batch = pack(name, make_samples(name, (0, 0)))
    before = batch.labels.clone()
    inputs = model_inputs(batch, model.config)
    assert torch.equal(batch.labels, before)
    assert BLANK_SAMPLE_ID not in batch.sample_ids
    assert inputs["use_cache"] is False
    assert "attention_mask" not in inputs
