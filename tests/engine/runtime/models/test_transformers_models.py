"""Models of transformers as layers: losses and gradients are those of transformers with each sample
alone.
"""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

pytest.importorskip("transformers")

import transformers

from isobatch.common.errors import ConfigError
from isobatch.engine.cost_model.training_mode import TrainingMode
from isobatch.engine.runtime.models.image_grids import patch_positions
from isobatch.engine.runtime.models.transformers_models import from_transformers
from isobatch.engine.runtime.models.weights import names_of, state_dict_of
from isobatch.engine.runtime.pipeline import PipelineOptions
from isobatch.loaders.batch.model_inputs.inputs import model_inputs
from isobatch.tensors.rotary_positions import rotary_positions
from support.cases import record
from support.models.tiny_models import IMAGE, NAMES, make_batch, make_model, run_alone
from support.rank_programs.model_ranks import STEPS, ModelCase, run_model_cases

torch.set_num_threads(1)

TOLERANCE = 1e-5
MIXED = (1, 0, 3, 2, 0, 1)
"""Images of each sample."""


@pytest.fixture(scope="module", params=NAMES)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def model(name):
    return make_model(name)


def run_layers(layered, batch):
    """Loss of all layers one after the other; what crosses each cut is as its spec says."""
    carry = {}
    for place, layer in enumerate(layered.layers):
        carry = layer(carry, batch)
        specs = layered.specs(place + 1, batch)
        for key, spec in specs.items():
            assert (tuple(carry[key].shape), carry[key].dtype) == (spec.shape, spec.dtype), (
                place,
                key,
            )
        # every other cut is one between stages, which only what specs name crosses
        carry = {key: carry[key] for key in specs} if place % 2 else carry
    return carry["loss"]


def packed_loss(model, batch):
    with torch.no_grad():
        return model(**model_inputs(batch, model.config)).loss.item()


def gradients_of(model):
    return {
        key: weight.grad.clone()
        for key, weight in model.named_parameters()
        if weight.grad is not None
    }


def assert_like(layered, model, expected):
    """Gradients of each layer as one vector: single ones (a key's bias) are sums that cancel
    out.
    """
    names = {id(weight): key for key, weight in model.named_parameters()}
    for place, layer in enumerate(layered.layers):
        found, wanted = [], []
        for weight in layer.parameters():
            found.append(
                (torch.zeros_like(weight) if weight.grad is None else weight.grad).flatten()
            )
            wanted.append(expected.get(names[id(weight)], torch.zeros_like(weight)).flatten())
        off = float(
            (torch.cat(found) - torch.cat(wanted)).norm() / torch.cat(wanted).norm().clamp(min=1e-6)
        )
        assert off <= TOLERANCE, f"layer {place}: gradients off by {off:.1e}"


@pytest.mark.parametrize("image_counts", [MIXED, (2,), (0, 0, 0)])
@pytest.mark.parametrize("more", [{}, {"tied": True}])
def test_loss_and_gradients_equal_those_of_each_sample_alone(name, image_counts, more):
    model = make_model(name, **more)
    layered, batch = from_transformers(model), make_batch(name, image_counts)
    expected = run_alone(name, model, batch)
    wanted = gradients_of(model)
    model.zero_grad()
    loss = run_layers(layered, batch)
    loss.backward()
    assert loss.item() == pytest.approx(expected, rel=TOLERANCE)
    assert_like(layered, model, wanted)
    # what transformers gives no gradient gets none here
    if image_counts == MIXED:
        assert set(gradients_of(model)) == set(wanted)


@pytest.mark.parametrize("more", [{"vision_feature_layer": -1}, {"vision_feature_layer": 1}])
@pytest.mark.parametrize("kind", ["llava", "internvl", "siglip"])
def test_features_are_taken_from_the_layer_that_the_config_names(kind, more):
    if kind == "siglip":
        more = more | {"encoder": "siglip_vision_model", "vision_feature_select_strategy": "full"}
        kind = "llava"
    model, batch = make_model(kind, **more), make_batch(kind, (1, 2), seed=3)
    with torch.no_grad():
        expected = model(**model_inputs(batch, model.config)).loss
        assert run_layers(from_transformers(model), batch).item() == pytest.approx(
            expected.item(), rel=TOLERANCE
        )


def test_sliding_windows_are_kept():
    window = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
    model = make_model("internvl", text=window)
    assert "sliding_attention" in model.config.text_config.layer_types
    batch, plain = make_batch("internvl", (2, 0, 1)), make_model("internvl")
    with torch.no_grad():
        expected = packed_loss(model, batch)
        assert run_layers(from_transformers(model), batch).item() == pytest.approx(
            expected, rel=TOLERANCE
        )
        assert abs(packed_loss(plain, batch) - expected) > 1e-3


def test_an_empty_micro_batch_adds_nothing(name, model):
    model.zero_grad()
    loss = run_layers(from_transformers(model), make_batch(name, ()))
    loss.backward()
    assert loss.item() == 0
    assert all(not gradient.count_nonzero() for gradient in gradients_of(model).values())


def test_the_model_runs_as_before_outside_its_layers(name, model):
    batch = make_batch(name, MIXED)
    before = model.config.text_config._attn_implementation
    with torch.no_grad():
        expected = packed_loss(model, batch)
        run_layers(from_transformers(model), batch)
        assert model.config.text_config._attn_implementation == before
        assert packed_loss(model, batch) == expected


def test_flash_attention_gets_the_borders_of_the_samples(name, model, monkeypatch):
    """A stand-in for flash attention, which needs a GPU: it attends inside the borders that it is
    given.
    """
    batch, seen = make_batch(name, MIXED), []

    def varlen(
        module, query, key, value, attention_mask, cu_seq_lens_q=None, max_length_q=None, **kwargs
    ):
        assert "sample_borders" not in kwargs
        seen.append((cu_seq_lens_q.tolist(), max_length_q))
        groups = query.shape[1] // key.shape[1]
        key, value = (part.repeat_interleave(groups, dim=1) for part in (key, value))
        parts = [
            torch.nn.functional.scaled_dot_product_attention(
                *(part[:, :, begin:end] for part in (query, key, value)), is_causal=True
            )
            for begin, end in pairwise(cu_seq_lens_q.tolist())
        ]
        return torch.cat(parts, dim=2).transpose(1, 2), None

    transformers.AttentionInterface.register("flash_stand_in", varlen)
    layered = from_transformers(model)
    with torch.no_grad():
        expected = run_layers(layered, batch).item()
        monkeypatch.setattr(
            model.model.language_model.config, "_attn_implementation_internal", "flash_stand_in"
        )
        assert run_layers(layered, batch).item() == pytest.approx(expected, rel=TOLERANCE)
    assert seen == [(batch.cu_seqlens.tolist(), batch.max_seqlen)] * 2


def test_positions_of_qwen_are_those_of_the_reference():
    model, batch = make_model("qwen2_vl"), make_batch("qwen2_vl", MIXED, seed=5)
    grids, config = batch.image_grid_thw, model.config
    merge = config.vision_config.spatial_merge_size
    rows = rotary_positions(batch.input_ids == IMAGE, batch.cu_seqlens, grids, merge)
    taken = 0
    for count, (start, end) in zip(MIXED, pairwise(batch.cu_seqlens.tolist()), strict=True):
        ids = batch.input_ids[start:end][None]
        own = grids[taken : taken + count]
        expected, _ = model.model.get_rope_index(ids, (ids == IMAGE).int(), image_grid_thw=own)
        assert torch.equal(rows[:, start:end], expected[:, 0])
        taken += count
    assert torch.equal(rows, model_inputs(batch, config)["position_ids"][1:, 0])


def test_each_square_of_an_image_has_one_place_and_merged_ones_stand_together():
    grids = torch.tensor([[1, 4, 6], [2, 2, 4]])
    places = patch_positions(grids, 2)
    assert sorted(map(tuple, places[:24].tolist())) == [
        (row, column) for row in range(4) for column in range(6)
    ]
    assert torch.equal(places[24:32], places[32:])  # two frames
    assert (places.reshape(-1, 4, 2) // 2).diff(dim=1).count_nonzero() == 0


def test_weights_of_layers_have_the_names_of_transformers(name):
    model, other = make_model(name, tied=True), make_model(name, tied=True, seed=1)
    state = model.state_dict()
    for part in (model, other):
        layers = from_transformers(part).layers
        prefixes, by_place = names_of(part, layers), dict(enumerate(layers))
        own = state_dict_of(by_place, prefixes)
        assert all(
            part.state_dict()[key].data_ptr() == tensor.data_ptr() for key, tensor in own.items()
        )
        # LLaVA looks at the last layer but one: what is behind it is in no layer
        left_out = {key for key in state if key not in own}
        assert all("layers.2." in key or "post_layernorm" in key for key in left_out)
        assert bool(left_out) == (name == "llava")


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable:FutureWarning")
def test_what_cannot_be_run_is_refused():
    with pytest.raises(ConfigError, match="'llama'"):
        from_transformers(make_model("llava").model.language_model)
    with pytest.raises(ConfigError, match=r"vision_feature_layer = \[-2, -1\]"):
        from_transformers(make_model("llava", vision_feature_layer=[-2, -1]))
    with pytest.raises(ConfigError, match=r"text model 'gemma': give one of llama, "):
        from_transformers(make_model("llava", text={"model_type": "gemma"}))
    model = make_model("internvl")
    model.gradient_checkpointing_enable()
    with pytest.raises(ConfigError, match="gradient_checkpointing_disable"):
        from_transformers(model)


def test_batches_of_another_model_are_refused():
    layered, batch = from_transformers(make_model("internvl")), make_batch("internvl", (1, 0))
    broken = {
        "images=.patches.": {"pixel_values": batch.pixel_values[:0]},
        "raw": {"pixel_values": batch.pixel_values.to(torch.uint8)},
        r"rows of shape \(3, 14, 14\), the model takes \(3, 28, 28\)": {
            "pixel_values": torch.zeros(1, 3, 14, 14)
        },
        "0 image tokens .id 5., but the images give .* features .samples sample-0, sample-1": {
            "input_ids": torch.full_like(batch.input_ids, 9)
        },
    }
    for message, change in broken.items():
        with pytest.raises(ConfigError, match=message):
            run_layers(layered, replace(batch, **change))


def test_what_crosses_a_cut_is_known_without_pixels(name, model):
    """Ranks behind the first stage do not decode images."""
    layered = from_transformers(model)
    for counts in (MIXED, (0, 0), ()):
        batch = make_batch(name, counts)
        bare = replace(batch, pixel_values=batch.pixel_values[:0])
        for cut in range(1, len(layered.layers)):
            assert layered.specs(cut, bare) == layered.specs(cut, batch)


def test_weights_that_cannot_be_trained_are_refused():
    model = make_model("llava").half()
    with pytest.raises(ConfigError, match=r"trained in float16.*dtype=torch\.float32"):
        from_transformers(model)
    from_transformers(model.requires_grad_(False))
    head = model.lm_head
    head.weight = torch.nn.Parameter(head.weight.to(torch.int8), requires_grad=False)
    with pytest.raises(ConfigError, match=r"lm_head\.weight is quantized \(torch\.int8\)"):
        from_transformers(model)


def test_a_model_that_accelerate_moves_is_refused():
    hooks = pytest.importorskip("accelerate.hooks")
    model = make_model("llava")
    hooks.add_hook_to_module(model.lm_head, hooks.AlignDevicesHook(execution_device="cpu"))
    with pytest.raises(ConfigError, match="device_map"):
        from_transformers(model)


def test_modules_of_another_version_of_transformers_are_refused(name):
    model = make_model(name)
    model.language_model_elsewhere = model.model.language_model
    del model.model.language_model
    version = transformers.__version__
    with pytest.raises(
        ConfigError, match=rf"of transformers {version}: .*'language_model'; .*install"
    ):
        from_transformers(model)


@pytest.mark.parametrize("kind", ["mistral", "qwen2", "qwen3"])
def test_other_text_models_give_the_loss_of_transformers(kind):
    model, batch = make_model("llava", text={"model_type": kind}), make_batch("llava", MIXED)
    assert model.config.text_config.model_type == kind
    expected = packed_loss(model, batch)
    with torch.no_grad():
        assert run_layers(from_transformers(model), batch).item() == pytest.approx(
            expected, rel=TOLERANCE
        )


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_attention_is_inside_samples_however_the_model_is_set(name, model, implementation):
    batch = make_batch(name, MIXED)
    other = make_model(name)
    other.set_attn_implementation(implementation)
    with torch.no_grad():
        expected = packed_loss(model, batch)
        assert run_layers(from_transformers(other), batch).item() == pytest.approx(
            expected, rel=TOLERANCE
        )
    assert other.config.text_config._attn_implementation == implementation


def test_flash_attention_in_float32_is_refused(monkeypatch):
    model, batch = make_model("internvl"), make_batch("internvl", (1,))
    config = model.model.language_model.config
    monkeypatch.setattr(config, "_attn_implementation_internal", "flash_attention_2")
    with pytest.raises(ConfigError, match=r"flash_attention_2 .* torch\.float32; give .*mode"):
        run_layers(from_transformers(model), batch)


def test_weights_in_bf16_give_the_loss_of_transformers_in_bf16(name):
    batch = make_batch(name, MIXED)
    exact, model = packed_loss(make_model(name), batch), make_model(name).bfloat16()
    expected = packed_loss(model, replace(batch, pixel_values=batch.pixel_values.bfloat16()))
    loss = run_layers(from_transformers(model), batch)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected, rel=5e-3)
    assert loss.item() != exact
    loss.backward()
    assert all(gradient.dtype == torch.bfloat16 for gradient in gradients_of(model).values())


def test_no_key_value_cache_is_made(name):
    model, batch = make_model(name), make_batch(name, MIXED)
    model.config.use_cache = model.config.text_config.use_cache = True
    seen = []
    for layer in model.model.language_model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda _, __, given: seen.append(given), with_kwargs=True
        )
    run_layers(from_transformers(model), batch)
    assert len(seen) == 2
    assert all(
        given.get("past_key_values") is None and not given.get("use_cache") for given in seen
    )


CASES = [
    # cut inside the vision encoder
    ModelCase(name="llava", borders=(0, 2, 8), recompute=(1, 5)),
    # two stages a rank, so that both parts lie on both ranks
    ModelCase(
        name="internvl",
        borders=(0, 2, 5, 7, 9),
        recompute=(2, 3, 6),
        options=PipelineOptions(schedule="interleaved", stages_per_rank=2),
        frozen="model.vision_tower",
    ),
    # the token embedding on one rank, the head, which has the same weights, on the other
    ModelCase(name="qwen2_vl", borders=(0, 7, 9), recompute=(0, 2, 7), tied=True),
    ModelCase(
        name="qwen2_vl",
        borders=(0, 3, 9),
        recompute=(1, 2, 6),
        options=PipelineOptions(mode=TrainingMode(zero_stage=0)),
        tolerance=2e-2,
    ),
    # windows of the encoder, their order crosses the cut
    ModelCase(name="qwen2_5_vl", borders=(0, 3, 9), recompute=(1, 2)),
    # deep features cross a cut in the encoder, after it, and among the first decoder layers
    ModelCase(
        name="qwen3_vl",
        borders=(0, 2, 4, 7, 9),
        recompute=(1, 6),
        options=PipelineOptions(schedule="interleaved", stages_per_rank=2),
    ),
    ModelCase(name="qwen3_vl", borders=(0, 6, 9), frozen="model.visual"),
    # joined tiles cross the cut, and a weight of no module of transformers is sent
    ModelCase(name="llava_next", borders=(0, 3, 7)),
    ModelCase(name="llava_onevision", borders=(0, 3, 8), recompute=(3,)),
    # a tied and scaled embedding, two rotary embeddings, images that are seen both ways
    ModelCase(name="gemma3", borders=(0, 6, 8), recompute=(5, 6)),
]
# pixels are on the first rank, positions and tokens of videos on the second
VIDEO_CASES = [
    ModelCase(name="qwen2_vl", borders=(0, 3, 8), videos=True),
    ModelCase(name="qwen2_5_vl", borders=(0, 3, 9), recompute=(1, 2), videos=True),
    ModelCase(
        name="qwen3_vl",
        borders=(0, 2, 4, 7, 9),
        recompute=(1, 6),
        options=PipelineOptions(schedule="interleaved", stages_per_rank=2),
        videos=True,
    ),
    ModelCase(name="internvl", borders=(0, 5, 8), videos=True),
]


def test_a_pipeline_of_two_ranks_trains_as_transformers_alone(tmp_path):
    run_model_cases(str(tmp_path), CASES)
    for name in {case.name for case in CASES}:
        record("ranks", name, sum(len(step) for step in STEPS))


def test_a_pipeline_of_two_ranks_trains_on_videos_as_transformers_alone(tmp_path):
    pytest.importorskip("av")
    run_model_cases(str(tmp_path), VIDEO_CASES)
