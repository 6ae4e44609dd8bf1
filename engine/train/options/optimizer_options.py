"""Options of AdamW, its learning rate, and what is done about bad gradients."""

from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from isobatch.common.config import Option
from isobatch.common.errors import ConfigError

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
