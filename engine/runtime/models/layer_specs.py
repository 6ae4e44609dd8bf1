"""Layers that know the specs of their output: `SpecLayer`.

For the layers of transformers' models (`engine.runtime.models.transformers_models`). A spec depends
on the micro-batch alone and holds no layer: a rank that drops other ranks' layers still knows what
they will send. It needs no pixels: ranks after the first leave images undecoded.
"""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from isobatch.engine.runtime.stage_io import Batch, StageTensors, TensorSpec, host_of

FEATURES, HIDDEN = "features", "hidden"
"""Tensors that cross cuts: before the token embedding, and after it."""

_DEEP = "deepstack_"

OutputSpecs = Callable[[Batch], Mapping[str, TensorSpec]]
"""Specs of a layer's output for one micro-batch."""


class SpecLayer(nn.Module):
    """A layer `(tensors, batch) -> tensors` with the specs of its output."""

    def __init__(self, output_specs: OutputSpecs) -> None:
        super().__init__()
        self.output_specs = output_specs

    def no_features(self, batch: Batch, like: Tensor) -> Tensor:
        """Empty features for a micro-batch without images, on the device of `like`."""
        dtype = next(self.parameters()).dtype  # the spec has that of before a training mode
        shape = self.output_specs(host_of(batch))[FEATURES].shape
        return torch.zeros(shape, dtype=dtype, device=like.device)


def hidden_specs(width: int, dtype: torch.dtype) -> OutputSpecs:
    """`hidden`: (1, tokens, width)."""
    return lambda batch: {HIDDEN: TensorSpec(shape=(1, len(batch.input_ids), width), dtype=dtype)}


def patch_specs(tokens: int, width: int, dtype: torch.dtype) -> OutputSpecs:
    """`features` of patches of one size: (patches, tokens, width)."""
    return lambda batch: {
        FEATURES: TensorSpec(shape=(pixel_rows(batch), tokens, width), dtype=dtype)
    }


def row_specs(num_rows: Callable[[int], int], width: int, dtype: torch.dtype) -> OutputSpecs:
    """`features`: (rows, width); `num_rows` maps the rows of `pixel_values` to that number."""
    return lambda batch: {
        FEATURES: TensorSpec(shape=(num_rows(pixel_rows(batch)), width), dtype=dtype)
    }


def deep_name(level: int) -> str:
    """Name of the features that the decoder layer of this number adds to its output (Qwen3-VL)."""
    return f"{_DEEP}{level}"


def deep_tensors(inputs: StageTensors, *, after: int = -1) -> StageTensors:
    """Features that decoder layers after this number add."""
    return {
        name: tensor
        for name, tensor in inputs.items()
        if name.startswith(_DEEP) and int(name.removeprefix(_DEEP)) > after
    }


def add_specs(specs: OutputSpecs, levels: Iterable[int], like: OutputSpecs) -> OutputSpecs:
    """`specs`, and those of deep features of these levels: as the `features` of `like`."""
    names = [deep_name(level) for level in levels]
    if not names:
        return specs
    return lambda batch: {**specs(batch), **dict.fromkeys(names, like(batch)[FEATURES])}


def pixel_rows(batch: Batch) -> int:
    """Rows of `pixel_values` once decoded: patches, or ViT tokens at native resolution."""
    rows = len(batch.pixel_values)
    if rows or not len(batch.patches_per_image):
        return rows
    if batch.image_grid_thw is None:
        return int(batch.patches_per_image.sum())
    return int(batch.image_grid_thw.prod(1).sum())
