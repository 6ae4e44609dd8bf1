"""`chunked_loss`: transformers' loss without float32 copies of the logits.

Logits are a model's widest tensor. At its peak `ForCausalLMLoss` of transformers takes 14 bytes per
bf16 logit and up to 16 per float32 one, the logit's own 2 and 4 among them: a float32 copy, its
log-softmax, and their gradients. Here it is 4 and 8, the logit and its gradient; float32 numbers
exist for a few rows at a time. Rows without a label have gradients of zeros, whatever they are.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from isobatch.common.types import LABEL_IGNORE

_CHUNK = 1 << 24
"""Logits in float32 at a time, 64 MiB: enough work for a GPU, little memory."""


def chunked_loss(
    logits: Tensor,
    labels: Tensor | None,
    vocab_size: int | None = None,
    *,
    num_items_in_batch: Tensor | float | None = None,
    shift_labels: Tensor | None = None,
    loss_weights: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """The loss of a causal language model, float32, as transformers computes it within rounding.

    `model.loss_function = chunked_loss` makes a model of transformers compute its loss by it.

    `logits` (..., vocabulary), floats of any precision, are not changed. `shift_labels` (...),
    int64, are the labels of the tokens that follow, -100 where there is none; without them `labels`
    (rows, tokens) are shifted. `loss_weights` (...), float32, are the weights of `shift_labels`.
    The sum is divided by `num_items_in_batch`, or by the number of labels. Without any label it is
    0, with gradients of zeros. `vocab_size` and further arguments are those of transformers' call
    and not read.

    ValueError if logits and labels do not fit, for weights without `shift_labels`, and for an
    `ignore_index` other than -100.
    """
    if options.get("ignore_index", LABEL_IGNORE) != LABEL_IGNORE:
        raise ValueError(f"ignore_index is {options['ignore_index']}; chunked_loss ignores -100")
    if shift_labels is None:
        if labels is None or loss_weights is not None:
            raise ValueError("chunked_loss needs labels, and loss_weights need shift_labels")
        shift_labels = functional.pad(labels, (0, 1), value=LABEL_IGNORE)[..., 1:]
    targets = shift_labels.reshape(-1).to(logits.device)
    rows = logits.reshape(-1, logits.shape[-1])
    if len(rows) != len(targets):
        raise ValueError(
            f"there are logits of {len(rows)} tokens and labels of {len(targets)}; give the model "
            "what one call of model_inputs gives"
        )
    labelled = targets != LABEL_IGNORE
    weights = labelled.float()
    if loss_weights is not None:
        weights = weights * loss_weights.reshape(-1).to(logits.device)
    targets = targets.where(labelled, 0)
    total: Tensor = _LossSum.apply(rows, targets, weights)  # type: ignore[no-untyped-call]
    divisor = labelled.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
    return total / (divisor.to(total.device) if isinstance(divisor, Tensor) else divisor)


class _LossSum(torch.autograd.Function):
    """Sum over rows of `weights` * -log softmax(logits)[target]."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        """(rows, vocabulary), (rows,), (rows,) -> a float32 number."""
        log_sums = torch.cat([part.float().logsumexp(1) for part in _chunks(logits)])
        predicted = logits.gather(1, targets[:, None]).squeeze(1).float()
        ctx.save_for_backward(logits, targets, weights, log_sums)
        # a row without label has no loss, whatever its logits are
        return torch.where(weights != 0, weights * (log_sums - predicted), 0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """The logits' gradient, in their dtype."""
        logits, targets, weights, log_sums = ctx.saved_tensors
        scales = (gradient * weights)[:, None]
        result = torch.empty_like(logits)
        first = 0
        for part, target_part in zip(_chunks(logits), _chunks(result), strict=True):
            rows = slice(first, first := first + len(part))
            # softmax, minus 1 at the target
            softmax = part.float().sub(log_sums[rows, None]).exp_()
            softmax.scatter_add_(1, targets[rows, None], -softmax.new_ones(len(part), 1))
            target_part.copy_(softmax.mul_(scales[rows]).masked_fill_(scales[rows] == 0, 0))
        return result, None, None


def _chunks(logits: Tensor) -> tuple[Tensor, ...]:
    """Views of a few rows each."""
    return torch.split(logits, max(1, _CHUNK // max(1, logits.shape[1])))
