"""What Accelerate would do to losses and steps that are right: one line for each.

Accelerate is not imported: who does not use it does not wait for it.
"""

import sys
from typing import Any

from isobatch.common.errors import ConfigError

ADVICE = "leave it out of prepare, or give prepare the loader itself, which it passes on"


def check_accumulation(micro_batches: int) -> None:
    """ConfigError if this process's Accelerator divides losses, or joins gradients, by other steps.

    `micro_batches`: of a step of the loader. With DeepSpeed Accelerate counts them itself.
    """
    state = _gradient_state()
    if state is None:
        return
    if _has_deepspeed():
        if state.num_steps != micro_batches:
            raise ConfigError(
                f"Accelerator has gradient_accumulation_steps={state.num_steps}, so DeepSpeed "
                f"updates after as many micro-batches, but a step of the loader has {micro_batches}"
                " (micro_batches_per_step); give both the same value"
            )
    elif state.num_steps > 1:
        raise ConfigError(
            f"Accelerator has gradient_accumulation_steps={state.num_steps} and divides each loss "
            "by it, but losses are divided already; leave it at 1: a step is "
            "micro_batches_per_step of the loader"
        )


def check_not_dispatched(dataset: Any) -> None:
    """ConfigError if Accelerate is about to give steps of its first rank to all."""
    state = _gradient_state()
    loader: Any = None if state is None else state.active_dataloader
    if type(loader).__name__ == "DataLoaderDispatcher" and loader.dataset is dataset:
        raise ConfigError(
            "prepare of Accelerate has made a DataLoader(StepDataset) one whose first rank reads "
            f"for all, but each rank has its own steps; {ADVICE}"
        )


def _gradient_state() -> Any:
    module = sys.modules.get("accelerate.state")
    return None if module is None else module.GradientState()


def _has_deepspeed() -> bool:
    module = sys.modules["accelerate.state"]
    return bool(module.is_initialized()) and (
        module.AcceleratorState().distributed_type.value == "DEEPSPEED"
    )
