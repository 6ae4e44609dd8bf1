"""Options of LoRA: adapters of peft that are trained instead of the weights."""

from dataclasses import dataclass
from typing import Annotated, Literal

from isobatch.common.config import Option
from isobatch.common.errors import ConfigError

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
