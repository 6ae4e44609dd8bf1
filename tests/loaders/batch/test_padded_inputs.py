"""Padded inputs of transformers' models: each sample has the loss and gradients it has alone."""

import os
from dataclasses import replace

import pytest
import torch

from isobatch.loaders.batch.model_inputs.inputs import model_inputs

pytest.importorskip("transformers")
from support.models.family_models import (
    FAMILIES,
    make_family_batch,
    make_family_model,
    run_family_alone,
)

torch.set_num_threads(1)

DRAWS = int(os.environ.get("ISOBATCH_TEST_DRAWS", "1"))
TOLERANCE = 1e-5
NAMES = ("llava_next", "qwen2_5_vl", "gemma3", "qwen3_5", "qwen2_5_omni_thinker")
"""Patches, M-RoPE, masks of its own, linear attention, and audio; with more draws all."""
LINEAR = {"qwen3_5", "qwen3_5_moe", "minicpmv4_6"}
"""Can be packed with kernels alone."""


def loss_and_gradients(model, run):
    model.zero_grad()
    loss = run()
    return loss, {
        key: own.grad.clone() for key, own in model.named_parameters() if own.grad is not None
    }


def run(model, inputs):
    loss = model(**inputs).loss
    loss.backward()
    return loss.item()


@pytest.mark.parametrize("is_eager", [False, True])
def test_padded_samples_have_the_loss_and_gradients_they_have_alone(is_eager):
    names = NAMES if DRAWS == 1 else FAMILIES
    for name in names:
        model = make_family_model(name)
        if is_eager:  # else sdpa, where the model has it
            model.set_attn_implementation("eager")
        for draw in range(DRAWS):
            for counts in ((2, 0, 3), (0, 0), (2,)):
                assert_padded_is_as_alone(name, model, make_family_batch(name, counts, draw, 7))


def assert_padded_is_as_alone(name, model, batch):
    padded = replace(batch, is_padded=True)
    inputs = model_inputs(padded, model.config)
    rows = batch.num_samples
    assert inputs["input_ids"].shape == inputs["labels"].shape
    assert len(inputs["input_ids"]) == rows, name
    assert inputs["num_items_in_batch"] == batch.loss_normalizer == 7
    expected, wanted = loss_and_gradients(model, lambda: run_family_alone(name, model, batch, 7))
    loss, found = loss_and_gradients(model, lambda: run(model, inputs))
    assert loss == pytest.approx(expected, rel=TOLERANCE), name
    norm = torch.cat([each.flatten() for each in wanted.values()]).norm()
    off = max(float((found[key] - each).norm() / norm) for key, each in wanted.items())
    assert off <= TOLERANCE, f"{name}: gradients off by {off:.1e}"
    extra = [key for key in found if key not in wanted and found[key].count_nonzero()]
    assert not extra, f"{name}: {extra}"
    # every weight has gradients, also where no sample has an image
    assert any("vis" in key for key in found), name
    if name not in LINEAR:
        packed = model_inputs(batch, model.config)
        assert packed["num_items_in_batch"] == inputs["num_items_in_batch"]
        with torch.no_grad():
            assert model(**packed).loss.item() == pytest.approx(loss, rel=TOLERANCE), name


def test_rows_give_their_tokens_back_and_an_empty_micro_batch_is_one_row():
    batch = replace(make_family_batch("qwen2_5_vl", (1, 0, 2)), is_padded=True)
    rows = batch.padded(pad_token_id=9)
    mask = rows["attention_mask"].bool()
    assert rows["input_ids"].shape == (3, batch.max_seqlen)
    for name in ("input_ids", "labels", "position_ids"):
        assert torch.equal(rows[name][mask], getattr(batch, name)), name
    assert set(rows["input_ids"][~mask].tolist()) == {9}
    assert set(rows["labels"][~mask].tolist()) == {-100}
    assert torch.equal(rows["position_ids"], torch.arange(batch.max_seqlen).repeat(3, 1))
    assert all(not (row.diff() > 0).any() for row in rows["attention_mask"])  # on the right
    model = make_family_model("qwen2_5_vl")
    # logits for a loss of one's own
    inputs = model_inputs(batch, model.config, with_labels=False)
    assert not {"labels", "num_items_in_batch"} & set(inputs)
    assert inputs["attention_mask"].sum() == len(batch.labels)
    without = replace(make_family_batch("qwen2_5_vl", (0, 0)), is_padded=True)
    mask = model_inputs(without, model.config, with_labels=False)["attention_mask"]
    assert int(mask.sum()) == len(without.labels) + 1  # one blank image token, at the end
    assert int(mask[0].sum()) == without.cu_seqlens[1]
    empty = replace(make_family_batch("qwen2_5_vl", ()), is_padded=True)
    assert empty.padded()["input_ids"].shape == (0, 0)
    inputs = model_inputs(empty, model.config)
    assert len(inputs["input_ids"]) == 1
    assert run(model, inputs) == 0
    with pytest.raises(ValueError, match="an empty micro-batch"):
        model_inputs(empty, model.config, always_encode=False)
