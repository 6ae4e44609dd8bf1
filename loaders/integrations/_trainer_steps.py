"""`TrainSteps`: a loader's steps as what Trainer takes for its DataLoader."""

import math
from collections.abc import Callable, Iterator
from itertools import chain, repeat
from typing import Any, cast

from torch.utils.data import DataLoader, IterableDataset
from transformers import TrainerState, TrainingArguments

from isobatch.common.errors import ConfigError
from isobatch.loaders.integrations.torch_dataset import Step, StepDataset
from isobatch.loaders.step_stream import StepStream

STATE_KEY = "isobatch_loader"
"""Key of the loader's state among the `stateful_callbacks` of `trainer_state.json`."""
GROUPS_KEY = "isobatch_groups_per_step"
"""Key of what says in which steps `num_train_epochs` was counted, in the same place."""
EPOCH_KEY = "isobatch_first_epoch"
"""Key of the loader's epoch when training began, in the same place."""


class TrainSteps:
    """All steps of a training as one stream; an item is a step, its length is in micro-batches.

    An iterator continues the one before. It starts when first iterated: Trainer asks for its data
    before it has read the checkpoint. Trainer counts steps and epochs, and what it skips after a
    resume, by its own number of steps; the loader's position comes from its state alone.
    """

    # what accelerate's skip_first_batches asks for
    batch_size, drop_last, prefetch_factor = None, False, None

    def __init__(
        self, loader: StepStream, args: TrainingArguments, state: Callable[[], TrainerState]
    ) -> None:
        self._loader, self._args, self._state = loader, args, state
        self._state_before = state()  # of an earlier training, until Trainer makes another
        self._has_epochs = args.max_steps <= 0
        self.ends_with_loader = (
            self._has_epochs and loader.epochs_vary and float(args.num_train_epochs).is_integer()
        )
        """Whether the loader's epochs say when to end, and not a number of steps."""
        self._steps_per_epoch = args.max_steps
        if self._has_epochs or not loader.epochs_vary:
            _ = loader.is_at_end  # plans a first window, of which `len` is estimated
            self._steps_per_epoch = len(loader)
        self._groups_per_step = loader.config.micro_batches_per_step * args.world_size
        self._stream: Iterator[Step] | None = None
        self._first_epoch = 0

    def __len__(self) -> int:
        return self._steps_per_epoch * self._args.gradient_accumulation_steps

    @property
    def are_over(self) -> bool:
        """Whether the loader has given all steps of the epochs that were asked for."""
        epochs = self._loader.epoch + self._loader.is_at_end - self._first_epoch
        return epochs >= self._args.num_train_epochs

    @property
    def num_left(self) -> int:
        """Steps after the one given last, with epochs to come as long as this one is expected."""
        loader = self._loader
        epochs_left = math.ceil(self._args.num_train_epochs) - 1 - loader.epoch + self._first_epoch
        return loader.remaining_steps + epochs_left * len(loader)

    def __iter__(self) -> Iterator[Step]:
        if self._stream is None:
            self._stream = self._begin()
        return self._stream

    @property
    def dataset(self) -> IterableDataset[Step | None]:
        """What Trainer skips after a resume, as nothing; then the steps."""
        state = self._state()
        if state.global_step and state is not self._state_before:
            iter(self)  # a resume: now the loader's position is known
        steps_done = state.global_step % self._steps_per_epoch
        return _AfterSkipped(self, steps_done * self._args.gradient_accumulation_steps)

    def close(self) -> None:
        """End the loader's threads."""
        stream, self._stream = self._stream, None
        if stream is not None and hasattr(stream, "close"):
            stream.close()

    def _begin(self) -> Iterator[Step]:
        loader, state = self._loader, self._state()
        saved = saved_states(state)
        if STATE_KEY in saved:
            loader.load_state_dict(saved[STATE_KEY])
            self._check_epochs(state.global_step, saved.get(GROUPS_KEY))
            self._first_epoch = saved.get(EPOCH_KEY, 0)
        elif state.global_step:
            raise ConfigError(
                f"the checkpoint has no loader state ({STATE_KEY}); it is not a BalancedTrainer's"
            )
        else:
            self._first_epoch = loader.epoch + loader.is_at_end
        saved |= {GROUPS_KEY: self._groups_per_step, EPOCH_KEY: self._first_epoch}
        loader.check_ranks()  # a worker's loader cannot
        dataset = StepDataset(loader)
        if not self._args.dataloader_num_workers:
            return iter(dataset)
        # not forked: the loader may hold connections, and this process a GPU
        workers: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "spawn"}
        steps = iter(DataLoader(dataset, batch_size=None, **workers))
        return self._followed(steps) if self.ends_with_loader else steps

    def _followed(self, steps: Iterator[Step]) -> Iterator[Step]:
        """A worker's steps; its loader moves, and so this one, which knows where epochs end."""
        for step in steps:
            self._loader.load_state_dict(step.state)
            yield step

    def _check_epochs(self, steps_done: int, saved_groups: int | None) -> None:
        """ConfigError if the epochs asked for were counted in steps of another size."""
        loader, groups = self._loader, self._groups_per_step
        if not self._has_epochs or saved_groups in (None, groups):
            return
        length = len(loader)
        whole = math.ceil(self._args.num_train_epochs * length)
        remaining = max(0, whole - (loader.epoch + 1) * length + loader.remaining_steps)
        raise ConfigError(
            f"a step has {groups} micro-batches on all ranks and had {saved_groups} when the "
            "checkpoint was made, so num_train_epochs are other steps now; give max_steps="
            f"{steps_done + remaining} ({steps_done} done, {remaining} to the end of the last "
            "epoch)"
        )


class _AfterSkipped(IterableDataset[Step | None]):
    def __init__(self, steps: TrainSteps, num_skipped: int) -> None:
        self._steps, self._num_skipped = steps, num_skipped

    def __iter__(self) -> Iterator[Step | None]:
        return chain(repeat(None, self._num_skipped), self._steps)


def saved_states(state: TrainerState) -> dict[str, Any]:
    """What `trainer_state.json` keeps for callbacks, by name."""
    # declared as a list, it is a dict once made
    return cast(dict[str, Any], state.stateful_callbacks)
