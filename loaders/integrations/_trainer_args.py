"""A trainer's loader, and its arguments that contradict one: one line for each."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainingArguments

from isobatch.common.errors import ConfigError
from isobatch.loaders.batch.chunked_loss import chunked_loss
from isobatch.loaders.batch.model_inputs.labelled_logits import (
    Logits,
    can_choose_positions,
    plain_model,
    why_all_logits,
)
from isobatch.loaders.online.per_rank.streams import is_stream
from isobatch.loaders.step_stream import StepStream

_DEFAULT_BATCH_SIZE, _DEFAULT_MAX_LENGTH = 8, 1024
"""Defaults of TrainingArguments and of TRL's SFTConfig: nobody may have asked for them."""

_ALLOWED: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    (
        "per_device_train_batch_size",
        (1, _DEFAULT_BATCH_SIZE),
        "leave it out: a rank runs one micro-batch at a time, and its size is max_tokens",
    ),
    ("auto_find_batch_size", (False,), "leave it out and use smaller caps of the groups"),
    ("train_sampling_strategy", ("random",), "leave it out: the loader has its own order"),
    ("group_by_length", (False,), "leave it out: groups have equal lengths already"),
    ("dataloader_drop_last", (False,), "leave it out and give the loader remainder='drop'"),
    ("dataloader_num_workers", (0, 1), "leave it out: the loader decodes in threads (workers=)"),
    ("packing", (False,), "leave it out: samples are packed already"),
    ("padding_free", (False,), "leave it out: samples are packed already, without padding"),
    ("completion_only_loss", (None, True), "leave it out: the loader's labels are the answers'"),
    ("assistant_only_loss", (False,), "leave it out: the loader's labels are the answers' already"),
    ("chat_template_path", (None,), "leave it out, and give the loader or build chat_template"),
    ("label_smoothing_factor", (0,), "leave it out: it is not computed for packed samples"),
    (
        "neftune_noise_alpha",
        (None, 0),
        "leave it out: its noise would be that of one sample as long as the micro-batch",
    ),
)
"""Name, values that do not contradict, what to do; names that a trainer has not are passed over."""


def check_arguments(args: TrainingArguments, *, has_other_data: bool) -> None:
    """ConfigError for arguments that would be ignored, lose samples or make gradients wrong.

    `has_other_data`: TRL also truncates the evaluation's samples, so its `max_length` is allowed.
    """
    for name, allowed, advice in _ALLOWED:
        value = getattr(args, name, allowed[0])
        if value not in allowed:
            raise ConfigError(f"{name} is {value!r}; {advice}")
    counted = getattr(args, "include_num_input_tokens_seen", "no")
    if counted != "no" and not hasattr(Trainer, "_track_num_input_tokens"):
        raise ConfigError(
            f"include_num_input_tokens_seen is {counted!r}; leave it "
            "out, or install transformers 5.6 or later"
        )
    max_length = getattr(args, "max_length", None)
    if max_length not in (None, _DEFAULT_MAX_LENGTH) and not has_other_data:
        raise ConfigError(
            f"max_length is {max_length}; leave it out: no sample is truncated, and max_tokens of "
            "the loader (a build's max_seq_len) leaves out longer ones"
        )
    if args.n_gpu > 1:
        raise ConfigError(
            f"one process has {args.n_gpu} GPUs (DataParallel); start one per GPU with torchrun"
        )
    if args.world_size > 1 and not args.average_tokens_across_devices:
        raise ConfigError(
            "average_tokens_across_devices is off; gradients would be divided by the world size"
        )


def check_loader(args: TrainingArguments, loader: StepStream) -> None:
    """ConfigError for a loader of other ranks or micro-batches than the trainer has."""
    config = loader.config
    if loader.is_evaluation:
        raise ConfigError("train_dataset is a loader with shuffle=False; leave that out")
    if config.micro_batches_per_step != args.gradient_accumulation_steps:
        raise ConfigError(
            f"gradient_accumulation_steps is {args.gradient_accumulation_steps}, but the loader's "
            f"micro_batches_per_step {config.micro_batches_per_step}; give both the same value"
        )
    if (args.process_index, args.world_size) != (config.dp_rank, config.dp_world_size):
        raise ConfigError(
            f"this process is rank {args.process_index} of {args.world_size}, but the loader's "
            f"dp_rank is {config.dp_rank} of {config.dp_world_size}; make TrainingArguments first, "
            "or give the loader dp_rank=args.process_index, dp_world_size=args.world_size"
        )


def logits_of(trainer: Any, requested: Logits | None, mixin: type) -> Logits:
    """Of which tokens a trainer's model computes logits; its model's loss becomes `chunked_loss`.

    `requested` None: of those with a label, unless something of the user's may read the others; a
    model that cannot do that is a warning. "labelled": also next to such things, and ConfigError
    where it cannot be. A `loss_function` of the user's stays.
    """
    if requested not in (None, "all", "labelled"):
        raise ConfigError(f"logits is {requested!r}; it must be 'all' or 'labelled'")
    model = trainer.model
    if requested == "labelled" and (reason := _why_never(trainer) or why_all_logits(model)):
        raise ConfigError(f"logits is 'labelled', but {reason}; leave logits out")
    if requested == "all" or (requested is None and _may_read_logits(trainer, mixin)):
        return "all"
    is_labelled = can_choose_positions(model)
    plain = plain_model(model)
    if plain is not None and _is_stock(plain.loss_function):
        plain.loss_function = chunked_loss
    return "labelled" if is_labelled else "all"


def _why_never(trainer: Any) -> str:
    if trainer.model_init is not None:
        return "model_init makes another model"
    is_trl = hasattr(trainer, "_total_train_tokens")
    return "TRL's trainer has a head of its own" if is_trl else ""


def _may_read_logits(trainer: Any, mixin: type) -> bool:
    """Whether something of the user's, or of another trainer's, may take all logits of a model."""
    names = "compute_loss_func", "compute_metrics", "preprocess_logits_for_metrics"
    functions = [name for name in names if getattr(trainer, name, None) is not None]
    others = [kind for kind in type(trainer).__mro__ if kind not in (mixin, Trainer)]
    has_loss = any("compute_loss" in vars(kind) for kind in others)
    loss = getattr(plain_model(trainer.model), "loss_function", chunked_loss)
    is_known = loss is chunked_loss or _is_stock(loss)
    return bool(functions or has_loss or not is_known or _why_never(trainer))


def _is_stock(loss: Any) -> bool:
    """Whether a `loss_function` is one of transformers'."""
    return str(getattr(loss, "__module__", "")).startswith("transformers.")


def loader_of(
    dataset: Any, args: TrainingArguments, model: Any, options: Mapping[str, Any]
) -> StepStream:
    """`dataset` if it is a loader; else a `BalancedLoader` of it for `model`, with `options`."""
    if isinstance(dataset, StepStream):
        if options:
            raise ConfigError(
                f"loader_options are {dict(options)!r}, but train_dataset is a loader; give them "
                "to the loader"
            )
        return dataset
    if dataset is None:
        raise ConfigError("train_dataset is None; give a loader, or a dataset of records")
    return _make_loader(dataset, args, model, options)


_TRAINING_ONLY = "epochs", "measure", "planner", "image_transform", "batch_transform"
"""Options of a training's loader that one for its evaluation does not take over."""


def evaluation_of(
    dataset: Any,
    train_dataset: Any,
    args: TrainingArguments,
    model: Any,
    options: Mapping[str, Any],
) -> Any:
    """`eval_dataset` with loaders in order for records, if the training's are packed here too.

    What has `input_ids`, or cannot be asked by index, stays for the trainer.
    """
    if isinstance(dataset, Mapping):
        return {
            name: evaluation_of(part, train_dataset, args, model, options)
            for name, part in dataset.items()
        }
    is_left = dataset is None or isinstance(dataset, StepStream) or _is_tokenised(dataset)
    if is_left or isinstance(train_dataset, StepStream):
        return dataset
    shared = {name: value for name, value in options.items() if name not in _TRAINING_ONLY}
    # no rank without a micro-batch, where FSDP would wait for it
    overrides = {"shuffle": False, "micro_batches_per_step": 1, "remainder": "pad"}
    return _make_loader(dataset, args, model, shared | overrides)


def _is_tokenised(dataset: Any) -> bool:
    if isinstance(dataset, str | Path):
        return False
    if (names := getattr(dataset, "column_names", None)) is None:
        if is_stream(dataset) or not hasattr(dataset, "__getitem__"):
            return True
        first = dataset[0] if len(dataset) else {}
        names = first if isinstance(first, Mapping) else ()
    return "input_ids" in names


def _make_loader(
    dataset: Any, args: TrainingArguments, model: Any, options: Mapping[str, Any]
) -> StepStream:
    from isobatch.loaders.online.loader import BalancedLoader  # noqa: PLC0415  needs the packer

    config = getattr(model, "config", None)
    name = model if isinstance(model, str) else getattr(config, "_name_or_path", "")
    loader_options: dict[str, Any] = {
        **({} if {"encode", "processor"} & options.keys() else {"model": name}),
        "micro_batches_per_step": args.gradient_accumulation_steps,
        "seed": args.seed if args.data_seed is None else args.data_seed,
        **options,
    }
    if not loader_options.get("model", "given"):
        raise ConfigError(
            "the model has no name or folder to count samples by; give "
            'loader_options={"model": a preset, a folder or a Hub id}, "processor" or "encode"'
        )
    return BalancedLoader(dataset, **loader_options)
