"""Options of `python -m engine plan` and `simulate`, to a `PlanRequest`."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal, get_args

import numpy as np

from isobatch.balance.baseline_samplers import BATCH_SIZE
from isobatch.common.config import Option, check_options, preset_families, preset_names
from isobatch.common.errors import ConfigError
from isobatch.common.visible_text import shown
from isobatch.engine.cost_model.loads import Loads
from isobatch.engine.cost_model.parallel import Parallelism, Part, Training
from isobatch.engine.cost_model.training_mode import Precision, TrainingMode
from isobatch.engine.planning.build_steps import read_build
from isobatch.engine.planning.plan import Plan, PlanRequest
from isobatch.engine.planning.trainers.expressible import TRAINERS, Trainer
from isobatch.engine.simulator.schedule import SCHEDULES, default_stages
from isobatch.models.clusters import load_cluster
from isobatch.models.folder.find_model import find_model
from isobatch.models.image_rules import NativeSizeRule
from isobatch.models.layer_bytes import Kernels

PARTS: tuple[Part, ...] = get_args(Part)
GIB = 2**30
BEST = "best"
"""Plan for every schedule, and keep the fastest."""
MOST_GIB = 2**20
"""Largest GPU memory that can be given."""
MOST_TOKENS = 10**8
"""Largest made-up micro-batch, in tokens and image patches: squares of more overflow 64 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanConfig:
    """One plan; every field is also a key of the TOML file given with --config."""

    build: str | None = None
    """Folder of a packed build; otherwise `model`, `images` and `seq_len` make up micro-batches."""
    model: Annotated[
        str | None,
        Option(
            "Without a build: folder with the model's config.json and its processor's files, or a"
            " Hub id; a .toml file; or a preset that `packer models` lists, of"
            f" {preset_families('models')}."
        ),
    ] = None
    images: Annotated[
        int | None, Option("Without a build: image patches of a micro-batch.", min=0)
    ] = None
    seq_len: Annotated[
        int | None, Option("Without a build: LLM tokens of a micro-batch.", min=1)
    ] = None
    samples: Annotated[
        int, Option("Without a build: samples that share these. Default: 1.", min=1)
    ] = 1
    cluster: Annotated[
        str,
        Option(
            f"Cluster preset, or a .toml file: {', '.join(preset_names('clusters'))}."
            " Default: h100."
        ),
    ] = "h100"
    tp: Annotated[int, Option("GPUs of a tensor-parallel group. Default: 1.", min=1)] = 1
    pp: Annotated[int, Option("Ranks of the pipeline. Default: 4.", min=1)] = 4
    dp: Annotated[int, Option("Replicas of the pipeline. Default: 1.", min=1)] = 1
    sequence_parallel: bool = True
    precision: Annotated[
        Precision,
        Option("Weights, activations and messages: bf16 (fp32 masters) or fp32. Default: bf16."),
    ] = "bf16"
    kernels: Annotated[
        Kernels,
        Option(
            "transformers: its modules as they are; fused: norms and activation functions of Liger"
            " or Megatron-LM, which keep less. Default: transformers."
        ),
    ] = "transformers"
    logits: Annotated[
        Literal["labelled", "all"],
        Option("labelled: only where tokens have labels; all: for trainers without that."),
    ] = "labelled"
    zero_stage: Annotated[
        int,
        Option("Shared out over replicas: 0 nothing, 1 the optimizer's state. Default: 1.", min=0),
    ] = 1
    innermost: Literal["replicas", "stages"] = "replicas"
    micro_batches: Annotated[
        int, Option("Micro-batches per step and replica. Default: 16.", min=1)
    ] = 16
    schedule: Annotated[
        str, Option(f"{', '.join(SCHEDULES)}; or best: all are planned for. Default: 1f1b.")
    ] = "1f1b"
    stages_per_rank: Annotated[
        int | None, Option("Stages per rank. Default: 2 for interleaved ones, else 1.", min=1)
    ] = None
    memory_gib: Annotated[
        float | None, Option("GiB of a GPU that may be used. Default: by the cluster's preset.")
    ] = None
    trainer: Annotated[
        Trainer | None,
        Option(
            f"Plan only what a trainer can express, and print its settings: {', '.join(TRAINERS)}.",
            flag="--for",
        ),
    ] = None
    """Key `trainer` in a TOML file."""
    steps: Annotated[int, Option("Steps of the epoch to simulate. Default: 4.", min=1)] = 4
    seed: Annotated[int, Option("Seed of the epoch's order, as loaders'. Default: 0.", min=0)] = 0
    frozen: Annotated[
        tuple[str, ...], Option(f"Part that is not trained, may be repeated: {', '.join(PARTS)}.")
    ] = ()
    time_limit: Annotated[
        float,
        Option("Seconds after which the search ends with its best. Default: 30.", min=0),
    ] = 30.0
    batch_size: Annotated[
        int | None,
        Option(
            "Samples of a random micro-batch to compare with. Default: 4, or a group's if less.",
            min=1,
        ),
    ] = None

    def __post_init__(self) -> None:
        check_options(self)
        if self.schedule not in (*SCHEDULES, BEST):
            names = ", ".join([*SCHEDULES, BEST])
            raise ConfigError(f"schedule is {self.schedule!r}; use one of {names}")
        if self.schedule == BEST and self.stages_per_rank is not None:
            raise ConfigError("schedule best chooses stages_per_rank as well; leave that out")
        if self.trainer is not None and self.trainer not in TRAINERS:
            names = ", ".join(TRAINERS)
            raise ConfigError(f"--for is {shown(self.trainer)}: use one of {names}")
        if self.trainer is not None and self.schedule != BEST:
            TRAINERS[self.trainer].check(self.schedule, self.pp, self.micro_batches)
        unknown = sorted(set(self.frozen) - set(PARTS))
        if unknown:
            raise ConfigError(f"frozen names {', '.join(unknown)}; parts are {', '.join(PARTS)}")
        if self.memory_gib is not None:
            gib_bytes(self.memory_gib)
        if self.build is None:
            self._check_made_up()
        else:
            self._check_build(self.build)

    def _check_made_up(self) -> None:
        if self.model is None or self.images is None or self.seq_len is None:
            raise ConfigError(
                "give a packed build, or --model with --images and --seq-len of a micro-batch"
            )
        if self.batch_size is not None:
            raise ConfigError(
                "batch_size is of random samples of a build; without a build leave it out"
            )
        if max(self.images, self.seq_len) > MOST_TOKENS:
            raise ConfigError(
                f"images is {self.images}, seq_len {self.seq_len}; give at most {MOST_TOKENS:,}"
            )
        if self.samples > self.seq_len:
            raise ConfigError(
                f"{self.samples} samples cannot share {self.seq_len} tokens; give each at least one"
            )

    def _check_build(self, build: str) -> None:
        made_up = {"model": self.model, "images": self.images, "seq_len": self.seq_len}
        options = [name for name, value in made_up.items() if value is not None]
        if self.samples != 1:
            options.append("samples")
        if options:
            raise ConfigError(f"a build has its own {', '.join(options)}; leave that out")
        if "://" in build:
            raise ConfigError(
                f"{build}: planning reads a folder; copy the build's manifest.json, index.arrow, "
                "counts.parquet and groups.parquet into one"
            )


def gib_bytes(memory_gib: float) -> int:
    """Memory of a GPU in bytes. ConfigError for what no GPU can have.

    >>> gib_bytes(0.5)
    536870912
    """
    if not 0 < memory_gib <= MOST_GIB:
        raise ConfigError(f"memory_gib is {memory_gib}; give more than 0 and at most {MOST_GIB:,}")
    return int(memory_gib * GIB)


def plan_request(config: PlanConfig) -> tuple[PlanRequest, Loads | None]:
    """The request, and of a build random micro-batches to compare with."""
    cluster = load_cluster(config.cluster)
    memory_gib = config.memory_gib
    random = None
    if config.build is None:
        model = find_model(config.model or "")
        loads = _equal_loads(config)
        full = loads.take(np.zeros(1, np.int64))
    else:
        build = read_build(Path(config.build))
        model = build.model
        full = build.full_micro_batch()
        size = config.batch_size or min(BATCH_SIZE, build.mean_group_size)
        asked = {n: getattr(config, n) for n in ("dp", "micro_batches", "steps", "seed")}
        loads, random = build.stream_steps(**asked), build.random_steps(batch_size=size, **asked)
    if config.trainer is not None:
        TRAINERS[config.trainer].modules_of(model)
    if config.logits == "all":
        loads, full = loads.all_labelled(), full.all_labelled()
        random = random.all_labelled() if random else None
    schedule = "1f1b" if config.schedule == BEST else config.schedule
    request = PlanRequest(
        model=model,
        cluster=cluster,
        parallel=Parallelism(**{f.name: getattr(config, f.name) for f in fields(Parallelism)}),
        training=Training(
            **{part: part not in config.frozen for part in PARTS},
            mode=TrainingMode(precision=config.precision, zero_stage=config.zero_stage),
            kernels=config.kernels,
        ),
        schedule=schedule,
        stages_per_rank=config.stages_per_rank or default_stages(schedule),
        num_micro_batches=config.micro_batches,
        memory_bytes=gib_bytes(memory_gib) if memory_gib else cluster.usable_memory_bytes,
        loads=loads,
        full=full,
    )
    return request, random


def changed_request(
    plan: Plan,
    schedule: str | None,
    micro_batches: int | None,
    cluster: str | None,
    memory_gib: float | None,
) -> PlanRequest:
    """The request that a plan was made for, with some of it changed."""
    on = plan.cluster if cluster is None else load_cluster(cluster)
    memory = plan.memory_bytes if cluster is None else on.usable_memory_bytes
    count = micro_batches or plan.num_micro_batches
    return plan.changed(
        cluster=on,
        schedule=schedule or plan.schedule,
        deferred=plan.deferred if schedule in (None, plan.schedule) else None,
        num_micro_batches=count,
        memory_bytes=memory if memory_gib is None else gib_bytes(memory_gib),
        loads=_regrouped_loads(plan, count),
    )


def _equal_loads(config: PlanConfig) -> Loads:
    """One step of equal micro-batches."""
    rule = find_model(config.model or "").vision
    images, seq_len = config.images or 0, config.seq_len or 0
    if isinstance(rule, NativeSizeRule):
        raise ConfigError(
            f"model {config.model} takes images of any size, so the cost of --images is not known; "
            "give a build"
        )
    tokens = images * getattr(rule, "llm_tokens_per_patch", 0)  # anyres: not known
    if tokens > seq_len:
        raise ConfigError(
            f"{images} image patches are {tokens:,} LLM tokens, "
            f"--seq-len is {seq_len:,}; give fewer images or a longer sequence"
        )
    return Loads.constant(
        config.dp * config.micro_batches,
        images=images,
        vit_tokens_per_image=rule.vit_tokens_per_patch,
        seq_len=seq_len,
        samples=config.samples,
    )


def _regrouped_loads(plan: Plan, count: int) -> Loads:
    """A plan's micro-batches in steps of `count`, each replica's in their order."""
    dp = plan.parallel.dp
    # (steps, dp, micro_batches) -> (dp, all micro-batches of the replica)
    numbers = np.arange(len(plan.loads)).reshape(plan.num_steps, dp, plan.num_micro_batches)
    of_replicas = numbers.swapaxes(0, 1).reshape(dp, -1)
    steps = of_replicas.shape[1] // count
    if not steps:
        raise ConfigError(
            f"the plan has {of_replicas.shape[1]} micro-batches per replica, not {count}; "
            "plan with more --steps"
        )
    # -> (new steps, dp, count)
    regrouped = of_replicas[:, : steps * count].reshape(dp, steps, count).swapaxes(0, 1)
    return plan.loads.take(regrouped.ravel())
