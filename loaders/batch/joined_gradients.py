"""How a trainer joins the ranks' gradients, and what losses are divided by for it.

A step's divisor is the same on all ranks (`MicroBatch.loss_normalizer`), so the step's gradient is
the sum of the ranks' gradients. DDP and FSDP take their mean: a rank's losses are then to be larger
by the number of ranks. Whether such a wrapper is there is asked of the process itself, once.
"""

import gc
import sys
import warnings
from functools import partial
from typing import Literal

import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from isobatch.common.errors import ConfigError

GradientJoin = Literal["mean", "sum"]
"""What becomes of the ranks' gradients: their mean (DDP, FSDP, DeepSpeed) or their sum."""

WATCHED = 8
"""Losses of a process for which a wrapper is looked for, and whose scale is compared.

The search goes through all objects of the process, and a comparison waits for the device.
"""

_found = ""
"""A wrapper of this process that takes means."""
_num_searches = 0
_num_watched = 0


def loss_divisor(normalizer: float, num_ranks: int, join: GradientJoin | None) -> float:
    """What losses of this rank are divided by, so that joined gradients are the step's.

    `join` None: as the wrappers in this process do it. ConfigError if there is none and torch runs
    on several ranks, or for "sum" next to one that takes means.
    """
    if num_ranks == 1:
        return normalizer
    if join == "mean":
        return normalizer / num_ranks
    if not (dist.is_available() and dist.is_initialized()):
        return normalizer
    wrapper = _wrapper()
    if wrapper and join == "sum":
        raise ConfigError(
            f"gradients='sum', but {wrapper} takes the mean of the ranks' gradients; leave"
            " gradients out of the loader, or give 'mean'"
        )
    if wrapper:
        return normalizer / num_ranks
    if join is None:
        raise ConfigError(
            f"{num_ranks} ranks train, and no module of this process is wrapped by DDP, FSDP or"
            " DeepSpeed: say how you join gradients, with the loader's gradients='sum' (an"
            " all-reduce of sums) or gradients='mean'"
        )
    return normalizer


def _wrapper() -> str:
    global _found, _num_searches  # noqa: PLW0603
    if not _found and _num_searches < WATCHED:
        _num_searches += 1
        # whoever has not imported FSDP or DeepSpeed uses none; FSDP's import takes half a second
        kinds: tuple[type, ...] = (DistributedDataParallel,)
        if (fsdp := sys.modules.get("torch.distributed.fsdp")) is not None:
            kinds = (*kinds, fsdp.FullyShardedDataParallel, fsdp.FSDPModule)
        if (deepspeed := sys.modules.get("deepspeed")) is not None:
            kinds = (*kinds, deepspeed.DeepSpeedEngine)
        # not `isinstance`, for which some objects import or load what they stand for
        wrappers = (item for item in gc.get_objects() if issubclass(type(item), kinds))
        for wrapper in wrappers:
            # a hook of the user's, by which DDP joins gradients, may take sums
            if not getattr(wrapper, "_comm_hooks", ()):
                name = type(wrapper).__name__
                # `fully_shard` names a class after the module's
                _found = "FSDP" if name.startswith("FSDP") else name
                break
    return _found


def watch_scale(loss: Tensor, num_ranks: int, micro_batches: int) -> None:
    """Warn in backward if the loss is scaled by what its divisor has in it already.

    Of the first losses of a process only.
    """
    global _num_watched  # noqa: PLW0603
    if loss.requires_grad and _num_watched < WATCHED:
        _num_watched += 1
        compare = partial(_compare, num_ranks=num_ranks, micro_batches=micro_batches)
        loss.register_hook(compare)  # type: ignore[no-untyped-call]


def _compare(grad: Tensor, *, num_ranks: int, micro_batches: int) -> None:
    scale = float(grad)
    if num_ranks > 1 and scale == num_ranks:
        what = (
            f"multiplied by {num_ranks}, the number of ranks, which the loader does where gradients"
            " are averaged; leave that out"
        )
    elif micro_batches > 1 and abs(scale * micro_batches - 1) < 1e-6:
        what = (
            f"divided by {micro_batches}, a step's micro-batches, which are in its divisor already;"
            " leave that out (Accelerator(gradient_accumulation_steps=1))"
        )
    else:
        return
    warnings.warn(f"the loss of a micro-batch is {what}", RuntimeWarning, stacklevel=2)
