"""`MicroBatch`: what a rank runs in one forward pass, packed without padding."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from isobatch.common.types import LABEL_IGNORE
from isobatch.loaders.batch.joined_gradients import GradientJoin, loss_divisor, watch_scale


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """Samples packed one after the other; sample i is `cu_seqlens[i]:cu_seqlens[i + 1]`.

    A micro-batch may have no images. Those that fill up an epoch's last step have no samples
    either: all tensors are then empty, of the usual shapes, and add nothing to the loss.
    """

    sample_ids: tuple[str, ...]
    """Ids of the samples; of several builds, two may have the same."""
    input_ids: Tensor
    """int64, (tokens,). The image token is repeated once per LLM token of an image."""
    labels: Tensor
    """int64, (tokens,). Aligned with `input_ids`, -100 = no loss: the model shifts, e.g. with
    `loaders.shift_labels`. A plain shift would train each sample to predict the next one's start.
    """
    position_ids: Tensor
    """int64, (tokens,). From 0 in each sample."""
    cu_seqlens: Tensor
    """int32, (num_samples + 1,). Boundaries of the samples, as flash attention takes them."""
    pixel_values: Tensor
    """(patches, 3, image_size, image_size), images as in `input_ids`; `channels_last` in memory.

    At native resolution one row per ViT token: (ViT tokens, 3 * frames * side * side); raw ones
    (`pixel_dtype` uint8) are (ViT tokens, 3, side, side), with videos (ViT tokens, 3, frames, side,
    side), which `loaders.normalize` converts. They are row by row, with Qwen-VL and GLM-4V block by
    block (those of an LLM token are neighbours), and frame after frame of a video's grid.
    """
    patches_per_image: Tensor
    """int64, (images,). Patches of each image or frames of each video; at native resolution 1, with
    slices their number."""
    image_sizes: Tensor
    """int64, (images, 2). Height and width in pixels of the upright image, before any resizing."""
    image_grid_thw: Tensor | None
    """int64, (images, 3). Frames, rows, columns of ViT patches; one row per slice; else None."""
    video_seconds: Tensor | None = None
    """float64, (images,). Seconds from one frame of a video's grid to the next, 0 for an image.

    None if there are no videos. A video is one of the images in all other fields: its frames are
    its patches, at native resolution those of its grid.
    """
    audio_values: Tensor | None = None
    """float32, the clips in the order of `input_ids`; None for a model that has no audio encoder.

    By the loader's `audio`: "waveform", (samples,) at the model's rate, clip after clip, to be
    split by `audio_lengths`; "features", (frames, mel bins), log-mel without padding, window after
    window, to be split by `audio_frames`: what packed encoders take; "windows", (windows, mel bins,
    window_frames), each padded with silence: `input_features` of Whisper and Qwen2-Audio.
    """
    audio_lengths: Tensor | None = None
    """int64, (clips,). Samples of each clip at the model's rate; None as `audio_values`."""
    audio_frames: Tensor | None = None
    """int64, (windows,). Frames of each window; all of a clip's windows but the last are full.

    Qwen2-Audio's `feature_attention_mask` is `arange(window_frames) < audio_frames[:, None]`.
    """
    processed: Mapping[str, Tensor] | None = None
    """What the model's image processor gives for all images together, by name, where the build has
    the rule `processor`, else None. `pixel_values` then has no rows. Without images: of one small
    blank image, whose image tokens are `blank_tokens`. With `BalancedLoader(encode=)`: the arrays
    that it gives, joined by name; none without any.
    """
    blank_tokens: int = 0
    """Image tokens of the blank image in `processed`."""
    images: Sequence[bytes | memoryview | Tensor] = ()
    """By the loader's `images`, in the order of `image_sizes`; `pixel_values` then has no rows.

    "encoded": image files, not copied: views into the mapped shard of a build on disk. "resized":
    tensors of (3, height, width) in the size that patches are cut from, so without the copy in
    `image_size` that tiles come with; with "anyres" the whole canvas, the image on black.
    """
    extras: Mapping[str, Sequence[Any] | Tensor] = field(default_factory=dict)
    """Columns of the raw data that the build has kept (`packer build --keep-columns`).

    Each is a list of one value per sample: bool, int, float, str, a list of numbers, or any JSON
    value; None for a sample without it. Of several builds, the columns of all. Tensors that a
    `batch_transform` puts here are moved with the others.
    """
    skipped: Mapping[str, str] = field(default_factory=dict)
    """Samples without labels because a file of theirs cannot be used -> why (`on_error="skip"`).

    The step's divisors count their labels all the same, so that all ranks have equal ones.
    """
    num_loss_tokens: int
    """Tokens with a label in the whole step, over all ranks and micro-batches."""
    num_step_samples: int
    """Samples in the whole step, over all ranks and micro-batches."""
    loss_normalizer: float
    """Divisor of every loss sum of the step, by the loader's `loss_normalizer`; never 0.

    The same on all ranks: the step's loss is the sum of all micro-batches' and ranks' parts.
    `loss_divisor` is what this rank divides by.
    """
    num_ranks: int = 1
    """Data-parallel ranks whose gradients are joined; 1 in an evaluation."""
    micro_batches_per_step: int = 1
    """Micro-batches of this rank in the step."""
    gradients: GradientJoin | None = None
    """How the trainer joins the ranks' gradients: the loader's `gradients`."""
    sample_builds: tuple[int, ...] = ()
    """Build of each sample: its place, from 0, among those that the loader was given."""
    loss_weights: Tensor | None = None
    """float32, (tokens,). Weight of each token's loss by the loader's `loss_weights`; None: 1.

    The same for all tokens of a sample, so for shifted labels too; 0 in a sample without labels.
    """
    is_padded: bool = False
    """Whether it was planned to be padded (`BalancedLoader(packing=False)`). Its tensors have no
    padding: `padded` and `loaders.model_inputs` give a row per sample.
    """

    @property
    def num_samples(self) -> int:
        """Samples of this micro-batch."""
        return len(self.sample_ids)

    @property
    def max_seqlen(self) -> int:
        """Tokens of the longest sample, or 0; reads values, so call it before moving to a GPU."""
        return int(self.cu_seqlens.diff().max()) if self.num_samples else 0

    @property
    def loss_divisor(self) -> float:
        """What losses of this rank are divided by, so that joined gradients are the step's.

        `loss_normalizer`, and a rank's share of it where gradients are averaged over ranks. See
        `loaders.batch.joined_gradients` for the errors.
        """
        return loss_divisor(self.loss_normalizer, self.num_ranks, self.gradients)

    def padded(self, pad_token_id: int = 0) -> dict[str, Tensor]:
        """The tokens with a row per sample, each padded on the right to the longest.

        `input_ids`, `labels` (-100 in the padding), `attention_mask` (0 there, else 1) and
        `position_ids` (the padding's continue), int64, (num_samples, max_seqlen). Images and clips
        stay in the order of the samples. `values[attention_mask.bool()]` are (tokens,) again.
        """
        lengths = self.cu_seqlens.diff().long()
        positions = torch.arange(self.max_seqlen, device=lengths.device)
        is_token = positions < lengths[:, None]

        def in_rows(values: Tensor, padding: int) -> Tensor:
            rows = values.new_full(is_token.shape, padding)
            rows[is_token] = values
            return rows

        return {
            "input_ids": in_rows(self.input_ids, pad_token_id),
            "labels": in_rows(self.labels, LABEL_IGNORE),
            "attention_mask": is_token.long(),
            "position_ids": positions.repeat(self.num_samples, 1),
        }

    def reduce_loss(self, token_losses: Tensor) -> Tensor:
        """This micro-batch's part of the step's loss: weighted, summed, divided by `loss_divisor`.

        `token_losses`: (tokens,), 0 where there is no label, in the place of the label's token or
        of the one before it. ValueError for another shape: a model's mean loss, divided once more,
        would train a thousand times too slowly.
        """
        if token_losses.shape != self.input_ids.shape:
            is_one = token_losses.numel() == 1
            advice = (
                "a model's loss is divided already: call model(**model_inputs(batch, model))"
                if is_one
                else "give the loss of each token"
            )
            raise ValueError(
                f"token_losses have the shape {tuple(token_losses.shape)}, the micro-batch has "
                f"{len(self.input_ids)} tokens; {advice}"
            )
        weighted = token_losses if self.loss_weights is None else token_losses * self.loss_weights
        loss = weighted.sum() / self.loss_divisor
        watch_scale(loss, self.num_ranks, self.micro_batches_per_step)
        return loss

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "MicroBatch":
        """The same micro-batch with all tensors on `device`."""
        return self._with_tensors(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "MicroBatch":
        """The micro-batch in page-locked memory, for `to(..., non_blocking=True)`; needs a GPU."""
        return self._with_tensors(Tensor.pin_memory)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy for other processes, which cannot have views of this one's memory."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        images = (image if isinstance(image, Tensor) else bytes(image) for image in self.images)
        return _of_values, (values | {"images": tuple(images)},)

    def _with_tensors(self, change: Callable[[Tensor], Tensor]) -> "MicroBatch":
        changed: dict[str, Any] = {
            field.name: change(value)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        if any(isinstance(image, Tensor) for image in self.images):
            changed["images"] = tuple(
                change(image) if isinstance(image, Tensor) else image for image in self.images
            )
        if self.processed is not None:
            changed["processed"] = {name: change(array) for name, array in self.processed.items()}
        if any(isinstance(values, Tensor) for values in self.extras.values()):
            changed["extras"] = {
                name: change(values) if isinstance(values, Tensor) else values
                for name, values in self.extras.items()
            }
        return replace(self, **changed)


def _of_values(values: dict[str, Any]) -> MicroBatch:
    return MicroBatch(**values)
