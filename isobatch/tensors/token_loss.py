"""The loss of labels, by logits of labelled tokens: for loaders and the engine.

Logits are a model's widest tensor, and `cross_entropy` of bf16 ones takes 12 bytes per logit at its
peak: a float32 copy, its softmax, the gradient. Here it is 2, or 4 where the logits must stay as
they are: float32 numbers exist for a few rows at a time.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from isobatch.common.types import LABEL_IGNORE
from isobatch.models.layer_bytes import LOSS_CHUNK


def shift_labels(labels: Tensor, cu_seqlens: Tensor) -> Tensor:
    """The label of the next token at each position, to compare logits with; same shape, dtype.

    Never across a boundary of samples: a sample's last position gets -100.

    >>> shift_labels(torch.tensor([-100, 5, 6, -100, 8]), torch.tensor([0, 3, 5])).tolist()
    [5, 6, -100, 8, -100]
    """
    # without the first label of each sample, a plain shift moves none across a boundary; one more
    # place at the end gives the last position its -100 and takes the boundary after the last sample
    masked = torch.cat([labels, labels.new_full((1,), LABEL_IGNORE)])
    masked[cu_seqlens.long()] = LABEL_IGNORE
    return masked[1:]


def labelled_loss(hidden: Tensor, logits_of: Callable[[Tensor], Tensor], batch: Any) -> Tensor:
    """Sum of the losses of a packed micro-batch's labels, each times its weight: a float32 number.

    Logits are computed only of tokens whose next one has a label. `hidden` (tokens, width);
    `logits_of`: some of its rows -> (rows, vocabulary), by an operation that does not need its
    result again, as a product: the backward pass overwrites it. `batch`: a `loaders.MicroBatch`, or
    what has its `labels`, `cu_seqlens` and perhaps `loss_weights`; if it is on the CPU, nothing
    waits for the device of `hidden`.
    """
    targets = shift_labels(batch.labels, batch.cu_seqlens)
    places = (targets != LABEL_IGNORE).nonzero().squeeze(1)
    targets = targets[places]
    weights = getattr(batch, "loss_weights", None)
    weights = torch.ones_like(targets, dtype=torch.float32) if weights is None else weights[places]
    places, targets, weights = (
        part.to(hidden.device, non_blocking=True) for part in (places, targets, weights)
    )
    logits = logits_of(hidden.index_select(0, places))
    return loss_sum(logits, targets, weights, overwrite=True)


def loss_sum(logits: Tensor, targets: Tensor, weights: Tensor, *, overwrite: bool) -> Tensor:
    """Sum over rows of weight * -log softmax(logits)[target], a float32 number.

    `logits` (rows, vocabulary), in any precision; `targets` (rows,), int64; `weights` (rows,),
    float32. A row of weight 0 has neither loss nor gradient, whatever its logits are. `overwrite`:
    the backward pass writes the gradient over the logits, which must be the result of an operation
    that does not need it again, as a product.
    """
    total: Tensor = _LossSum.apply(logits, targets, weights, overwrite)  # type: ignore[no-untyped-call]
    return total


class _LossSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, weights: Tensor, overwrite: bool
    ) -> Tensor:
        log_sums = torch.cat([part.float().logsumexp(1) for part in _chunks(logits)])
        predicted = logits.gather(1, targets[:, None]).squeeze(1).float()
        ctx.save_for_backward(logits, targets, weights, log_sums)
        ctx.overwrite = overwrite
        return torch.where(weights != 0, weights * (log_sums - predicted), 0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        logits, targets, weights, log_sums = ctx.saved_tensors
        # without its graph, which would hold it if who defers weight gradients keeps the result
        result = logits.detach() if ctx.overwrite else logits.detach().clone()
        scales = (gradient * weights)[:, None]
        first = 0
        for part in _chunks(result):
            rows = slice(first, first := first + len(part))
            # softmax, minus 1 at the target; `wide` is the part's own memory if that is float32
            wide = part.float().sub_(log_sums[rows, None]).exp_()
            wide.scatter_add_(1, targets[rows, None], -wide.new_ones(len(part), 1))
            wide.mul_(scales[rows]).masked_fill_(scales[rows] == 0, 0)
            part.copy_(wide)
        return result, None, None, None


def _chunks(logits: Tensor) -> tuple[Tensor, ...]:
    """Views of a few rows each."""
    return torch.split(logits, max(1, LOSS_CHUNK // max(1, logits.shape[1])))
