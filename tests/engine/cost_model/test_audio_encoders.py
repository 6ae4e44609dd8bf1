"""Audio encoders from folders have the weights of the model and cost what torch counts."""

from __future__ import annotations

import re
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from isobatch.common.types import COUNT_COLUMNS, Counts
from isobatch.engine.cost_model.layer_list import layers_of
from isobatch.engine.cost_model.loads import sample_loads
from isobatch.engine.cost_model.operations import Attention, MatMul
from isobatch.engine.cost_model.parallel import Parallelism
from isobatch.engine.runtime.batch_loads import batch_loads
from isobatch.models.audio_tokens import plan_audio
from isobatch.models.folder.find_model import find_model
from isobatch.models.presets import ModelPreset, load_model
from support.models.family_models import FAMILIES, make_family_batch, make_family_model
from support.models.saved_folders import make_config, save_folder

CLASSES = {"qwen2_5_omni": "Qwen2_5Omni", "qwen3_omni_moe": "Qwen3OmniMoe"}


def encoder_flops(model: ModelPreset, tokens: int, squares: int) -> float:
    """Forward FLOPs of the products and the attention of all layers of the audio encoder."""
    total = 0.0
    for layer in layers_of(model, Parallelism()):
        for each in layer.operations:
            if isinstance(each, MatMul) and each.stream.phase == "audio":
                total += 2 * each.inputs * each.outputs * tokens * each.stream.per_token
            if isinstance(each, Attention) and each.stream.phase == "audio":
                total += 4 * each.width * squares
    return total


@pytest.mark.parametrize("name", CLASSES)
def test_the_weights_are_those_of_the_model(name: str, tmp_path: Path) -> None:
    save_folder(name, tmp_path)
    config = make_config(name).thinker_config.audio_config
    kind: Any = getattr(transformers.models, name)
    module = getattr(kind, f"modeling_{name}")
    with torch.device("meta"):
        encoder = getattr(module, f"{CLASSES[name]}AudioEncoder")(config)
    held = sum(
        prod(weight.shape)
        for key, weight in encoder.named_parameters()
        if weight.ndim > 1 and not re.search("audio_bos_eos_token", key)
    )
    model = find_model(str(tmp_path))
    products = {
        layer: sum(each.inputs * each.outputs for each in layer.operations if type(each) is MatMul)
        for layer in layers_of(model, Parallelism())
        if layer.kind.startswith("audio")
    }
    found = sum(products[layer] for layer in layers_of(model, Parallelism()) if layer in products)
    assert found == held


@pytest.mark.parametrize("name", CLASSES)
def test_clips_cost_what_torch_counts(name: str, tmp_path: Path) -> None:
    """Clips of whole chunks: of half a span of attention, and of one and a half."""
    save_folder(name, tmp_path)
    found = find_model(str(tmp_path))
    family = f"{name}_thinker"
    thinker, batch = make_family_model(family), make_family_batch(family, (0,))
    config = thinker.config.audio_config
    rule, encoder = found.audio, found.audio_encoder
    assert rule is not None
    assert encoder is not None
    chunk, span = 2 * config.n_window, getattr(config, "n_window_infer", 2 * config.n_window)
    rule = replace(rule, chunk_frames=chunk, attention_frames=span)
    shape = replace(
        encoder,
        num_layers=config.encoder_layers,
        hidden_size=config.d_model,
        num_heads=2,
        num_kv_heads=2,
        head_size=config.d_model // 2,
        ffn_size=config.encoder_ffn_dim,
        projector=(*[config.d_model] * (len(encoder.projector) - 1), config.output_dim),
        frame_values=config.num_mel_bins,
        conv_channels=encoder.conv_channels and config.downsample_hidden_size,
    )
    model = replace(found, audio=rule, audio_encoder=shape)
    frames = torch.tensor([4 * chunk, 8 * chunk])
    features = torch.zeros(config.num_mel_bins, int(frames.sum()))
    with (
        torch.no_grad(),
        FlopCounterMode(display=False) as counter,
        sdpa_kernel(SDPBackend.MATH),
    ):  # torch counts no other on CPUs
        tower = thinker.model.audio_tower
        made = tower(features, feature_lens=frames, aftercnn_lens=frames // 2).last_hidden_state
    clips = replace_audio(batch, frames)
    loads = batch_loads([clips], replace(model, vit=found.vit, llm=found.llm)).audio
    assert loads.items.tolist() == [2]
    assert len(made) == int(loads.tokens[0]) // rule.downsample
    flops = encoder_flops(model, int(loads.tokens[0]), int(loads.squares[0]))
    assert flops == pytest.approx(counter.get_total_flops(), rel=1e-12)


def replace_audio(batch: Any, frames: torch.Tensor) -> Any:
    """The micro-batch with clips of so many frames."""
    return replace(batch, audio_frames=frames, audio_lengths=160 * frames)


@pytest.mark.parametrize("name", [*CLASSES, "orchmllm_10b"])
def test_counts_have_the_loads_of_micro_batches(name: str, tmp_path: Path) -> None:
    """One clip per sample, of which counts know nothing else."""
    if name in CLASSES:
        save_folder(name, tmp_path)
    model = find_model(str(tmp_path)) if name in CLASSES else load_model(name)
    rule = model.audio
    assert rule is not None
    batch = make_family_batch("qwen2_5_omni_thinker", (0,))
    # frames of whole LLM tokens
    for frames in (8, 96, 800, 1608, 2996):
        plan = plan_audio(rule, frames * rule.hop_length, rule.sampling_rate)
        columns = {column: np.array([0]) for column in COUNT_COLUMNS}
        columns["num_audio_tokens"] = np.array([plan.num_audio_tokens])
        counted = sample_loads(Counts(**columns), model).audio
        loads = batch_loads([replace_audio(batch, torch.tensor([plan.num_frames]))], model).audio
        assert counted.tokens.tolist() == loads.tokens.tolist() == [plan.num_encoder_tokens]
        assert counted.squares.tolist() == loads.squares.tolist()
        assert counted.items.tolist() == loads.items.tolist() == [1]


def test_the_tiny_encoders_are_those_of_both_families() -> None:
    assert {f"{name}_thinker" for name in CLASSES} == {
        name for name, family in FAMILIES.items() if family.frames
    }
