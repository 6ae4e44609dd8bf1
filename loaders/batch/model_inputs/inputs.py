"""`model_inputs`: a `MicroBatch` as arguments of transformers' models, unpadded.

For trainers that run transformers' vision-language models. Needs only the model's config, and
imports nothing of transformers. Avoids what transformers accepts and computes wrongly: samples
would see each other with a key-value cache, with an attention mask, in Qwen-VL with three rows of
`position_ids` instead of four, and in linear attention without the samples' borders. Pure; reads
tensors' values, so call it on the CPU.
"""

import sys
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.utils.rnn import pad_sequence

from isobatch.common.errors import ConfigError
from isobatch.common.types import LABEL_IGNORE
from isobatch.loaders.batch.micro_batch import MicroBatch
from isobatch.loaders.batch.model_inputs._gemma_families import GEMMA_FAMILIES
from isobatch.loaders.batch.model_inputs._native_families import NATIVE_FAMILIES
from isobatch.loaders.batch.model_inputs._patch_families import PATCH_FAMILIES
from isobatch.loaders.batch.model_inputs._processed_family import as_own_rule, processed_family
from isobatch.loaders.batch.model_inputs.family import (
    Arguments,
    BlankImage,
    ModelFamily,
    config_of_text,
    vision_tokens,
)
from isobatch.loaders.batch.model_inputs.labelled_logits import (
    Logits,
    can_choose_positions,
    has_chunked_loss,
    labelled_positions,
)

FAMILIES: dict[Any, ModelFamily] = {**PATCH_FAMILIES, **NATIVE_FAMILIES, **GEMMA_FAMILIES}
"""`model_type` -> what is particular about its inputs."""
BLANK_SAMPLE_ID = "(blank image)"
BLANK_CLIP_ID = "(blank clip)"
BORDERS_FOR_ENCODERS = (5, 9), (5, 18)
"""First and last transformers that hand the text's borders to encoders, which have their own."""


def model_inputs(
    batch: MicroBatch,
    model: Any,
    *,
    always_encode: bool = True,
    with_labels: bool = True,
    logits: Logits = "all",
) -> dict[str, Any]:
    """What `model(**inputs)` takes for a model of transformers; new tensors.

    `model`: the model, wrapped by DDP, FSDP or torch.compile or not, or its `config`.

    `input_ids` and `labels` (1, tokens), `position_ids` (1, tokens) from 0 in each sample, or for
    models with M-RoPE (4, 1, tokens): those and its three. `pixel_values` and their sizes, grids or
    places as the model takes them, masks where tokens see later ones. With flash attention and with
    linear attention also the borders of the samples. No loss crosses a border, and the model's
    `loss` is this micro-batch's part of the step's: divided by `MicroBatch.loss_divisor`, so that
    its gradients are right once the trainer has joined them over the ranks.

    A micro-batch that is planned to be padded (`is_padded`) gets a row per sample instead, padded
    on the right: (rows, longest), with an `attention_mask`, and needs no attention that keeps
    samples apart. Blank images and clips are then the end of the last row.

    `always_encode`: a micro-batch without images gets a sample of one small blank image at its end,
    without labels. The vision encoder then runs on every rank in every micro-batch: DDP finds no
    unused parameter, FSDP does not hang, and empty micro-batches work. So it is with a clip of
    silence for a model with audio. Otherwise a micro-batch without images has no `pixel_values`,
    and an empty one, which no model accepts, is a ValueError. What `encode=` gives without `model=`
    has a blank image for Qwen-VL, GLM-V, Gemma 3 and PaliGemma only; else an empty micro-batch is
    one token.

    `with_labels=False` leaves out labels and divisor, for a loss of your own: that of the logits'
    first `len(batch.labels)` rows, by `MicroBatch.reduce_loss`. Losses with weights need that. With
    padding they are the first of `logits[attention_mask.bool()]`.

    `logits="labelled"`: the model computes logits only of tokens whose next one has a label, which
    saves most of the head's memory and time; loss and gradients stay the same. `logits_to_keep` are
    then positions (n,), or with padding a mask (rows, longest), and `shift_labels` the n labels.
    Needs the model itself, not its config. A model that does not take it computes all logits, and a
    warning of one line says so. Next to `model.loss_function = isobatch.chunked_loss` losses may
    have weights: `loss_weights`, float32, as `shift_labels`.

    Raises ConfigError for another model, another preset's pixels, raw pixels
    (`pixel_dtype=torch.uint8`), audio, images that a planner gave to another rank, labels of
    unequal weight, which transformers' losses do not know, and attention that cannot keep packed
    samples apart.
    """
    samples = batch
    num_rows = max(1, batch.num_samples)
    batch, config, family = with_blank_media(batch, model, always_encode=always_encode)
    batch = family.one_kind(batch, config)
    is_labelled = _chooses_positions(model, logits, with_labels=with_labels)
    if (
        with_labels
        and batch.loss_weights is not None
        and not (is_labelled and has_chunked_loss(model))
    ):
        raise ConfigError(
            "transformers' losses have no weights: use the loader's loss_weights='token', or "
            "logits='labelled' with model.loss_function = isobatch.chunked_loss, or "
            "with_labels=False and MicroBatch.reduce_loss"
        )
    if batch.is_padded:
        inputs = _padded_text(batch, num_rows, config, family)
    else:
        # transformers' shift over the whole sequence then moves no label across a sample border
        labels = batch.labels.clone()
        labels[batch.cu_seqlens[:-1].long()] = LABEL_IGNORE
        inputs = {
            "input_ids": batch.input_ids[None],
            "labels": labels[None],
            "position_ids": family.positions(batch, config),
            **family.masks(batch, config),
            **_borders(batch, config),
        }
    inputs["use_cache"] = False
    if with_labels:
        inputs["num_items_in_batch"] = batch.loss_divisor
        if is_labelled:
            weights = _token_weights(samples, inputs["labels"])
            inputs |= labelled_positions(inputs["labels"], weights)
    else:
        del inputs["labels"]
    return inputs | media_arguments(batch, config, family)


def with_blank_media(
    batch: MicroBatch, model: Any, *, always_encode: bool = True
) -> tuple[MicroBatch, Any, ModelFamily]:
    """The micro-batch with the blank images and clips of `model_inputs`, config and family.

    ConfigError as `model_inputs`; ValueError if it is empty and nothing is added.
    """
    config = config_of(model)
    batch = as_own_rule(batch, config)
    is_own = batch.processed is None
    family = _family_of(config) if is_own else processed_family(batch, config)
    _check_media(batch, config, family)
    if always_encode:
        batch = _with_blanks(batch, config, family)
    if not len(batch.input_ids):
        raise ValueError("an empty micro-batch; skip it, or leave always_encode=True")
    return batch, config, family


def media_arguments(batch: MicroBatch, config: Any, family: ModelFamily) -> Arguments:
    """Arguments of the model's encoders for the images, videos and clips, if there are any."""
    arguments: Arguments = {}
    if _has_images(batch):
        arguments |= family.images(batch, config)
    if _has_clips(batch):
        arguments |= _audio_arguments(batch, config)
    return arguments


def config_of(model: Any) -> Any:
    """The config of a model of transformers, whatever wraps it; a config as it is."""
    # DeepSpeed's engine has a config of its own, a dict
    while isinstance(model, Module) and isinstance(getattr(model, "config", {}), dict):
        if (inner := getattr(model, "module", None)) is None:
            raise ConfigError(
                f"{type(model).__name__} is no model of transformers; give one, or its config"
            )
        model = inner
    return model.config if isinstance(model, Module) else model


def _chooses_positions(model: Any, logits: str, *, with_labels: bool) -> bool:
    if logits not in ("all", "labelled"):
        raise ConfigError(f"logits is {logits!r}; it must be 'all' or 'labelled'")
    if logits == "all":
        return False
    if not with_labels:
        raise ConfigError(
            "logits='labelled' and with_labels=False: give your own loss as model.loss_function, "
            "with transformers' arguments, and leave with_labels out"
        )
    return can_choose_positions(model)


def _token_weights(batch: MicroBatch, labels: Tensor) -> Tensor | None:
    """`MicroBatch.loss_weights` in the shape of a model's `labels`, 0 in padding and blanks."""
    if batch.loss_weights is None:
        return None
    weights = batch.loss_weights.new_zeros(labels.shape)
    lengths = batch.cu_seqlens.diff() if batch.is_padded else batch.cu_seqlens[-1:]
    is_token = torch.arange(weights.shape[1], device=lengths.device) < lengths[:, None]
    weights[: len(lengths)][is_token] = batch.loss_weights
    return weights


def _has_images(batch: MicroBatch) -> bool:
    """Whether it has images, or arrays that a function gives for them."""
    return len(batch.image_sizes) > 0 or bool(batch.processed and not batch.blank_tokens)


def has_media(batch: MicroBatch) -> bool:
    """Whether it has images, videos or clips."""
    return _has_images(batch) or _has_clips(batch)


def _borders(batch: MicroBatch, config: Any) -> Arguments:
    """Borders of samples for flash attention and for linear attention."""
    text = config_of_text(config)
    layer_types = getattr(text, "layer_types", None) or ()
    is_linear = "linear_attention" in layer_types and batch.num_samples > 1
    if is_linear:
        _check_kernels(config)
    if not is_linear and (not _has_flash(config) or _confuses_encoder(config)):
        return {}
    # else transformers finds the borders in position_ids, waiting for the GPU in every layer, and
    # linear attention knows of none
    longest, borders = batch.max_seqlen, batch.cu_seqlens
    arguments: Arguments = {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders}
    arguments |= {"max_length_q": longest, "max_length_k": longest}
    if is_linear:
        numbers = torch.arange(batch.num_samples, dtype=torch.int32, device=borders.device)
        arguments["seq_idx"] = numbers.repeat_interleave(borders.diff().long())[None]
    return arguments


def _has_flash(config: Any) -> bool:
    return "flash" in str(getattr(config, "_attn_implementation", None))


def _confuses_encoder(config: Any) -> bool:
    """Whether flash attention of the encoder would get the borders of samples besides its own."""
    version = str(getattr(sys.modules.get("transformers"), "__version__", "")).split(".")[:2]
    if not all(part.isdecimal() for part in version):
        return False
    first, last = BORDERS_FOR_ENCODERS
    return first <= tuple(map(int, version)) <= last and _has_flash(config.vision_config)


def _check_kernels(config: Any) -> None:
    """ConfigError if linear attention would carry its state from one sample into the next."""
    missing = [name for name in ("fla", "causal_conv1d") if find_spec(name) is None]
    # hub kernels do it too, if the model is loaded with them; transformers checks that
    if missing and find_spec("kernels") is None:
        raise ConfigError(
            f"{config.model_type} has linear attention, which keeps packed samples apart only with"
            " its kernels: pip install flash-linear-attention causal-conv1d; or pad them"
            " (BalancedLoader(packing=False))"
        )


def _check_media(batch: MicroBatch, config: Any, family: ModelFamily) -> None:
    if not batch.pixel_values.is_floating_point():
        raise ConfigError("pixel_values are raw (torch.uint8); use loaders.normalize first")
    if len(batch.images):
        raise ConfigError(
            "images are whole (images='resized') or files ('encoded'), which no model takes; leave "
            "out the loader's images="
        )
    is_other = (batch.image_grid_thw is not None) != family.is_native
    if family.is_native and not is_other and len(batch.pixel_values):
        # rows of patches of this side, of one frame or two
        values = 3 * config.vision_config.patch_size**2
        is_other = batch.pixel_values.shape[1:].numel() not in (values, 2 * values)
    if is_other:
        raise ConfigError(
            f"the micro-batch was not made for {config.model_type}; build with that model's preset,"
            " or give the loader that model"
        )
    if _has_clips(batch) and family.blank_clip is None:
        raise ConfigError(
            f"there are audio clips, but {config.model_type} has no audio encoder that model_inputs"
            " knows"
        )
    takes_images = getattr(config, "image_token_id", None) is not None
    if takes_images and not _has_images(batch) and bool(vision_tokens(batch, config).any()):
        raise ConfigError(
            f"image tokens ({config.image_token_id}) without images: a planner gave them to "
            "another rank's encoder, or the model's image_token_id is not the build's"
        )


def blank_media_tokens(config: Any) -> list[int]:
    """LLM tokens of each blank sample that a micro-batch may get, at most."""
    family = _family_of(config)
    has_images = getattr(config, "image_token_id", None) is not None
    tokens = [family.blank(config).tokens] if has_images else [1]
    return [*tokens, *[1] * (family.blank_clip is not None)]


def _with_blanks(batch: MicroBatch, config: Any, family: ModelFamily) -> MicroBatch:
    """`batch` with a sample more for each encoder that would have nothing to do."""
    if not _has_images(batch):
        if batch.processed is None or batch.blank_tokens:
            batch = _with_blank_image(batch, family.blank(config), int(config.image_token_id))
        elif not batch.num_samples:  # of arrays that encode= gives, no blank ones are known
            batch = with_blank_sample(batch, BLANK_SAMPLE_ID, 1, 0)
    if family.blank_clip is not None and not _has_clips(batch):
        batch = with_blank_sample(batch, BLANK_CLIP_ID, 1, int(config.audio_token_id))
        batch = _with_blank_clip(batch, family.blank_clip, config)
    return batch


def _with_blank_image(batch: MicroBatch, blank: BlankImage, image_token_id: int) -> MicroBatch:
    """`batch` and a sample of one image; not of zeros, which Idefics3 takes for padding."""
    grid = batch.image_grid_thw
    batch = with_blank_sample(batch, BLANK_SAMPLE_ID, blank.tokens, image_token_id)
    return replace(
        batch,
        pixel_values=batch.pixel_values.new_ones(blank.rows, *batch.pixel_values.shape[1:]),
        patches_per_image=batch.patches_per_image.new_tensor([1 if blank.grid else blank.rows]),
        image_sizes=batch.image_sizes.new_tensor([blank.size]),
        image_grid_thw=None if grid is None else grid.new_tensor([blank.grid]),
    )


def with_blank_sample(batch: MicroBatch, name: str, count: int, token_id: int) -> MicroBatch:
    """`batch` followed by a sample of so many of one token, without labels and of weight 0."""
    ids = batch.input_ids
    tokens = torch.arange(count, device=ids.device)
    end = batch.cu_seqlens.new_tensor([len(ids) + count])
    weights = batch.loss_weights
    if weights is not None:
        weights = torch.cat([weights, weights.new_zeros(count)])
    return replace(
        batch,
        sample_ids=(*batch.sample_ids, name),
        input_ids=torch.cat([ids, torch.full_like(tokens, token_id)]),
        labels=torch.cat([batch.labels, torch.full_like(tokens, LABEL_IGNORE)]),
        position_ids=torch.cat([batch.position_ids, tokens]),
        cu_seqlens=torch.cat([batch.cu_seqlens, end]),
        loss_weights=weights,
    )


# --- clips: arguments of Qwen2.5-Omni's and Qwen3-Omni's thinkers ---


def _has_clips(batch: MicroBatch) -> bool:
    """Whether a micro-batch has audio clips."""
    return batch.audio_lengths is not None and len(batch.audio_lengths) > 0


def _audio_arguments(batch: MicroBatch, config: Any) -> Arguments:
    """`input_features` (clips, mel bins, longest clip) and the mask of their frames.

    Of log-mel features without padding, a clip's by its `audio_frames`. The thinkers of
    transformers take no `audio_feature_lengths` in place of the mask. ConfigError for clips in
    another form, or of another model.
    """
    values = batch.audio_values
    frames = batch.audio_frames
    bins = config.audio_config.num_mel_bins
    if values is None or frames is None or values.ndim != 2:
        raise ConfigError(f"{config.model_type}: open the loader with audio='features'")
    clips = 0 if batch.audio_lengths is None else len(batch.audio_lengths)
    if (values.shape[1], len(frames), len(values)) != (bins, clips, int(frames.sum())):
        contents = f"{len(values)} frames of {values.shape[1]} mel bins, {clips} clips"
        raise ConfigError(
            f"{contents} in {len(frames)} windows of {int(frames.sum())} frames: not made for"
            f" {config.model_type}, or a planner gave clips to another rank's encoder"
        )
    parts = list(torch.split(values, frames.tolist()))
    features = pad_sequence(parts, batch_first=True).transpose(1, 2)
    mask = torch.arange(features.shape[2], device=frames.device) < frames[:, None]
    return {"input_features": features, "feature_attention_mask": mask.long()}


def _with_blank_clip(batch: MicroBatch, frames: int, config: Any) -> MicroBatch:
    """`batch`, which has no clips, with one of silence of so many frames: fields of audio alone."""
    values = batch.pixel_values.new_zeros(frames, config.audio_config.num_mel_bins)
    lengths = batch.patches_per_image.new_tensor([frames])
    return replace(batch, audio_values=values, audio_frames=lengths, audio_lengths=lengths)


# --- padding: a row per sample, for models without varlen attention ---


def _padded_text(batch: MicroBatch, num_rows: int, config: Any, family: ModelFamily) -> Arguments:
    """`input_ids`, `labels`, `attention_mask` and `position_ids`, (rows, longest).

    M-RoPE's positions are (4, rows, longest). Samples after the first `num_rows`, which are blank
    media, become the end of the last row, mostly the shortest: causal, so nothing before sees them,
    as no token sees the padding on its right. Masks that let some see later ones are made row by
    row, (rows, 1, longest, longest).
    """
    borders = torch.cat([batch.cu_seqlens[:num_rows], batch.cu_seqlens[-1:]])
    row_batch = replace(batch, sample_ids=batch.sample_ids[:num_rows], cu_seqlens=borders)
    # any id but an image's would do: no token with a label sees it. Some configs have none, or -1
    pad_token_id = max(0, getattr(config_of_text(config), "pad_token_id", None) or 0)
    rows = row_batch.padded(pad_token_id)
    texts = [{name: rows[name][row] for name in rows} for row in range(num_rows)]
    # one row each, for masks
    alone = [_with_text(row_batch, row_batch.sample_ids[:1], text) for text in texts]
    masks: Arguments = _joined([family.masks(row, config) for row in alone])
    positions = family.positions(_with_text(row_batch, row_batch.sample_ids, rows), config)
    shape = *positions.shape[:-2], *rows["input_ids"].shape
    return rows | masks | {"position_ids": positions.reshape(shape)}


def _with_text(
    batch: MicroBatch, sample_ids: tuple[str, ...], text: dict[str, Tensor]
) -> MicroBatch:
    """`batch` with text of as many samples of one length, one after the other."""
    ids = text["input_ids"].flatten()
    borders = torch.arange(len(sample_ids) + 1, dtype=torch.int32, device=ids.device)
    return replace(
        batch,
        sample_ids=sample_ids,
        input_ids=ids,
        labels=text["labels"].flatten(),
        position_ids=text["position_ids"].flatten(),
        cu_seqlens=borders * (len(ids) // len(sample_ids)),
    )


def _joined(parts: list[Any]) -> Any:
    """Tensors, or dicts of them, joined along the first dimension."""
    if isinstance(parts[0], dict):
        return {name: _joined([part[name] for part in parts]) for name in parts[0]}
    return torch.cat(parts)


def _family_of(config: Any) -> ModelFamily:
    """The family of transformers' `config`, without a processor; ConfigError if unknown."""
    name = getattr(config, "model_type", None)
    vision = getattr(getattr(config, "vision_config", None), "model_type", None)
    if (name, vision) == ("llava", "pixtral"):  # the first Pixtral is a LLaVA
        name = "pixtral"
    family = FAMILIES.get(name)
    if family is None:
        name = name or type(config).__name__
        raise ConfigError(f"model type {name!r}: give a config of {', '.join(FAMILIES)}")
    return family
