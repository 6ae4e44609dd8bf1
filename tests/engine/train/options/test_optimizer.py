"""AdamW's groups and learning rates are those of transformers' Trainer."""

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from transformers.trainer_pt_utils import get_parameter_names

from isobatch.common.errors import ConfigError
from isobatch.engine.runtime.models.transformers_models import from_transformers
from isobatch.engine.train.optimizer import lr_factor, make_optimizer, set_lr
from isobatch.engine.train.options import OptimizerOptions, Schedule
from support.models.family_models import make_family_model

STEPS, WARMUP = 20, 4
NORMS = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
"""What `Trainer.get_decay_parameter_names` leaves out by name."""


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_matrices_decay_as_in_transformers_and_vectors_do_not(name):
    model = make_family_model(name)
    layers = dict(enumerate(from_transformers(model).layers))
    parts = ["vision"] * 4 + ["llm"] * (len(layers) - 4)
    options = OptimizerOptions(weight_decay=0.1, lr=1e-3, lr_vision=1e-4, beta1=0.8, eps=1e-6)
    optimizer = make_optimizer(layers, parts, options)
    decays = {
        id(weight): group["weight_decay"]
        for group in optimizer.param_groups
        for weight in group["params"]
    }
    assert len(decays) == len(
        {id(weight) for layer in layers.values() for weight in layer.parameters()}
    )
    expected = set(get_parameter_names(model, [torch.nn.LayerNorm], NORMS))
    differ = {
        parameter
        for parameter, weight in model.named_parameters()
        if id(weight) in decays and (decays[id(weight)] > 0) != (parameter in expected)
    }
    # its name says no norm, so there the Trainer's rule lets it decay
    assert all(".norm" in parameter or "ln_q" in parameter for parameter in differ), differ
    rates = {(group["lr"], group["weight_decay"]) for group in optimizer.param_groups}
    assert rates == {(1e-4, 0.1), (1e-4, 0.0), (1e-3, 0.1), (1e-3, 0.0)}
    assert optimizer.defaults["betas"] == (0.8, 0.999)
    assert optimizer.defaults["eps"] == 1e-6
    for layer in layers.values():
        layer.requires_grad_(False)
    assert make_optimizer(layers, parts, options) is None


@pytest.mark.parametrize("name", Schedule.__args__)
def test_learning_rates_are_those_of_transformers(name):
    warmup = 0 if name == "constant" else WARMUP
    options = OptimizerOptions(lr=0.5, lr_schedule=name, warmup_steps=warmup / STEPS)
    factor = lr_factor(options, STEPS)
    weight = torch.nn.Parameter(torch.ones(1))
    theirs, ours = (torch.optim.SGD([weight], lr=0.5) for _ in range(2))
    ours.param_groups[0]["initial_lr"] = 0.5
    scheduler = transformers.get_scheduler(name, theirs, warmup, STEPS)
    for step in range(STEPS):
        set_lr(ours, factor(step))
        assert ours.param_groups[0]["lr"] == theirs.param_groups[0]["lr"]
        theirs.step()
        scheduler.step()


def test_a_schedule_that_transformers_refuses_is_one_line():
    options = OptimizerOptions(lr=1e-8, lr_schedule="polynomial", warmup_steps=1)
    with pytest.raises(ConfigError, match="--lr-schedule polynomial is one of transformers: "):
        lr_factor(options, STEPS)
