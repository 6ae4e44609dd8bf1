"""`StreamingLoader`: builds, step by step, for one data-parallel rank.

Every rank computes the same stream of groups from the build, the seed and the epoch alone, and
takes its own places in it (`loaders.plan.steps`); so ranks never talk, all have the same number of
steps, and each knows the sums of the whole step. The position in the stream is the whole state, so
that a run goes on exactly on another number of ranks.

Two orders: "blocks" balances each micro-batch across ranks; "random" draws a step's groups at
random and balances only each rank's sum over the step, for trainers whose ranks meet once per step
(`balance.order.block_shuffle`, `balance.order.assign_ranks`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import get_worker_info

from balance.errors import ConfigError
from balance.presets import ModelPreset
from balance.steps.step_planner import StepPlanner
from loaders.batch.collate import MediaOptions
from loaders.batch.micro_batch import MicroBatch
from loaders.plan.epoch_groups import EpochSource, MixedGroups, Regrouped, StoredGroups
from loaders.plan.look_ahead import plans_ahead
from loaders.plan.steps import StepConfig, StepPlan, Steps
from loaders.prefetch import Prefetcher
from loaders.read.build import StorageOptions
from loaders.read.builds import Build, open_builds
from loaders.read.reader import SampleReader
from loaders.stats import LoaderStats, Meter
from loaders.step_builder import StepBatches, StepBuilder

MAX_WORKERS = 8
"""Threads by default at most: beyond, they wait for the interpreter's lock more than they
decode.
"""

Datasets = Sequence[tuple[str | Path, float]]


class StreamingLoader:
    """Iterating gives one list of `MicroBatch` per step, `micro_batches_per_step` long, until the
    epoch ends.

    An iterator continues where the last one stopped, be it in the middle of an epoch; after a
    complete pass the next one starts the next epoch. A new iterator, `load_state_dict` and `close`
    end the one before.

    - `url`: a build, in a folder or at `s3:// gs:// az:// http(s)://`; or several, each with a weight: one stream of
      all, mixed in every step. Weights are relative: an epoch is one pass over the build of the
      largest, a share of a pass over others, which the next epoch continues.
    - `remainder`: the last step of an epoch may lack groups: "pad" fills it up with empty micro-batches, so that every
      sample is seen; "drop" leaves it out and counts its samples in `num_dropped_samples`. An epoch
      that has no step at all is a ConfigError when it begins.
    - `order`: "random" is for plain data parallelism with eight or more micro-batches per step: as random as a shuffle,
      as balanced as "blocks".
    - `regroup="epoch"`: samples are grouped anew in every epoch, within windows of `regroup_window` stored groups.
    - `planner`: packs each step anew (`balance.steps.step_planner`); `step.encoders` then holds what it deals to encoders.
    - `workers`: threads that read and decode coming steps; by default as many as this rank has cores, 0 for none.
      `prefetch_bytes`: what they make ahead, at most, beyond one step.
    - `pixel_dtype`: torch.uint8 gives raw pixels, to be normalised on the device with `loaders.normalize`: a quarter of
      the bytes. `device`: where tensors shall be; to a GPU they are copied from pinned memory,
      without waiting.
    - `audio`, `exact_resize`, `reduced_decode`: how clips and images become tensors (`loaders.batch.collate.MediaOptions`).
      `decode_images=False` leaves images as they are stored, in `MicroBatch.images`: for decoders
      on the GPU.
    - `storage`: cache, time limit and checksums of builds that are not on disk (`loaders.read.build.StorageOptions`).
      `image_root` replaces the folder or URI that a refs build takes its files from.
    """

    def __init__(  # noqa: PLR0913  (the options of the one public class)
        self,
        url: str | Path | Datasets,
        *,
        dp_rank: int,
        dp_world_size: int,
        micro_batches_per_step: int = 1,
        seed: int = 0,
        pixel_dtype: torch.dtype = torch.float32,
        image_root: str | Path | None = None,
        remainder: str = "pad",
        order: str = "blocks",
        regroup: str | None = None,
        regroup_window: int = 4096,
        planner: StepPlanner | None = None,
        workers: int | None = None,
        prefetch_bytes: int = 1 << 30,
        device: torch.device | str | None = None,
        audio: str = "waveform",
        exact_resize: bool = False,
        reduced_decode: bool = False,
        decode_images: bool = True,
        storage: StorageOptions | None = None,
    ) -> None:
        self._options = {name: value for name, value in locals().items() if name != "self"}
        self.num_dropped_samples = 0
        """Samples that `remainder="drop"` has left out so far, over all epochs that this loader has
        finished.
        """
        self._open()

    def _open(self) -> None:
        """Open everything that the options name, at the beginning of the first epoch."""
        options = self._options
        config = StepConfig(
            dp_rank=options["dp_rank"],
            dp_world_size=options["dp_world_size"],
            micro_batches=options["micro_batches_per_step"],
            seed=options["seed"],
            remainder=options["remainder"],
            order=options["order"],
        )
        _check(options)
        datasets = _datasets(options["url"])
        builds = open_builds(
            [url for url, _ in datasets],
            image_root=options["image_root"],
            options=options["storage"],
        )
        self._manifest = builds[0].manifest
        self._steps = Steps(
            _source(builds, [weight for _, weight in datasets], options),
            config,
            self.model.vision_unit,
            options["planner"],
        )
        self._reader, self._meter = SampleReader(builds), Meter()
        device = torch.device(options["device"]) if options["device"] is not None else None
        media = MediaOptions.of(
            self.model,
            audio=options["audio"],
            exact_resize=options["exact_resize"],
            reduced_decode=options["reduced_decode"],
            decode_images=options["decode_images"],
        )
        self._maker = StepBuilder(
            self._reader, self.model.vision, options["pixel_dtype"], media, device, self._meter
        )
        self._pid = os.getpid()
        self._running: Prefetcher[StepPlan, MicroBatch] | None = None

    @property
    def epoch(self) -> int:
        """The epoch of the next step, from 0; advances when an iterator has come to its end."""
        return self._steps.epoch

    @property
    def model(self) -> ModelPreset:
        """The model preset that the build was made for."""
        return self._manifest.model

    @property
    def image_token_id(self) -> int:
        """The token in `input_ids` that vision features replace."""
        return self._manifest.image_token_id

    @property
    def audio_token_id(self) -> int | None:
        """The token in `input_ids` that audio features replace; None for a model that hears
        nothing.
        """
        return self._manifest.audio_token_id

    @property
    def vocab_size(self) -> int:
        """Size of the build's vocabulary."""
        return self._manifest.vocab_size

    @property
    def remaining_steps(self) -> int:
        """Steps until the epoch ends: what the next iterator gives."""
        return self._steps.remaining

    def __len__(self) -> int:
        """Steps of a whole epoch, the same on every rank; with several datasets or regrouping, of
        this epoch.
        """
        return len(self._steps)

    def __iter__(self) -> Iterator[StepBatches]:
        if os.getpid() != self._pid:
            # threads are not carried across a fork, and locks that they held would never be free:
            # open all anew
            self.__setstate__(self.__getstate__())
        self._end_iterator()
        if self._steps.is_behind_last:
            self._finish_epoch()
        self._steps.check_epoch()
        works = map(self._maker.work, plans_ahead(self._steps.copy(), self._reader))
        running = self._running = Prefetcher(
            works,
            workers=_num_workers(self._options["workers"]),
            max_bytes=self._options["prefetch_bytes"],
            cancel=self._reader.cancel,
        )
        try:
            while (step := self._next(running)) is not None:
                yield step
        finally:
            running.close()
        self._finish_epoch()

    def _next(self, running: Prefetcher[StepPlan, MicroBatch]) -> StepBatches | None:
        """The next step, None at the epoch's end."""
        if self._running is not running:
            raise RuntimeError(
                "this iterator ended when another one of the same loader began, or its state was loaded, or it was "
                "closed; use the newer iterator"
            )
        begun = time.perf_counter()
        made = next(running, None)
        self._meter.add_wait(time.perf_counter() - begun)
        if made is None:
            return None
        plan, batches = made
        step = self._maker.step(plan, batches)
        # only now: a step that raised is not lost for a state that is taken afterwards
        self._steps.move_behind(plan)
        self._meter.add_step(plan, sum(batch.num_samples for batch in step))
        self._steps.prepare_next_epoch()
        return step

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands, as plain JSON: behind the last step that an iterator gave.

        The same on every rank, so one rank's is enough for a run on any number of ranks.
        """
        return self._steps.state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`, with the step after the one it was taken behind; on any number of
        ranks.

        Raises ConfigError, and changes nothing, if the state is of another build, order, seed or
        version.
        """
        self._steps.load(state)
        self._end_iterator()

    def stats(self) -> LoaderStats:
        """What this loader has done so far, in this process."""
        return self._meter.stats(self._reader.cache_hits)

    def close(self) -> None:
        """End the threads of an iterator under way, and let go of files and connections. Safe to
        call twice.
        """
        self._end_iterator()
        if os.getpid() == self._pid:
            self._reader.close()

    def __getstate__(self) -> dict[str, Any]:
        """For worker processes: they open the build themselves."""
        return {
            "options": self._options,
            "state": self.state_dict(),
            "num_dropped_samples": self.num_dropped_samples,
        }

    def __setstate__(self, pickled: dict[str, Any]) -> None:
        self._options, self.num_dropped_samples = pickled["options"], pickled["num_dropped_samples"]
        self._open()
        self._steps.load(pickled["state"])

    def _end_iterator(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.close()

    def _finish_epoch(self) -> None:
        self.num_dropped_samples += self._steps.finish_epoch()


def _source(
    builds: Sequence[Build], weights: Sequence[float], options: dict[str, Any]
) -> EpochSource:
    if len(builds) > 1:
        return MixedGroups(builds, weights, options["seed"])
    if options["regroup"] is not None:
        return Regrouped(builds[0], options["seed"], options["regroup_window"])
    return StoredGroups(builds[0])


def _datasets(url: str | Path | Datasets) -> Datasets:
    return [(url, 1.0)] if isinstance(url, str | Path) else url


def _check(options: dict[str, Any]) -> None:
    """ConfigError names an option that is wrong."""
    datasets, pixel_dtype, workers = (
        _datasets(options["url"]),
        options["pixel_dtype"],
        options["workers"],
    )
    if not datasets or any(not 0 < weight < float("inf") for _, weight in datasets):
        raise ConfigError(
            f"datasets are {datasets}; give at least one (url, weight), with weights above 0"
        )
    if pixel_dtype != torch.uint8 and not pixel_dtype.is_floating_point:
        raise ConfigError(
            f"pixel_dtype is {pixel_dtype}; use torch.uint8 (raw) or a floating type (normalised)"
        )
    if options["regroup"] not in (None, "epoch"):
        raise ConfigError(f"regroup is {options['regroup']!r}; use None or 'epoch'")
    if options["regroup"] is not None and len(datasets) > 1:
        raise ConfigError(
            "regroup='epoch' is for one dataset; build the datasets as one, or leave out regroup"
        )
    if options["regroup_window"] < 1:
        raise ConfigError(
            f"regroup_window is {options['regroup_window']}; it must be at least 1 stored group"
        )
    if workers is not None and workers < 0:
        raise ConfigError(f"workers is {workers}; use 0 for none, or a number of threads")
    if options["prefetch_bytes"] < 0:
        raise ConfigError(f"prefetch_bytes is {options['prefetch_bytes']}; it must not be negative")


def _num_workers(workers: int | None) -> int:
    """Threads of an iterator."""
    if workers is not None:
        return workers
    if get_worker_info() is not None:
        return 1  # as many processes as the DataLoader was given are at work already
    ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return max(1, min(MAX_WORKERS, len(os.sched_getaffinity(0)) // ranks))
