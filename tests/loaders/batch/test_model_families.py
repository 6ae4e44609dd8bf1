"""Every family of models: a packed micro-batch has the loss and gradients of its samples alone.

Alone means as users of transformers run a sample: what its processor gives, and no positions.
"""

import dataclasses
import io
import os
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from isobatch.common.errors import ConfigError
from isobatch.loaders.batch.collate import collate
from isobatch.loaders.batch.model_inputs import inputs as inputs_module
from isobatch.loaders.batch.model_inputs.inputs import FAMILIES as KNOWN
from isobatch.loaders.batch.model_inputs.inputs import model_inputs
from isobatch.loaders.config import LoaderConfig
from isobatch.loaders.steps.step_plan import StepTotals
from isobatch.models.image_rules.anyres import AnyresRule
from isobatch.models.image_rules.budget import BudgetRule
from isobatch.models.image_rules.fixed import FixedRule
from isobatch.models.image_rules.native import NativeRule
from isobatch.models.image_rules.pixtral import PixtralRule
from isobatch.models.image_rules.slices import SlicesRule
from isobatch.models.image_rules.splits import SplitsRule
from isobatch.models.image_tokens import plan_image
from isobatch.shards.stored_group import StoredGroup

transformers = pytest.importorskip("transformers")
from support.cases import record  # noqa: E402
from support.models.family_models import (  # noqa: E402
    FAMILIES,
    IMAGE,
    PINPOINTS,
    SIDE,
    make_family_batch,
    make_family_model,
    run_family_alone,
)

torch.set_num_threads(1)

DRAWS = int(os.environ.get("ISOBATCH_TEST_DRAWS", "3"))
TOLERANCE = 1e-5
GROUPS = {
    "merged": ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v"),
    "thinkers": ("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"),
    "patches": ("llava_next", "llava_onevision", "idefics3", "smolvlm"),
    "pixtral": ("mistral3", "pixtral"),
    "masked": ("gemma3", "gemma4", "paligemma"),
    "linear": ("qwen3_5", "qwen3_5_moe", "minicpmv4_6"),
}
ELSEWHERE = {"llava", "internvl", "qwen2_vl"}
"""In test_model_inputs.py, with the loader's own pixels."""
SAME_CODE = {"glm4v_moe", "glm46v"}
"""As glm4v, with another language model."""


def gradients_of(model):
    return {key: own.grad.clone() for key, own in model.named_parameters() if own.grad is not None}


def assert_packed_is_as_alone(name, model, batch, num_loss_tokens):
    """-> names of the parameters that have gradients."""
    model.zero_grad()
    expected = run_family_alone(name, model, batch, num_loss_tokens)
    wanted = gradients_of(model)
    model.zero_grad()
    loss = model(**model_inputs(batch, model.config)).loss
    loss.backward()
    found = gradients_of(model)
    assert loss.item() == pytest.approx(expected, rel=TOLERANCE), name
    if wanted:
        norm = torch.cat([each.flatten() for each in wanted.values()]).norm()
        off = max(float((found[key] - each).norm() / norm) for key, each in wanted.items())
        assert off <= TOLERANCE, f"{name}: gradients off by {off:.1e}"
    unwanted = [key for key in found if key not in wanted and found[key].count_nonzero()]
    assert not unwanted, f"{name}: {unwanted}"
    return set(found)


def varlen_kernels(monkeypatch):
    """Stand-ins for flash-linear-attention and causal-conv1d: transformers' own code per sample."""
    monkeypatch.setattr(inputs_module, "find_spec", lambda name: object())
    for kind in ("qwen3_5", "qwen3_5_moe"):
        module = getattr(transformers.models, kind)
        module = getattr(module, f"modeling_{kind}")
        monkeypatch.setattr(module, "causal_conv1d_fn", conv_of_samples(module.causal_conv1d_fn))
        rule = rule_of_samples(module.torch_chunk_gated_delta_rule)
        monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", rule)


def conv_of_samples(conv):
    def run(values, weight, bias=None, *, activation=None, seq_idx=None, **_):
        if seq_idx is None:
            return conv(values, weight, bias, activation=activation)
        parts = values.split(seq_idx[0].bincount().tolist(), dim=-1)
        return torch.cat([conv(own, weight, bias, activation=activation) for own in parts], -1)

    return run


def rule_of_samples(rule):
    def run(query, key, value, *, g, beta, cu_seqlens=None, seq_idx=None, **more):
        if cu_seqlens is None:
            return rule(query, key, value, g=g, beta=beta, **more)
        split = [each.split(cu_seqlens.diff().tolist(), 1) for each in (query, key, value, g, beta)]
        parts = zip(*split, strict=True)
        outputs = [rule(*own[:3], g=own[3], beta=own[4], **more)[0] for own in parts]
        return torch.cat(outputs, dim=1), None

    return run


def test_every_family_is_compared():
    compared = {name for names in GROUPS.values() for name in names}
    assert compared == set(FAMILIES)
    assert set(KNOWN) == compared | ELSEWHERE | SAME_CODE


@pytest.mark.parametrize("group", GROUPS)
def test_packs_have_the_loss_and_gradients_of_their_samples_alone(group, monkeypatch):
    """Text only, several images and none at all; an image reaches the same weights in every one."""
    if group == "linear":
        varlen_kernels(monkeypatch)
    for name in GROUPS[group]:
        model, drawn = make_family_model(name), random.Random(name)
        reached = set()
        for draw in range(DRAWS):
            counts = [0, 2, *(drawn.randint(0, 3) for _ in range(draw % 4))]
            counts = [(), (0, 0)][draw % 2] if draw % 5 == 1 else drawn.sample(counts, len(counts))
            batch = make_family_batch(name, counts, draw, num_loss_tokens=9)
            assert_arrays_of_a_processor_are_taken(name, batch, model.config)
            now = assert_packed_is_as_alone(name, model, batch, 9)
            assert now == (reached or now), name
            reached = now
        record("packs", name.removesuffix("_thinker"), DRAWS)


def assert_arrays_of_a_processor_are_taken(name, batch, config):
    """The same images as arrays, as `encode=` gives them: none in a micro-batch without images."""
    takes_arrays = {*GROUPS["merged"], "qwen3_5", "qwen3_5_moe", "gemma3", "paligemma"}
    if name not in takes_arrays:
        return
    arrays, grids = {"pixel_values": batch.pixel_values}, batch.image_grid_thw
    arrays |= {} if grids is None else {"image_grid_thw": grids}
    given = dataclasses.replace(
        batch,
        processed=arrays if len(batch.image_sizes) else {},
        pixel_values=torch.empty(0, 3, 1, 1),
        image_sizes=torch.empty(0, 2, dtype=torch.long),
        patches_per_image=torch.empty(0, dtype=torch.long),
        image_grid_thw=None,
    )
    found, expected = model_inputs(given, config), model_inputs(batch, config)
    assert found.keys() == expected.keys(), name
    for key, value in expected.items():
        own = [*value.items()] if isinstance(value, dict) else [(None, value)]
        for part, each in own:
            other = found[key] if part is None else found[key][part]
            same = torch.equal(each, other) if isinstance(each, torch.Tensor) else each == other
            assert same, (name, key, part)
    clips = dataclasses.replace(given, processed=arrays | {"pixel_values_videos": grids})
    with pytest.raises(ConfigError, match=r"pixel_values_videos of encode=: .* images"):
        model_inputs(clips, config)


PIXELS = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
CROPS = {**PIXELS, "image_size": SIDE, "vit_tokens_per_patch": 16}
TOKENS = {**PIXELS, "vit_patch_size": 4}
MERGED_RULE = NativeRule(
    **TOKENS,
    merge_size=2,
    temporal_patch_size=2,
    min_pixels=64,
    max_pixels=64 * 9,
    max_aspect_ratio=200.0,
)
POINTS = tuple(map(tuple, PINPOINTS))
RULES = {
    "qwen3_vl": MERGED_RULE,
    "llava_next": AnyresRule(**CROPS, vit_patch_size=7, grid_pinpoints=POINTS),
    "llava_onevision": AnyresRule(**CROPS, vit_patch_size=7, grid_pinpoints=POINTS, anyres_max=2),
    "idefics3": SplitsRule(**CROPS, llm_tokens_per_patch=4, longest_side=2 * SIDE),
    "mistral3": PixtralRule(**TOKENS, merge_size=2, longest_side=40),
    "minicpmv4_6": SlicesRule(**TOKENS, slice_size=32, max_slices=4),
    "gemma3": FixedRule(**CROPS, llm_tokens_per_patch=4, crop=False),
    "gemma4": BudgetRule(
        vit_patch_size=4, pool_size=3, max_tokens=9, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0)
    ),
}


def collated(rule, image_counts, seed=0):
    """A micro-batch as the loader makes it of samples with so many images."""
    drawn = np.random.default_rng(seed)
    ids, images, lengths = [], [], []
    for place, count in enumerate(image_counts):
        sizes = drawn.integers(14, 90, (count, 2)).tolist()
        own = drawn.integers(10, 64, 3).tolist()
        for height, width in sizes:
            tokens = plan_image(rule, width, height, count).num_image_tokens
            own += [IMAGE] * tokens + drawn.integers(10, 64, 4).tolist()
            pixels = drawn.integers(0, 256, (height, width, 3), dtype=np.uint8)
            buffer = io.BytesIO()
            Image.fromarray(pixels).save(buffer, "PNG")
            images.append((buffer.getvalue(), (height, width), place))
        ids, lengths = [*ids, *own], [*lengths, len(own)]
    ids = np.array(ids, np.int32)
    raw = StoredGroup(
        where="here",
        sample_ids=tuple(map(str, range(len(lengths)))),
        input_ids=ids,
        labels=np.where(ids == IMAGE, -100, ids),
        cu_seqlens=np.cumsum([0, *lengths], dtype=np.int32),
        images=[image[0] for image in images],
        image_sizes=np.array([image[1] for image in images], dtype=np.int32).reshape(-1, 2),
        image_samples=np.array([image[2] for image in images], dtype=np.int32),
    )
    totals = StepTotals(num_loss_tokens=1, num_samples=len(lengths), loss_normalizer=1.0)
    model = SimpleNamespace(vision=rule, video=None, audio=None)  # of a preset, what pixels need
    return collate(raw, model, LoaderConfig(pixel_dtype=torch.float32), totals)


def test_micro_batches_of_the_loader_fit_every_model(monkeypatch):
    """One of each rule of pixels: packed they give the sum of the losses of single samples."""
    varlen_kernels(monkeypatch)
    for name, rule in RULES.items():
        model, counts = make_family_model(name), (1, 0, 2, 3)
        with torch.no_grad():
            loss = model(**model_inputs(collated(rule, counts), model.config)).loss
            empty = model(**model_inputs(collated(rule, ()), model.config)).loss
            alone = sum(
                model(**model_inputs(one_of(collated(rule, counts), place), model.config)).loss
                for place in range(len(counts))
            )
        assert loss.item() == pytest.approx(alone.item(), rel=TOLERANCE), name
        assert empty == 0, name


def one_of(batch, place):
    """A sample of a micro-batch, by itself."""
    start, end = batch.cu_seqlens[place : place + 2].tolist()
    is_native = batch.image_grid_thw is not None
    pictures = torch.tensor([0, *batch.patches_per_image.tolist()]).cumsum(0)
    counts = (1, 0, 2, 3)
    first, last = sum(counts[:place]), sum(counts[: place + 1])
    chosen = slice(int(pictures[first]), int(pictures[last]))
    rows = batch.image_grid_thw.prod(1).tolist() if is_native else [1] * int(pictures[-1])
    parts = batch.pixel_values.split(rows)
    return dataclasses.replace(
        batch,
        sample_ids=batch.sample_ids[place : place + 1],
        **{key: getattr(batch, key)[start:end] for key in ("input_ids", "labels", "position_ids")},
        cu_seqlens=torch.tensor([0, end - start], dtype=torch.int32),
        pixel_values=torch.cat([batch.pixel_values[:0], *parts[chosen]]),
        patches_per_image=batch.patches_per_image[first:last],
        image_sizes=batch.image_sizes[first:last],
        image_grid_thw=batch.image_grid_thw[chosen] if is_native else None,
    )


def test_pixels_are_as_those_of_transformers_processors():
    generator = np.random.default_rng(0)
    images = [
        Image.fromarray(generator.integers(0, 256, (height, width, 3), dtype=np.uint8))
        for height, width in ((40, 90), (64, 31), (20, 20))
    ]
    side = 4
    for name, kind, options in (
        ("mistral3", "pixtral.image_processing_pil_pixtral.Pixtral", {"patch_size": 2 * side}),
        ("gemma4", "gemma4.image_processing_pil_gemma4.Gemma4", {"patch_size": side}),
    ):
        module, _, class_name = kind.rpartition(".")
        module = __import__(f"transformers.models.{module}", fromlist=["x"])
        processor = getattr(module, f"{class_name}ImageProcessorPil")(**options)
        given = processor(images, return_tensors="pt")
        expected = given["pixel_values"]
        if name == "mistral3":
            sizes = given["image_sizes"] // side
            rows = [
                pixels[:, : side * height, : side * width]
                .reshape(3, height, side, width, side)
                .permute(1, 3, 0, 2, 4)
                .reshape(-1, 3 * side**2)
                for pixels, (height, width) in zip(expected, sizes.tolist(), strict=True)
            ]
            grids = [(1, height, width) for height, width in sizes.tolist()]
        else:
            places = given["image_position_ids"]
            counts = (places[..., 0] >= 0).sum(1).tolist()
            rows = [
                pixels[:count].reshape(count, -1, 3).transpose(1, 2).flatten(1)
                for pixels, count in zip(expected, counts, strict=True)
            ]
            ends = (places.amax(1) + 1).tolist()
            grids = [(1, height, width) for width, height in ends]
        batch = dataclasses.replace(
            make_family_batch(name, (1, 2)),
            pixel_values=torch.cat(rows),
            image_grid_thw=torch.tensor(grids),
        )
        found = model_inputs(batch, FAMILIES[name].config())
        most = found["pixel_values"].shape[1] if name == "gemma4" else None
        assert torch.equal(found["pixel_values"], expected[:, :most]), name
        for key in ("image_sizes", "image_position_ids"):
            if key in given:
                assert torch.equal(found[key], given[key][:, :most]), (name, key)


def test_images_of_two_samples_that_touch_do_not_see_each_other():
    model = make_family_model("gemma3")
    whole = make_family_batch("gemma3", (1, 1), num_loss_tokens=3)
    ids = torch.tensor([11, 12, *[IMAGE] * 4, *[IMAGE] * 4, 13, 14])
    batch = dataclasses.replace(
        whole,
        input_ids=ids,
        labels=torch.where(ids == IMAGE, -100, ids),
        position_ids=torch.cat([torch.arange(6), torch.arange(6)]),
        cu_seqlens=torch.tensor([0, 6, 12], dtype=torch.int32),
    )
    assert_packed_is_as_alone("gemma3", model, batch, 3)


def test_masks_are_made_for_the_attention_that_a_model_has():
    for name in GROUPS["masked"]:
        model, batch = make_family_model(name), make_family_batch(name, (1, 0, 2))
        expected = model(**model_inputs(batch, model.config)).loss.item()
        model.set_attn_implementation("eager")
        inputs = model_inputs(batch, model.config)
        assert model(**inputs).loss.item() == pytest.approx(expected, rel=TOLERANCE), name
        model.config.text_config._attn_implementation_internal = "flash_attention_2"
        with pytest.raises(ConfigError, match="attn_implementation='sdpa'"):
            model_inputs(batch, model.config)
    model.config.text_config._attn_implementation_internal = "sdpa"
    model.config.text_config.sliding_window = batch.max_seqlen - 1
    with pytest.raises(ConfigError, match=rf"a sample of {batch.max_seqlen} tokens: beyond"):
        model_inputs(batch, model.config)


def test_linear_attention_without_its_kernels_is_refused(monkeypatch):
    model = make_family_model("qwen3_5")
    assert_packed_is_as_alone("qwen3_5", model, make_family_batch("qwen3_5", (2,)), 1)
    batch = make_family_batch("qwen3_5", (1, 0))
    with pytest.raises(ConfigError, match="pip install flash-linear-attention causal-conv1d"):
        model_inputs(batch, model.config)
    # and by transformers, where only a part of the kernels is there
    monkeypatch.setattr(inputs_module, "find_spec", lambda name: object())
    with pytest.raises(ValueError, match="can't keep packed sequences apart"):
        model(**model_inputs(batch, model.config))


def test_an_image_alone_in_its_sample_must_have_tiles():
    batch = make_family_batch("llava_onevision", (2,))
    one = dataclasses.replace(
        batch, patches_per_image=batch.patches_per_image[:1], image_sizes=batch.image_sizes[:1]
    )
    with pytest.raises(ConfigError, match="without tiles that is alone"):
        model_inputs(one, FAMILIES["llava_onevision"].config())


def test_clips_must_come_as_features_of_the_model():
    name = "qwen2_5_omni_thinker"
    config = FAMILIES[name].config()
    batch = next(
        batch
        for seed in range(9)
        if len((batch := make_family_batch(name, (0, 1), seed)).audio_lengths) > 1
    )
    for changed, message in (
        ({"audio_values": torch.zeros(1600)}, "audio='features'"),
        ({"audio_values": batch.audio_values[:, 1:]}, "of 7 mel bins, .* not made for"),
        ({"audio_lengths": batch.audio_lengths[1:]}, "clips in .* windows"),
        ({"audio_values": batch.audio_values[1:]}, "gave clips to another rank's encoder"),
    ):
        with pytest.raises(ConfigError, match=message):
            model_inputs(dataclasses.replace(batch, **changed), config)
