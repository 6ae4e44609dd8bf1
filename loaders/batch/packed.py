"""`packed_batch`: a `MicroBatch` as one padded row (THD), for packed trainers.

What Megatron, NeMo Automodel, TorchTitan and others share: labels that are shifted already, a loss
mask, the borders of samples with and without padding, and positions, all padded alike. An adapter
renames them. Pure; reads tensors' values, so call it on the CPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from isobatch.common.errors import ConfigError
from isobatch.common.types import LABEL_IGNORE
from isobatch.loaders.batch.micro_batch import MicroBatch
from isobatch.loaders.batch.model_inputs.family import Arguments, config_of_text, vision_tokens
from isobatch.loaders.batch.model_inputs.inputs import (
    blank_media_tokens,
    config_of,
    media_arguments,
    with_blank_media,
    with_blank_sample,
)
from isobatch.tensors.token_loss import shift_labels

TEXT, IMAGE, VIDEO, AUDIO = range(4)
"""`mm_token_type_ids` of transformers' processors."""
SEQ_LENS_FILL = -1000
"""Automodel's, after the last sample of a row of `seq_lens`."""
EMPTY_SAMPLE_ID = "(nothing)"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedBatch:
    """Samples in one row of T tokens; i has `cu_seqlens_padded[i]:cu_seqlens_padded[i + 1]`.

    A sample's tokens come first there, then its padding. All tensors are new, on the device of the
    micro-batch.
    """

    input_ids: Tensor
    """int64, (T,)."""
    labels: Tensor
    """int64, (T,). Of the next token, -100 = no loss: the trainer must not shift again."""
    loss_mask: Tensor
    """float32, (T,). 1 where there is a label, or its weight (`loss_weights`); else 0."""
    position_ids: Tensor
    """int64, (T,). From 0 in each sample; its padding continues."""
    mrope_positions: Tensor | None
    """int64, (3, T). Frames, rows, columns as of `model_inputs`; the padding continues after the
    sample's largest in all three. None for models without M-RoPE, and without `model`.
    """
    mm_token_type_ids: Tensor | None
    """int64, (T,). 0 text and padding, 1 image, 2 video, 3 audio; None without `model`."""
    is_token: Tensor
    """bool, (T,). False in the padding."""
    cu_seqlens: Tensor
    """int32, (samples + 1,). Running sums of the samples' lengths without padding: not places."""
    cu_seqlens_padded: Tensor
    """int32, (samples + 1,). Places of the samples; from 0 to T."""
    max_seqlen: int
    """Tokens of the longest sample, padding included."""
    media: Arguments
    """What the model's encoders take, by the names in transformers: `pixel_values`,
    `image_grid_thw`, `pixel_values_videos`, ... Empty without `model`.
    """
    samples: MicroBatch
    """The micro-batch, with the blank samples at its end; `loss_divisor` is its."""

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.input_ids)

    @property
    def num_samples(self) -> int:
        """Samples, blank ones included."""
        return len(self.cu_seqlens) - 1

    def unpadded(self, values: Tensor) -> Tensor:
        """Values of (..., T) without those of the padding, as in `samples`."""
        return values[..., self.is_token]

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "PackedBatch":
        """The same with all tensors on `device`."""

        def moved(value: Any) -> Any:
            if isinstance(value, dict):
                return {name: moved(part) for name, part in value.items()}
            is_moved = isinstance(value, Tensor | MicroBatch)
            return value.to(device, non_blocking=non_blocking) if is_moved else value

        values = {part.name: moved(getattr(self, part.name)) for part in fields(self)}
        return replace(self, **values)


class SeqLens(NamedTuple):
    """Lengths of samples, a row per packed batch; int64, (batches, most samples of one)."""

    seq_lens: Tensor
    """Without padding."""
    seq_lens_padded: Tensor


def packed_batch(
    batch: MicroBatch,
    model: Any = None,
    *,
    pad_each_to: int = 1,
    pad_total_to: int | None = None,
    pad_token_id: int | None = None,
    always_encode: bool = True,
) -> PackedBatch:
    """The micro-batch in one row, each sample padded on the right to a multiple of `pad_each_to`.

    `model`: a model of transformers or its config, as `model_inputs` takes it: M-RoPE, token types
    and media need it, and blank images and clips, which are added as there (`always_encode`).
    Without one the row is the text alone, and an empty micro-batch one token without a label.

    `pad_total_to`: T, of which the last sample has the rest as padding; `packed_length` says which
    is enough. `pad_token_id`: by default the config's, or 0.

    ConfigError as of `model_inputs`, for a micro-batch that is planned to be padded (`is_padded`),
    if it does not fit `pad_total_to`, or if that is not a multiple of `pad_each_to`. ValueError for
    an empty one with `always_encode=False`.
    """
    _check_multiples(batch, pad_each_to, pad_total_to)
    config = None if model is None else config_of(model)
    media: Arguments = {}
    mrope = types = None
    if config is not None:
        batch, config, family = with_blank_media(batch, config, always_encode=always_encode)
        media = media_arguments(batch, config, family)
        positions = family.positions(batch, config)
        mrope = positions[1:, 0] if positions.ndim == 3 else None
        types = _token_types(batch, config)
    elif not batch.num_samples:
        if not always_encode:
            raise ValueError("an empty micro-batch; skip it, or leave always_encode=True")
        batch = with_blank_sample(batch, EMPTY_SAMPLE_ID, 1, 0)
    if pad_token_id is None:  # some configs have none, or -1
        configured = getattr(config_of_text(config), "pad_token_id", None)
        pad_token_id = max(0, configured or 0)
    # Places of the samples
    lengths = batch.cu_seqlens.diff().long()
    slots = -(-lengths // pad_each_to) * pad_each_to
    if pad_total_to is not None:
        missing = pad_total_to - int(slots.sum())
        if missing < 0:
            raise ConfigError(
                f"a micro-batch has {int(slots.sum()):,} tokens with padding and blank samples, "
                f"more than pad_total_to {pad_total_to:,}; `loaders.packed_length` of the cap says "
                "what is enough, if the build or loader has the same pad_each_to"
            )
        slots[-1] += missing
    borders = torch.cat([slots.new_zeros(1), slots.cumsum(0)])
    positions = torch.arange(int(borders[-1]), device=slots.device)
    positions -= borders[:-1].repeat_interleave(slots)
    is_token = positions < lengths.repeat_interleave(slots)

    def placed(values: Tensor, padding: int) -> Tensor:
        row = values.new_full((*values.shape[:-1], len(is_token)), padding)
        row[..., is_token] = values
        return row

    # Values there
    labels = placed(shift_labels(batch.labels, batch.cu_seqlens), LABEL_IGNORE)
    loss_mask = (labels != LABEL_IGNORE).float()
    if batch.loss_weights is not None:
        loss_mask *= placed(batch.loss_weights, 0)
    if mrope is not None:
        # after the largest of a sample, its padding counts on as text does
        ends = torch.stack([part.max() + 1 for part in torch.split(mrope, lengths.tolist(), dim=1)])
        mrope = placed(mrope, 0)
        continued = positions + (ends - lengths).repeat_interleave(slots)
        mrope[:, ~is_token] = continued[~is_token]
    return PackedBatch(
        input_ids=placed(batch.input_ids, pad_token_id),
        labels=labels,
        loss_mask=loss_mask,
        position_ids=positions,
        mrope_positions=mrope,
        mm_token_type_ids=None if types is None else placed(types, TEXT),
        is_token=is_token,
        cu_seqlens=batch.cu_seqlens.clone(),
        cu_seqlens_padded=borders.to(torch.int32),
        max_seqlen=int(slots.max()),
        media=media,
        samples=batch,
    )


def packed_length(max_tokens: int, model: Any = None, *, pad_each_to: int = 1) -> int:
    """The least `pad_total_to` that every micro-batch under a cap of `max_tokens` fits.

    That of a build or loader with the same `pad_each_to`: its `max_seq_len` or `max_tokens`, given
    and not chosen, since a sample above a chosen cap is a micro-batch of its own. It has
    room for the blank samples, which come on top of the cap.
    """
    blanks = [1] if model is None else blank_media_tokens(config_of(model))
    padded = (-(-tokens // pad_each_to) * pad_each_to for tokens in blanks)
    return max_tokens // pad_each_to * pad_each_to + sum(padded)


def seq_lens(batches: Sequence[PackedBatch], fill: int = SEQ_LENS_FILL) -> SeqLens:
    """Lengths of samples with and without padding, a row per batch, `fill` after its last."""
    max_samples = max((batch.num_samples for batch in batches), default=0)

    def rows(name: str) -> Tensor:
        table = torch.full((len(batches), max_samples), fill, dtype=torch.int64)
        for row, batch in zip(table, batches, strict=True):
            row[: batch.num_samples] = getattr(batch, name).diff()
        return table

    return SeqLens(rows("cu_seqlens"), rows("cu_seqlens_padded"))


def _check_multiples(batch: MicroBatch, pad_each_to: int, pad_total_to: int | None) -> None:
    if batch.is_padded:
        raise ConfigError(
            "the micro-batch is planned to be padded (packing=False); leave that out of the loader"
        )
    if pad_each_to < 1:
        raise ConfigError(f"pad_each_to is {pad_each_to}; it must be at least 1")
    if pad_total_to is not None and (pad_total_to < 1 or pad_total_to % pad_each_to):
        raise ConfigError(
            f"pad_total_to is {pad_total_to}; it must be a multiple of pad_each_to, {pad_each_to}"
        )


def _token_types(batch: MicroBatch, config: Any) -> Tensor:
    """0 text, 1 image, 2 video, 3 audio: int64, (tokens,)."""
    ids = batch.input_ids
    types = torch.zeros_like(ids)
    image_id = getattr(config, "image_token_id", None)
    video_id = getattr(config, "video_token_id", None)
    audio_id = getattr(config, "audio_token_id", None)
    for token_id, kind in ((image_id, IMAGE), (video_id, VIDEO), (audio_id, AUDIO)):
        if token_id is not None:
            types[ids == token_id] = kind
    grids, seconds = batch.image_grid_thw, batch.video_seconds
    if seconds is not None and grids is not None and image_id is not None:
        # some models' videos have the images' token: then the grids tell them apart
        places = vision_tokens(batch, config)
        merge = config.vision_config.spatial_merge_size
        kinds = torch.where(seconds > 0, VIDEO, IMAGE).to(ids)
        types[places] = kinds.repeat_interleave(grids.prod(dim=1) // merge**2)
    return types
