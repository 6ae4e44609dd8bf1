"""AdamW of a rank's layers, and its learning rate by transformers' schedules."""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module

import torch
from torch import nn

from isobatch.common.errors import ConfigError, first_line
from isobatch.engine.runtime.optimizer.main_weights import main_param
from isobatch.engine.train.options import OptimizerOptions

LrFactor = Callable[[int], float]
"""Steps that are done -> the next one's share of the largest learning rate."""


def make_optimizer(
    layers: Mapping[int, nn.Module], parts: Sequence[str], options: OptimizerOptions
) -> torch.optim.AdamW | None:
    """AdamW for the trained weights of a rank's layers; None if there is none.

    `parts`: the part of each layer of the model. Each part has a learning rate. Only matrices decay
    (no biases, no norms). The groups depend on neither options nor partition, so any run resumes.
    """
    groups: dict[tuple[str, bool], dict[nn.Parameter, None]] = {}
    seen: set[nn.Parameter] = set()
    for index, layer in layers.items():
        for weight in layer.parameters():
            if weight.requires_grad and weight not in seen:
                seen.add(weight)
                groups.setdefault((parts[index], weight.dim() > 1), {})[main_param(weight)] = None
    if not groups:
        return None
    return torch.optim.AdamW(
        [
            {
                "params": list(weights),
                "lr": options.lr_of(part),
                "initial_lr": options.lr_of(part),
                "weight_decay": options.weight_decay if decays else 0.0,
            }
            for (part, decays), weights in groups.items()
        ],
        betas=(options.beta1, options.beta2),
        eps=options.eps,
        fused=True,  # torch's default for GPUs makes a copy of all moments in each step
    )


def lr_factor(options: OptimizerOptions, steps: int) -> LrFactor:
    """The schedule of a run of so many steps: a function of the step alone, so it needs no state.

    ConfigError if transformers is not installed, or refuses the schedule.
    """
    if options.lr_schedule == "constant":
        return lambda _: 1.0
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=options.lr)
    warmup = options.num_warmup_steps(steps)
    try:
        get_scheduler = import_module("transformers.optimization").get_scheduler
        scheduler = get_scheduler(options.lr_schedule, optimizer, warmup, steps)
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"--lr-schedule {options.lr_schedule} is one of transformers: {first_line(error)}"
        ) from error
    factor: LrFactor = scheduler.lr_lambdas[0]
    return factor


def set_lr(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Set each group's learning rate to a share of its largest."""
    for group in optimizer.param_groups:
        group["lr"] = factor * group["initial_lr"]
