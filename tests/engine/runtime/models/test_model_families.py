"""Families of models as layers: each pack has the loss and gradients of its samples alone."""

import os
import random
from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers")

from transformers import vision_utils

from isobatch.common.errors import ConfigError
from isobatch.engine.runtime.models.image_grids import interpolated_places, window_order
from isobatch.engine.runtime.models.transformers_models import from_transformers
from support.cases import record
from support.models.family_models import make_family_batch, make_family_model, run_family_alone
from support.models.video_samples import alone, make_samples, make_video_model, packed

torch.set_num_threads(1)

DRAWS = int(os.environ.get("ISOBATCH_TEST_DRAWS", "3"))
TOLERANCE = 1e-5
NAMES = ("qwen2_5_vl", "qwen3_vl", "llava_next", "llava_onevision", "gemma3")


def run_layers(layered, batch):
    """Loss; what crosses each cut is as its spec says, and only that crosses every other one."""
    carry = {}
    for place, layer in enumerate(layered.layers):
        carry = layer(carry, batch)
        specs = layered.specs(place + 1, batch)
        for key, spec in specs.items():
            found = tuple(carry[key].shape), carry[key].dtype
            assert found == (spec.shape, spec.dtype), (place, key)
        carry = {key: carry[key] for key in specs} if place % 2 else carry
    return carry["loss"]


def gradients_of(model):
    return {key: own.grad.clone() for key, own in model.named_parameters() if own.grad is not None}


def test_packs_have_the_loss_and_gradients_of_their_samples_alone():
    for name in NAMES:
        model, drawn = make_family_model(name), random.Random(name)
        layered = from_transformers(model)
        for draw in range(DRAWS):
            counts = [0, 2, *(drawn.randint(0, 3) for _ in range(draw % 4))]
            counts = (
                [(0,), (0, 0)][draw % 2] if draw % 5 == 1 else drawn.sample(counts, len(counts))
            )
            batch = make_family_batch(name, counts, draw)
            model.zero_grad()
            expected = run_family_alone(name, model, batch)
            wanted = gradients_of(model)
            model.zero_grad()
            loss = run_layers(layered, batch)
            loss.backward()
            found = gradients_of(model)
            assert loss.item() == pytest.approx(expected, rel=TOLERANCE), name
            assert set(found) == set(wanted), name
            norm = torch.cat([each.flatten() for each in wanted.values()]).norm()
            off = max(float((found[key] - each).norm() / norm) for key, each in wanted.items())
            assert off <= TOLERANCE, f"{name}: gradients off by {off:.1e}"
        record("layers", name, DRAWS)


def test_packs_with_videos_have_the_loss_and_gradients_of_their_samples_alone():
    pytest.importorskip("av")
    for name in ("qwen2_5_vl", "qwen3_vl", "internvl"):
        model = make_video_model(name)
        layered, samples = from_transformers(model), make_samples(name, ["v", "t", "ivl"], seed=4)
        model.zero_grad()
        expected = 0.0
        for sample in samples:
            loss = model(**alone(name, sample)).loss
            loss.backward()
            expected += loss.item()
        wanted = gradients_of(model)
        model.zero_grad()
        loss = run_layers(layered, packed(name, samples))
        loss.backward()
        found = gradients_of(model)
        assert loss.item() == pytest.approx(expected, rel=TOLERANCE), name
        norm = torch.cat([each.flatten() for each in wanted.values()]).norm()
        off = max(float((found[key] - each).norm() / norm) for key, each in wanted.items())
        assert off <= TOLERANCE, f"{name}: gradients off by {off:.1e}"
    batch = packed("llava_onevision", make_samples("llava_onevision", ["v"], seed=4))
    with pytest.raises(ConfigError, match="there are videos, whose features this model pools"):
        run_layers(from_transformers(make_video_model("llava_onevision")), batch)


def test_an_empty_micro_batch_adds_nothing_and_specs_need_no_pixels():
    for name in NAMES:
        model = make_family_model(name)
        layered = from_transformers(model)
        loss = run_layers(layered, make_family_batch(name, ()))
        loss.backward()
        assert loss.item() == 0, name
        assert all(not own.count_nonzero() for own in gradients_of(model).values()), name
        for counts in ((1, 0, 2), (0,), ()):
            batch = make_family_batch(name, counts)
            bare = replace(batch, pixel_values=batch.pixel_values[:0])
            for cut in range(1, len(layered.layers)):
                assert layered.specs(cut, bare) == layered.specs(cut, batch), name


def test_orders_of_windows_and_learnt_places_are_those_of_transformers():
    drawn = torch.Generator().manual_seed(0)
    for side in (1, 2, 3, 4):
        grids = torch.randint(1, 12, (6, 3), generator=drawn) * torch.tensor([1, 2, 2])
        grids[:, 0] = grids[:, 0] % 2 + 1
        index, borders = vision_utils.get_vision_window_index(grids, 2, side * 2 * 14, 14)
        order, found = window_order(grids, 2, side)
        assert torch.equal(order, (index[:, None] * 4 + torch.arange(4)).flatten())
        assert torch.equal(found, borders)
        index, weights = vision_utils.get_vision_interpolation_indices_and_weights(
            grids, 3 + side, align_corners=True, spatial_merge_size=2
        )
        own = interpolated_places(grids, 2, 3 + side)
        assert torch.equal(own[0], index)
        torch.testing.assert_close(own[1], weights)


def test_gemma_3_with_attention_that_has_no_mask_is_refused(monkeypatch):
    model, batch = make_family_model("gemma3").bfloat16(), make_family_batch("gemma3", (1,))
    config = model.model.language_model.config
    monkeypatch.setattr(config, "_attn_implementation_internal", "flash_attention_2")
    with pytest.raises(ConfigError, match="see later ones, for which it has no mask"):
        run_layers(from_transformers(model), batch)
    monkeypatch.setattr(config, "use_bidirectional_attention", True)
    with pytest.raises(ConfigError, match="no token predicts the next"):
        from_transformers(model)
