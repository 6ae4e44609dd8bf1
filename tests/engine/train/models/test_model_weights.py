"""Layers of transformers' models filled one by one: the values that whole models have."""

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from safetensors.torch import load_file

from isobatch.engine.runtime.models.transformers_models import from_transformers
from isobatch.engine.train.models import model_weights
from support.models.family_models import FAMILIES, make_family_model
from support.models.tiny_models import NAMES, lazy_model, make_model

ALL = [*NAMES, "qwen2_5_vl", "qwen3_vl", "llava_next", "llava_onevision", "gemma3"]


def make(name):
    return make_family_model(name) if name in FAMILIES else make_model(name)


@pytest.mark.parametrize("name", ALL)
def test_layers_filled_from_files_are_those_of_from_pretrained(name, tmp_path, monkeypatch):
    monkeypatch.setattr(model_weights, "BLOCK_BYTES", 300)  # several reads of most weights
    make(name).to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size="10KB")
    expected = transformers.AutoModelForImageTextToText.from_pretrained(
        tmp_path, dtype=torch.float32
    )
    files = list(tmp_path.glob("*.safetensors"))
    assert len(files) > 2
    model, weights = lazy_model(expected, tmp_path)
    if name.startswith("llava"):  # files have names of their own
        assert not {key for file in files for key in load_file(file)} <= set(model.state_dict())
    layers = from_transformers(model).layers
    for number, layer in enumerate(layers):
        tied = set(layers[0].parameters()) | set(layers[-1].parameters())
        before = [weight for weight in model.parameters() if weight.is_meta and weight not in tied]
        weights.fill(layer.parameters())
        filled = {weight for weight in before if not weight.is_meta}
        assert filled <= set(layer.parameters()), number  # and nothing of others
    weights.fill(model.parameters())  # layers that are not used
    state = model.state_dict() | dict(model.named_buffers())
    for key, value in (expected.state_dict() | dict(expected.named_buffers())).items():
        assert torch.equal(state[key], value), key


@pytest.mark.parametrize("name", ALL)
def test_random_layers_depend_on_the_seed_and_not_on_the_others(name):
    whole = make(name)
    states = []
    for seed, step in ((3, 1), (3, -1), (4, 1)):
        model, weights = lazy_model(whole, seed=seed)
        layers = from_transformers(model).layers[::step]
        before = torch.get_rng_state()
        for layer in layers:
            weights.fill(layer.parameters())
        assert torch.equal(before, torch.get_rng_state())
        states.append({key: value for key, value in model.named_parameters() if not value.is_meta})
    reference = transformers.AutoModelForImageTextToText.from_config(whole.config)
    for key, value in states[0].items():
        assert torch.equal(value, states[1][key]), key
        as_made = reference.get_parameter(key)
        if len(as_made.unique()) <= 2:  # zeros or ones, one row perhaps other than the rest
            assert torch.equal(value, as_made), key
        else:
            assert not torch.equal(value, states[2][key]), key
            ratio = float(value.detach().std() / as_made.detach().std())
            assert abs(ratio - 1) < 0.05 + 4 / value.numel() ** 0.5, (key, ratio)
