"""Training modes: bytes of a parameter by hand, activations of fp32, what cannot be."""

import numpy as np
import pytest

from isobatch.common.errors import ConfigError
from isobatch.engine.cost_model.analytical import layer_costs
from isobatch.engine.cost_model.loads import Loads
from isobatch.engine.cost_model.parallel import Parallelism, Training
from isobatch.engine.cost_model.training_mode import TrainingMode
from isobatch.models.clusters import load_cluster
from isobatch.models.presets import load_model
from support.cases import for_each


@for_each(
    ("mode", "trained", "per_param"),
    [
        ({"zero_stage": 0}, True, 2 + 4 + 12),
        ({"zero_stage": 1}, True, 2 + 4 + 12 / 4),
        ({"zero_stage": 2}, True, 2 + 4 / 4 + 12 / 4),
        ({"zero_stage": 3}, True, 18 / 4),
        ({"zero_stage": 1}, False, 2),
        ({"zero_stage": 3}, False, 0.5),
        ({"gradients": "bf16"}, True, 2 + 2 + 12 / 4),
        ({"precision": "fp32", "zero_stage": 0}, True, 4 + 4 + 8),
        ({"precision": "fp32"}, True, 4 + 4 + 8 / 4),
        ({"precision": "fp32"}, False, 4),
    ],
)
def test_bytes_of_a_parameter_on_one_of_four_replicas(mode, trained, per_param):
    assert TrainingMode(**mode).state_bytes(1_000_000, 4, trained=trained) == 1_000_000 * per_param


@for_each(
    "wrong", [{"zero_stage": 4}, {"precision": "fp16"}, {"gradients": "bf16", "precision": "fp32"}]
)
def test_a_mode_that_cannot_be_is_an_error(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        TrainingMode(**wrong)


def test_fp32_doubles_activations_of_fused_kernels_and_messages():
    model, loads = (
        load_model("tiny"),
        Loads.constant(1, images=2, vit_tokens_per_image=17, seq_len=100),
    )
    half, whole = (
        layer_costs(
            model,
            load_cluster("a100_80g"),
            Parallelism(),
            loads,
            Training(mode=TrainingMode(precision=precision), kernels="fused"),
        )
        for precision in ("bf16", "fp32")
    )
    for name in ("saved_bytes", "kept_bytes", "working_bytes", "sent_bytes"):
        difference = np.abs(getattr(whole, name) - 2 * getattr(half, name))
        # rounded; but the loss is float32 in both, which are chunks of the head's work
        assert (difference[:-1] if name == "working_bytes" else difference).max() <= 1
    assert (whole.forward_ns >= half.forward_ns).all()
