"""Logits only where there are labels: the positions that a model computes them of.

A VLM's prompts and images have no labels, yet its head computes a vocabulary of logits for each of
their tokens. Most models take `logits_to_keep`, and their losses take `shift_labels` next to them.
Imports nothing of transformers; what a model takes is asked of its forward function.
"""

import inspect
import sys
import warnings
from typing import Any, Literal

from torch import Tensor
from torch.nn import Module, functional

from isobatch.common.errors import ConfigError
from isobatch.common.types import LABEL_IGNORE
from isobatch.loaders.batch.chunked_loss import chunked_loss

Logits = Literal["all", "labelled"]
"""Of which tokens a model computes logits: of all, or of those whose next one has a label."""


def plain_model(model: Module) -> Any:
    """The model of transformers in DDP, FSDP, PEFT or torch.compile; None without one."""
    # asks classes: instances of wrappers pass on what they are asked for
    models = (module for module in model.modules() if hasattr(type(module), "loss_function"))
    return next(models, None)


def why_all_logits(model: Module) -> str:
    """Why a model has to compute all logits, a phrase; empty if positions can be chosen."""
    plain = plain_model(model)
    if plain is None:
        return f"{type(model).__name__} is no model of transformers"
    name = type(plain).__name__
    parameters = inspect.signature(plain.forward).parameters
    if "logits_to_keep" not in parameters:
        return f"{name} takes no logits_to_keep"
    if "liger_kernel" in getattr(plain.forward, "__module__", ""):
        return f"{name} has Liger's loss, which needs no logits"
    # a forward function without **kwargs passes none to its loss
    if not any(item.kind is inspect.Parameter.VAR_KEYWORD for item in parameters.values()) or (
        "shift_labels" not in inspect.signature(plain.loss_function).parameters
    ):
        return f"the loss of {name} takes no shift_labels"
    adapters = (getattr(module, "active_peft_config", None) for module in model.modules())
    is_moved = any(getattr(adapter, "is_prompt_learning", False) for adapter in adapters)
    return "PEFT's prompt learning moves all positions" if is_moved else ""


def can_choose_positions(model: Any) -> bool:
    """Whether a model takes positions; if not, a warning of one line says why, once per reason.

    ConfigError for what is no model, as a config.
    """
    if not isinstance(model, Module):
        raise ConfigError(
            f"logits is 'labelled' and {type(model).__name__} no model; give model_inputs the "
            "model and not its config, or leave logits out"
        )
    reason = why_all_logits(model)
    if reason:
        line = f"logits of all tokens are computed: {reason}"
        warnings.warn(line, RuntimeWarning, stacklevel=4)
    return not reason


def has_chunked_loss(model: Module) -> bool:
    """Whether a model computes its loss by `chunked_loss`, which knows weights."""
    return getattr(plain_model(model), "loss_function", None) is chunked_loss


def labelled_positions(labels: Tensor, weights: Tensor | None) -> dict[str, Tensor]:
    """`logits_to_keep`, `shift_labels` and perhaps `loss_weights` of a model's `labels`.

    `labels` (rows, tokens), int64, as the model shifts them; `weights` of the same shape, float32.
    One row: `logits_to_keep` are positions (n,), int64, the others (1, n). Several rows: a mask of
    (rows, tokens), bool, the others (n,), row after row; where transformers knows positions only
    (its versions before `slice_logits_to_keep`), all columns with a label, the others (rows, n).
    Without any label, the first position: a model's head then has a gradient, of zeros.
    """
    targets = functional.pad(labels, (0, 1), value=LABEL_IGNORE)[:, 1:]
    chosen = targets != LABEL_IGNORE
    if not chosen.any():
        chosen[0, 0] = True
    keep: Tensor = chosen
    if len(labels) == 1 or not _takes_masks():
        keep = chosen.any(dim=0).nonzero().flatten()
        targets = targets[:, keep].contiguous()
    else:
        targets = targets[chosen]
    arguments = {"logits_to_keep": keep, "shift_labels": targets}
    if weights is not None:
        # all tokens of a sample weigh the same, so weights are not shifted
        arguments["loss_weights"] = weights[:, keep] if keep.ndim == 1 else weights[chosen]
    return arguments


def _takes_masks() -> bool:
    return hasattr(sys.modules.get("transformers.modeling_utils"), "slice_logits_to_keep")
