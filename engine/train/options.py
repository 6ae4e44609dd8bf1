"""Options of `python -m engine train` and `measure`, and their checks.

`TrainConfig` and `MeasureConfig`; LoRA's and the optimizer's have classes of their own.
"""

from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from isobatch.balance.loss_weights import LossNormalizer, LossWeights
from isobatch.common.config import Option, check_options
from isobatch.common.errors import ConfigError
from isobatch.engine.cost_model.training_mode import Precision, TrainingMode
from isobatch.engine.simulator.schedule import SCHEDULES

PARTS: tuple[Literal["vision", "projector", "llm"], ...] = ("vision", "projector", "llm")
ALL_LINEAR = "all-linear"
"""peft's word for every linear layer but the output."""


@dataclass(frozen=True, kw_only=True)
class LoraOptions:
    """Adapters of a training run; without a rank, the weights themselves are trained."""

    lora_rank: Annotated[
        int | None, Option("Train adapters of this rank, by peft, and no weights.", min=1)
    ] = None
    lora_alpha: Annotated[float, Option("Adapters count by alpha / rank. Default: 16.", min=0)] = (
        16.0
    )
    lora_dropout: Annotated[
        float, Option("Dropout of adapters' inputs. Default: 0.", min=0, max=1)
    ] = 0.0
    lora_targets: Annotated[
        tuple[str, ...],
        Option(
            "Name of the linear layers that get adapters, as q_proj; may be repeated. Default:"
            f" {ALL_LINEAR}, all but the output layer."
        ),
    ] = (ALL_LINEAR,)
    lora_parts: Annotated[
        tuple[str, ...],
        Option(f"Part that gets adapters, may be repeated: {', '.join(PARTS)}. Default: llm."),
    ] = ("llm",)
    merge: Annotated[bool, Option("Add the adapters to the weights that --export writes.")] = False

    def __post_init__(self) -> None:
        defaults = LoraOptions.__dataclass_fields__
        changed = [
            f"--{name.replace('_', '-')}"
            for name, field in defaults.items()
            if getattr(self, name) != field.default
        ]
        if self.lora_rank is None and changed:
            raise ConfigError(f"{changed[0]} is for LoRA: give --lora-rank too")
        unknown = [part for part in self.lora_parts if part not in PARTS]
        if unknown:
            raise ConfigError(f"--lora-parts {unknown[0]!r}: give one of {', '.join(PARTS)}")


MAX_LR = 1e37
"""AdamW divides by 1 - beta, in float32."""
Schedule = Literal[
    "constant",
    "constant_with_warmup",
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "inverse_sqrt",
]
"""Names that transformers' `get_scheduler` has for schedules without further arguments."""


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
    """The optimizer of a training run."""

    lr: Annotated[
        float,
        Option("Largest learning rate. Default: 0.003, for random weights; less for trained ones."),
    ] = 3e-3
    lr_vision: Annotated[float | None, Option("That of the vision encoder. Default: --lr.")] = None
    lr_projector: Annotated[float | None, Option("That of the projector. Default: --lr.")] = None
    lr_llm: Annotated[float | None, Option("That of the language model. Default: --lr.")] = None
    lr_schedule: Annotated[
        Schedule,
        Option(
            "Learning rate over --steps, as transformers has it:"
            f" {', '.join(get_args(Schedule))}. Default: constant."
        ),
    ] = "constant"
    warmup_steps: Annotated[
        float,
        Option("Steps in which the learning rate rises; below 1, their share of --steps.", min=0),
    ] = 0
    weight_decay: Annotated[
        float, Option("Weight decay; none for vectors, as biases and norms. Default: 0.", min=0)
    ] = 0.0
    beta1: Annotated[float, Option("Of AdamW. Default: 0.9.", min=0, max=1)] = 0.9
    beta2: Annotated[float, Option("Of AdamW. Default: 0.999.", min=0, max=1)] = 0.999
    eps: Annotated[float, Option("Of AdamW. Default: 1e-8.", min=0)] = 1e-8
    clip: Annotated[float, Option("Largest norm of the gradients; inf: no limit. Default: 1.")] = (
        1.0
    )
    not_finite: Annotated[
        Literal["end", "skip"],
        Option(
            "For a step whose loss or gradients are NaN or infinite: end, or change no weight."
            " Default: end."
        ),
    ] = "end"

    def __post_init__(self) -> None:
        for name in ("lr", "lr_vision", "lr_projector", "lr_llm"):
            rate = getattr(self, name)
            if rate is not None and not 0 <= rate <= MAX_LR:
                option = name.replace("_", "-")
                raise ConfigError(f"--{option} {rate}: give a learning rate from 0 to {MAX_LR:g}")
        if not self.clip > 0:
            raise ConfigError(f"--clip {self.clip}: give a norm above 0, or inf for no limit")
        if self.beta1 == 1 or self.beta2 == 1:
            raise ConfigError("the betas of AdamW must be below 1")
        if self.warmup_steps and self.lr_schedule == "constant":
            raise ConfigError(
                "--warmup-steps with --lr-schedule constant: give constant_with_warmup, or another"
                " schedule"
            )
        if self.warmup_steps >= 1 and self.warmup_steps != int(self.warmup_steps):
            raise ConfigError(
                f"--warmup-steps {self.warmup_steps}: give whole steps, or a share below 1"
            )

    def num_warmup_steps(self, steps: int) -> int:
        """Steps of the warm-up in a run of so many.

        >>> [OptimizerOptions(lr_schedule="cosine", warmup_steps=n).num_warmup_steps(50)
        ...  for n in (0, 0.1, 7)]
        [0, 5, 7]
        """
        return int(self.warmup_steps if self.warmup_steps >= 1 else self.warmup_steps * steps)

    def lr_of(self, part: str) -> float:
        """The largest learning rate of a part of the model."""
        rate: float | None = getattr(self, f"lr_{part}", None)
        return self.lr if rate is None else rate


GIB = 2**30
MAX_SEED = 2**64 - 1
"""torch takes no larger one."""
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


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Options of both commands."""

    build: str
    """Folder of `packer build`, for this model."""
    model: Annotated[ModelName | None, Option("Default: the one of the build's preset.")] = None
    config: Annotated[
        Path | None,
        Option("config.json of transformers, or a folder with weights. Default: a tiny model."),
    ] = None
    seed: Annotated[
        int,
        Option("Of random weights and the order of samples. Default: 0.", min=0, max=MAX_SEED),
    ] = 0
    precision: Annotated[
        Precision | None,
        Option(
            "Weights, activations and messages: fp32, or bf16 with fp32 masters. Default: the"
            " plan's; without a plan: fp32."
        ),
    ] = None
    zero_stage: Annotated[
        int | None,
        Option(
            "Shared out over replicas: 0 nothing, 1 the optimizer's state. Default: the plan's;"
            " without a plan: 0.",
            min=0,
        ),
    ] = None
    device: Annotated[Literal["cpu", "cuda"] | None, Option("Default: cuda if there is one.")] = (
        None
    )
    # tensors of tiny models lose more to threads than they gain
    threads: Annotated[int, Option("CPU threads of each rank. Default: 1.", min=1)] = 1
    memory_gib: Annotated[
        float | None,
        Option(
            "Memory of a rank. Default of measure: the cluster preset's; of train --tune: the"
            " plan's; of --recompute adapt: the plan's on a CPU, all free memory on a GPU."
        ),
    ] = None

    def __post_init__(self) -> None:
        check_options(self)
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

    out: Annotated[Path, Option("Folder for profile.json, evidence.json and plan.json.")]
    schedule: Annotated[str, Option(f"{_SCHEDULES} Default: 1f1b.")] = "1f1b"
    stages_per_rank: Annotated[
        int | None, Option("Default: 2 for interleaved schedules, else 1.", min=1)
    ] = None
    micro_batches_per_step: Annotated[int, Option("Of the measured step. Default: 4.", min=1)] = 4
    most_run: Annotated[int, Option("Partitions to run. Default: 12.", min=1)] = 12
    cluster: Annotated[
        str, Option("Preset that the plan names for what was not measured. Default: h100.")
    ] = "h100"


@dataclass(frozen=True, kw_only=True)
class TrainConfig(LoraOptions, OptimizerOptions, RunConfig):
    """Options of `python -m engine train`; each is a key of its TOML file too."""

    plan: Annotated[str, Option("plan.json, or auto: layers cut evenly. Default: auto.")] = "auto"
    borders: Annotated[str | None, Option("Stages' first layers and the end, as 0,20,45.")] = None
    dp: Annotated[int | None, Option("Replicas. Default: the plan's; auto: 1.")] = None
    schedule: Annotated[str | None, Option(f"{_SCHEDULES} Default: the plan's; auto: 1f1b.")] = None
    stages_per_rank: Annotated[
        int | None,
        Option("Default: the plan's; auto: 2 for interleaved schedules, else 1.", min=1),
    ] = None
    micro_batches_per_step: Annotated[
        int | None, Option("Per replica. Default: the plan's; auto: 4.", min=1)
    ] = None
    recompute: Annotated[
        Literal["plan", "none", "all", "adapt"] | None,
        Option(
            "Layers that are recomputed. adapt: as few as memory allows, found with --profile after"
            " the first step; a later step that runs out of memory is repeated with all of them,"
            " then they are chosen again. Default: plan; auto: none."
        ),
    ] = None
    reserve_gib: Annotated[
        float, Option("For adapt: memory that its trials leave free. Default: 0.")
    ] = 0.0
    steps: Annotated[int, Option("In all, those before a resume included. Default: 60.", min=1)] = (
        60
    )
    loss_normalizer: Annotated[
        LossNormalizer,
        Option(
            "Divisor of a step's losses: its own labels, or those of the epoch's average step."
            " Default: epoch."
        ),
    ] = "epoch"
    loss_weights: Annotated[
        LossWeights,
        Option(
            "Whether each label counts once, each sample, or between (1/sqrt n). Default: token."
        ),
    ] = "token"
    freeze: Annotated[
        tuple[str, ...], Option(f"Part that is not trained, may be repeated: {', '.join(PARTS)}.")
    ] = ()
    tune: Annotated[bool, Option("Repack each step, with a schedule of its own.")] = False
    profile: Annotated[Path | None, Option("For --tune and adapt: profile.json of measure.")] = None
    encode: Annotated[
        Literal["never", "own", "any"] | None,
        Option(
            "For --tune: ranks whose idle time a frozen encoder may use: none, the first stage's,"
            " or any, which then holds a copy of it and decodes images. Default: own, if the first"
            " stage has all of it."
        ),
    ] = None
    effort: Annotated[
        int, Option("For --tune: limit of the search for an order. Default: 20,000.")
    ] = 20_000
    eval: Annotated[str | None, Option("Build whose loss is reported: each sample once.")] = None
    eval_every: Annotated[
        int | None, Option("Steps between two evaluations. Default: only after --steps.", min=1)
    ] = None
    state: Annotated[Path | None, Option("Folder to save in, and to resume from.")] = None
    save_every: Annotated[int, Option("Steps between two saves. Default: 10.", min=1)] = 10
    export: Annotated[
        Path | None, Option("Folder for the trained model of transformers, or its adapters.")
    ] = None
    figures: Annotated[Path | None, Option("File for each step's figures, lines of JSON.")] = None
    log_to: Annotated[
        str | None,
        Option("tensorboard, wandb, mlflow or trackio, as of a loader (docs/load/metrics.md)."),
    ] = None
    trace: Annotated[Path | None, Option("File for the last step, for ui.perfetto.dev.")] = None
    dry_run: Annotated[
        bool, Option("Print memory and time as planned; no data and no weights are read.")
    ] = False

    def __post_init__(self) -> None:
        RunConfig.__post_init__(self)
        OptimizerOptions.__post_init__(self)
        LoraOptions.__post_init__(self)
        _check_gib("--reserve-gib", self.reserve_gib)
        unknown = [part for part in self.freeze if part not in PARTS]
        if unknown:
            raise ConfigError(f"--freeze {unknown[0]!r}: give one of {', '.join(PARTS)}")
        if self.borders is not None:
            _numbers("--borders", self.borders)
        if self.eval_every is not None and self.eval is None:
            raise ConfigError("--eval-every needs --eval: the build to evaluate on")
        if self.save_every != type(self).save_every and self.state is None:
            raise ConfigError("--save-every needs --state: the folder to save in")
        if self.effort != type(self).effort and not self.tune:
            raise ConfigError("--effort is for --tune: give both, or neither")
        if self.merge and self.export is None:
            raise ConfigError("--merge is for --export: give its folder")
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
