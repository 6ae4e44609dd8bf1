"""Loss of packed tokens: its sum, and gradients in the memory of the logits.

Logits are the widest tensor of a model. `cross_entropy` of bf16 ones takes 12 bytes per logit at
its peak: a float32 copy, its softmax, the gradient. Here it is 2: float32 numbers exist for a few
rows at a time, and the gradient takes the logits' place.
"""

from typing import Any

import torch
from torch import Tensor

from isobatch.common.types import LABEL_IGNORE
from isobatch.engine.runtime.stage_io import Batch

_CHUNK = 1 << 24
"""Logits in float32 at a time, 64 MiB: enough work for a GPU, little memory."""


def loss_sum(logits: Tensor, batch: Batch) -> Tensor:
    """Sum of the losses of the labels, each times its weight: a float32 number.

    `logits` (tokens, vocabulary), in any precision, are overwritten by their gradient in the
    backward pass: give the result of an operation that does not need it again, as a product.
    """
    targets = next_labels(batch.labels, batch.cu_seqlens)
    labelled = targets != LABEL_IGNORE
    weights = getattr(batch, "loss_weights", None)
    scale = labelled.float() if weights is None else labelled * weights
    chosen = targets.where(labelled, 0)
    total: Tensor = _LossSum.apply(logits, chosen, scale)  # type: ignore[no-untyped-call]
    return total


def next_labels(labels: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Label that each position must predict: the next one in its sample; none at a sample's end.

    >>> next_labels(torch.tensor([-100, 3, 4, 7, 9]), torch.tensor([0, 3, 5])).tolist()
    [3, 4, -100, 9, -100]
    """
    targets = labels.roll(-1)
    targets[cu_seqlens[1:].long() - 1] = LABEL_IGNORE
    return targets


class _LossSum(torch.autograd.Function):
    """Sum over tokens of `scale` * -log softmax(logits)[target]."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, scale: Tensor) -> Tensor:
        log_sums = torch.cat([part.float().logsumexp(1) for part in _chunks(logits)])
        chosen = logits.gather(1, targets[:, None]).squeeze(1).float()
        ctx.save_for_backward(logits, targets, scale, log_sums)
        # a token without label has no loss, whatever its logits are
        return torch.where(scale != 0, scale * (log_sums - chosen), 0).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        logits, targets, scale, log_sums = ctx.saved_tensors
        factors, first = (gradients[0] * scale)[:, None], 0
        for part in _chunks(logits):
            rows = slice(first, first := first + len(part))
            # softmax - 1 at the target; `wide` is the logits' own memory if they are float32
            wide = part.float().sub_(log_sums[rows, None]).exp_()
            wide.scatter_add_(1, targets[rows, None], wide.new_full((len(part), 1), -1.0))
            wide.mul_(factors[rows]).masked_fill_(factors[rows] == 0, 0)
            part.copy_(wide)
        return logits, None, None


def _chunks(logits: Tensor) -> tuple[Tensor, ...]:
    """Views of a few rows each."""
    return torch.split(logits, max(1, _CHUNK // max(1, logits.shape[1])))
