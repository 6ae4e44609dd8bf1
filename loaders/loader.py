"""`StreamingLoader`: steps of one or several builds for a data-parallel rank.

Every rank computes the same steps from build, options, seed and epoch, and takes its own part
(`loaders.steps.steps`). So all have equally many steps and know a step's sums without a message;
only when an iterator begins, ranks compare what they plan (`loaders.ranks`). The position in the
stream is the state: a run resumes exactly on any number of ranks.
"""

import os
import pickle
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from math import gcd
from numbers import Real
from pathlib import Path
from typing import Any, Unpack

from isobatch.common.config import check_names
from isobatch.common.errors import ConfigError, first_line
from isobatch.common.types import BoolArray
from isobatch.loaders.batch.micro_batch import MicroBatch
from isobatch.loaders.config import LoaderConfig, LoaderOptions, tell_wrong_options
from isobatch.loaders.prefetch import Prefetcher
from isobatch.loaders.read.build import Build, open_builds
from isobatch.loaders.read.reader import SampleReader
from isobatch.loaders.sample_choice import choose_samples
from isobatch.loaders.stats import Meter
from isobatch.loaders.step_builder import StepBuilder
from isobatch.loaders.step_stream import StepStream
from isobatch.loaders.steps.build_groups import BuildSource
from isobatch.loaders.steps.in_order import StoredSource
from isobatch.loaders.steps.mixing_schedule import MixingSchedule, ScheduledSource
from isobatch.loaders.steps.mixture import GrownSource, MixedSource
from isobatch.loaders.steps.source import GroupSource
from isobatch.loaders.steps.step_plan import StepPlan
from isobatch.loaders.steps.steps import Steps

Url = str | Path
Datasets = Sequence[tuple[Url, float]] | Mapping[Url, float] | Sequence[Url]


class StreamingLoader(StepStream):
    """Iterating gives one list of `MicroBatch` per step, until the epoch ends.

    `url` is a build, in a folder or at `s3:// gs:// az:// http(s)://`, or several, each with a
    weight: one stream of all, mixed in every step. Weights are relative: an epoch is one pass over
    the build of the largest, and a share of a pass over others, which the next epoch continues.
    Builds without weights have equal ones: an epoch is one pass over each.
    Options are the fields of `LoaderConfig`; those given as keywords replace `config`'s.

    An iterator continues where the last one stopped, also in the middle of an epoch; after a whole
    pass it starts the next epoch. With `shuffle=False` each is a whole pass, but for the first one
    after `load_state_dict`. A new iterator, `load_state_dict` and `close` end the one before.
    """

    def __init__(
        self,
        url: Url | Datasets,
        config: LoaderConfig | None = None,
        **options: Unpack[LoaderOptions],
    ) -> None:
        is_config = isinstance(config, LoaderConfig | None)
        try:
            if "decode_images" in options:
                raise ConfigError("decode_images is now images: write images='encoded' for False")
            check_names(LoaderConfig, options)
            if not is_config:
                problem = f"config is {config!r}"
                raise ConfigError(f"{problem}; give a LoaderConfig, or options as keywords")
            config = replace(config or LoaderConfig(), **options)
        except ConfigError as error:
            tell_wrong_options(error, options, config if is_config else None)
            raise
        self._url = url
        self.num_dropped_samples = 0
        with self._opening(config, "build"):
            self._open()
        rank, size = config.ranks()
        if rank == 0 and size > 1 and config.balance:
            shape = size, config.micro_batches_per_step
            if line := self._source.waiting_line(shape):
                warnings.warn(line, stacklevel=2)

    def _open(self) -> None:
        """Open the builds, at the beginning of the first epoch; or none, if anything fails."""
        config = self._config
        datasets = _datasets(self._url, config)
        builds = open_builds(
            [url for url, _ in datasets], image_root=config.image_root, options=config.storage
        )
        with ExitStack() as opened:
            for build in builds:
                opened.callback(build.close)
                if config.on_error == "skip":
                    build.skip_missing_files()
            manifest = builds[0].manifest
            self.model = manifest.model
            self.pad_each_to = gcd(*(build.manifest.limits.pad_each_to for build in builds))
            """Multiple that samples may be padded to without a micro-batch going over its caps."""
            self.vocab_size = manifest.vocab_size
            self.image_token_id = manifest.image_token_id
            self.video_token_id = manifest.video_token_id
            self.audio_token_id = manifest.audio_token_id
            totals = [build.manifest.values["totals"] for build in builds]
            self._rejected = sum(int(total.get("num_rejected", 0)) for total in totals)
            weights = [weight for _, weight in datasets]
            chosen = choose_samples(
                builds,
                split=config.split,
                validation_fraction=config.validation_fraction,
                filter=config.filter,
                limit=config.limit,
            )
            source = self._source = _step_source(builds, datasets, chosen, config)
            hashes = ", ".join(build.manifest.hash[:12] for build in builds)
            self._told = {"the build's manifest": hashes, "weights": repr(weights)}
            self._steps = Steps(source, config.step_config(), config.planner)
            num_left_out = 0 if chosen is None else sum(int((~mask).sum()) for mask in chosen)
            self._reader = SampleReader(builds)
            self._meter = Meter(num_left_out, len(builds))
            self._builder = StepBuilder(self._reader, self.model, config, self._meter)
            opened.pop_all()  # nothing failed
        self._pid = os.getpid()
        self._running: Prefetcher[StepPlan, MicroBatch] | None = None
        self._closed = self._resumes = False

    @property
    def _num_rejected(self) -> int:
        return self._rejected

    def _open_again(self) -> None:
        self.__setstate__(self._pickled())

    def __getstate__(self) -> dict[str, Any]:
        """State for worker processes, which open the build themselves."""
        for field in fields(self._config):
            if callable(value := getattr(self._config, field.name)):
                _require_pickled(field.name, value)
        return self._pickled()

    def _pickled(self) -> dict[str, Any]:
        return {
            "url": self._url,
            "config": self._config,
            "state": self.state_dict(),
            "num_dropped_samples": self.num_dropped_samples,
            "resumes": self._resumes,
            "is_first": self._is_first,
        }

    def __setstate__(self, pickled: dict[str, Any]) -> None:
        self._url, self._config = pickled["url"], pickled["config"]
        self.num_dropped_samples = pickled["num_dropped_samples"]
        self._is_first = pickled["is_first"]
        self._open()
        self._steps.load(pickled["state"])
        self._resumes = pickled["resumes"]
        self._checks = None  # a copy may be in a process without a group


def _datasets(url: object, config: LoaderConfig) -> list[tuple[Url, float]]:
    """The builds and their weights. ConfigError if they or their use are wrong."""
    datasets: list[Any] = [url]
    if isinstance(url, Mapping | list | tuple):
        datasets = list(url.items() if isinstance(url, Mapping) else url)
    if all(_is_url(entry) for entry in datasets):
        datasets = [(entry, 1.0) for entry in datasets]
    wrong = [entry for entry in datasets if not _is_weighted(entry)]
    if wrong or not datasets:
        lacks = ", without a weight" * (bool(wrong) and _is_url(wrong[0]))
        what = f"a dataset is {wrong[0]!r}{lacks}" if wrong else f"datasets are {url!r}"
        raise ConfigError(
            f"{what}; give the folder or URI of a build, or a list of them, or of pairs "
            "(build, weight) with weights above 0"
        )
    if config.mixing_weights is not None and any(weight != 1 for _, weight in datasets):
        raise ConfigError("mixing_weights are given; leave out the weights of the datasets")
    if not config.shuffle and len({weight for _, weight in datasets}) > 1:
        raise ConfigError("shuffle=False gives every sample once; give all datasets the weight 1")
    return [(entry, float(weight)) for entry, weight in datasets]


def _is_url(value: object) -> bool:
    return isinstance(value, Url) and value != ""


def _is_weighted(dataset: object) -> bool:
    """Whether this is a build and its weight."""
    match dataset:
        case (url, Real() as weight) if not isinstance(weight, bool):
            return _is_url(url) and 0 < float(weight) < float("inf")
    return False


def _require_pickled(name: str, function: object) -> None:
    """ConfigError for a function that no other process can import, such as a lambda."""
    try:
        pickle.dumps(function)
    except Exception as error:  # whatever an object's own __reduce__ raises
        raise ConfigError(
            f"{name} cannot be sent to a worker process ({first_line(error)}); define it with def "
            "at the top of a module, or leave the loader in this process: it decodes in threads"
        ) from error


def _step_source(
    builds: Sequence[Build],
    datasets: Sequence[tuple[str | Path, float]],
    chosen: Sequence[BoolArray] | None,
    config: LoaderConfig,
) -> GroupSource[Any]:
    """The groups of all epochs; `chosen` are masks over the builds' samples."""
    if not config.shuffle:
        return StoredSource(builds, chosen)
    parts = [
        BuildSource(
            build,
            number,
            seed=config.seed,
            balance=config.balance,
            chosen=None if chosen is None else chosen[number],
            window_groups=None if config.regroup is None else config.regroup_window,
        )
        for number, build in enumerate(builds)
    ]
    if config.mixing_weights is not None:
        schedule = MixingSchedule(config.mixing_weights, [str(url) for url, _ in datasets])
        return ScheduledSource(parts, schedule, config.seed, config.balance)
    if len(parts) == 1:
        if not builds[0].manifest.values.get("earlier"):
            return parts[0]
        return GrownSource(parts[0], config.added, config.seed, config.balance)
    weights = [weight for _, weight in datasets]
    return MixedSource(parts, weights, config.seed, config.balance)
