"""Options of a `StreamingLoader`: `LoaderConfig`, and keywords for it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self, TypedDict

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from isobatch.balance.loss_weights import LossNormalizer, LossWeights
from isobatch.balance.order.step_order import DEFAULT_BALANCE, MAX_BALANCE
from isobatch.balance.steps.step_planner import StepPlanner
from isobatch.common.config import check_names, check_types
from isobatch.common.errors import ConfigError, first_line
from isobatch.loaders.batch.joined_gradients import GradientJoin
from isobatch.loaders.metrics import Write, check_tool
from isobatch.loaders.ranks.compare import RankChecks
from isobatch.loaders.ranks.mesh import mesh_ranks
from isobatch.loaders.read.build import StorageOptions
from isobatch.loaders.sample_choice import SampleFilter, Split
from isobatch.loaders.steps.mixing_schedule import WeightSchedule
from isobatch.loaders.steps.mixture import Added
from isobatch.loaders.steps.steps import Remainder, StepConfig
from isobatch.loaders.transforms import BatchTransform, ImageTransform

AudioForm = Literal["waveform", "features", "windows"]
Transparency = Literal["drop", "white"]
OnError = Literal["raise", "skip"]
ImageForm = Literal["patches", "resized", "encoded"]

_MINIMUMS = {
    "rank_timeout_s": 1,
    "micro_batches_per_step": 1,
    "seed": 0,
    "regroup_window": 1,
    "prefetch_bytes": 0,
    "log_every": 1,
}
_OF_ONE_RANK = {"dp_rank", "process_group", "device_mesh", "check_ranks", "rank_timeout_s"}
_OF_ONE_RANK |= {"workers", "prefetch_bytes", "device", "image_root", "storage"}
_OF_ONE_RANK |= {"images", "image_transform", "log_to", "log_every"}
"""Options that may differ between ranks: their steps are the same."""
_OF_RANKS = "dp_rank", "dp_world_size", "process_group", "device_mesh", "dp_dims", "check_ranks"
"""Options that say which ranks there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderConfig:
    """How a loader orders, reads and decodes builds. ConfigError names an option that is wrong."""

    dp_rank: int | None = None
    """Data-parallel rank of this process; by default the rank in torch.distributed's group if that
    is initialised, else 0. With pipeline or tensor parallelism give this and `dp_world_size`, or
    `device_mesh`.
    """
    dp_world_size: int | None = None
    """Number of data-parallel ranks; by default the size of torch.distributed's group, else 1."""
    process_group: dist.ProcessGroup | None = None
    """Data-parallel group of this process: gives `dp_rank` and `dp_world_size`."""
    device_mesh: DeviceMesh | None = None
    """Mesh of all ranks that train together: gives `dp_rank` and `dp_world_size`, by `dp_dims`."""
    dp_dims: Sequence[str] | None = None
    """Dimensions of the mesh that are data parallel; ranks that differ only in others get the same
    data. By default those named "dp", "ddp" or "dp_...", where others are "tp", "cp", "sp", "pp".
    """
    check_ranks: bool = True
    """Compare builds, options and position with the other ranks of the mesh, the group or the
    world whenever an iterator begins; ranks that disagree are a ConfigError on all of them. Not
    with `dp_world_size=1`, which one rank may give for an evaluation of its own.
    """
    rank_timeout_s: float = 600.0
    """Longest wait for another rank to begin its epoch; then `RankMissing` names it. NCCL waits as
    long by default.
    """
    micro_batches_per_step: int = 1
    """Micro-batches of each rank per optimizer step."""
    seed: int = 0
    """Seed of the order, the same on all ranks."""
    balance: float = DEFAULT_BALANCE
    """Randomness of the order that may be traded for balance, from 0 (plainly random) to .999:
    a step's groups are chosen from 1 / (1 - balance) times as many random ones, so that they
    cost about the same. May change from run to run.
    """
    shuffle: bool = True
    """False, for evaluation: every sample once in stored order, the same in every epoch."""
    remainder: Remainder | None = None
    """Last step of an epoch that lacks groups: "pad" fills it up with empty micro-batches; "drop"
    leaves it out and counts its samples in `num_dropped_samples`. No step at all is a ConfigError.
    "split", with `shuffle=False` only, gives it fewer micro-batches, equally many to all ranks, and
    splits groups so that none is empty; only where samples are too few do the last ranks have one
    less. By default "pad" with shuffling and "split" without.
    """
    split: Split | None = None
    """"train" or "validation": the samples whose id has a hash outside or inside of
    `validation_fraction`, whatever build, group and place they are in. None: all.
    """
    validation_fraction: float = 0.01
    """Share of all ids that is for validation."""
    filter: SampleFilter | None = None
    """Function of `loaders.SampleColumns` that gives a bool per sample: whether it is used."""
    limit: int | None = None
    """Samples used at most: drawn by the hash of the id, so any ranks have the same."""
    mixing_weights: WeightSchedule | None = None
    """Weights of several builds that change: [(first step, {build: weight}), ...], or a function of
    the step, counted over the whole training. Builds by URL or its last part. Every step is full,
    so `remainder` has no effect; `balance` chooses which groups of each build it has.
    """
    regroup: Literal["epoch"] | None = None
    """"epoch" lets samples of nearly equal size trade places in every epoch, within windows of
    stored groups (docs/load/options.md).
    """
    regroup_window: int = 4096
    """Stored groups of a window."""
    added: Added = "next_epoch"
    """Data that `packer add` brought since a state was saved: it comes from the next epoch on, so
    that the epoch in progress ends as it began, or "now", shuffled with what is left of it. For a
    loader of one build.
    """
    loss_normalizer: LossNormalizer = "epoch"
    """Divisor of a step's weighted losses, `MicroBatch.loss_normalizer`: the weights of an average
    step of the epoch, so that a label counts the same in whichever step it comes ("epoch"), or the
    weights of the step's own labels, so that every step counts the same ("step").
    """
    loss_weights: LossWeights = "token"
    """Weight of a label whose sample has n: 1 ("token"), 1 / n ("sample": samples count the same,
    however long) or 1 / sqrt(n) ("square"). All but "token" read each sample's counts at the start.
    """
    gradients: GradientJoin | None = None
    """How the trainer joins the ranks' gradients: "mean" (DDP, FSDP, DeepSpeed) or "sum". By
    default "mean" where a module of this process is wrapped by one of these; ConfigError with the
    first loss if none is and torch runs on several ranks. It decides `MicroBatch.loss_divisor`.
    """
    planner: StepPlanner | None = None
    """Planner that packs each step again (`balance.steps.step_planner`); see `StepBatches`."""
    workers: int | None = None
    """Threads that read and decode; by default one per core of this rank, up to 8. 0: none."""
    prefetch_bytes: int = 1 << 30
    """Limit of what the threads make in advance, beyond one step."""
    device: torch.device | str | int | None = None
    """Device of the tensors; to a GPU they are copied from pinned memory, without waiting."""
    pixel_dtype: torch.dtype = torch.float32
    """Type of pixels; torch.uint8: raw, a quarter of the bytes, for `loaders.normalize`."""
    images: ImageForm = "patches"
    """"patches" cuts images into `MicroBatch.pixel_values`. "resized" gives each image whole, in
    the size that patches are cut from, in `MicroBatch.images`: for models that cut them. "encoded"
    gives files as they are stored, in `MicroBatch.images`: for decoders on the GPU.
    """
    image_transform: ImageTransform | None = None
    """Function (image, generator) -> image of each decoded image before it is resized: RGB, uint8
    (height, width, 3), of the same size again. `generator` is a NumPy Generator that depends on the
    seed, the epoch, the sample and the image alone. Threads call it at the same time.
    """
    batch_transform: BatchTransform | None = None
    """Function (micro-batch, generators) -> micro-batch, after collation, on the CPU; `generators`
    has one per sample. Also called for micro-batches without samples and for encoders' batches.
    """
    transparency: Transparency = "drop"
    """What is under transparent pixels: their own colour ("drop", as transformers' processors have
    an image that was opened and converted to RGB) or "white", as those have one that was opened.
    One transparent colour of a file without alpha becomes white in both, as in both of theirs;
    of models whose processor does not convert (`convert_rgb = false`) only with "white".
    """
    exact_resize: bool = False
    """Resize with Pillow, bit for bit as transformers; an eighth of the speed."""
    reduced_decode: bool = False
    """Decode large JPEGs at a fraction of their size where `loaders.decode.image` allows it."""
    audio: AudioForm = "waveform"
    """Form of `MicroBatch.audio_values`, which says what each gives."""
    on_error: OnError = "raise"
    """What an image or a clip does that has broken since it was packed, or cannot be decoded:
    "raise" a DataError that names the sample, or "skip" what its sample teaches: its labels become
    -100 and its file black or silent, so that all shapes and all ranks stay as planned. Skipped
    samples are in `MicroBatch.skipped` and counted in `LoaderStats.skipped_samples`, with a warning
    each. A store that cannot be reached is an error always, and so are damaged shards.
    """
    image_root: str | Path | None = None
    """Folder or URI that replaces the one a refs build takes its files from."""
    storage: StorageOptions | None = None
    """Cache, time limit and checksums (`loaders.StorageOptions`)."""
    log_to: str | Write | None = None
    """Where rank 0 of the job logs speed, waiting, fill and position (docs/load/metrics.md):
    "tensorboard", "wandb", "mlflow" or "trackio", with a folder or project after a colon if you
    like; or a function that takes the figures by name, and the number of the step.
    """
    log_every: int = 10
    """Steps whose means are logged at a time."""

    def __new__(cls, **options: Any) -> Self:
        """A config as the constructor makes it; ConfigError for an option that is not there."""
        check_names(LoaderConfig, options)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        check_types(self)
        for name, minimum in _MINIMUMS.items():
            if (value := getattr(self, name)) < minimum:
                raise ConfigError(f"{name} is {value}; it must be at least {minimum}")
        self._check_ranks()
        self._check_choice()
        check_tool(self.log_to)
        if not 0 <= self.balance <= MAX_BALANCE:
            raise ConfigError(
                f"balance is {self.balance}; use 0 (random) to {MAX_BALANCE} (most balanced)"
            )
        if self.workers is not None and self.workers < 0:
            raise ConfigError(f"workers is {self.workers}; use 0 for none, or a number of threads")
        try:
            device = torch.device("cpu" if self.device is None else self.device)
            if device.type == "cuda" and not torch.cuda.is_available():
                raise RuntimeError("torch finds no GPU here")
        except RuntimeError as error:
            raise ConfigError(f"device is {self.device!r}: {first_line(error)}") from None
        if self.pixel_dtype != torch.uint8 and not self.pixel_dtype.is_floating_point:
            raise ConfigError(
                f"pixel_dtype is {self.pixel_dtype}; use torch.uint8 (raw) or a floating type"
            )
        needs_pixels = "image_transform" if self.image_transform is not None else ""
        if self.on_error == "skip":
            needs_pixels = needs_pixels or "on_error='skip'"
        if needs_pixels and self.images == "encoded":
            raise ConfigError(
                f"{needs_pixels} needs decoded images, but images='encoded' decodes none; leave out"
                " one of them"
            )

    def _check_choice(self) -> None:
        """ConfigError if shuffling and the choice of samples do not fit."""
        fraction = self.validation_fraction
        wrong = ""
        if not 0 < fraction < 1:
            wrong = f"validation_fraction is {fraction}; it must be between 0 and 1"
        elif self.limit is not None and self.limit < 1:
            wrong = f"limit is {self.limit}; it must be at least 1, or None for all samples"
        elif not self.shuffle and (self.regroup or self.planner):
            wrong = "shuffle=False gives stored groups; leave out regroup and planner"
        elif not self.shuffle and self.mixing_weights is not None:
            wrong = "shuffle=False gives every sample once; leave out mixing_weights"
        elif not self.shuffle and self.remainder == "drop":
            wrong = "shuffle=False gives every sample once; use remainder='split' or 'pad'"
        elif self.shuffle and self.remainder == "split":
            wrong = "remainder='split' is for shuffle=False; use 'pad' or 'drop'"
        if wrong:
            raise ConfigError(wrong)

    def _check_ranks(self) -> None:
        if (self.dp_rank is None) != (self.dp_world_size is None):
            raise ConfigError(
                f"dp_rank is {self.dp_rank} and dp_world_size {self.dp_world_size}; give both, or "
                "neither to use torch.distributed's"
            )
        ways = ("dp_rank", "process_group", "device_mesh")
        names = [name for name in ways if getattr(self, name) is not None]
        if len(names) > 1:
            raise ConfigError(f"{' and '.join(names)} are given; each says which rank this is")
        if self.dp_dims is not None and self.device_mesh is None:
            raise ConfigError(f"dp_dims is {self.dp_dims!r}; it is for a device_mesh")
        rank, size = self.ranks()
        if not 0 <= rank < size:
            raise ConfigError(f"dp_rank is {rank}; it must be in 0..{size - 1} (dp_world_size - 1)")

    def ranks(self) -> tuple[int, int]:
        """(dp_rank, dp_world_size) as given, else torch.distributed's, else (0, 1)."""
        if self.dp_rank is not None and self.dp_world_size is not None:
            return self.dp_rank, self.dp_world_size
        if self.device_mesh is not None:
            return mesh_ranks(self.device_mesh, self.dp_dims)
        if dist.is_available() and dist.is_initialized():
            group = self.process_group
            if (rank := dist.get_rank(group)) < 0:
                raise ConfigError(f"process_group has no rank {dist.get_rank()}; give this rank's")
            return rank, dist.get_world_size(group)
        return 0, 1

    def peers(self) -> Sequence[int]:
        """Ranks of torch.distributed that must plan the same steps; none if nobody compares."""
        if not (self.check_ranks and dist.is_available() and dist.is_initialized()):
            return ()
        if self.dp_world_size == 1:  # given: one rank may evaluate while others wait
            return ()
        if self.device_mesh is not None:
            return [int(rank) for rank in self.device_mesh.mesh.flatten()]
        return dist.get_process_group_ranks(self.process_group)

    def is_first(self) -> bool:
        """Whether this is the first process of all that train, which logs.

        That of the whole job: a group of data-parallel ranks does not know of the others beside it.
        """
        if not (dist.is_available() and dist.is_initialized()):
            return self.ranks()[0] == 0
        return dist.get_rank() == 0

    def shared(self) -> dict[str, str]:
        """What all `peers` must have been given, by option."""
        values = {name: getattr(self, name) for name in self.__slots__ if name not in _OF_ONE_RANK}
        values["dp_world_size"] = self.ranks()[1]
        if (mesh := self.device_mesh) is not None:
            values["device_mesh"] = mesh.mesh_dim_names, mesh.mesh.tolist()
        return {
            name: getattr(value, "__qualname__", type(value).__name__)
            if callable(value)
            else repr(value)
            for name, value in values.items()
        }

    def step_config(self) -> StepConfig:
        """The part that planning takes."""
        rank, size = self.ranks()
        # by changing weights every step is full
        remainder = self.remainder if self.mixing_weights is None else "pad"
        return StepConfig(
            dp_rank=rank,
            dp_world_size=size,
            micro_batches=self.micro_batches_per_step,
            seed=self.seed,
            remainder=remainder or ("pad" if self.shuffle else "split"),
            loss_normalizer=self.loss_normalizer,
            loss_weights=self.loss_weights,
        )


def tell_wrong_options(
    error: ConfigError, options: Mapping[str, Any], config: LoaderConfig | None = None
) -> Sequence[int]:
    """Let other ranks know that this one has no loader, so that none waits; -> all ranks."""
    of_ranks = {name: options[name] for name in _OF_RANKS if name in options}
    peers: Sequence[int] = ()
    for changes in (of_ranks, {}):  # what says which rank this is may be wrong too
        try:
            peers = replace(config or LoaderConfig(), **changes).peers()
            break
        except ConfigError:
            continue
    if len(peers) > 1:
        RankChecks(peers, 1.0).tell(f"has wrong options: {first_line(error)}")
    return peers


class LoaderOptions(TypedDict, total=False):
    """The fields of `LoaderConfig`, as keywords of `StreamingLoader`."""

    dp_rank: int | None
    dp_world_size: int | None
    process_group: dist.ProcessGroup | None
    device_mesh: DeviceMesh | None
    dp_dims: Sequence[str] | None
    check_ranks: bool
    rank_timeout_s: float
    micro_batches_per_step: int
    seed: int
    balance: float
    shuffle: bool
    remainder: Remainder | None
    split: Split | None
    validation_fraction: float
    filter: SampleFilter | None
    limit: int | None
    mixing_weights: WeightSchedule | None
    regroup: Literal["epoch"] | None
    regroup_window: int
    added: Added
    loss_normalizer: LossNormalizer
    loss_weights: LossWeights
    gradients: GradientJoin | None
    planner: StepPlanner | None
    workers: int | None
    prefetch_bytes: int
    device: torch.device | str | int | None
    pixel_dtype: torch.dtype
    images: ImageForm
    image_transform: ImageTransform | None
    batch_transform: BatchTransform | None
    transparency: Transparency
    exact_resize: bool
    reduced_decode: bool
    audio: AudioForm
    on_error: OnError
    image_root: str | Path | None
    storage: StorageOptions | None
    log_to: str | Write | None
    log_every: int
