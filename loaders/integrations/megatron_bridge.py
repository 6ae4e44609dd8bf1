"""`BridgeIterator`: a loader's micro-batches for Megatron-Bridge's iterator.

Imports nothing of Megatron: batches are dicts, and the container of the pixels is given. Bridge 0.3
packs in its step, from a padded row per sample; Bridge 0.6 is given one row (THD) with the borders
of its samples. Pixels stay on the CPU; Bridge moves what it is given.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from isobatch.common.errors import ConfigError
from isobatch.loaders.batch.micro_batch import MicroBatch
from isobatch.loaders.batch.model_inputs.inputs import config_of
from isobatch.loaders.batch.packed import packed_batch
from isobatch.loaders.integrations.adapter_checks import check_media
from isobatch.loaders.integrations.torch_dataset import StepDataset
from isobatch.loaders.step_stream import StepStream
from isobatch.tensors.token_loss import shift_labels

Layout = Literal["rows", "thd"]
"""Of a batch: "rows", a sample each (Bridge 0.3, `pack_sequences_in_batch`), or "thd" (0.6)."""
VISUAL_FIELDS: dict[Layout, tuple[str, ...]] = {
    "rows": ("pixel_values", "image_grid_thw"),
    "thd": ("pixel_values", "pixel_values_videos", "image_grid_thw", "video_grid_thw"),
}
"""Fields of `Qwen2_5_VLVisualInputs` (0.3.1) and `GenericVisualInputs` (main) that are filled."""


@dataclass(frozen=True, slots=True)
class BridgeBatches:
    """How micro-batches become Bridge's dicts."""

    model: Any
    """A model of transformers, or its config."""
    visual_inputs: Callable[..., Any]
    """Bridge's container of pixels and grids, a class of `training.utils.visual_inputs`."""
    layout: Layout = "thd"
    pad_each_to: int = 1
    """Tokens that each sample is padded to a multiple of: 2 * context-parallel ranks, and those of
    sequence parallelism. The same as the build's or the loader's. For "thd"."""
    pad_total_to: int | None = None
    """Tokens of each row, for pipeline stages that want one shape; for "thd"."""

    def __post_init__(self) -> None:
        if self.layout not in VISUAL_FIELDS:
            raise ConfigError(f"layout is {self.layout!r}; use 'rows' (Bridge 0.3) or 'thd' (0.6)")
        if self.layout == "rows" and (self.pad_each_to != 1 or self.pad_total_to is not None):
            raise ConfigError("layout is 'rows', which Bridge pads itself; leave out pad_each_to")

    def __call__(self, batch: MicroBatch) -> dict[str, Any]:
        """Bridge's dict: `input_ids`, `labels` (shifted) and `position_ids` int64, `loss_mask`
        float32, (1, T), or (samples, longest) with an `attention_mask`; `visual_inputs`.

        "thd" also has `cu_seqlens_q` and `_kv`, those with `_padded`, int32, (samples + 1,), and
        `max_seqlen_q` and `_kv`, int32, 0-d. M-RoPE is what Bridge's models compute of the grids.
        ConfigError as of `packed_batch`, and for media that are not in `VISUAL_FIELDS`.
        """
        config = config_of(self.model)
        packed = packed_batch(
            batch, config, pad_each_to=self.pad_each_to, pad_total_to=self.pad_total_to
        )
        names = VISUAL_FIELDS[self.layout]
        check_media(packed.media, names, f"Bridge with layout={self.layout!r}")
        visual = {name: packed.media[name] for name in names if name in packed.media}
        shared = {"attention_mask": None, "visual_inputs": self.visual_inputs(**visual)}
        if self.layout == "rows":
            return shared | _rows(packed.samples)
        borders, places = packed.cu_seqlens, packed.cu_seqlens_padded
        longest = torch.tensor(packed.max_seqlen, dtype=torch.int32)
        names_of_row = "input_ids", "labels", "loss_mask", "position_ids"
        values: dict[str, Tensor] = {name: getattr(packed, name)[None] for name in names_of_row}
        for kind in ("q", "kv"):
            values |= {f"cu_seqlens_{kind}": borders, f"cu_seqlens_{kind}_padded": places}
            values[f"max_seqlen_{kind}"] = longest
        return shared | values


class BridgeIterator:
    """Micro-batches without end, one per `next`, as Bridge's schedules take them.

    Bridge asks `micro_batches_per_step` times per step. For `dataloader_type="external"`. State by
    its hook, `dataset.dataloader_save`: after whole steps, and for any number of ranks.
    """

    def __init__(self, loader: StepStream, batches: BridgeBatches) -> None:
        self.loader, self._batches = loader, batches
        self._stream: Iterator[tuple[dict[str, Any], dict[str, Any] | None]] | None = None
        self._state = loader.state_dict()

    def __iter__(self) -> "BridgeIterator":
        return self

    def __next__(self) -> dict[str, Any]:
        if self._stream is None:
            self._stream = _stream(self.loader, self._batches)
        batch, state = next(self._stream)
        if state is not None:
            self._state = state
        return batch

    def save_state(self) -> dict[str, Any]:
        """Position after the last step of which all micro-batches were taken."""
        return self._state

    def restore_state(self, state: dict[str, Any]) -> None:
        """Go on after a position, on any number of ranks."""
        self.loader.load_state_dict(state)
        self._state, self._stream = state, None


def _stream(
    loader: StepStream, batches: BridgeBatches
) -> Iterator[tuple[dict[str, Any], dict[str, Any] | None]]:
    """Batches, the last of each step with the state after it."""
    for step in StepDataset(loader):
        *others, last = step.micro_batches
        for batch in others:
            yield batches(batch), None
        yield batches(last), step.state


def _rows(batch: MicroBatch) -> dict[str, Tensor]:
    """(samples, longest), padded on the right, from which 0.3 packs."""
    padded = batch.padded()
    borders = torch.tensor([0, padded["labels"].shape[1]])
    labels = torch.stack([shift_labels(row, borders) for row in padded["labels"]])
    loss_mask = (labels != -100).float()
    if batch.loss_weights is not None:
        weights = torch.zeros_like(loss_mask)
        weights[padded["attention_mask"].bool()] = batch.loss_weights
        loss_mask *= weights
    return {
        "input_ids": padded["input_ids"],
        "attention_mask": padded["attention_mask"],
        "labels": labels,
        "loss_mask": loss_mask,
        "position_ids": padded["position_ids"],
    }
