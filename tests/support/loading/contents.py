"""What a step holds, comparable."""

import dataclasses

import torch

from isobatch.loaders import MicroBatch


def content(step):
    """All that a step holds, comparable."""
    batches = [*step, *(batch for name in sorted(step.encoders) for batch in step.encoders[name])]
    return [
        [as_bytes(getattr(batch, field.name)) for field in dataclasses.fields(MicroBatch)]
        for batch in batches
    ]


def as_bytes(value):
    if isinstance(value, dict):
        return {name: as_bytes(each) for name, each in value.items()}
    return (
        (value.shape, value.dtype, value.numpy().tobytes())
        if isinstance(value, torch.Tensor)
        else value
    )
