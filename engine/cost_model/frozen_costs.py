"""Costs with parts of the model frozen, from costs with all of it trained: a profile need not be
measured again. Pure.

Backward passes change, and what they need of the forward passes. Weights keep the memory of trained
ones, for costs do not tell what of it is gradients and optimizer state: never too little.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from balance.errors import ConfigError
from engine.cost_model.costs import Costs


def frozen_costs(costs: Costs, trained: Sequence[bool]) -> Costs:
    """The costs if only the layers `trained`, (layers,), are trained.

    The first of them needs no gradient of its input, those before it no backward pass at all, and
    others that are not trained none for weights. ConfigError if the costs are without a gradient
    where there is to be one.
    """
    is_trained = np.array(trained, np.bool_)
    first = int(is_trained.argmax()) if is_trained.any() else len(is_trained)
    known = int(costs.sends_grad.argmax()) if costs.sends_grad.any() else costs.num_layers
    if len(is_trained) != costs.num_layers or first < known:
        raise ConfigError(
            f"the costs are of {costs.num_layers} layers, trained from layer {known} on, but {len(is_trained)} layers "
            f"are to be trained from layer {first} on: measure with these parts trained"
        )
    # each (layers, 1)
    places = np.arange(costs.num_layers)[:, np.newaxis]
    goes_back, goes_on, learns = places >= first, places > first, is_trained[:, np.newaxis]
    return replace(
        costs,
        input_grad_ns=costs.input_grad_ns * goes_on,
        weight_grad_ns=costs.weight_grad_ns * (learns & goes_back),
        recompute_ns=costs.recompute_ns * goes_back,
        saved_bytes=costs.saved_bytes * goes_back,
        kept_bytes=costs.kept_bytes * goes_back,
        sends_grad=goes_back[:, 0],
    )
