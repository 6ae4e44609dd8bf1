"""A loader's steps for torch's DataLoader, and for trainers that build on it.

`StreamingLoader.state_dict()` is the loader's position. With a worker process, or a trainer that
asks for the next batch before it trains on this one, the loader is ahead of the training, and a
checkpoint would skip samples. So each step has its own state: save that of the last one trained on.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils.collate import default_collate_fn_map

from isobatch.common.errors import ConfigError
from isobatch.loaders.accelerate_checks import ADVICE, check_accumulation, check_not_dispatched
from isobatch.loaders.batch.micro_batch import MicroBatch
from isobatch.loaders.step_builder import StepBatches
from isobatch.loaders.step_stream import StepStream


@dataclass(slots=True)
class Step:
    """One optimizer step of one rank."""

    micro_batches: StepBatches
    state: dict[str, Any]
    """State of the loader after this step, the same on all ranks, for `load_state_dict`."""

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "Step":
        """The same step with all tensors on `device`."""

        def moved(batches: list[MicroBatch]) -> list[MicroBatch]:
            return [batch.to(device, non_blocking=non_blocking) for batch in batches]

        step = self.micro_batches
        encoders = {name: moved(batches) for name, batches in step.encoders.items()}
        return replace(self, micro_batches=StepBatches(moved(step), encoders, step.note))


class StepDataset(IterableDataset[Step]):
    """The steps of `loader`, epoch after epoch without end; for evaluation one whole pass.

    For `DataLoader(StepDataset(loader), batch_size=None)`, in this process or in one worker, and
    torchdata's StatefulDataLoader. `step.state["epoch"]` is the epoch's number. Endless, because a
    worker's loader does not tell this process's its position: a new pass would begin with the same
    epoch. A second worker is a ConfigError: it would give every step again.
    """

    def __init__(self, loader: StepStream) -> None:
        if not isinstance(loader, StepStream):
            raise ConfigError(
                f"StepDataset is given {loader!r}; give it a StreamingLoader or a BalancedLoader"
            )
        self.loader = loader

    def __iter__(self) -> Iterator[Step]:
        worker = get_worker_info()
        if worker is not None and worker.num_workers > 1:
            raise ConfigError(
                f"num_workers is {worker.num_workers}; use 0 or 1: the loader decodes in threads"
            )
        check_not_dispatched(self)  # now, on all ranks, and not with the first step
        return self._steps()

    def __getstate__(self) -> dict[str, Any]:
        """State for a worker process, which does not know what this one does with its steps."""
        check_not_dispatched(self)
        if not self.loader.is_evaluation:
            check_accumulation(self.loader.config.micro_batches_per_step)
        return self.__dict__

    @property
    def generator(self) -> NoReturn:
        """ConfigError: `prepare` of Accelerate asks for it (`dispatch_batches=False`)."""
        raise ConfigError(
            f"prepare of Accelerate would give each rank a part of its own steps; {ADVICE}"
        )

    def _steps(self) -> Iterator[Step]:
        while True:
            num_steps = 0
            for micro_batches in self.loader:
                num_steps += 1
                yield Step(micro_batches, self.loader.state_dict())
            # without steps: a BalancedLoader has given all its `epochs`
            if self.loader.is_evaluation or not num_steps:
                return

    def state_dict(self) -> dict[str, Any]:
        """The loader's state after the last step that this process has made."""
        return self.loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state, as `StreamingLoader.load_state_dict` does."""
        self.loader.load_state_dict(state)


def _refuse_to_collate(steps: list[Step], **_: object) -> NoReturn:
    raise ConfigError("a DataLoader must not collate steps; give it batch_size=None")


default_collate_fn_map[Step] = _refuse_to_collate
