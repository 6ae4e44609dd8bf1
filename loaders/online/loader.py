"""`BalancedLoader`: balanced steps from any dataset, without a build.

Each rank measures its share of a window of the dataset's random order, and all plan the window in
the same way (`loaders.steps.windows`); only the rank that was given a sample reads and decodes it.
Planning, decoding and collating are those of `StreamingLoader`.
"""

import hashlib
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NoReturn, Unpack, cast

from isobatch.common.errors import ConfigError, first_line
from isobatch.common.types import Limits
from isobatch.counting.record_counter import RejectedSample
from isobatch.loaders.config import tell_wrong_options
from isobatch.loaders.online._length_table import LengthTable
from isobatch.loaders.online._open_counter import identity_of, open_counter
from isobatch.loaders.online._packer import require_place, save_build, write_page
from isobatch.loaders.online._place_records import open_records, require_columns
from isobatch.loaders.online.config import PackingConfig, PackingOptions, checked_options
from isobatch.loaders.online.lengths import LengthOptions, SampleLengths
from isobatch.loaders.online.per_rank.items import of_items, require_own_options, require_records
from isobatch.loaders.online.per_rank.lengths import OwnLengths, RecentRows
from isobatch.loaders.online.per_rank.streams import StreamRecords
from isobatch.loaders.online.processes.pool import WorkerPool, require_processes
from isobatch.loaders.online.processes.worker import WorkerSetup
from isobatch.loaders.online.reader import KEPT_BYTES, RecordReader
from isobatch.loaders.online.records import Records
from isobatch.loaders.ranks.exchange import RankExchange
from isobatch.loaders.ranks.store import Awaited
from isobatch.loaders.stats import Meter
from isobatch.loaders.step_builder import StepBatches, StepBuilder
from isobatch.loaders.step_stream import StepStream
from isobatch.loaders.steps.steps import Steps
from isobatch.loaders.steps.window_groups import WindowSettings
from isobatch.loaders.steps.windows import WindowOrder, WindowSource

FIRST_WINDOW = 256
"""Samples of an epoch's first window where both caps are given: the first step comes soon."""
OWN_SHARE = 8
"""With `measure="own"` a rank loads 1 / this of `window` at a time, on any number of ranks."""


class BalancedLoader(StepStream):
    """Iterating gives one list of `MicroBatch` per step, as `StreamingLoader` does.

    `dataset` is a list of records, a map-style torch Dataset or a `datasets.Dataset`, of
    conversations with their images and audio files as `packer build` takes them; or the name or
    place of what `packer build --dataset` takes, whose records are then read into a cache
    (`packer.count.record_table`). What a sample costs is said by `model` (a preset, a folder or a
    Hub id), by a `processor`, or by `encode`, a function that gives the sample of any record. With
    `measure="own"` it may also be an IterableDataset, and items may be samples already.

    All ranks make the loader at the same place of their programs, and iterate together. Without
    torch.distributed, `dp_rank` and `dp_world_size` may be given: each rank then measures all
    samples by itself.
    """

    def __init__(
        self, dataset: Any, *, model: str | Path | None = None, **options: Unpack[PackingOptions]
    ) -> None:
        packing_names = {field.name for field in fields(PackingConfig)}
        values: dict[str, Any] = {"model": model, **options}
        values |= {name: str(value) for name, value in values.items() if isinstance(value, Path)}
        packing = {name: value for name, value in values.items() if name in packing_names}
        loading = {name: value for name, value in values.items() if name not in packing_names}
        try:
            config, self._packing = checked_options(loading, packing)
        except ConfigError as error:
            if len(peers := tell_wrong_options(error, loading)) > 1:
                RankExchange(peers, 1.0)  # ranks count those that each has made
            raise
        with self._opening(config, "dataset") as peers:
            exchange = RankExchange(peers, config.rank_timeout_s) if len(peers) > 1 else None
            self._awaited = exchange or Awaited()
            self._begin(dataset, exchange)

    def _begin(self, dataset: Any, exchange: RankExchange | None) -> None:
        """The beginning of the first epoch."""
        config = self._config
        if self._packing.processes:
            require_processes(self._packing.processes)
        is_leader = exchange.rank == 0 if exchange is not None else config.dp_rank == 0
        records = self._open_records(dataset, shows=is_leader)
        packing = self._packing
        self._counter = counter = open_counter(packing, config, records.places)
        require_columns(records, packing, tells=is_leader)
        self.model, self.vocab_size = counter.model, counter.vocab_size
        self.image_token_id = counter.image_token_id
        self.video_token_id = counter.tokenizer.video_token_id
        self.audio_token_id = counter.tokenizer.audio_token_id
        self._records, self._is_leader = records, is_leader
        is_alone = config.dp_world_size == 1
        options = LengthOptions(
            packing=packing, seed=config.seed, is_alone=is_alone, tells=is_leader
        )
        is_own, extras = packing.measure == "own", packing.keep_columns
        max_bytes = sys.maxsize if is_own else KEPT_BYTES
        may_lose = config.on_error == "skip"
        reader = RecordReader(records, counter, extras, may_lose=may_lose, kept_bytes=max_bytes)
        owners = None
        if is_own:
            owners = OwnLengths(counter, reader.measure, RecentRows(), exchange, options)
            reader.lengths, name = owners, owners.open(reader, config.ranks())
            owners.compare_items(packing.is_sharded)
        else:
            folder, name = packing.lengths_cache, identity_of(records, counter)
            counted = f"{counter.identity} {Path(packing.data_root or '').resolve()}"
            table = LengthTable.open(folder, records, counted, may_write=is_leader)
            reader.lengths = SampleLengths(counter, reader.measure, table, exchange, options)
        self._lengths = lengths = reader.lengths
        identity: dict[str, object] = {"dataset": name, "window": self._window_identity()}
        self._source = WindowSource(lengths, self._settings(), identity, owners)
        self._told = {"dataset": name} | {k: str(v) for k, v in self._window_identity().items()}
        self._steps = Steps(self._source, config.step_config(), config.planner)
        self._reader, self._meter = reader, Meter()
        pool = reader.pool = self._pool = self._open_pool(dataset)
        self._builder = StepBuilder(
            reader,
            self.model,
            config,
            self._meter,
            are_padded=not packing.packing,
            make_elsewhere=None if pool is None else pool.make,
        )
        self._pid, self._running = os.getpid(), None
        self._closed, self._resumes, self.num_dropped_samples = False, False, 0
        self._has_compared = False

    def _open_records(self, dataset: Any, *, shows: bool) -> Records:
        """The records; `_packing` then says how they are counted, if they are samples already."""
        packing, is_own = self._packing, self._packing.measure == "own"
        if is_own:
            require_own_options(packing, self._config)
        records = open_records(dataset, packing, self._config, shows=shows)
        if not len(records):
            raise ConfigError("the dataset has no records")
        if is_own:
            packing = self._packing = of_items(records, packing)
            records.as_files = packing.encode is None
        require_records(records, packing)
        return records

    def _open_pool(self, dataset: Any) -> WorkerPool | None:
        """The worker processes, if there are to be any."""
        size, records = self._packing.processes, self._records
        if not size:
            return None
        setup = WorkerSetup(
            dataset=None if isinstance(records, StreamRecords) else dataset,
            packing=self._packing,
            # what only this process needs need not be something that can be sent
            config=replace(self._config, planner=None, gradients=None, device=None),
            as_files=records.as_files,
        )
        self._counter.name_blobs(0, size + 1)
        pool = WorkerPool(setup, size)
        # now, as workers take longer to open: they would wait for it after the first window
        from isobatch.balance.grouping.window import load_kernels  # noqa: PLC0415 (see `loaders`)

        load_kernels()
        return pool

    def _settings(self) -> WindowSettings:
        packing, config = self._packing, self._config
        has_caps = packing.max_tokens is not None and packing.max_vision is not None
        is_own, ranks = packing.measure == "own", config.ranks()[1]
        window = max(1, packing.window // OWN_SHARE) * ranks if is_own else packing.window
        return WindowSettings(
            window=window,
            first_window=min(window, FIRST_WINDOW) if has_caps else window,
            seed=config.seed,
            balance=config.balance,
            step_groups=config.ranks()[1] * config.micro_batches_per_step,
            loss_weights=config.loss_weights,
            shuffle=config.shuffle,
            ranks=config.ranks()[1],
            packing=packing.packing,
            pad_each_to=packing.pad_each_to,
        )

    def _window_identity(self) -> dict[str, int | str | None]:
        names = "measure", "window", "max_tokens", "max_vision", "packing"
        values = {name: getattr(self._packing, name) for name in names}
        if self._packing.pad_each_to > 1:  # states without it are those of earlier versions
            values["pad_each_to"] = self._packing.pad_each_to
        return values | {"shuffle": self._config.shuffle}

    def __iter__(self) -> Iterator[StepBatches]:
        is_within = self.is_evaluation and self._position.num_taken and not self._resumes
        if is_within and not self._steps.is_after_last:
            self._steps.start_epoch(self.epoch + 1)  # ranks tell passes apart by their numbers
        while True:
            if (epochs := self._packing.epochs) is not None and self.epoch >= epochs:
                return
            self._compare()  # before ranks wait for what the others measure
            if self.epoch + 1 == epochs and self._steps.is_after_last:
                self._finish_epoch()  # resumed after the last step of all
                return
            yield from super().__iter__()
            if epochs is None:
                return

    def _compare(self) -> None:
        """ConfigError on all ranks if one of them has other options, or is at another place."""
        if self._checks is not None:
            position = hashlib.sha256(json.dumps(self.state_dict()).encode()).hexdigest()
            begun = {"epochs and states begun": str(self._source.run.num_begun)}
            self._checks.compare(self._told | {"position in the epoch": position[:12]} | begun)
        self._has_compared = True

    def __len__(self) -> int:
        """Steps of this epoch, the same on every rank; an estimate until `is_len_exact`.

        Measures the first window if none is yet: all ranks ask for it. TypeError for a stream.
        """
        if isinstance(self._records, StreamRecords):
            raise TypeError("nobody knows the length of a stream before its end; give max_steps")
        if not self._has_compared:
            self._compare()
        groups, step_groups = self._position.expected, self._source.run.settings.step_groups
        is_whole = self._config.remainder == "drop"
        return groups // step_groups if is_whole else -(-groups // step_groups)

    @property
    def epochs_vary(self) -> bool:
        """True: each epoch's windows are grouped anew."""
        return True

    @property
    def is_len_exact(self) -> bool:
        """Whether the last window of this epoch is read, so that its steps are known."""
        return self._position.is_read

    @property
    def remaining_steps(self) -> int:
        """Steps until the epoch ends; as exact as `len`."""
        step_groups = self._source.run.settings.step_groups
        return max(0, len(self) - -(-self._position.num_taken // step_groups))

    @property
    def _position(self) -> WindowOrder:
        return cast("WindowOrder", self._steps.position)

    @property
    def limits(self) -> Limits | None:
        """Caps of a micro-batch, None until they are chosen; `explained` says why."""
        return self._source.run.limits

    @property
    def pad_each_to(self) -> int:
        """Multiple that samples may be padded to without a micro-batch going over its caps."""
        return self._packing.pad_each_to

    @property
    def explained(self) -> list[str]:
        """How the caps were chosen, in lines; none if both were given, or before the first step."""
        return self._lengths.explained

    @property
    def _num_rejected(self) -> int:
        return len(self._lengths.rejected)

    @property
    def rejected(self) -> list[RejectedSample]:
        """The samples so far that cannot be used, with reasons, by their index in the dataset."""
        return [sample for _, sample in sorted(self._lengths.rejected.items())]

    def report(self) -> dict[str, Any]:
        """What the packing has done; groups, fill and times are of what this rank has planned."""
        figures, stats, limits = self._source.run.figures, self.stats(), self.limits
        return {
            "records": None if isinstance(self._records, StreamRecords) else len(self._lengths),
            "measured": self._lengths.num_measured,
            "rejected": dict(Counter(sample.reason for sample in self.rejected)),
            "never_read": {name: dict(keys) for name, keys in self._lengths.never_read.items()},
            "sources": self._lengths.source_shares(),
            "limits": None if limits is None else limits.to_json(),
            "explained": self.explained,
            "groups": figures.num_groups,
            "token_fill": figures.token_fill,
            "padding": figures.padding,
            "first_window_s": figures.first_window_s,
            "measuring_s": figures.measuring_s,
            "grouping_s": figures.grouping_s,
            "steps": stats.steps,
            "dist_ratio_vit": stats.dist_ratio_vit,
            "dist_ratio_llm": stats.dist_ratio_llm,
        }

    def write_report(self, path: str | Path) -> None:
        """Write `report`, the dist ratios by step and what was rejected as a page of HTML.

        The first rank writes it. ConfigError if it cannot be written.
        """
        if self._is_leader:
            write_page(Path(path), self.report(), self._meter.step_ratios(), self.rejected)

    def save_build(self, out: str | Path, *, overwrite: bool = False) -> None:
        """Write a build of all samples to a folder or URI, as `packer build` does, and its report.

        The first rank writes; others return at once. Samples that it measured and still has in
        memory are not tokenised again, others are read now; progress is printed. ConfigError if
        `out` holds a finished build and not `overwrite`; DataError if too many samples cannot be
        used. A build that was interrupted does not open.
        """
        if self._packing.measure == "own":
            raise ConfigError("save_build is not there with measure='own'; leave that out")
        if self._is_leader:
            require_place(str(out), overwrite=overwrite)
            counted = cast("RecordReader", self._reader).in_memory()
            args = self._records, self._counter, counted, self._packing, self._config.seed
            try:
                save_build(str(out), *args)
            except OSError as error:
                raise ConfigError(f"{out}: no build can be written: {first_line(error)}") from None

    def close(self) -> None:
        """End all threads. Safe to call twice."""
        self._source.close()
        super().close()
        if self._pool is not None:
            self._pool.close()

    def __getstate__(self) -> NoReturn:
        raise ConfigError(_ONE_PROCESS)

    def _open_again(self) -> None:
        raise ConfigError(_ONE_PROCESS)


_ONE_PROCESS = (
    "a BalancedLoader cannot go to a worker process: it measures and decodes in threads, or in "
    "processes=N of its own; use num_workers=0 (dataloader_num_workers of a Trainer)"
)
