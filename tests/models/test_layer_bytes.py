"""`models.layer_bytes` against the tensors that layers of transformers keep, and as the only source
of what packer and planner know of memory; FLOPs of both for every preset.
"""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from transformers.models.clip import modeling_clip
from transformers.models.gemma3 import modeling_gemma3
from transformers.models.internvl import modeling_internvl
from transformers.models.llama import modeling_llama
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl
from transformers.models.qwen2_vl import modeling_qwen2_vl
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.siglip import modeling_siglip

from isobatch.common.config import preset_names
from isobatch.engine.cost_model.analytical import layer_costs
from isobatch.engine.cost_model.layer_list import layers_of
from isobatch.engine.cost_model.loads import Loads, PhaseLoads
from isobatch.engine.cost_model.parallel import Parallelism, Training
from isobatch.engine.cost_model.training_mode import TrainingMode
from isobatch.models.clusters import load_cluster
from isobatch.models.flops import ComputeLoad, FlopsModel
from isobatch.models.layer_bytes import (
    LOGIT_BYTES,
    LayerRun,
    activation_budget,
    transformer_bytes,
)
from isobatch.models.presets import LlmShape, VitShape, load_model
from support.cases import for_each

TOKENS, HEADS, KV_HEADS, HEAD = 64, 16, 4, 64
HIDDEN, FFN = HEADS * HEAD, 2_816
LLM = LlmShape(
    num_layers=1,
    hidden_size=HIDDEN,
    num_heads=HEADS,
    num_kv_heads=KV_HEADS,
    head_size=HEAD,
    ffn_size=FFN,
    gated=True,
    vocab_size=100,
)
VIT = VitShape(
    num_layers=1,
    hidden_size=HIDDEN,
    num_heads=HEADS,
    num_kv_heads=HEADS,
    head_size=HEAD,
    ffn_size=FFN,
    gated=False,
    projector=(HIDDEN, HIDDEN),
    patch_values=588,
)
TEXT = {
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "intermediate_size": FFN,
    "num_hidden_layers": 1,
    "vocab_size": 100,
}
VISION = {"hidden_size": HIDDEN, "num_attention_heads": HEADS, "intermediate_size": FFN}
NATIVE = {"num_heads": HEADS, "depth": 1}
PRESETS = [name for name in preset_names("models") if load_model(name).has_dimensions]
A100 = load_cluster("a100_80g")


def with_sdpa(config):
    config._attn_implementation = "sdpa"
    return config


def text_layer(module, name, config=None):
    """A decoder layer of a family and the call of it on hidden states."""
    config = with_sdpa(getattr(module, config or f"{name}Config")(**TEXT))
    layer = getattr(module, f"{name}DecoderLayer")(config, 0)

    def run(hidden):
        # tables of rotary positions in the dtype of the layer, as the models give them
        tables = [torch.zeros(1, TOKENS, HEAD, dtype=hidden.dtype)] * 2
        positions = torch.arange(TOKENS)[None]
        return layer(
            hidden[None],
            attention_mask=None,
            position_ids=positions,
            position_embeddings=tables,
            use_cache=False,
        )

    return layer, run


def patch_layer(config, kind, *arguments):
    """An encoder layer of images of one size."""
    layer = kind(with_sdpa(config))
    return layer, lambda hidden: layer(hidden[None], *arguments)


def native_layer(config, kind):
    """An encoder layer at native resolution: two images."""
    layer = kind(with_sdpa(config))
    borders = torch.tensor([0, TOKENS // 4, TOKENS], dtype=torch.int32)
    tables = (torch.zeros(TOKENS, HEAD), torch.zeros(TOKENS, HEAD))
    return layer, lambda hidden: layer(hidden, cu_seqlens=borders, position_embeddings=tables)


def encoder(config, kind, *arguments, **more):
    """How to make an encoder layer of images of one size."""
    return lambda: patch_layer(config(**VISION, **more), kind, *arguments)


LAYERS = {
    "llama": (LLM, partial(text_layer, modeling_llama, "Llama")),
    "qwen2": (LLM, partial(text_layer, modeling_qwen2, "Qwen2")),
    "qwen3": (replace(LLM, head_norms=True), partial(text_layer, modeling_qwen3, "Qwen3")),
    "gemma3": (
        replace(LLM, head_norms=True, sandwich_norms=True),
        partial(text_layer, modeling_gemma3, "Gemma3", config="Gemma3TextConfig"),
    ),
    "clip": (
        replace(VIT, quick_gelu=True),
        encoder(modeling_clip.CLIPVisionConfig, modeling_clip.CLIPEncoderLayer, None),
    ),
    "siglip": (
        VIT,
        encoder(modeling_siglip.SiglipVisionConfig, modeling_siglip.SiglipEncoderLayer, None),
    ),
    "internvit": (
        replace(VIT, layer_scale=True),
        encoder(modeling_internvl.InternVLVisionConfig, modeling_internvl.InternVLVisionLayer),
    ),
    "internvit_6b": (
        replace(VIT, layer_scale=True, query_key_norm=True),
        encoder(
            modeling_internvl.InternVLVisionConfig,
            modeling_internvl.InternVLVisionLayer,
            use_qk_norm=True,
            norm_type="rms_norm",
        ),
    ),
    "qwen2_vl": (
        replace(VIT, ffn_size=4 * HIDDEN, quick_gelu=True, joint_attention=True),
        lambda: native_layer(
            modeling_qwen2_vl.Qwen2VLVisionConfig(embed_dim=HIDDEN, mlp_ratio=4, **NATIVE),
            modeling_qwen2_vl.Qwen2VLVisionBlock,
        ),
    ),
    "qwen2_5_vl": (
        replace(VIT, gated=True, joint_attention=True),
        lambda: native_layer(
            modeling_qwen2_5_vl.Qwen2_5_VLVisionConfig(
                hidden_size=HIDDEN, intermediate_size=FFN, **NATIVE
            ),
            modeling_qwen2_5_vl.Qwen2_5_VLVisionBlock,
        ),
    ),
}


def kept_bytes(layer, run, hidden):
    """Bytes of the storages that autograd keeps, each once, without parameters."""
    parameters = {weight.untyped_storage().data_ptr() for weight in layer.parameters()}
    kept = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            # the tensor is held, so that no other takes its address
            kept[storage.data_ptr()] = (tensor, storage.nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        run(hidden)
    return sum(size for _, size in kept.values())


@for_each("name", LAYERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("trained", [True, False])
def test_a_layer_of_transformers_keeps_what_the_formula_says_within_3_percent(name, dtype, trained):
    shape, make = LAYERS[name]
    layer, run = make()
    layer.to(dtype).requires_grad_(trained)
    hidden = torch.randn(TOKENS, HIDDEN, dtype=dtype, requires_grad=True)
    kept = transformer_bytes(shape, LayerRun(number_bytes=dtype.itemsize))
    expected = kept.trained if trained else kept.frozen
    assert kept_bytes(layer, run, hidden) / TOKENS == pytest.approx(expected, rel=0.03)


def one_token_each(model, count):
    """A micro-batch of so many ViT tokens and LLM tokens."""
    tokens = np.array([count])
    phase = PhaseLoads(tokens, tokens, np.ones(1, np.int64))
    return Loads(vision=phase, audio=PhaseLoads.nothing(1), llm=phase)


@for_each("name", PRESETS)
@pytest.mark.parametrize("kernels", ["transformers", "fused"])
def test_packer_and_planner_have_the_same_bytes_per_layer_and_token(name, kernels):
    """But for logits: the engine has a loss of its own, which takes as little as fused ones."""
    model, count = load_model(name), 10**6
    vit, llm = model.dimensions
    tp = 2 if llm.num_heads % 2 == llm.num_kv_heads % 2 == 0 else 1
    for parallel in (Parallelism(), Parallelism(tp=tp)):
        budget = activation_budget(model, 1e12, gpus=parallel.tp, kernels=kernels)
        training = Training(kernels=kernels)
        costs = layer_costs(model, A100, parallel, one_token_each(model, count), training)
        saved = costs.saved_bytes[:, 0] / count
        parts = np.array([layer.part for layer in layers_of(model, parallel)])
        logits = (LOGIT_BYTES[kernels] - LOGIT_BYTES["fused"]) * -(-llm.vocab_size // parallel.tp)
        planned = saved[parts == "llm"].sum() + logits
        assert budget.bytes_per_token == pytest.approx(planned, rel=1e-9)
        is_vision = np.isin(parts, ["vision", "projector"])
        if model.audio_encoder is not None:
            is_vision &= np.array(costs.kinds) != "audio_projector"
        planned = saved[is_vision].sum() * model.vit_tokens_per_unit
        assert budget.bytes_per_vision == pytest.approx(planned, rel=1e-5)
        # layer by layer
        run = LayerRun(gpus=parallel.tp, kernels=kernels)
        for kind, shape in (("vision_layer", vit), ("llm_layer", llm)):
            each = saved[np.array(costs.kinds) == kind]
            assert each == pytest.approx(transformer_bytes(shape, run).trained, rel=1e-6)


@for_each("name", PRESETS)
def test_packer_and_planner_have_the_same_flops(name):
    """On GPUs that only compute, the planner's forward passes are the packer's FLOPs."""
    ideal = replace(
        A100,
        hbm_bytes_per_s=1e30,
        launch_us=1e-12,
        half_speed_width=1,
        product_efficiency=1.0,
        attention_forward_efficiency=1.0,
        attention_backward_efficiency=1.0,
    )
    model = load_model(name)
    tokens = np.array([8_192])
    work = ComputeLoad(
        vit_tokens=tokens, vit_squares=tokens**2, llm_tokens=tokens, llm_squares=tokens**2
    )
    phase = PhaseLoads(tokens, tokens**2, np.ones(1, np.int64))
    loads = Loads(vision=phase, audio=PhaseLoads.nothing(1), llm=phase)
    cost = FlopsModel.of(model)
    flops = cost.vit_flops(work)[0] + cost.llm_flops(work)[0]
    costs = layer_costs(model, ideal, Parallelism(), loads)
    seconds = costs.forward_ns.sum() * 1e-9
    assert seconds * ideal.peak_flops_per_s == pytest.approx(flops, rel=3e-3)


def test_float32_weights_keep_less_than_twice_the_bytes():
    """Norms compute in float32 either way."""
    model, loads = load_model("llava_1_5"), one_token_each(None, 1_000)
    saved = [
        layer_costs(
            model, A100, Parallelism(), loads, Training(mode=TrainingMode(precision=precision))
        )
        .saved_bytes[-2, 0]
        .item()
        for precision in ("bf16", "fp32")
    ]
    assert 1.5 < saved[1] / saved[0] < 2
