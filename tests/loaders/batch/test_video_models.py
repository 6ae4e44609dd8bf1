"""Packs with videos have the loss and gradients of their samples alone, in every family."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch

from isobatch.loaders.batch.model_inputs.inputs import model_inputs
from support.cases import for_each

pytest.importorskip("transformers")
pytest.importorskip("av")
from support.models.video_samples import RULES, alone, make_samples, make_video_model, packed

torch.set_num_threads(1)

DRAWS = int(os.environ.get("ISOBATCH_TEST_DRAWS", "2"))
TOLERANCE = 1e-5


def gradients_of(model: Any) -> dict[str, torch.Tensor]:
    return {key: own.grad.clone() for key, own in model.named_parameters() if own.grad is not None}


@for_each("name", [name for name in RULES if name != "qwen3_5"])
def test_packs_with_videos_are_as_their_samples_alone(name: str) -> None:
    model, drawn = make_video_model(name), random.Random(name)
    for draw in range(DRAWS):
        kinds = ["t", "v", "i", drawn.choice(["vi", "iv", "vtv", "ivi"]), "l"]
        if name == "glm4v":  # alone it takes either: both have one token
            kinds = ["t", "v", "i", "vtv", "l"]
        drawn.shuffle(kinds)
        samples = make_samples(name, kinds[: 5 if draw % 2 == 0 else 3], seed=draw)
        batch = packed(name, samples)
        model.zero_grad()
        total = 0.0
        for sample in samples:
            loss = model(**alone(name, sample)).loss
            loss.backward()
            total += float(loss.detach())
        wanted = gradients_of(model)
        model.zero_grad()
        loss = model(**model_inputs(batch, model.config)).loss
        loss.backward()
        assert loss.item() == pytest.approx(total, rel=TOLERANCE), kinds
        found = gradients_of(model)
        norm = torch.cat([each.flatten() for each in wanted.values()]).norm()
        off = max(float((found[key] - each).norm() / norm) for key, each in wanted.items())
        assert off <= TOLERANCE, f"{kinds}: gradients off by {off:.1e}"


@for_each("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_encoders_run_once_whatever_a_micro_batch_has(name: str) -> None:
    """As often on every rank, which FSDP needs."""
    model = make_video_model(name)
    passes: list[int] = []
    model.model.visual.register_forward_hook(lambda *_: passes.append(1))
    for kinds in (["t"], ["i"], ["v"], ["i", "v"], ["ivi", "t", "v"]):
        passes.clear()
        inputs = model_inputs(packed(name, make_samples(name, kinds, seed=1)), model.config)
        model(**inputs).loss.backward()
        assert len(passes) == 1, kinds


def test_samples_with_videos_of_a_model_with_linear_attention_are_as_alone() -> None:
    """By themselves: several need kernels that keep them apart."""
    model = make_video_model("qwen3_5")
    for sample in make_samples("qwen3_5", ["v", "ivl"], seed=2):
        expected = model(**alone("qwen3_5", sample)).loss.item()
        batch = packed("qwen3_5", [sample])
        assert model(**model_inputs(batch, model.config)).loss.item() == pytest.approx(
            expected, rel=TOLERANCE
        )
