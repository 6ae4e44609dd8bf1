"""FLOPs equal what torch counts in real modules, and the published figures; sums of work cost what
their parts cost.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_vlm import TinyVLM
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

from isobatch.balance.metrics import epoch_ms
from isobatch.common.errors import ConfigError
from isobatch.common.types import Counts, Groups
from isobatch.models.flops import ComputeLoad, FlopsModel, GpuSpeed
from isobatch.models.presets import LlmShape, load_model, model_from_dict, model_to_dict
from isobatch.models.video_tokens import VideoFacts, plan_video

MODELS = ["llava_1_5", "llava_next", "internvl_1_5", "qwen2_vl", "tiny"]


def counts_of(patches, vit_tokens, seq_len):
    zeros = np.zeros(len(seq_len), dtype=np.int64)
    return Counts(
        num_image_patches=np.array(patches, np.int64),
        num_vit_tokens=np.array(vit_tokens, np.int64),
        num_image_tokens=zeros,
        num_text_tokens=np.array(seq_len, np.int64),
        num_audio_tokens=zeros,
        num_loss_tokens=zeros,
    )


def work_of(vit_tokens, vit_squares, llm_tokens, llm_squares):
    values = (np.array([value]) for value in (vit_tokens, vit_squares, llm_tokens, llm_squares))
    return ComputeLoad(
        **dict(zip(("vit_tokens", "vit_squares", "llm_tokens", "llm_squares"), values, strict=True))
    )


def tiny_batch(patches, lengths):
    ids = torch.zeros(sum(lengths), dtype=torch.long)
    ids[: patches * 4] = 1
    return SimpleNamespace(
        input_ids=ids,
        pixel_values=torch.zeros(patches, 3, 56, 56, requires_grad=True),
        cu_seqlens=torch.tensor([0, *np.cumsum(lengths).tolist()]),
        position_ids=torch.cat([torch.arange(length) for length in lengths]),
    )


@pytest.mark.parametrize(
    ("patches", "lengths"), [(1, [5]), (7, [40, 3, 61]), (2, [8, 8]), (0, [9])]
)
def test_equals_what_torch_counts_in_the_example_model(patches, lengths):
    model = TinyVLM(2000, 1)
    model(tiny_batch(1, [5]))  # whatever torch sets up at first
    cost = FlopsModel.of(load_model("tiny"))
    counts = counts_of(
        [patches] + [0] * (len(lengths) - 1), [patches * 17] + [0] * (len(lengths) - 1), lengths
    )
    group = Groups(np.arange(len(lengths)), np.array([0, len(lengths)]))
    with (
        FlopCounterMode(display=False) as counter,
        sdpa_kernel(SDPBackend.MATH),
    ):  # torch counts no other on CPUs
        logits = model(tiny_batch(patches, lengths))
    # torch counts causal attention as if it were not: twice ours
    dense = replace(cost, llm_flops_per_square=2 * cost.llm_flops_per_square)
    work = cost.loads(counts).sum(group)
    assert (dense.vit_flops(work) + dense.llm_flops(work)).tolist() == [counter.get_total_flops()]
    assert logits.shape == (sum(lengths), 2000)


class Layer(nn.Module):
    """An LLM layer with grouped queries and a gated feed-forward part."""

    def __init__(self, shape: LlmShape) -> None:
        super().__init__()
        self.shape = shape
        width, kv = shape.hidden_size, shape.num_kv_heads * shape.head_size
        self.q, self.o = (
            nn.Linear(width, shape.attention_size),
            nn.Linear(shape.attention_size, width),
        )
        self.k, self.v = nn.Linear(width, kv), nn.Linear(width, kv)
        self.gate, self.up, self.down = (
            nn.Linear(a, b) for a, b in [(width, shape.ffn_size)] * 2 + [(shape.ffn_size, width)]
        )

    def forward(self, x, *, attend):
        size = self.shape.head_size
        q, k, v = (
            part.unflatten(-1, (-1, size)).transpose(0, 1)[None]
            for part in (self.q(x), self.k(x), self.v(x))
        )
        repeats = self.shape.num_heads // self.shape.num_kv_heads
        k, v = (part.repeat_interleave(repeats, 1) for part in (k, v))
        mixed = scaled_dot_product_attention(q, k, v) if attend else q + k + v
        x = x + self.o(mixed[0].transpose(0, 1).flatten(1))
        return x + self.down(nn.functional.silu(self.gate(x)) * self.up(x))


SHAPE = LlmShape(
    num_layers=3,
    hidden_size=24,
    num_heads=6,
    num_kv_heads=2,
    head_size=8,
    ffn_size=40,
    gated=True,
    vocab_size=50,
)


def llm_cost():
    return FlopsModel.of(replace(load_model("tiny"), llm=SHAPE))


def run_layers(tokens, *, attend, backward):
    layers = [Layer(SHAPE) for _ in range(SHAPE.num_layers)]
    head = nn.Linear(SHAPE.hidden_size, SHAPE.vocab_size, bias=False)
    x = torch.randn(tokens, SHAPE.hidden_size, requires_grad=True)
    with (
        FlopCounterMode(display=False) as counter,
        sdpa_kernel(SDPBackend.MATH),
    ):  # torch counts no other on CPUs
        y = x
        for layer in layers:
            y = layer(y, attend=attend)
        y = head(y)
        if backward:
            y.sum().backward()
    return counter.get_total_flops()


def test_grouped_queries_a_gated_mlp_and_heads_wider_than_the_model_are_counted_as_torch_does():
    work = work_of(0, 0, 13, 2 * 13**2)  # twice: not causal here
    assert llm_cost().llm_flops(work).tolist() == [run_layers(13, attend=True, backward=False)]


def test_training_costs_three_forward_passes_of_matrix_products():
    # without attention: torch counts its backward pass with the recomputation that flash attention
    # does
    counted = run_layers(13, attend=False, backward=True)
    assert llm_cost().train_flops(work_of(0, 0, 13, 0)).tolist() == [counted]


@pytest.mark.parametrize(
    ("name", "vit", "llm", "digits"),
    [
        (
            "internvl_1_5",
            5.54e9,
            19.86e9,
            2,
        ),  # model cards of InternViT-6B-448px-V1-5 and internlm2-20b
        (
            "llava_1_5",
            0.304e9 * 23 / 24,
            6.74e9,
            2,
        ),  # CLIP ViT-L/14 without its last layer, and Llama 2 7B
        ("qwen2_vl", 0.675e9, 7.62e9, 2),  # Qwen2-VL's table 1 (merger included) and Qwen2-7B
    ],
)
def test_the_weights_of_the_presets_are_the_published_ones(name, vit, llm, digits):
    preset = load_model(name)
    counted = (
        preset.vit.num_layers * preset.vit.layer_weights
        + preset.vit.patch_values * preset.vit.hidden_size
    )
    if name == "qwen2_vl":
        counted += preset.vit.projector_weights
    embeddings = 2 * preset.llm.vocab_size * preset.llm.hidden_size
    assert counted == pytest.approx(vit, rel=10**-digits)
    assert preset.llm.num_layers * preset.llm.layer_weights + embeddings == pytest.approx(
        llm, rel=10**-digits
    )


def test_at_9_images_and_4k_tokens_the_encoder_takes_almost_40_percent():
    preset = load_model("internvl_1_5")
    cost = FlopsModel.of(preset)
    work = work_of(9 * 1025, 9 * 1025**2, 4096, 4096**2)
    vit, llm = cost.vit_flops(work)[0], cost.llm_flops(work)[0]
    assert 0.385 < vit / (vit + llm) < 0.4  # OmniBal, introduction
    layers = [shape.num_layers * shape.layer_weights for shape in (preset.vit, preset.llm)]
    linear = layers[0] * 9 * 1025, layers[1] * 4096
    assert linear[0] / sum(linear) == pytest.approx(0.399, abs=5e-4)


@pytest.mark.parametrize("name", MODELS)
def test_a_group_costs_what_its_samples_cost(name):
    cost = FlopsModel.of(load_model(name))
    counts = counts_of([0, 1, 3], [0, 577, 1800], [40, 700, 2000])
    each, group = cost.loads(counts), cost.loads(counts).sum(Groups(np.arange(3), np.array([0, 3])))
    assert cost.train_flops(group)[0] == pytest.approx(cost.train_flops(each).sum())
    overhead = cost.speed.micro_batch_overhead_ms
    assert cost.micro_batch_ms(group)[0] == pytest.approx(cost.compute_ms(each).sum() + overhead)


def test_packing_does_not_make_samples_attend_to_each_other():
    cost = FlopsModel.of(load_model("llava_1_5"))
    split, joined = (
        cost.loads(counts_of([0, 0], [0, 0], [500, 500])),
        cost.loads(counts_of([0], [0], [1000])),
    )
    assert cost.llm_flops(split).sum() < cost.llm_flops(joined)[0]


def test_native_resolution_attends_inside_each_image():
    cost = FlopsModel.of(load_model("qwen2_vl"))
    counts = counts_of([2, 1, 0], [1000, 1000, 0], [400, 400, 400])
    assert cost.loads(counts).vit_squares.tolist() == [500_000, 1_000_000, 0]


def test_videos_attend_inside_each_frame():
    """Of the grid, at native resolution; an encoder of crops looks at each frame by itself."""
    facts = VideoFacts(640, 360, 90, 30.0)
    for name in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "internvl3"):
        model = load_model(name)
        plan = plan_video(model.video, facts)
        counts = counts_of([plan.num_patches], [plan.num_vit_tokens], [plan.num_image_tokens])
        each = plan.num_vit_tokens // plan.num_patches
        vit = model.vit
        full = plan.num_patches * each**2
        if vit.window is not None:
            windowed = (vit.num_layers - vit.num_full_layers) * vit.window * plan.num_vit_tokens
            full = (vit.num_full_layers * full + windowed) // vit.num_layers
        load = FlopsModel.of(model).loads(counts)
        assert load.vit_squares.tolist() == [full], name
        assert load.llm_tokens.tolist() == [plan.num_image_tokens], name


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 100), max_size=40), st.integers(1, 9))
def test_a_step_takes_as_long_as_its_slowest_rank(times, dp):
    expected = sum(max(times[start : start + dp]) for start in range(0, len(times), dp))
    assert epoch_ms(np.array(times, np.float64), dp) == expected


def test_faster_hardware_takes_less_time_in_proportion():
    preset = load_model("internvl_1_5")
    slow, fast = (
        FlopsModel.of(preset, GpuSpeed(vit_flops_per_s=s, llm_flops_per_s=s)) for s in (1e14, 4e14)
    )
    work = slow.loads(counts_of([3], [3075], [2000]))
    assert slow.compute_ms(work)[0] == pytest.approx(4 * fast.compute_ms(work)[0])
    assert slow.compute_ms(work)[0] == pytest.approx(1e3 * slow.train_flops(work)[0] / 1e14)
    with pytest.raises(ConfigError, match="greater than 0"):
        GpuSpeed(vit_flops_per_s=0)


def test_a_preset_without_dimensions_still_loads_and_says_what_is_missing():
    values = {**model_to_dict(load_model("tiny")), "vit": None, "llm": None}
    preset = model_from_dict(values)
    assert not preset.has_dimensions
    with pytest.raises(ConfigError, match=r"tiny has no \[vit\] and \[llm\] tables"):
        FlopsModel.of(preset)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("num_layers", 0, r"\[llm\]: num_layers = 0: must be greater than 0"),
        ("layers", 3, r"\[llm\]: unknown key layers; known: .*num_layers"),
        ("gated", 1, r"\[llm\]: gated is 1, but should be bool"),
    ],
)
def test_wrong_dimensions_are_an_error_that_names_them(key, value, message):
    values = model_to_dict(load_model("tiny"))
    values["llm"] = {**values["llm"], key: value}
    with pytest.raises(ConfigError, match=message):
        model_from_dict(values)


def test_attention_in_tokens_is_the_flops_of_attention():
    lengths = np.array([10, 1_000, 32_768])
    for name in MODELS:
        flops = FlopsModel.of(load_model(name))
        found = flops.attention_tokens(lengths) * flops.llm_flops_per_token
        wanted = flops.llm.mean_squares(lengths, lengths**2) * flops.llm_flops_per_square
        rounding = flops.llm_flops_per_token + 0.05 * wanted
        assert (np.abs(found - wanted) <= rounding).all(), name
    # in layers with windows only as far as these reach
    gemma = FlopsModel.of(load_model("gemma3"))
    assert gemma.attention_tokens(lengths[2:]) < 0.4 * lengths[2] ** 2 // (
        gemma.llm_flops_per_token // gemma.llm_flops_per_square
    )
