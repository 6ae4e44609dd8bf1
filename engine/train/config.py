"""Options of `python -m engine train` and `measure`, and their checks."""

from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from isobatch.balance.loss_weights import LossNormalizer, LossWeights
from isobatch.common.errors import ConfigError
from isobatch.engine.cost_model.training_mode import Precision, TrainingMode
from isobatch.engine.simulator.schedule import SCHEDULES

GIB = 2**30
MOST_LR = 1e37
"""AdamW divides by 1 - beta, in float32."""
PARTS: tuple[Literal["vision", "projector", "llm"], ...] = ("vision", "projector", "llm")
ONE_STAGE = (
    "--recompute adapt is for one stage per rank: use --stages-per-rank 1 with --schedule 1f1b or"
    " zero_bubble, or --recompute plan, all or none"
)
_SCHEDULES = f"{', '.join(SCHEDULES)}."

ModelName = Literal[
    "tiny",
    "llava",
    "internvl",
    "qwen2_vl",
    "llava_next",
    "llava_onevision",
    "qwen2_5_vl",
    "qwen3_vl",
    "gemma3",
]


def _help(text: str, *names: str, min_value: int | None = None) -> Any:
    """An option with its help text and smallest value."""
    return typer.Option(*names, help=text, min=min_value)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Options of both commands."""

    build: Annotated[
        str, typer.Argument(metavar="BUILD", help="Folder of `packer build`, for this model.")
    ]
    model: Annotated[ModelName | None, _help("Default: the one of the build's preset.")] = None
    config: Annotated[
        Path | None,
        _help("config.json of transformers, or a folder with weights. Default: a tiny model."),
    ] = None
    seed: int = 0
    precision: Annotated[
        Precision | None,
        _help(
            "Weights, activations and messages: fp32, or bf16 with fp32 masters. Default: the"
            " plan's; without a plan: fp32."
        ),
    ] = None
    zero_stage: Annotated[
        int | None,
        _help(
            "Shared out over replicas: 0 nothing, 1 the optimizer's state. Default: the plan's;"
            " without a plan: 0.",
            min_value=0,
        ),
    ] = None
    device: Annotated[Literal["cpu", "cuda"] | None, _help("Default: cuda if there is one.")] = None
    # tensors of tiny models lose more to threads than they gain
    threads: Annotated[int, _help("CPU threads of each rank.", min_value=1)] = 1
    memory_gib: Annotated[
        float | None,
        _help(
            "Memory of a rank. Default of measure: the cluster preset's; of train --tune: the"
            " plan's; of --recompute adapt: the plan's on a CPU, all free memory on a GPU."
        ),
    ] = None

    def __post_init__(self) -> None:
        _check_gib("--memory-gib", self.memory_gib)

    def training_mode(self, planned: TrainingMode | None = None) -> TrainingMode:
        """The plan's mode, or by options. ConfigError where they contradict each other."""
        options: dict[str, Any] = {"precision": self.precision, "zero_stage": self.zero_stage}
        chosen = {name: value for name, value in options.items() if value is not None}
        if planned is None:
            return TrainingMode(**{"precision": "fp32", "zero_stage": 0, **chosen})
        for name, value in chosen.items():
            planned_value = getattr(planned, name)
            if value != planned_value:
                option = f"--{name.replace('_', '-')}"
                raise ConfigError(
                    f"{option} is {value}, but the plan is for {planned_value} ({planned}): plan"
                    f" with {option} {value}, or leave the option out"
                )
        return planned

    @property
    def memory_bytes(self) -> int | None:
        """Memory of a rank, if given."""
        return None if self.memory_gib is None else int(self.memory_gib * GIB)


@dataclass(frozen=True, kw_only=True)
class MeasureConfig(RunConfig):
    """Options of `python -m engine measure`."""

    out: Annotated[Path, _help("Folder for profile.json, evidence.json and plan.json.")]
    schedule: Annotated[str, _help(_SCHEDULES)] = "1f1b"
    stages_per_rank: Annotated[int, _help("For interleaved ones.", min_value=1)] = 1
    micro_batches_per_step: Annotated[int, _help("Of the measured step.", min_value=1)] = 4
    most_run: Annotated[int, _help("Partitions to run.", min_value=1)] = 12
    cluster: Annotated[str, _help("Preset that the plan names for what was not measured.")] = "h100"


@dataclass(frozen=True, kw_only=True)
class TrainConfig(RunConfig):
    """Options of `python -m engine train`."""

    plan: Annotated[str, _help("plan.json, or auto: layers cut evenly.")] = "auto"
    borders: Annotated[str | None, _help("Stages' first layers and the end, as 0,20,45.")] = None
    dp: Annotated[int | None, _help("Replicas. Default: the plan's; auto: 1.")] = None
    schedule: Annotated[str | None, _help(f"{_SCHEDULES} Default: the plan's; auto: 1f1b.")] = None
    stages_per_rank: Annotated[
        int | None, _help("For interleaved ones. Default: the plan's; auto: 1.", min_value=1)
    ] = None
    micro_batches_per_step: Annotated[
        int | None, _help("Per replica. Default: the plan's; auto: 4.", min_value=1)
    ] = None
    recompute: Annotated[
        Literal["plan", "none", "all", "adapt"] | None,
        _help(
            "Layers that are recomputed. adapt: as few as memory allows, found with --profile after"
            " the first step; a later step that runs out of memory is repeated with all of them,"
            " then they are chosen again. Default: plan; auto: none."
        ),
    ] = None
    reserve_gib: Annotated[float, _help("For adapt: memory that its trials leave free.")] = 0.0
    steps: Annotated[int, _help("In all, those before a resume included.", min_value=1)] = 60
    lr: Annotated[float, _help("For random weights; give less for trained ones.")] = 3e-3
    clip: Annotated[float, _help("Largest norm of the gradients; inf: no limit.")] = 1.0
    not_finite: Annotated[
        Literal["end", "skip"],
        _help("For a step whose loss or gradients are NaN or infinite: end, or change no weight."),
    ] = "end"
    loss_normalizer: Annotated[
        LossNormalizer,
        _help("Divisor of a step's losses: its own labels, or those of the epoch's average step."),
    ] = "epoch"
    loss_weights: Annotated[
        LossWeights, _help("Whether each label counts once, each sample, or between (1/sqrt n).")
    ] = "token"
    freeze: Annotated[
        list[str] | None, _help(f"Part that is not trained, may be repeated: {', '.join(PARTS)}.")
    ] = None
    tune: Annotated[bool, _help("Repack each step, with a schedule of its own.", "--tune")] = False
    profile: Annotated[Path | None, _help("For --tune and adapt: profile.json of measure.")] = None
    encode: Annotated[
        Literal["never", "own", "any"] | None,
        _help(
            "For --tune: ranks whose idle time a frozen encoder may use: none, the first stage's,"
            " or any, which then holds a copy of it and decodes images. Default: own, if the first"
            " stage has all of it."
        ),
    ] = None
    effort: Annotated[int, _help("For --tune: limit of the search for an order.")] = 20_000
    state: Annotated[Path | None, _help("Folder to save in, and to resume from.")] = None
    save_every: Annotated[int, _help("Steps between two saves.", min_value=1)] = 10
    export: Annotated[Path | None, _help("Folder for the trained model of transformers.")] = None
    figures: Annotated[Path | None, _help("File for each step's figures, lines of JSON.")] = None
    log_to: Annotated[
        str | None,
        _help("tensorboard, wandb, mlflow or trackio, as of a loader (docs/load/metrics.md)."),
    ] = None
    trace: Annotated[Path | None, _help("File for the last step, for ui.perfetto.dev.")] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_gib("--reserve-gib", self.reserve_gib)
        if not 0 <= self.lr <= MOST_LR:
            raise ConfigError(f"--lr {self.lr}: give a learning rate from 0 to {MOST_LR:g}")
        if not self.clip > 0:
            raise ConfigError(f"--clip {self.clip}: give a norm above 0, or inf for no limit")
        unknown = [part for part in self.freeze or () if part not in PARTS]
        if unknown:
            raise ConfigError(f"--freeze {unknown[0]!r}: give one of {', '.join(PARTS)}")
        if self.borders is not None:
            _numbers("--borders", self.borders)
        self._check_adapt_and_tune()

    def _check_adapt_and_tune(self) -> None:
        """ConfigError for options that exclude each other, whatever build and plan are."""
        adapts = self.recompute == "adapt"
        if adapts and self.tune:
            raise ConfigError(
                "--recompute adapt tries out micro-batches as they are stored, --tune makes others:"
                " use --tune with --memory-gib and --recompute plan, all or none"
            )
        if adapts and (self.stages_per_rank or 1) > 1:
            raise ConfigError(ONE_STAGE)
        if (self.tune or adapts) != bool(self.profile) or (self.encode and not self.tune):
            raise ConfigError(
                "--tune needs --profile, and so does --recompute adapt; --profile needs one of"
                " them, --encode needs --tune"
            )
        if self.reserve_gib and not adapts:
            raise ConfigError("--reserve-gib is for --recompute adapt: give both, or neither")
        if self.memory_gib is not None and not (adapts or self.tune):
            raise ConfigError(
                "--memory-gib is for --recompute adapt and --tune: give either, or plan with it"
            )

    @property
    def partition(self) -> tuple[int, ...] | None:
        """`--borders` as numbers."""
        return None if self.borders is None else _numbers("--borders", self.borders)


def _numbers(option: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        raise ConfigError(f"{option} {text}: give numbers, as 0,20,45") from None


def _check_gib(option: str, size: float | None) -> None:
    if size is not None and not (isfinite(size) and size >= 0):
        raise ConfigError(f"{option} {size} is not a size in GiB: give a number, as 0.5")
