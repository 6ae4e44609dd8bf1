"""`StepStream`: iterating, positions and epochs, which all loaders share.

A loader opens its data and leaves here what it needs: `_steps`, a reader, a builder and a meter.
"""

import os
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn, Self

from torch.utils.data import get_worker_info

from isobatch.common.errors import ConfigError, DataError, first_line
from isobatch.loaders.accelerate_checks import check_accumulation
from isobatch.loaders.batch.micro_batch import MicroBatch
from isobatch.loaders.config import LoaderConfig
from isobatch.loaders.metrics import MetricsLogger, MetricsWindow
from isobatch.loaders.prefetch import Prefetcher
from isobatch.loaders.ranks.compare import RankChecks
from isobatch.loaders.ranks.store import Awaited
from isobatch.loaders.read.reader import SelectionReader
from isobatch.loaders.stats import LoaderStats, Meter
from isobatch.loaders.step_builder import StepBatches, StepBuilder, plans_ahead
from isobatch.loaders.steps.step_plan import StepPlan
from isobatch.loaders.steps.steps import Steps
from isobatch.models.presets import ModelPreset

MAX_WORKERS = 8
"""Largest default number of threads: more wait for the interpreter's lock more than they decode."""


class StepStream:
    """The steps of a data-parallel rank, epoch after epoch; the base of all loaders.

    An iterator continues where the last one stopped, also in the middle of an epoch; after a whole
    pass it starts the next epoch. A new iterator, `load_state_dict` and `close` end the one before.
    `with` closes it at the end of the block.
    """

    model: ModelPreset
    """Model preset that samples are counted for."""
    image_token_id: int
    """Token in `input_ids` that vision features replace."""
    video_token_id: int | None
    """Token in `input_ids` that features of videos replace; None for models without videos."""
    audio_token_id: int | None
    """Token in `input_ids` that audio features replace; None without an audio encoder."""
    vocab_size: int
    """Size of the vocabulary."""
    num_dropped_samples: int
    """Samples left out by `remainder="drop"`, over all epochs that this loader has finished."""

    _config: LoaderConfig
    _steps: Steps
    _reader: SelectionReader
    _meter: Meter
    _builder: StepBuilder
    _checks: RankChecks | None
    _awaited = Awaited()
    """Shared, but for loaders that wait for other ranks while training runs."""
    _told: dict[str, str]
    """What all ranks must have been given, by name."""
    _pid: int
    _running: Prefetcher[StepPlan, MicroBatch] | None
    _closed: bool
    _is_first: bool
    """Whether this process logs for all ranks."""
    _logger: MetricsLogger | None = None
    _resumes: bool
    """Whether the next iterator begins where a state says, also in an evaluation."""

    @contextmanager
    def _opening(self, config: LoaderConfig, what: str) -> Iterator[Sequence[int]]:
        """The ranks to agree with, for what opens `what`; they hear of it if that fails."""
        rank, size = config.ranks()
        # fixed now: worker processes, which get a copy, are not in torch.distributed's group
        alone = replace(config, process_group=None, device_mesh=None, dp_dims=None)
        self._config = replace(alone, dp_rank=rank, dp_world_size=size)
        self._is_first = config.is_first()
        peers = config.peers()
        self._checks = RankChecks(peers, config.rank_timeout_s) if len(peers) > 1 else None
        try:
            yield peers
        except Exception as error:
            if self._checks is not None:
                self._checks.tell(f"cannot open its {what}: {first_line(error)}")
            raise
        self._told |= {"dp_rank": str(rank)} | config.shared()

    @property
    def config(self) -> LoaderConfig:
        """The options, with the ranks that were found."""
        return self._config

    @property
    def epochs_vary(self) -> bool:
        """Whether `len` is this epoch's number of steps, and others have other numbers."""
        config = self._config
        return bool(config.regroup or config.mixing_weights) or self._steps.has_grown

    @property
    def is_at_end(self) -> bool:
        """Whether no step of this epoch is left; may plan the next one, for which all ranks ask."""
        with self._awaited.being(awaited=True):
            return not self._steps.remaining

    @property
    def is_evaluation(self) -> bool:
        """Whether every iterator gives the same whole pass (`shuffle=False`)."""
        return not self._config.shuffle

    @property
    def epoch(self) -> int:
        """Epoch of the next step, from 0; advances when an iterator has come to its end."""
        return self._steps.epoch

    @property
    def remaining_steps(self) -> int:
        """Steps until the epoch ends: what the next iterator gives."""
        return self._steps.remaining

    def __len__(self) -> int:
        """Steps of a whole epoch (this one, if they vary), the same on every rank."""
        return len(self._steps)

    def __getitem__(self, step: object) -> NoReturn:
        raise ConfigError(
            f"a {type(self).__name__} has no items, only steps in order; for a DataLoader write "
            "DataLoader(StepDataset(loader), batch_size=None)"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[StepBatches]:
        self._check_open()
        if os.getpid() != self._pid:
            self._open_again()
        self._end_iterator()
        if self._steps.is_after_last:
            self._finish_epoch()
        elif self.is_evaluation and not self._resumes and self.remaining_steps < len(self):
            self._steps.start_epoch(self.epoch)
        if not self.is_evaluation:
            check_accumulation(self._config.micro_batches_per_step)
        self._resumes = False
        self.check_ranks()
        self._steps.check_epoch()
        logger = self._open_logger()
        running = self._running = Prefetcher(
            map(
                partial(self._builder.task, epoch=self._steps.epoch),
                plans_ahead(self._steps.copy(), self._reader),
            ),
            workers=_num_workers(self._config.workers),
            max_bytes=self._config.prefetch_bytes,
            cancel=self._reader.cancel,
        )
        try:
            while (step := self._next(running)) is not None:
                with self._awaited.being(awaited=False):
                    yield step
                if logger is not None:  # who asks for the next step has trained on this one
                    logger.step(self._steps.num_steps)
        finally:
            running.close()
            if logger is not None:
                logger.flush(self._steps.num_steps)
        self._finish_epoch()

    def _next(self, running: Prefetcher[StepPlan, MicroBatch]) -> StepBatches | None:
        """The next step, None at the epoch's end."""
        self._check_open()
        if self._running is not running:
            raise RuntimeError(
                "this iterator ended when another one of the same loader began, or its state was "
                "loaded; use the newer iterator"
            )
        begun = time.perf_counter()
        result = next(running, None)
        waiting_s = time.perf_counter() - begun
        if result is None:
            return None
        plan, batches = result
        step = self._builder.step(plan, batches)
        # only now: a state taken after a step that raised still has that step before it
        self._steps.move_past(plan)
        num_samples = sum([len(batch.sample_ids) for batch in step])
        self._meter.add_step(plan, num_samples, waiting_s)
        self._steps.prepare_next_epoch()
        return step

    def state_dict(self) -> dict[str, Any]:
        """Position after the last step that an iterator gave: plain JSON, equal on all ranks."""
        return self._steps.state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume with the step after the one that `state` was taken after, on any number of ranks.

        ConfigError, and no change, if it is of another build, order, seed or version. Ranks that
        were given states of different positions notice when their next iterators begin.
        """
        try:
            self._steps.load(state)
        except ConfigError as error:
            if self._checks is not None:
                self._checks.tell(f"does not resume: {error}")
            raise
        self._resumes = True
        self._end_iterator()

    def set_epoch(self, epoch: int) -> None:
        """Let the next iterator begin with epoch `epoch`, as torch's DistributedSampler does.

        Nothing changes if that is the loader's epoch already: one that was resumed continues in its
        middle, and one at its end begins the next. Else the rest of this epoch is not given.
        """
        if type(epoch) is not int or epoch < 0:
            raise ConfigError(f"epoch is {epoch!r}; epochs are numbered from 0")
        if epoch == self._steps.epoch:
            return
        if epoch == self._steps.epoch + 1 and self._steps.is_after_last:
            self._finish_epoch()
        else:
            self._steps.start_epoch(epoch)
        self._end_iterator()

    def check_ranks(self) -> None:
        """Compare builds, options and position with the other ranks; ConfigError if any differ.

        All ranks call it. Every iterator begins with it, but not in a DataLoader's worker, which
        belongs to no group: call it before. `LoaderConfig.check_ranks` says which ranks take part.
        """
        if self._checks is not None and get_worker_info() is None:
            self._checks.compare(self._told | self._steps.agreed())

    def stats(self) -> LoaderStats:
        """What this loader has done so far, in this process."""
        return self._meter.stats(self._reader.cache_hits, self._num_rejected)

    def log(self, figures: Mapping[str, float]) -> None:
        """Let the trainer's figures of its last step be written with the loader's (`log_to`)."""
        if self._logger is not None:
            self._logger.add(figures)

    def metrics_window(self) -> MetricsWindow:
        """What this loader does from now on, for a trainer that logs by itself."""
        try:
            self._steps.watch_attention()
        except (ConfigError, DataError) as error:
            warnings.warn(f"waiting for attention is not logged: {first_line(error)}", stacklevel=2)
        return MetricsWindow(self._meter, self._progress)

    def close(self) -> None:
        """End the current iterator's threads; release files and connections. Safe to call twice."""
        self._end_iterator()
        if self._logger is not None:
            self._logger.close(self._steps.num_steps)
        self._closed = True
        if os.getpid() == self._pid:
            self._reader.close()

    @property
    def _num_rejected(self) -> int:
        """Samples that packing could not use."""
        raise NotImplementedError

    def _progress(self) -> dict[str, float]:
        """How far the training is, for a log."""
        try:
            progress = 1 - self.remaining_steps / max(1, len(self))
        except TypeError:  # of a stream nobody knows
            progress = 0.0
        done = {"epoch": self.epoch + progress, "tokens": self._steps.num_tokens}
        return done | {"rejected": self._num_rejected}

    def _open_logger(self) -> MetricsLogger | None:
        """The logger, as an iterator begins; None if nothing is logged here."""
        if (log_to := self._config.log_to) is None:
            return None
        if get_worker_info() is not None:
            raise ConfigError(
                "log_to logs where the training runs, and this is a DataLoader's worker: give the"
                " DataLoader num_workers=0 (the loader decodes in threads), or leave out log_to"
            )
        if self._logger is None and self._is_first:
            every = self._config.log_every
            self._logger = MetricsLogger(log_to, every, self.metrics_window())
        if self._logger is not None:
            self._logger.begin()
        return self._logger

    def _open_again(self) -> None:
        """Open again in a fork, which lacks the threads and where no lock of theirs is released."""
        raise NotImplementedError

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError(f"this {type(self).__name__} was closed; make another to continue")

    def _end_iterator(self) -> None:
        self._awaited.is_awaited = True  # also after an iterator that nobody has ended
        running, self._running = self._running, None
        if running is not None:
            running.close()

    def _finish_epoch(self) -> None:
        self.num_dropped_samples += self._steps.finish_epoch()


def _num_workers(workers: int | None) -> int:
    """Threads of an iterator."""
    if workers is not None:
        return workers
    if get_worker_info() is not None:
        return 1  # as many processes as the DataLoader was given are at work already
    ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return max(1, min(MAX_WORKERS, len(os.sched_getaffinity(0)) // ranks))
