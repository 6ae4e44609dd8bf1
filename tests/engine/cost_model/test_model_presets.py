"""Model presets of the papers: parameters of every part, and layers as OmniBal's Table 9 sums
them.
"""

import pytest

from isobatch.engine.cost_model.layer_list import layers_of
from isobatch.engine.cost_model.parallel import Parallelism
from isobatch.models.presets import load_model
from support.cases import for_each

BILLIONS = {
    # published parameters of vision encoder and language model: model cards of OpenGVLab, BAAI,
    # InternLM, Meta, 01.AI, Qwen; EVA-CLIP's are of the vision tower alone
    "internvl_1_5": (5.54, 19.86),
    "internvit_6b_llama3_8b": (5.54, 8.03),
    "internvit_6b_yi_34b": (5.54, 34.39),
    "internvit_6b_llama3_70b": (5.54, 70.55),
    "internvit_6b_qwen1_5_110b": (5.54, 111.2),
    "eva_clip_1b_internlm2_20b": (1.01, 19.86),
    "eva_clip_4b_internlm2_20b": (4.35, 19.86),
    "eva_clip_8b_internlm2_20b": (7.53, 19.86),
    "eva_clip_18b_internlm2_20b": (17.6, 19.86),
    "pipetune_7b": (0.413, 6.74),
    "pipetune_13b": (0.413, 13.02),
}
TABLE_9 = {
    "internvit_6b_llama3_8b": [16, 17, 20, 24],
    "internvl_1_5": [22, 23, 24, 24],
    "internvit_6b_yi_34b": [28, 29, 24, 24],
    "internvit_6b_llama3_70b": [22, 23, 13, 14, 14, 14, 13, 12],
    "internvit_6b_qwen1_5_110b": [21, 22, 13, 13, 14, 14, 14, 14],
    "eva_clip_1b_internlm2_20b": [43, 16, 15, 14],
    "eva_clip_8b_internlm2_20b": [17, 18, 23, 22],
    "eva_clip_18b_internlm2_20b": [18, 19, 25, 34],
}


def parameters(name, part, *, without=()):
    layers = layers_of(load_model(name), Parallelism())
    return (
        sum(
            layer.num_params for layer in layers if layer.part == part and layer.kind not in without
        )
        / 1e9
    )


@for_each("name", BILLIONS)
def test_every_part_has_its_published_number_of_parameters(name):
    vision, llm = BILLIONS[name]
    assert parameters(name, "vision") == pytest.approx(vision, rel=0.02)
    assert parameters(name, "llm") == pytest.approx(llm, rel=0.02)


@pytest.mark.parametrize(
    ("size", "billions"), [("10b", (2, 0.6, 7)), ("18b", (3, 0.6, 14)), ("84b", (6, 6, 72))]
)
def test_orchmllms_models_have_the_sizes_of_its_table_1(size, billions):
    for part, published in zip(("vision", "audio", "llm"), billions, strict=True):
        outside = ("token_embedding", "head") if part == "llm" else ()
        # the table rounds to one digit
        assert parameters(f"orchmllm_{size}", part, without=outside) == pytest.approx(
            published, rel=0.1
        )


def test_pipetunes_3b_has_2_billion_parameters_by_the_papers_own_dimensions():
    assert parameters("pipetune_3b", "llm") == pytest.approx(2.07, rel=0.01)


@for_each("name", TABLE_9)
def test_table_9_shares_out_all_transformer_layers(name):
    model = load_model(name)
    assert model.vit.num_layers + model.llm.num_layers == sum(TABLE_9[name])


def test_table_9s_sum_for_eva_clip_4b_is_of_no_published_model():
    model = load_model("eva_clip_4b_internlm2_20b")
    assert (model.vit.num_layers, sum([39, 22, 21, 20]) - model.llm.num_layers) == (64, 54)
