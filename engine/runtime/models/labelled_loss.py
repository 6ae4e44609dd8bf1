"""Loss of packed tokens by a head that computes logits only of those with a label.

6 to 18 % of a VLM's tokens have a label, and logits are a model's widest tensor. Which tokens these
are is read on the CPU, so nothing waits for a GPU.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from isobatch.common.types import LABEL_IGNORE
from isobatch.engine.runtime.stage_io import Batch, host_of, to_device
from isobatch.tensors.token_loss import loss_sum, shift_labels


def labelled_loss(hidden: Tensor, logits_of: Callable[[Tensor], Tensor], batch: Batch) -> Tensor:
    """Sum of the losses of the labels, each times its weight: a float32 number.

    `hidden` (tokens, width); `logits_of`: some of its rows -> (rows, vocabulary), by an operation
    that does not need its result again, as a product: the backward pass overwrites it.
    """
    host = host_of(batch)
    targets = shift_labels(host.labels, host.cu_seqlens)
    places = (targets != LABEL_IGNORE).nonzero().squeeze(1)
    targets = targets[places]
    weights = getattr(host, "loss_weights", None)
    weights = torch.ones_like(targets, dtype=torch.float32) if weights is None else weights[places]
    places, targets, weights = (to_device(v, hidden.device) for v in (places, targets, weights))
    logits = logits_of(hidden.index_select(0, places))
    return loss_sum(logits, targets, weights, overwrite=True)
