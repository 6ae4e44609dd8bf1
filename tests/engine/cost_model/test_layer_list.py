"""Layers of a model: complete, in order, split evenly over GPUs; activations by the formula
stated.
"""

import pytest

from isobatch.common.config import preset_names
from isobatch.common.errors import ConfigError
from isobatch.engine.cost_model.layer_list import layers_of, phases_of
from isobatch.engine.cost_model.operations import MatMul
from isobatch.engine.cost_model.parallel import Parallelism, Training
from isobatch.models.presets import load_model, model_from_dict, model_to_dict
from support.cases import for_each

ONE, TWO = Parallelism(), Parallelism(tp=2)
FUSED = Training(kernels="fused")


def kinds(layers):
    return [layer.kind for layer in layers]


def only(layers, kind):
    return next(layer for layer in layers if layer.kind == kind)


def test_layers_stand_in_the_order_in_which_a_micro_batch_passes_them():
    assert kinds(layers_of(load_model("internvl_1_5"), TWO)) == [
        "patch_embedding",
        *["vision_layer"] * 45,
        "vision_projector",
        "token_embedding",
        *["llm_layer"] * 48,
        "head",
    ]
    heard = kinds(layers_of(load_model("orchmllm_10b"), ONE))
    assert heard[:3] == ["audio_embedding", "audio_layer", "audio_layer"]
    assert heard.index("audio_projector") == 33 == heard.index("patch_embedding") - 1


@for_each("name", [name for name in preset_names("models") if load_model(name).has_dimensions])
def test_weights_of_all_products_are_the_layers_parameters_but_for_norms(name):
    for layer in set(layers_of(load_model(name), ONE)):
        weights = sum(
            each.inputs * each.outputs for each in layer.operations if isinstance(each, MatMul)
        )
        if layer.kind == "token_embedding":
            assert weights == 0
        else:
            vit, llm = load_model(name).dimensions
            # of experts a token goes to some; a mean layer's width is a whole number
            idle = llm.held_weights - llm.layer_weights if layer.kind == "llm_layer" else 0
            mean = llm.hidden_size if llm.linear_weights else 0
            assert abs(layer.num_params - layer.gpu_params) <= mean
            assert 0 <= layer.num_params - idle - weights <= 4 * vit.projector[0] + 20_000 + mean


def test_gpus_hold_whole_heads_so_that_25_on_two_are_13_on_each():
    vision, llm = (
        only(layers_of(load_model("internvl_1_5"), TWO), kind)
        for kind in ("vision_layer", "llm_layer")
    )
    assert llm.gpu_params - 2 * 6144 == (llm.num_params - 2 * 6144) // 2
    assert vision.gpu_params > vision.num_params / 2
    assert [each.inputs for each in vision.operations if isinstance(each, MatMul)][1] == 13 * 128


@pytest.mark.parametrize(
    ("name", "kind", "widths", "plain"),
    [
        ("internvl_1_5", "vision_layer", 40, 56),
        # 16 + 4 x 7/6 + 8 x 8/3 with modules of transformers
        ("internvl_1_5", "llm_layer", 28 + 2 / 3, 42),
        ("eva_clip_8b_internlm2_20b", "vision_layer", 36, 36),
    ],
)
def test_activations_saved_are_so_many_bytes_per_token_and_width(name, kind, widths, plain):
    model = load_model(name)
    layer = only(layers_of(model, ONE, FUSED), kind)
    width = (model.vit if kind == "vision_layer" else model.llm).hidden_size
    assert layer.saved.trained == pytest.approx(widths * width)
    assert only(layers_of(model, ONE), kind).saved.trained == pytest.approx(plain * width)
    assert layer.input_bytes == 2 * width


def test_sequence_parallelism_shares_out_what_tensor_parallelism_alone_does_not():
    model = load_model("internvl_1_5")
    shared = only(layers_of(model, TWO, FUSED), "llm_layer")
    alone = only(layers_of(model, Parallelism(tp=2, sequence_parallel=False), FUSED), "llm_layer")
    # inputs and outputs of two norms, 8 bytes per width, are whole on each GPU
    assert alone.saved.trained - shared.saved.trained == 8 * 6144 / 2
    assert (alone.input_bytes, shared.input_bytes) == (2 * 6144, 6144)
    assert alone.sent[0][1] == 2 * shared.sent[0][1]


def test_a_frozen_layer_that_hands_a_gradient_on_saves_no_inputs_of_products():
    for training, inputs in ((FUSED, 4), (None, 8)):  # normalized inputs too, in transformers
        layer = only(layers_of(load_model("internvl_1_5"), ONE, training), "llm_layer")
        assert layer.saved.trained - layer.saved.frozen == inputs * 6144 + 2 * 16384


def test_deferred_weight_gradients_need_what_products_take_and_the_gradients_of_what_they_make():
    layers = layers_of(load_model("internvl_1_5"), ONE, FUSED)
    # norms' outputs, attention's and GELU's; gradients of query-key-value, two residuals, GELU
    h, f = 3200, 12800
    assert only(layers, "vision_layer").deferred_bytes == 2 * (3 * h + f + 3 * h + 2 * h + f)
    embedding, head = only(layers, "token_embedding"), only(layers, "head")
    assert embedding.deferred_bytes == 0
    logits = 2 * load_model("internvl_1_5").dimensions[1].vocab_size
    # their gradient takes their place
    assert head.deferred_bytes == 2 * 6144 + logits
    assert head.saved.trained - head.saved.frozen == 2 * 6144
    assert head.saved.frozen == 2 * 6144 + logits


def test_features_of_the_audio_encoder_travel_along_through_the_vision_encoder():
    model = load_model("orchmllm_84b")
    layers = layers_of(model, ONE)
    sent = dict(only(layers, "vision_layer").sent)
    features = {stream: size for stream, size in sent.items() if stream.phase == "audio"}
    assert list(features.values()) == [2 * 8192]
    assert next(iter(features)).per_token == 1 / 4
    assert {stream.phase for stream, _ in only(layers, "llm_layer").sent} == {"llm"}


def test_a_kind_of_layer_is_one_object_and_goes_by_one_phase():
    model = load_model("orchmllm_10b")
    layers = layers_of(model, TWO)
    assert len(set(layers)) == len(set(kinds(layers))) == 9
    assert phases_of(model)["vision_projector"] == "vision"
    assert phases_of(model)["head"] == "labels"


def test_a_preset_without_dimensions_is_an_error():
    values = model_to_dict(load_model("tiny")) | {"vit": None}
    with pytest.raises(ConfigError, match=r"model preset tiny has no \[vit\] and \[llm\] tables"):
        layers_of(model_from_dict(values), ONE)
