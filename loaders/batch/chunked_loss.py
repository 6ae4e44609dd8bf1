"""`chunked_loss`: transformers' loss without float32 copies of the logits.

Logits are a model's widest tensor. At its peak `ForCausalLMLoss` of transformers takes 14 bytes per
bf16 logit and up to 16 per float32 one, the logit's own 2 and 4 among them: a float32 copy, its
log-softmax, and their gradients. Here it is 4 and 8, the logit and its gradient; float32 numbers
exist for a few rows at a time. Rows without a label have gradients of zeros, whatever they are.
"""

from typing import Any

from torch import Tensor
from torch.nn import functional

from isobatch.common.types import LABEL_IGNORE
from isobatch.tensors.token_loss import loss_sum


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
    total = loss_sum(rows, targets.where(labelled, 0), weights, overwrite=False)
    divisor = labelled.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
    return total / (divisor.to(total.device) if isinstance(divisor, Tensor) else divisor)
