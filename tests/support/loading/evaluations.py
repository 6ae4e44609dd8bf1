"""What an evaluation should give: each sample by itself, in one process."""

from dataclasses import asdict

import torch

from isobatch.common.types import LABEL_IGNORE, Limits
from isobatch.loaders import BalancedLoader, model_inputs

ALONE = Limits(max_seq_len=1, max_vision=0, min_seq_len=1, min_vision=0)
"""Caps that were chosen, and not given: each sample is over them, so a group of its own."""


def each_alone(rows, packing):
    """A micro-batch of each record."""
    given = packing | {"max_tokens": None, "max_vision": None}
    loader = BalancedLoader(rows, **given, shuffle=False, dp_rank=0, dp_world_size=1)
    state = loader.state_dict()
    state["stream"]["limits"] = asdict(ALONE)
    loader.load_state_dict(state)
    batches = [batch for (batch,) in loader]
    assert [batch.num_samples for batch in batches] == [1] * len(rows)
    loader.close()
    return batches


def loss_of_each(model, rows, packing):
    """Mean loss over all labels of records."""
    total, labels = 0.0, 0
    with torch.no_grad():
        for batch in each_alone(rows, packing):
            inputs = model_inputs(batch, model.config) | {"num_items_in_batch": 1}
            total += float(model(**inputs).loss)
            labels += int((batch.labels != LABEL_IGNORE).sum())
    return total / labels
